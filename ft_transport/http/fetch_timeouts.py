"""The deadlines of a fetch, as one value for all its connections."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from typing import Final, Protocol

from ft_transport.errors import DeadlineExceededError
from ft_transport.http.peer_address import PeerAddress

_CLOCK_TOLERANCE_S: Final = 0.001
"""A wait may end this much early, because the system counts in milliseconds."""


class Progress:
    """The time of the last progress of a fetch. Shared by its connections.

    Args:
        timeout_s: Longest time without progress, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.last_s = time.monotonic()

    def note(self) -> None:
        """Note that data came, or that this side was busy by itself."""
        self.last_s = time.monotonic()


class Interruptible(Protocol):
    """A waiting object, such as a connection."""

    def interrupt(self) -> None:
        """Ends the current wait and all future ones at once. Thread-safe."""


class FetchHandle:
    """Lets another thread watch a fetch and end all its waits. Thread-safe.

    Attributes:
        num_bytes: Approximate bytes of bodies received so far.
        reason: Why the fetch was cancelled; empty while it is not.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.reason = ""
        self._mutex = threading.Lock()
        self._waiting: weakref.WeakSet[Interruptible] = weakref.WeakSet()

    def cancel(self, reason: str) -> None:
        """End the fetch as if its deadline had passed."""
        with self._mutex:
            self.reason = self.reason or reason
            waiting = list(self._waiting)
        for each in waiting:
            each.interrupt()

    def add(self, waiting: Interruptible) -> None:
        """Let `cancel` interrupt ``waiting`` as well."""
        with self._mutex:
            self._waiting.add(waiting)
            is_cancelled = bool(self.reason)
        if is_cancelled:
            waiting.interrupt()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Deadlines and the minimum throughput of one fetch.

    Attributes:
        deadline_s: Deadline of the whole fetch, on the monotonic clock.
        connect_timeout_s: Timeout of one connection attempt, in seconds.
        stall_timeout_s: The longest silence, and the head start that a slow body has before ``min_bytes_per_s`` counts.
        min_bytes_per_s: Minimum throughput, averaged over the request; a slower body is given up.
        progress: Ends the fetch if no data comes for too long, however many requests are tried.
        handle: Ends the fetch when another thread cancels it.
    """

    deadline_s: float
    connect_timeout_s: float
    stall_timeout_s: float
    min_bytes_per_s: float
    progress: Progress | None = None
    handle: FetchHandle | None = None

    def end_s(self) -> float:
        """Return when the deadline passes or the time without progress is over; every byte postpones the latter."""
        if self.handle is not None and self.handle.reason:
            return 0.0
        if self.progress is None:
            return self.deadline_s
        return min(self.deadline_s, self.progress.last_s + self.progress.timeout_s)

    def is_over(self) -> bool:
        """Whether no more time is left."""
        return time.monotonic() >= self.end_s() - _CLOCK_TOLERANCE_S

    def note_progress(self, num_bytes: int = 0) -> None:
        """Note progress of ``num_bytes``, and restart the time without progress."""
        if self.handle is not None:
            self.handle.num_bytes += num_bytes
        if self.progress is not None:
            self.progress.note()

    def reason(self) -> str:
        """Return why no time is left."""
        if self.handle is not None and self.handle.reason:
            return self.handle.reason
        if self.progress is not None and self.end_s() < self.deadline_s:
            return f"no data came for {self.progress.timeout_s:.3g} s"
        return "the deadline passed"

    def check_deadline(self) -> None:
        """Check the deadline during long work on this side, which counts as progress.

        Raises:
            DeadlineExceededError: The deadline passed.
        """
        if time.monotonic() >= self.deadline_s:
            raise DeadlineExceededError("timed out making sense of what the peer has sent: the deadline passed")
        self.note_progress()

    def remaining_s(self, doing: str, peer: PeerAddress) -> float:
        """Return the seconds left.

        Raises:
            DeadlineExceededError: No time is left.
        """
        remaining_s = self.end_s() - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceededError(f"timed out {doing}: {self.reason()}", peer=str(peer))
        return remaining_s
