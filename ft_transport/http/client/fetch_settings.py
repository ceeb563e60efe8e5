"""The settings and the deadlines of one fetch, each as one value for all its connections."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, Protocol

from ft_transport.errors import DeadlineExceededError
from ft_transport.http.peer_address import PeerAddress
from ft_transport.keys import Keys
from ft_transport.settings import FetchProgress, TransportSettings, check_duration, check_rate
from ft_transport.tls import Certificates

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimeout:
    """How long a fetch may take, where one duration for all of it is too coarse.

    Attributes:
        total: For everything.
        unreachable: How long a peer may be out of reach before the first byte; ``None`` for the default of the call.
        progress: How long no data may arrive, at the start or in the middle; ``None`` for ``total``.

    Raises:
        ConfigurationError: One of them is no duration, or ``progress`` is negative.
    """

    total: timedelta
    unreachable: timedelta | None = None
    progress: timedelta | None = None

    def __post_init__(self) -> None:
        check_duration("timeout", self.total, at_least=timedelta.min)
        if self.unreachable is not None:
            check_duration("unreachable timeout", self.unreachable, at_least=timedelta.min)
        if self.progress is not None:
            check_duration("progress timeout", self.progress, at_least=timedelta(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """Settings of one fetch.

    Attributes:
        num_connections: Parallel connections; at most one per chunk is used.
        verify: Whether each chunk is compared with its digest as it lands, if the manifest has digests.
        max_failures: Consecutive failures after which a source is given up.
        keys: The job's keys, if it has any.
        certificates: This side's certificates, if it has any.
        unreachable_s: How long a source may be out of reach before the first byte, in seconds.
        timeouts: Deadlines and the minimum throughput.
        on_progress: Called after each chunk, on the fetching threads, one call at a time; must be quick.
        replica: Name of this replica, for the sources' audit logs.
    """

    num_connections: int
    verify: bool
    max_failures: int
    keys: Keys | None
    certificates: Certificates | None
    unreachable_s: float
    timeouts: Timeouts
    on_progress: Callable[[FetchProgress], None] | None
    replica: str = ""

    @classmethod
    def of(
        cls,
        settings: TransportSettings,
        *,
        keys: Keys | None,
        certificates: Certificates | None,
        num_connections: int,
        timeout: FetchTimeout,
    ) -> FetchSettings:
        """Return the settings of one fetch from those of a transport; the deadlines begin now."""
        unreachable = timeout.total if timeout.unreachable is None else timeout.unreachable
        return cls(
            num_connections=num_connections,
            verify=settings.verify,
            max_failures=settings.max_failures,
            keys=keys,
            certificates=certificates,
            unreachable_s=unreachable.total_seconds(),
            timeouts=Timeouts(
                deadline_s=time.monotonic() + timeout.total.total_seconds(),
                connect_timeout_s=min(10.0, settings.limits.stall_timeout.total_seconds()),
                stall_timeout_s=settings.limits.stall_timeout.total_seconds(),
                min_bytes_per_s=settings.limits.min_bytes_per_s,
                progress=Progress(timeout.progress.total_seconds()) if timeout.progress is not None else None,
            ),
            on_progress=settings.on_progress,
            replica=settings.replica,
        )

    def with_stall_timeout(self, longest_s: float) -> FetchSettings:
        """Return the same settings with at most this stall timeout."""
        timeouts = self.timeouts
        shorter_s = min(longest_s, timeouts.stall_timeout_s)
        return replace(
            self,
            timeouts=replace(
                timeouts, stall_timeout_s=shorter_s, connect_timeout_s=min(shorter_s, timeouts.connect_timeout_s)
            ),
        )


_NUM_CONNECTIONS = 1
"""Several connections would request their chunks at the same moment."""


def paced(settings: FetchSettings, max_bytes_per_s: float | None) -> FetchSettings:
    """Return the settings with a limit on the throughput; ``None`` for no limit.

    Raises:
        ConfigurationError: The limit is not a positive number.
    """
    if max_bytes_per_s is None:
        return settings
    check_rate("max_bytes_per_s", max_bytes_per_s)
    pace = _Pace(max_bytes_per_s, settings.on_progress, settings.timeouts.end_s)
    return dataclasses.replace(settings, num_connections=_NUM_CONNECTIONS, on_progress=pace)


class _Pace:
    """Sleeps after each chunk for as long as its bytes may take; does not catch up after a late chunk."""

    def __init__(
        self,
        max_bytes_per_s: float,
        on_progress: Callable[[FetchProgress], None] | None,
        end_s: Callable[[], float],
    ) -> None:
        self._seconds_per_byte = 1 / max_bytes_per_s
        self._on_progress = on_progress
        self._end_s = end_s
        self._next_s = time.monotonic()
        self._num_before = 0

    def __call__(self, progress: FetchProgress) -> None:
        if self._on_progress is not None:
            self._on_progress(progress)
        # A restarted fetch counts from zero.
        num_bytes = progress.done_bytes - min(self._num_before, progress.done_bytes - 1)
        self._num_before = progress.done_bytes
        now_s = time.monotonic()
        self._next_s = max(now_s, self._next_s) + num_bytes * self._seconds_per_byte
        time.sleep(max(0.0, min(self._next_s, self._end_s()) - now_s))
