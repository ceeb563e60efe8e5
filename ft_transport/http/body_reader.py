"""Reads the body of one response straight from its socket into given memory, and enforces the minimum throughput."""

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
"""Halves a receiver's wake-ups; with far more, the sender runs into a full window."""
_TICK_S: Final = 0.1
"""Interval at which a waiting read checks the clock."""


class BodyReader:
    """Reads one body; made when the head of the response has arrived. Used by one thread.

    Args:
        timed: The socket.
        peer: The responding peer.
        timeouts: Deadlines and the minimum throughput.
        length: Bytes of the body according to the head; 0 if the head has no length.

    Attributes:
        ahead: Bytes of the body that were read together with the head.
        num_bytes: Bytes of the body received so far.
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
        """Fill all views, in order, with the next bytes.

        Raises:
            PeerUnreachableError: The body ended early.
            TimeoutError: The body came too slowly, or the deadline passed.
            OSError: The connection broke.
        """
        # The peer is not to blame for time that this side spent in between.
        self._received_s = time.monotonic()
        if self.num_bytes:
            self._timeouts.note_progress()
        # The bytes behind these views may take a while: a relay sends each chunk when it has it.
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
        """Restart the throughput measurement: fast bytes before do not excuse a trickle now."""
        self._started_s, self._num_paced = time.monotonic(), self.num_bytes

    def _check_pace(self) -> None:
        """Limit the next read to the deadline, the stall timeout and the minimum throughput."""
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
    """Split views after the first ``at`` bytes."""
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
