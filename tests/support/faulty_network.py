"""A TCP proxy that, by a seed, does what networks and broken boxes do, in both directions, connection by connection.

Unlike ``proxy``, which hurts chosen answers, this one draws a fault for each connection: which direction, at which
byte, and what happens there. One thread serves all connections of a proxy, so that thousands of fetches take seconds.
"""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PIECE_BYTES = 16 << 10
KINDS = (
    "flip",
    "byte",
    "cut",
    "reset",
    "half_close",
    "drop",
    "duplicate",
    "reorder",
    "insert",
    "delay",
    "trickle",
    "stall",
)
_HEAD_BYTES = 400
"""Where requests, and the heads of answers, are: most faults are put there."""


@dataclass(frozen=True)
class Fault:
    """What happens to one direction of a connection once ``after`` bytes of it have passed."""

    kind: str
    to_server: bool
    after: int
    size: int = 1
    pause_s: float = 0.0
    byte: int = 0


def draw(random_: random.Random, stall_s: float) -> Fault:
    to_server = random_.random() < 0.5
    within = _HEAD_BYTES if to_server or random_.random() < 0.5 else 40_000
    return Fault(
        kind=random_.choice(KINDS),
        to_server=to_server,
        after=random_.randrange(within),
        size=random_.choice((1, 1, 2, 8, 100)),
        pause_s=random_.uniform(0, 2 * stall_s),
        byte=random_.randrange(256),
    )


@dataclass
class _Half:
    """One direction: what came in waits in ``pending`` until its time, and goes out."""

    source: socket.socket
    target: socket.socket
    fault: Fault | None
    num_bytes: int = 0
    pending: list[tuple[float, bytes]] = field(default_factory=list)
    is_stalled: bool = False
    ends: str | None = None
    held: bytes = b""


class FaultyProxy:
    """Forwards to ``target_port``; ``next_fault`` is asked for the fault of each new connection."""

    def __init__(self, target_port: int, next_fault: Callable[[], Fault | None]) -> None:
        self._target_port = target_port
        self._next_fault = next_fault
        self.hurt: Counter[str] = Counter()
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._halves: dict[socket.socket, _Half] = {}
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="faulty-network")
        self._thread.start()

    def close(self) -> None:
        self._stopping = True
        with contextlib.suppress(OSError):  # The thread has seen that already.
            self._wake_write.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                now_s = time.monotonic()
                due_s = [half.pending[0][0] for half in self._halves.values() if half.pending]
                timeout_s = max(0.0, min(due_s) - now_s) if due_s else None
                for key, _ in self._selector.select(timeout_s):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj in self._halves:
                        assert isinstance(key.fileobj, socket.socket)
                        self._receive(self._halves[key.fileobj])
                self._send_due()
        finally:
            for sock in list(self._halves):
                self._drop(sock)
            self._selector.close()
            for sock in (self._listener, self._wake_read, self._wake_write):
                sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port), timeout=5)
            except OSError:
                client.close()
                return
            fault = self._next_fault()
            self.num_connections += 1
            for source, target, to_server in ((client, server, True), (server, client, False)):
                source.setblocking(True)
                source.settimeout(5)
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                is_hurt = fault is not None and fault.to_server is to_server
                self._halves[source] = _Half(source, target, fault if is_hurt else None)
                self._selector.register(source, selectors.EVENT_READ)

    def _receive(self, half: _Half) -> None:
        try:
            data = half.source.recv(PIECE_BYTES)
        except OSError:
            self._drop(half.source)
            return
        if not data:
            self._drop(half.source, orderly=True)
            return
        start = half.num_bytes
        half.num_bytes += len(data)
        now_s = time.monotonic()
        fault = half.fault
        if half.is_stalled:
            return
        if fault is None or half.num_bytes <= fault.after:
            last_s = half.pending[-1][0] if half.pending else now_s
            half.pending.append((max(now_s, last_s), half.held + data))
            half.held = b""
            return
        half.fault = None
        self.hurt[fault.kind] += 1
        self._hurt(half, fault, data, fault.after - start, now_s)

    def _hurt(self, half: _Half, fault: Fault, data: bytes, at: int, now_s: float) -> None:
        before, behind = data[:at], data[at:]
        piece, rest = behind[: fault.size], behind[fault.size :]
        add = half.pending.append
        match fault.kind:
            case "flip":
                add((now_s, before + bytes([piece[0] ^ (1 << fault.size % 8)]) + behind[1:]))
            case "byte":
                add((now_s, before + bytes([fault.byte]) + behind[1:]))
            case "cut":
                add((now_s, before))
                half.ends = "cut"
            case "reset":
                add((now_s, before))
                half.ends = "reset"
            case "half_close":
                add((now_s, before))
                half.ends = "half_close"
            case "drop":
                add((now_s, before + rest))
            case "duplicate":
                add((now_s, before + piece + piece + rest))
            case "reorder":
                add((now_s, before + rest[: fault.size] + piece + rest[fault.size :]))
            case "insert":
                add((now_s, before + bytes((fault.byte + number) % 256 for number in range(fault.size)) + behind))
            case "delay":
                add((now_s, before))
                add((now_s + fault.pause_s, behind))
            case "trickle":
                add((now_s, before))
                for number, byte in enumerate(behind[:50]):
                    add((now_s + number * fault.pause_s / 20, bytes([byte])))
                add((now_s + 50 * fault.pause_s / 20, behind[50:]))
            case "stall":
                add((now_s, before))
                half.is_stalled = True

    def _send_due(self) -> None:
        now_s = time.monotonic()
        for half in list(self._halves.values()):
            while half.pending and half.pending[0][0] <= now_s and half.source in self._halves:
                _, data = half.pending.pop(0)
                try:
                    half.target.sendall(data)
                except OSError:
                    self._drop(half.source)
            if half.ends is not None and not half.pending and half.source in self._halves:
                self._end(half)

    def _end(self, half: _Half) -> None:
        match half.ends:
            case "cut":
                self._drop(half.source)
            case "reset":
                for sock in (half.source, half.target):
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._drop(half.source)
            case "half_close":
                half.ends, half.is_stalled = None, True
                with contextlib.suppress(OSError):
                    half.target.shutdown(socket.SHUT_WR)

    def _drop(self, sock: socket.socket, *, orderly: bool = False) -> None:
        half = self._halves.get(sock)
        if half is None:
            return
        if orderly and half.pending:  # What is on its way arrives before the end.
            self._selector.unregister(sock)
            half.ends = half.ends or "cut"
            return
        for each in (half.source, half.target):
            if self._halves.pop(each, None) is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(each)
            each.close()


@contextmanager
def faulty_network(target_port: int, next_fault: Callable[[], Fault | None]) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(target_port, next_fault)
    try:
        yield proxy
    finally:
        proxy.close()
