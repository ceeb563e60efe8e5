"""How long a peer may take: one value for all connections of a fetch."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass
from typing import Final, Protocol

from ft_transport.errors import DeadlineExceededError
from ft_transport.http.peer_address import PeerAddress

_CLOCK_TOLERANCE_S: Final = 0.001
"""A wait may end this much before its time, because the system counts in milliseconds."""


class Progress:
    """When the data of a fetch last came on. Shared by its connections.

    Args:
        timeout_s: How long it may stand still, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.last_s = time.monotonic()

    def note(self) -> None:
        """Something has come, or this side was busy by itself."""
        self.last_s = time.monotonic()


class Interruptible(Protocol):
    """What waits for a peer."""

    def interrupt(self) -> None:
        """Ends the wait at once, and all waits to come. Thread-safe."""


class FetchHandle:
    """Of a fetch that another thread watches, and may end whatever it waits for. Thread-safe.

    Attributes:
        num_bytes: How many bytes of bodies have come so far, about.
        reason: Why it was cancelled; empty while it was not.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.reason = ""
        self._mutex = threading.Lock()
        self._waiting: weakref.WeakSet[Interruptible] = weakref.WeakSet()

    def cancel(self, reason: str) -> None:
        """Ends the fetch as if its deadline had passed."""
        with self._mutex:
            self.reason = self.reason or reason
            waiting = list(self._waiting)
        for each in waiting:
            each.interrupt()

    def add(self, waiting: Interruptible) -> None:
        """Has `cancel` interrupt it as well."""
        with self._mutex:
            self._waiting.add(waiting)
            is_cancelled = bool(self.reason)
        if is_cancelled:
            waiting.interrupt()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long a peer may take.

    Attributes:
        deadline_s: When all has to be done, on the monotonic clock.
        connect_timeout_s: For one connection attempt, in seconds.
        stall_timeout_s: The longest silence, and the head start that a slow body has before ``min_bytes_per_s`` counts.
        min_bytes_per_s: A body that comes slower than this, averaged over the request, is given up.
        progress: Ends everything where no data comes for too long, however many requests are tried.
        handle: Ends everything when another thread says so.
    """

    deadline_s: float
    connect_timeout_s: float
    stall_timeout_s: float
    min_bytes_per_s: float
    progress: Progress | None = None
    handle: FetchHandle | None = None

    def end_s(self) -> float:
        """When the deadline, or the time without progress, is over; the latter moves on with every byte."""
        if self.handle is not None and self.handle.reason:
            return 0.0
        if self.progress is None:
            return self.deadline_s
        return min(self.deadline_s, self.progress.last_s + self.progress.timeout_s)

    def is_over(self) -> bool:
        """Whether no more time is left."""
        return time.monotonic() >= self.end_s() - _CLOCK_TOLERANCE_S

    def note_progress(self, num_bytes: int = 0) -> None:
        """The time without progress begins anew; so many bytes have come."""
        if self.handle is not None:
            self.handle.num_bytes += num_bytes
        if self.progress is not None:
            self.progress.note()

    def reason(self) -> str:
        """Why no more time is left."""
        if self.handle is not None and self.handle.reason:
            return self.handle.reason
        if self.progress is not None and self.end_s() < self.deadline_s:
            return f"no data came for {self.progress.timeout_s:.3g} s"
        return "the deadline passed"

    def check_deadline(self) -> None:
        """To be called now and then by what takes long on this side, which counts as no lack of progress.

        Raises:
            DeadlineExceededError: The deadline passed.
        """
        if time.monotonic() >= self.deadline_s:
            raise DeadlineExceededError("timed out making sense of what the peer has sent: the deadline passed")
        self.note_progress()

    def remaining_s(self, doing: str, peer: PeerAddress) -> float:
        """Seconds left.

        Raises:
            DeadlineExceededError: None are.
        """
        remaining_s = self.end_s() - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceededError(f"timed out {doing}: {self.reason()}", peer=str(peer))
        return remaining_s
