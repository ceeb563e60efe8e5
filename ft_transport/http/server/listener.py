"""Accepts connections only while slots are free; further connections wait in the kernel.

asyncio's own server may accept a thousand connections at once, so a burst would use up the file descriptors that the
training needs. Here, each connection gets a slot (``connection_slots``) before the next connection is accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import re
import resource
import socket
from collections.abc import Callable
from typing import Final

from ft_transport.http.bind_address import LISTEN_BACKLOG
from ft_transport.http.peer_address import client_of
from ft_transport.http.server.connection_slots import ConnectionSlots, Slot
from ft_transport.http.server.logs import PeerLog

_MAX_CONNECTIONS: Final = 512
"""Maximum number of connections, so that receivers do not use up the file descriptors that the training needs."""
_DESCRIPTOR_SHARE: Final = 8
"""The server opens at most one connection for every 8 file descriptors of the process's limit. A connection uses two
descriptors while it sends a body, so all connections together use at most a quarter of the limit.
"""
_LEAST_CONNECTIONS: Final = 8
_FULL_BACKLOG: Final = 16
"""Length of the kernel's queue while all slots are in use. The kernel ignores further connections, which retry."""
_FULL_PAUSE_S: Final = 0.05
_BATCH: Final = 16
_BATCH_PAUSE_S: Final = 0.002
"""Pause after each batch of accepted connections, so that a flood does not keep the interpreter from the training."""
_PARKED_S: Final = 0.02
"""Interval between two attempts to admit the connections that wait for their rate limit."""
_ROUNDS_TO_ASK: Final = 8
"""aiohttp needs six iterations of the loop to read a connection's first request. The connections that are accepted
meanwhile must not evict it.
"""
_NO_DESCRIPTOR_PAUSE_S: Final = 1.0
_SWEEP_S: Final = 1.0
_HELD_UP_S: Final = 0.5
"""If the sweep runs later than this, the loop was delayed: requests may lie unread in its sockets, so the sweep closes
no connection.
"""
_OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_MAX_PEEK_BYTES: Final = 16 << 10
_HEAD_BEGINS: Final = re.compile(
    rb"[A-Z]+( ([!-~]+( (H|HT|HTT|HTTP|HTTP/1?|HTTP/1\.[01]?(\r?|\r\n.*))?)?)?)?\Z", re.DOTALL
)
"""Matches any beginning of a request (RFC 9112, section 3). Other bytes are passed on, to be refused at once."""
_BUSY: Final = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def max_connections() -> int:
    """Return the maximum number of connections, given this process's limit of file descriptors."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit < 0:
        return _MAX_CONNECTIONS
    return max(_LEAST_CONNECTIONS, min(_MAX_CONNECTIONS, soft_limit // _DESCRIPTOR_SHARE))


class Listener:
    """Accepts connections on a listening socket. Used only on the server's event loop.

    A connection gets its protocol when the head of a request has arrived; until then it costs little more than a
    socket.

    Args:
        listening: The listening socket; the caller closes the socket.
        slots: Assigns slots to the connections.
        make_protocol: Creates the protocol of a connection. In ``connection_made``, the protocol sets ``end`` of its
            slot; in ``connection_lost``, it returns the slot.
        peer_log: Logs that the process has no file descriptor or memory for a connection.
        claims: Takes the address and the first bytes of a connection; returns whether its client may be a member of the
            job.
    """

    def __init__(
        self,
        listening: socket.socket,
        slots: ConnectionSlots,
        make_protocol: Callable[[Slot], asyncio.BaseProtocol],
        peer_log: PeerLog,
        *,
        claims: Callable[[str, bytes], bool],
    ) -> None:
        self._listening = listening
        self._slots = slots
        self._make_protocol = make_protocol
        self._peer_log = peer_log
        self._claims = claims
        self._parked: dict[tuple[str, bool], dict[_Waiting, None]] = {}
        self._unparking: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting: set[_Waiting] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._backlog = LISTEN_BACKLOG
        listening.setblocking(False)
        self._resume()

    async def stop(self) -> None:
        """Stop accepting connections, and close the connections that have no protocol yet."""
        self._loop.remove_reader(self._listening.fileno())
        for timer in (self._resuming, self._sweeping, self._unparking):
            if timer is not None:
                timer.cancel()
        for waiting in (*self._waiting, *itertools.chain.from_iterable(self._parked.values())):
            waiting.end()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _pause(self, pause_s: float) -> None:
        self._loop.remove_reader(self._listening.fileno())
        self._resuming = self._loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._listening.fileno(), self._accept)

    def _set_backlog(self, backlog: int) -> None:
        if backlog != self._backlog:
            self._backlog = backlog
            self._listening.listen(backlog)

    def _accept(self) -> None:
        num_to_connect = max(1, self._slots.max_newcomers_of_address // _ROUNDS_TO_ASK)
        for number in range(_BATCH):
            if number and not self._slots.has_room:
                break  # Evicts nothing, because perhaps no further client waits.
            if not self._slots.make_room():
                if self._slots.is_full:
                    self._set_backlog(_FULL_BACKLOG)
                    self._pause(_FULL_PAUSE_S)
                return
            self._set_backlog(LISTEN_BACKLOG)
            try:
                accepted, address = self._listening.accept()
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    self._peer_log.note(logging.ERROR, "the server", f"cannot accept a connection: {error.strerror}")
                    self._pause(_NO_DESCRIPTOR_PAUSE_S)
                return  # No client waits, or the waiting client has disconnected.
            num_to_connect -= self._enter(accepted, client_of(address[0]))
            if not num_to_connect:
                break
        self._pause(_BATCH_PAUSE_S)

    def _enter(self, accepted: socket.socket, address: str) -> bool:
        """Assign a slot to a connection; return whether it got its protocol, because its request has arrived."""
        accepted.setblocking(False)
        if _has_closed(accepted):
            accepted.close()
            return False
        slot = self._slots.enter(address)
        if slot is None:
            with accepted, contextlib.suppress(OSError):
                accepted.send(_BUSY)
            return False
        if self._sweeping is None:
            self._sweep_later()
        return _Waiting(self, accepted, slot).look()

    def _connect_or_park(self, waiting: _Waiting, sent: bytes) -> bool:
        """Pass a connection to its protocol, unless its rate limit is exceeded; return whether it was passed.

        A connection whose rate limit is exceeded waits in a queue.
        """
        slot = waiting.slot
        slot.claims = self._claims(slot.address, sent)
        if slot.claims:
            self._slots.note_request(slot)
        if waiting.payer not in self._parked and self._admit(waiting):
            return True
        self._parked.setdefault(waiting.payer, {})[waiting] = None
        if self._unparking is None:
            self._unparking = self._loop.call_later(_PARKED_S, self._unpark)
        return False

    def _admit(self, waiting: _Waiting) -> bool:
        if not self._slots.limits.admit(waiting.slot):
            return False
        self._connect(waiting.accepted, waiting.slot)
        return True

    def _unpark(self) -> None:
        self._unparking = None
        for parked in tuple(self._parked.values()):
            for waiting in tuple(parked):
                if not self._admit(waiting):
                    break
                self._leave_parked(waiting)
        if self._parked:
            self._unparking = self._loop.call_later(_PARKED_S, self._unpark)

    def _leave_parked(self, waiting: _Waiting) -> None:
        parked = self._parked.get(waiting.payer)
        if parked is not None:
            parked.pop(waiting, None)
            if not parked:
                del self._parked[waiting.payer]

    def _connect(self, accepted: socket.socket, slot: Slot) -> None:
        self._slots.note_request(slot)

        async def connect() -> None:
            await self._loop.connect_accepted_socket(lambda: self._make_protocol(slot), accepted)

        def connected(task: asyncio.Task[None]) -> None:
            self._connecting.discard(task)
            if task.cancelled() or task.exception() is not None:
                self._slots.leave(slot)
                accepted.close()

        task = self._loop.create_task(connect())
        slot.end = task.cancel
        self._connecting.add(task)
        task.add_done_callback(connected)

    def _sweep_later(self) -> None:
        due_s = self._loop.time() + _SWEEP_S
        self._sweeping = self._loop.call_at(due_s, self._sweep, due_s)

    def _sweep(self, due_s: float) -> None:
        self._sweeping = None
        if self._loop.time() - due_s < _HELD_UP_S:
            self._slots.end_overdue()
        if self._slots.has_newcomers:
            self._sweep_later()


class _Waiting:
    """A connection without a protocol: it has not sent the head of a request. Its bytes stay in the kernel."""

    def __init__(self, listener: Listener, accepted: socket.socket, slot: Slot) -> None:
        self._listener = listener
        self.accepted = accepted
        self.slot = slot
        self._num_bytes = 0
        self._is_watched = False
        slot.end = self.end

    @property
    def payer(self) -> tuple[str, bool]:
        """Key of the budget to which the connection is charged."""
        return self.slot.address, self.slot.claims

    def look(self) -> bool:
        """Pass the connection on if its bytes contain the head of a request, or cannot be the beginning of one.

        Returns:
            Whether the connection got its protocol.
        """
        try:
            sent = self.accepted.recv(_MAX_PEEK_BYTES, socket.MSG_PEEK)
            if not sent:
                self.end()
                return False
            if len(sent) > self._num_bytes and _may_become_a_head(sent):
                self._num_bytes = len(sent)
                self.accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(sent) + 1)
                self._watch()
                return False
            self.accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        except (BlockingIOError, InterruptedError):
            self._watch()
            return False
        except OSError:
            self.end()
            return False
        self._unwatch()
        return self._listener._connect_or_park(self, sent)

    def end(self) -> None:
        self._unwatch()
        self._listener._leave_parked(self)
        self.accepted.close()
        self._listener._slots.leave(self.slot)

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._listener._waiting.add(self)
            self._listener._loop.add_reader(self.accepted.fileno(), self.look)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._listener._waiting.discard(self)
            self._listener._loop.remove_reader(self.accepted.fileno())


def _has_closed(accepted: socket.socket) -> bool:
    """Whether the peer has closed the connection without sending anything, so that it needs no slot."""
    try:
        return not accepted.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True


def _may_become_a_head(sent: bytes) -> bool:
    """Return whether ``sent`` may be the beginning of an incomplete request head."""
    if len(sent) >= _MAX_PEEK_BYTES or b"\r\n\r\n" in sent:
        return False
    return bool(_HEAD_BEGINS.match(sent))
