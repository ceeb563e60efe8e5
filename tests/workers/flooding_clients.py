"""One stranger at full speed, for as long as its standard input is open: ``PORT KIND REQUEST [FROM]``.

``asking`` makes REQUEST again and again on eight connections, and opens those anew that the server ends;
``reconnecting`` makes it once on each connection; ``connecting`` opens and closes without asking. FROM is the address
that they come from. Prints at its end how many connections were opened, how many requests made and answers got.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import sys

_NUM_ASKING = 8
_NUM_AT_ONCE = 64


class Flood:
    def __init__(self, port: int, kind: str, request: bytes, source: str) -> None:
        self.target = ("127.0.0.1", port)
        self.kind = kind
        self.request = request
        self.source = source
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.num_opened = self.num_asked = self.num_answers = 0

    def open(self) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        if self.source:
            # The port is chosen when it connects, so that the same one serves for several connections.
            sock.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
            sock.bind((self.source, 0))
        with contextlib.suppress(BlockingIOError):
            sock.connect(self.target)
        self.selector.register(sock, selectors.EVENT_WRITE)

    def again(self, sock: socket.socket) -> None:
        self.selector.unregister(sock)
        sock.close()
        self.open()

    def ask(self, sock: socket.socket) -> None:
        sock.send(self.request)
        self.num_asked += 1

    def step(self, sock: socket.socket, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.num_opened += 1
            if self.kind == "connecting":
                self.again(sock)
                return
            self.ask(sock)
            self.selector.modify(sock, selectors.EVENT_READ)
        elif not sock.recv(1 << 16):
            self.again(sock)
        else:
            self.num_answers += 1
            if self.kind == "asking":
                self.ask(sock)
            else:
                self.again(sock)

    def run(self) -> None:
        for _ in range(_NUM_ASKING if self.kind == "asking" else _NUM_AT_ONCE):
            self.open()
        while True:
            for key, events in self.selector.select():
                sock = key.fileobj
                if not isinstance(sock, socket.socket):
                    if not os.read(0, 1):
                        return
                    continue
                try:
                    self.step(sock, events)
                except OSError:
                    self.again(sock)


if __name__ == "__main__":
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flood = Flood(int(sys.argv[1]), sys.argv[2], sys.argv[3].encode(), sys.argv[4] if len(sys.argv) > 4 else "")
    flood.run()
    print(flood.num_opened, flood.num_asked, flood.num_answers, flush=True)
