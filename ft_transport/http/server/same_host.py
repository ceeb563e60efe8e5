"""Lends the memory of snapshots to receivers on the same host, by passing file descriptors over a unix socket.

Only processes of the same user can borrow: the kernel reports the user of a connection (``SO_PEERCRED``), and the
server closes connections of other users. A receiver sends a ticket, which it has received over HTTP (``wire.routes``).
Receivers cannot change the memory, because it is sealed and the lent descriptor is read-only.

The cache keeps a snapshot while a connection borrows it, but no longer than a slow transfer over HTTP may take. If a
newer snapshot needs the memory, the cache cuts the receiver off. The receiver's descriptor then still works, but the
content of the memory changes. So a receiver verifies digests, or asks the source at the end whether the memory was
unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ft_transport.http.server.snapshot_cache import Reader, Reading, SnapshotCache
from ft_transport.http.shared_memory import is_sealed
from ft_transport.runtime.children import close_in_children
from ft_transport.runtime.unix_sockets import is_own_user
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.routes import DONE, GONE, HELD, LENT, TICKET_CHARACTERS, MemoryTicket, socket_name
from ft_transport.wire.snapshot import MemoryFile, Snapshot

_MAX_CONNECTIONS: Final = 64
_MAX_TICKETS: Final = 256
_TICKET_S: Final = 10.0
"""How long a ticket is valid, and how long a connection may be open without one."""
_BACKLOG: Final = 64
_NO_DESCRIPTOR_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Promise:
    """The snapshot for which a ticket is valid."""

    step: int
    snapshot_id: SnapshotId
    until_s: float


class SameHostServer:
    """Lends the memory of snapshots to receivers on this host. Used only on the server's event loop.

    Args:
        cache: The cache of served snapshots.
        name: The random name of the socket, which receivers learn over HTTP.
        stall_timeout_s: How long a receiver may take to copy 4 MiB, in seconds.

    Attributes:
        name: The name of the socket.

    Raises:
        OSError: This system has no abstract unix sockets.
    """

    def __init__(self, cache: SnapshotCache, *, name: str, stall_timeout_s: float) -> None:
        address = socket_name(name)
        if sys.platform != "linux" or address is None:
            raise OSError("abstract unix sockets are Linux's")
        self.name = name
        self._address = address
        self._cache = cache
        self._stall_timeout_s = stall_timeout_s
        self._promises: dict[str, _Promise] = {}
        self._lendings: set[_Lending] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listening.setblocking(False)
            self._listening.bind(address)
            self._listening.listen(_BACKLOG)
        except BaseException:
            self._listening.close()
            raise
        close_in_children(self)

    def is_mine(self, candidate: socket.socket) -> bool:
        """Whether ``candidate`` is this listener or a socket that it accepted; forked children close these sockets."""
        return candidate.family == socket.AF_UNIX and candidate.getsockname() == self._address

    def start(self) -> None:
        """Start to accept connections. Called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._resume()

    def stop(self) -> None:
        """Close all connections, and accept no further ones. Called on the event loop."""
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._listening.fileno())
        for lending in tuple(self._lendings):
            lending.close()
        self.close()

    def close(self) -> None:
        """Close the listener. Called instead of `stop` if `start` was never called."""
        self._listening.close()

    def can_lend(self, snapshot: Snapshot) -> bool:
        """Whether `ticket_for` returns a ticket for this snapshot."""
        return isinstance(snapshot.memory, MemoryFile) and is_sealed(snapshot.memory.descriptor)

    def ticket_for(self, snapshot: Snapshot) -> MemoryTicket | None:
        """Return a ticket for a snapshot's memory; ``None`` if the memory cannot be lent."""
        memory = snapshot.memory
        if not isinstance(memory, MemoryFile) or not self.can_lend(snapshot):
            return None
        now_s = time.monotonic()
        for known, promise in tuple(self._promises.items()):
            if promise.until_s <= now_s or len(self._promises) >= _MAX_TICKETS:
                del self._promises[known]
        ticket = secrets.token_hex(TICKET_CHARACTERS // 2)
        self._promises[ticket] = _Promise(snapshot.step, snapshot.snapshot_id, now_s + _TICKET_S)
        return MemoryTicket(ticket, memory.data_start, snapshot.total_bytes - len(snapshot.header))

    def redeem(self, ticket: str, reader: Reader) -> Reading | None:
        """Use up a ticket, and begin to read its snapshot; return ``None`` if the ticket or the snapshot expired."""
        promise = self._promises.pop(ticket, None)
        if promise is None or promise.until_s <= time.monotonic():
            return None
        return self._cache.read(promise.step, snapshot_id=promise.snapshot_id, reader=reader)

    def patience_s(self, num_bytes: int) -> float:
        """Return for how many seconds a receiver may borrow ``num_bytes``: as long as a slow transfer may take."""
        return self._stall_timeout_s * (1 + num_bytes / CHUNK_BYTES)

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # The process has no free file descriptor. Meanwhile receivers fetch over HTTP.
            self._loop.remove_reader(self._listening.fileno())
            self._resuming = self._loop.call_later(_NO_DESCRIPTOR_PAUSE_S, self._resume)
            return
        if len(self._lendings) >= _MAX_CONNECTIONS or not is_own_user(accepted):
            accepted.close()
            return
        self._lendings.add(_Lending(self, accepted))


class _Lending:
    """One connection: receives a ticket, sends the descriptor, and keeps the snapshot until the connection closes."""

    def __init__(self, server: SameHostServer, connected: socket.socket) -> None:
        self._server = server
        self._loop = loop = server._loop
        self._connected = connected
        self._received = b""
        self._reading: Reading | None = None
        self._is_closed = False
        connected.setblocking(False)
        loop.add_reader(connected.fileno(), self._read)
        self._overdue = loop.call_later(_TICKET_S, self.close)

    def close(self) -> None:
        """Close the connection, and release the snapshot."""
        if self._is_closed:
            return
        self._is_closed = True
        self._overdue.cancel()
        self._loop.remove_reader(self._connected.fileno())
        with contextlib.suppress(OSError):  # Shuts down, because a forked child may still have a copy of the socket.
            self._connected.shutdown(socket.SHUT_RDWR)
        self._connected.close()
        self._end_reading()
        self._server._lendings.discard(self)

    def _end_reading(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.__exit__()

    def _read(self) -> None:
        try:
            received = self._connected.recv(TICKET_CHARACTERS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""
        if not received:
            self.close()
        elif self._reading is not None:
            self._confirm(received)
        else:
            self._received += received
            if len(self._received) >= TICKET_CHARACTERS:
                self._lend(self._received.decode("ascii", "replace"))

    def _confirm(self, received: bytes) -> None:
        """Confirm to the receiver, which has copied everything, that the memory was unchanged until now."""
        self._end_reading()
        with contextlib.suppress(OSError):
            self._connected.send(HELD if received == DONE else GONE)
        self.close()

    def _lend(self, ticket: str) -> None:
        reading = self._server.redeem(ticket, Reader(lambda: self._is_closed, self._cut_off))
        if reading is None:
            with contextlib.suppress(OSError):
                self._connected.send(GONE)
            self.close()
            return
        reading.is_leasing = False
        self._reading = reading
        memory = reading.snapshot.memory
        assert isinstance(memory, MemoryFile), "there are tickets only for memory files"
        try:
            lent = os.open(f"/proc/self/fd/{memory.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                socket.send_fds(self._connected, [LENT], [lent])
            finally:
                os.close(lent)
        except OSError:  # The memory was closed, or ``/proc`` is missing.
            self.close()
            return
        self._overdue.cancel()
        self._overdue = self._loop.call_later(self._server.patience_s(reading.snapshot.total_bytes), self.close)

    def _cut_off(self, ended: Callable[[], None]) -> None:
        """Close the connection soon, and then call ``ended``. Called on any thread."""

        def close() -> None:
            self.close()
            ended()

        try:
            self._loop.call_soon_threadsafe(close)
        except RuntimeError:  # The loop was closed, after every connection.
            ended()
