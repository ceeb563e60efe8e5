"""A server that has nothing to do with this package: answers each request with a few bytes. Prints its port.

What a crowd costs that goes here is what it costs the machine.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket

ANSWER = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"


def main() -> None:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    listening.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    print(listening.getsockname()[1], flush=True)
    while True:
        for key, _events in selector.select():
            sock = key.fileobj
            if sock is listening:
                try:
                    accepted, _address = listening.accept()
                except OSError:
                    continue
                accepted.setblocking(False)
                selector.register(accepted, selectors.EVENT_READ)
            elif not isinstance(sock, socket.socket):
                if not os.read(0, 1):
                    return
            else:
                try:
                    received = sock.recv(1 << 16)
                    if b"\r\n\r\n" in received:
                        sock.send(ANSWER)
                except OSError:
                    received = b""
                if not received:
                    selector.unregister(sock)
                    sock.close()


if __name__ == "__main__":
    main()
