"""The body of one answer, read straight from its socket into given memory, at no less than the pace that is allowed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from ft_transport.errors import PeerUnreachableError
from ft_transport.http.fetch_timeouts import Timeouts
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.timed_socket import TimedSocket

_MAX_VIEWS_PER_READ: Final = 512
"""Below IOV_MAX, which Linux puts at 1024 (``man 2 readv``)."""
_WAKE_BYTES: Final = 256 << 10
"""Half the wake-ups that a receiver has without it; with far more, the sender runs into a full window."""
_TICK_S: Final = 0.1
"""How often a read that waits for more looks at the clock."""


class BodyReader:
    """Made when the head of the answer is there. Used by one thread.

    Args:
        timed: The socket.
        peer: Who answers.
        timeouts: How long things may take.
        length: The bytes of the body, as the head says; 0 if it does not.

    Attributes:
        ahead: What was read while looking for the end of the head, and belongs to the body.
        num_bytes: How many bytes of the body have come.
    """

    def __init__(self, timed: TimedSocket, *, peer: PeerAddress, timeouts: Timeouts, length: int) -> None:
        self.ahead = b""
        self.num_bytes = 0
        self._num_paced = 0
        self._timed = timed
        self._peer = peer
        self._timeouts = timeouts
        self._length = length
        self._started_s = self._received_s = time.monotonic()
        self._tick_s = 0.0

    def read_into(self, views: Sequence[memoryview]) -> None:
        """Fills all views, in order, with the next bytes.

        Raises:
            PeerUnreachableError: The body ended early.
            TimeoutError: It came too slowly, or the deadline passed.
            OSError: The connection broke.
        """
        # What this side did in between is no fault of the peer's.
        self._received_s = time.monotonic()
        if self.num_bytes:
            self._timeouts.note_progress()
        # What comes behind these views may be a while in coming: a relay sends each chunk when it has it.
        early, late = _split(views, sum(map(len, views)) - _WAKE_BYTES)
        for num_bytes, part in ((_WAKE_BYTES, early), (1, late)):
            for start in range(0, len(part), _MAX_VIEWS_PER_READ):
                self._timed.wake_at(num_bytes)
                self._fill(list(part[start : start + _MAX_VIEWS_PER_READ]))

    def _fill(self, views: list[memoryview]) -> None:
        index = 0
        while index < len(views) and self.ahead:
            taken = min(len(self.ahead), len(views[index]))
            views[index][:taken] = self.ahead[:taken]
            self.ahead = self.ahead[taken:]
            self.num_bytes += taken
            if taken < len(views[index]):
                views[index] = views[index][taken:]
                break
            index += 1
        while index < len(views):
            self._check_pace()
            try:
                got = self._timed.receive_into(views[index:])
            except BlockingIOError:
                continue
            if not got:
                raise PeerUnreachableError(
                    f"expected more of the body, the peer closed the connection after {self.num_bytes} bytes",
                    peer=str(self._peer),
                )
            self.num_bytes += got
            self._received_s = time.monotonic()
            self._timeouts.note_progress(got)
            while got:
                size = len(views[index])
                if got < size:
                    views[index] = views[index][got:]
                    break
                got -= size
                index += 1

    def pace_anew(self) -> None:
        """Counts the minimum throughput from here on: bytes that came fast before do not excuse a trickle now."""
        self._started_s, self._num_paced = time.monotonic(), self.num_bytes

    def _check_pace(self) -> None:
        """Allows the next read, until the deadline, the stall timeout or the minimum throughput ends it."""
        timeouts = self._timeouts
        until_s = min(
            timeouts.end_s(),
            self._received_s + timeouts.stall_timeout_s,
            self._started_s + timeouts.stall_timeout_s + (self.num_bytes - self._num_paced) / timeouts.min_bytes_per_s,
        )
        remaining_s = until_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        tick_s = min(_TICK_S, remaining_s)
        if tick_s != self._tick_s:
            self._timed.block(tick_s)
            self._tick_s = tick_s


def _split(views: Sequence[memoryview], at: int) -> tuple[Sequence[memoryview], Sequence[memoryview]]:
    """The first ``at`` bytes, and the rest."""
    if at <= 0:
        return (), views
    early: list[memoryview] = []
    for number, view in enumerate(views):
        if at <= len(view):
            early.append(view[:at])
            return early, [*([view[at:]] if at < len(view) else ()), *views[number + 1 :]]
        early.append(view)
        at -= len(view)
    return early, ()
