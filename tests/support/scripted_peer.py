"""A server that answers what a test tells it to, however wrong."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PAUSE_S = 0.02


class Peer:
    """One accepted connection, in the hands of a script."""

    def __init__(self, sock: socket.socket, stopping: threading.Event) -> None:
        self.sock = sock
        self.stopping = stopping

    def request(self) -> str:
        """Reads one request and returns its head; empty if the client left."""
        head = bytearray()
        while b"\r\n\r\n" not in head:
            piece = self.sock.recv(65536)
            if not piece:
                return ""
            head += piece
        return head.decode("latin-1")

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def trickle(self, data: bytes, *, bytes_at_once: int = 1) -> None:
        """Sends a little at a time until all is sent, the client leaves or the test ends."""
        for start in range(0, len(data), bytes_at_once):
            self.sock.sendall(data[start : start + bytes_at_once])
            if self.stopping.wait(PAUSE_S):
                return

    def hold(self) -> None:
        """Keeps the connection open and silent until the client leaves."""
        self.sock.recv(1)

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


Script = Callable[[Peer], None]


def answering(data: bytes) -> Script:
    """Answers every request with the same bytes."""

    def script(peer: Peer) -> None:
        while peer.request():
            peer.send(data)

    return script


@contextmanager
def scripted(script: Script) -> Iterator[int]:
    """Serves every connection by ``script``, one thread each, and closes it afterwards; gives the port."""
    stopping = threading.Event()
    threads: list[threading.Thread] = []
    open_sockets: set[socket.socket] = set()

    def serve(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            script(Peer(sock, stopping))
        open_sockets.discard(sock)
        sock.close()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                sock.settimeout(60)
                open_sockets.add(sock)
                threads.append(threading.Thread(target=serve, args=(sock,)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stopping.set()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for sock in list(open_sockets):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
