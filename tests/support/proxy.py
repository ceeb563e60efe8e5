"""A TCP proxy between receiver and sender that does to chosen connections what bad networks do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PIECE_BYTES = 16 << 10


class Link:
    """One connection through the proxy, in the direction of the receiver."""

    def __init__(self, proxy: Proxy, to_receiver: socket.socket) -> None:
        self._proxy = proxy
        self._to_receiver = to_receiver
        self.num_bytes = 0
        self.started_s = time.monotonic()

    def send(self, data: bytes) -> None:
        self._to_receiver.sendall(data)
        self.num_bytes += len(data)
        with self._proxy.lock:
            self._proxy.num_bytes += len(data)

    def reset(self) -> None:
        """Ends it with a reset instead of an orderly close."""
        self._to_receiver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    @property
    def stopping(self) -> threading.Event:
        return self._proxy.stopping


Fault = Callable[[Link, bytes], bool]
"""Takes what the sender sent next, sends of it what it likes; returns whether the connection goes on."""


_THROTTLED_BYTES = 8 << 10


def forward(link: Link, data: bytes) -> bool:
    link.send(data)
    return True


def cut(after: int, *, reset: bool = False) -> Fault:
    """Closes the connection once ``after`` bytes have passed, the heads of the answers included."""

    def fault(link: Link, data: bytes) -> bool:
        link.send(data[: max(0, after - link.num_bytes)])
        if link.num_bytes < after:
            return True
        if reset:
            link.reset()
        return False

    return fault


def corrupt(at: int) -> Fault:
    """Flips the bits of byte ``at`` of the connection."""

    def fault(link: Link, data: bytes) -> bool:
        offset = at - link.num_bytes
        if 0 <= offset < len(data):
            data = data[:offset] + bytes([data[offset] ^ 0xFF]) + data[offset + 1 :]
        link.send(data)
        return True

    return fault


def stall(after: int, stalled: threading.Event | None = None) -> Fault:
    """Passes nothing on once ``after`` bytes have passed, and keeps the connection open."""

    def fault(link: Link, data: bytes) -> bool:
        link.send(data[: max(0, after - link.num_bytes)])
        if link.num_bytes < after:
            return True
        if stalled is not None:
            stalled.set()
        link.stopping.wait()
        return False

    return fault


def trickle(after: int, *, pause_s: float) -> Fault:
    """One byte at a time once ``after`` bytes have passed."""

    def fault(link: Link, data: bytes) -> bool:
        link.send(data[: max(0, after - link.num_bytes)])
        for byte in data[max(0, after - link.num_bytes) :] if link.num_bytes >= after else b"":
            link.send(bytes([byte]))
            if link.stopping.wait(pause_s):
                return False
        return True

    return fault


def throttle(bytes_per_s: float) -> Fault:
    """Everything, a piece at a time."""

    def fault(link: Link, data: bytes) -> bool:
        for start in range(0, len(data), _THROTTLED_BYTES):
            piece = data[start : start + _THROTTLED_BYTES]
            link.send(piece)
            if link.stopping.wait(len(piece) / bytes_per_s):
                return False
        return True

    return fault


def delay(pause_s: float) -> Fault:
    """Everything later."""

    def fault(link: Link, data: bytes) -> bool:
        if link.stopping.wait(pause_s):
            return False
        link.send(data)
        return True

    return fault


def lie(true: bytes, false: bytes) -> Fault:
    """Replaces a piece of a head."""

    def fault(link: Link, data: bytes) -> bool:
        link.send(data.replace(true, false, 1))
        return True

    return fault


@dataclass
class _Order:
    fault: Fault
    on: str
    times: int
    skip: int


@dataclass
class Proxy:
    """Attributes: ``port`` to connect to; ``num_bytes`` that reached the receiver; ``num_faulty`` connections;
    ``watch`` is called with what receivers send, ``watch_answers`` with what the sender sends."""

    target_port: int
    port: int = 0
    num_bytes: int = 0
    num_faulty: int = 0
    requests: list[str] = field(default_factory=list)
    watch: Callable[[bytes], object] = lambda _data: None
    watch_answers: Callable[[bytes], object] = lambda _data: None
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopping: threading.Event = field(default_factory=threading.Event)
    _orders: list[_Order] = field(default_factory=list)
    _sockets: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/checkpoint/"

    def inject(self, fault: Fault, *, on: str = "/full", times: int = 1, skip: int = 0) -> None:
        """Hurts the next ``times`` connections whose first request has ``on`` in its path, after ``skip`` of them."""
        self._orders.append(_Order(fault, on, times, skip))

    def _fault_for(self, path: str) -> Fault:
        with self.lock:
            self.requests.append(path)
            for order in self._orders:
                if order.on in path and order.times:
                    if order.skip:
                        order.skip -= 1
                        continue
                    order.times -= 1
                    self.num_faulty += 1
                    return order.fault
        return forward

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=f"proxy-{target.__name__}")
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                receiver, _ = listener.accept()
                with self.lock:
                    self._sockets.append(receiver)
                self._spawn(self._connect, receiver)

    def _connect(self, receiver: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            stack.enter_context(receiver)
            first = receiver.recv(PIECE_BYTES)
            fault = self._fault_for(first.split(b" ")[1].decode("latin-1") if b" " in first else "")
            sender = stack.enter_context(socket.create_connection(("127.0.0.1", self.target_port), timeout=60))
            with self.lock:
                self._sockets.append(sender)
            self.watch(first)
            sender.sendall(first)
            requests = threading.Thread(target=self._pass_requests, args=(receiver, sender), name="proxy-requests")
            requests.start()
            try:
                link = Link(self, receiver)
                while data := sender.recv(PIECE_BYTES):
                    self.watch_answers(data)
                    if not fault(link, data):
                        break
            finally:
                for sock in (sender, receiver):
                    with contextlib.suppress(OSError):
                        # Wakes the other thread; the receiver's side is not shut down where it has to end by a reset.
                        sock.shutdown(socket.SHUT_RD if sock is receiver else socket.SHUT_RDWR)
                requests.join()

    def _pass_requests(self, receiver: socket.socket, sender: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := receiver.recv(PIECE_BYTES):
                self.watch(data)
                sender.sendall(data)
        # The receiver is gone: the sender must see that.
        with contextlib.suppress(OSError):
            sender.shutdown(socket.SHUT_RDWR)

    def cut_all(self) -> None:
        """Ends every connection that there is; new ones go through."""
        with self.lock:
            sockets, self._sockets = self._sockets, []
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stopping.set()
        self.cut_all()
        for thread in self._threads:
            thread.join()


@contextmanager
def proxied(target_port: int) -> Iterator[Proxy]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(target_port, listener.getsockname()[1])
        proxy._spawn(proxy._accept, listener)
        try:
            yield proxy
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            proxy.close()
