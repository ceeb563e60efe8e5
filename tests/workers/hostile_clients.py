"""Connections that hold a server up, for as long as its standard input is open: ``PORT KIND COUNT [REQUEST]``.

``idle`` sends nothing; ``head`` a request's head, a byte a second; ``asked`` REQUEST, and then nothing; ``body``
REQUEST and then a body, a byte a second. Those that the server ended are opened anew each second. Prints ``ready`` when
all were opened once.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import sys
import time

HEAD = b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


class Crowd:
    def __init__(self, port: int, kind: str, count: int, request: bytes) -> None:
        self.port = port
        self.kind = kind
        self.count = count
        self.request = request
        self.open: dict[socket.socket, int] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ)
        self.next_s = time.monotonic() + 1

    def fill(self) -> None:
        while len(self.open) < self.count:
            sock = socket.socket()
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect(("127.0.0.1", self.port))
            self.open[sock] = 0
            self.selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def drop(self, sock: socket.socket) -> None:
        self.selector.unregister(sock)
        sock.close()
        del self.open[sock]

    def connected(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self.kind in ("asked", "body"):
                sock.send(self.request)
        self.selector.modify(sock, selectors.EVENT_READ)

    def trickle(self) -> None:
        for sock, position in list(self.open.items()):
            with contextlib.suppress(OSError):
                sock.send(HEAD[position : position + 1] or b"x")
                self.open[sock] = position + 1

    def run(self) -> None:
        self.fill()
        is_told = False
        while True:
            for key, events in self.selector.select(0.1):
                sock = key.fileobj
                if not isinstance(sock, socket.socket):
                    if not os.read(0, 1):
                        return
                    continue
                if events & selectors.EVENT_WRITE:
                    self.connected(sock)
                elif events & selectors.EVENT_READ:
                    try:
                        is_over = not sock.recv(1 << 16)
                    except OSError:
                        is_over = True
                    if is_over:
                        self.drop(sock)
            if not is_told:
                is_told = True
                print("ready", flush=True)
            if time.monotonic() >= self.next_s:
                self.next_s += 1
                self.fill()
                if self.kind in ("head", "body"):
                    self.trickle()


if __name__ == "__main__":
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    Crowd(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), (sys.argv[4] if len(sys.argv) > 4 else "").encode()).run()
