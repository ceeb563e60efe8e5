"""The settings and deadlines of one fetch, which all connections of the fetch share."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final, Protocol

from ft_transport.credentials import Certificates, Keys
from ft_transport.errors import DeadlineExceededError
from ft_transport.http.peer_address import PeerAddress
from ft_transport.settings import FetchProgress, TransportSettings, check_duration, check_rate

_CLOCK_TOLERANCE_S: Final = 0.001
"""A wait that ended this much before the deadline counts as having reached the deadline: the kernel counts waits in
milliseconds."""


class Interruptible(Protocol):
    """An object on which a thread may wait, such as a connection."""

    def interrupt(self) -> None:
        """Ends the current wait at once, and each later wait as soon as it begins. Thread-safe."""


class FetchHandle:
    """The progress and the cancellation of a fetch, shared by all connections of the fetch. Thread-safe.

    Attributes:
        num_bytes: Approximate number of bytes that the fetch has received in the bodies of responses.
        progress_s: Time at which the fetch last made progress, on the monotonic clock; at first, the time at which this
            object was created.
        reason: Why the fetch was cancelled; empty if it was not cancelled.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.progress_s = time.monotonic()
        self.reason = ""
        self._mutex = threading.Lock()
        self._waiting: weakref.WeakSet[Interruptible] = weakref.WeakSet()

    def cancel(self, reason: str) -> None:
        """End the fetch at once, as if its deadline had passed, with ``reason`` in the error."""
        with self._mutex:
            self.reason = self.reason or reason
            waiting = list(self._waiting)
        for each in waiting:
            each.interrupt()

    def add(self, waiting: Interruptible) -> None:
        """Register an object that `cancel` interrupts; interrupt it now if the fetch is cancelled already."""
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
        stall_timeout_s: Longest time without a byte from a peer, in seconds. ``min_bytes_per_s`` applies to a body only
            after this time.
        min_bytes_per_s: Minimum average throughput of a body; a request with a slower body fails.
        progress_timeout_s: Longest time without data from any peer, in seconds; ``None`` for no limit.
        handle: The progress of the fetch.
    """

    deadline_s: float
    connect_timeout_s: float
    stall_timeout_s: float
    min_bytes_per_s: float
    progress_timeout_s: float | None = None
    handle: FetchHandle = field(default_factory=FetchHandle)

    def end_s(self) -> float:
        """Return the monotonic time at which the fetch has to end: its deadline, or earlier if progress stops."""
        if self.handle.reason:
            return 0.0
        if self.progress_timeout_s is None:
            return self.deadline_s
        return min(self.deadline_s, self.handle.progress_s + self.progress_timeout_s)

    def is_over(self) -> bool:
        """Return whether the fetch has no time left."""
        return time.monotonic() >= self.end_s() - _CLOCK_TOLERANCE_S

    def note_progress(self, num_bytes: int = 0) -> None:
        """Count ``num_bytes`` received bytes, and restart the time without progress."""
        self.handle.num_bytes += num_bytes
        self.handle.progress_s = time.monotonic()

    def reason(self) -> str:
        """Return why the fetch has no time left."""
        if self.handle.reason:
            return self.handle.reason
        if self.progress_timeout_s is not None and self.end_s() < self.deadline_s:
            return f"no data arrived for {self.progress_timeout_s:.3g} s"
        return "the deadline passed"

    def check_deadline(self) -> None:
        """Check the deadline during long work of this process, and count that work as progress.

        Raises:
            DeadlineExceededError: The deadline passed.
        """
        if time.monotonic() >= self.deadline_s:
            raise DeadlineExceededError("timed out processing the manifests of peers: the deadline passed")
        self.note_progress()

    def remaining_s(self, doing: str, peer: PeerAddress) -> float:
        """Return the seconds that the fetch has left.

        Args:
            doing: Description of the next wait, for the error.
            peer: The peer, for the error.

        Raises:
            DeadlineExceededError: The fetch has no time left.
        """
        remaining_s = self.end_s() - time.monotonic()
        if remaining_s <= 0:
            raise DeadlineExceededError(f"timed out {doing}: {self.reason()}", peer=str(peer))
        return remaining_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimeout:
    """Timeouts of a fetch, for callers that need more than a total timeout.

    Attributes:
        total: Longest duration of the whole fetch.
        unreachable: Longest time that a peer may be out of reach before its first byte; ``None`` for the default of
            the called method.
        progress: Longest time without data from any peer, at any point of the fetch; ``None`` for no such limit.

    Raises:
        ConfigurationError: A value is not a duration, or ``progress`` is negative.
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
        num_connections: Maximum number of parallel connections.
        verify: Whether to compare each received chunk with its digest, if the manifest has digests.
        max_failures: Number of consecutive failures after which the fetch stops using a source.
        keys: The job's keys; ``None`` without a job token.
        certificates: This process's certificates; ``None`` without TLS.
        unreachable_s: Longest time that a source may be out of reach before its first byte, in seconds.
        timeouts: Deadlines and the minimum throughput.
        on_progress: Function that the fetching threads call after each chunk, one call at a time; it must be fast.
            ``None`` for no reports.
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
        """Return the settings of one fetch that begins now, from the settings of a transport."""
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
                progress_timeout_s=timeout.progress.total_seconds() if timeout.progress is not None else None,
            ),
            on_progress=settings.on_progress,
            replica=settings.replica,
        )

    def report_progress(self, done_bytes: int, total_bytes: int, *, elapsed_s: float) -> None:
        """Call ``on_progress``, if the caller has set it."""
        if self.on_progress is not None:
            self.on_progress(FetchProgress(done_bytes=done_bytes, total_bytes=total_bytes, elapsed_s=elapsed_s))

    def with_stall_timeout(self, longest_s: float) -> FetchSettings:
        """Return the same settings with a stall timeout of at most ``longest_s`` seconds."""
        timeouts = self.timeouts
        shorter_s = min(longest_s, timeouts.stall_timeout_s)
        return replace(
            self,
            timeouts=replace(
                timeouts, stall_timeout_s=shorter_s, connect_timeout_s=min(shorter_s, timeouts.connect_timeout_s)
            ),
        )


def rate_limited(settings: FetchSettings, max_bytes_per_s: float | None) -> FetchSettings:
    """Return the settings with a limit on the throughput; ``None`` means no limit.

    Raises:
        ConfigurationError: The limit is not a positive number.
    """
    if max_bytes_per_s is None:
        return settings
    seconds_per_byte = 1 / check_rate("max_bytes_per_s", max_bytes_per_s)
    on_progress, end_s = settings.on_progress, settings.timeouts.end_s
    next_s, num_before = time.monotonic(), 0

    def pause(progress: FetchProgress) -> None:
        """Sleep after each chunk. The rate does not rise after a late chunk to make up for it."""
        nonlocal next_s, num_before
        if on_progress is not None:
            on_progress(progress)
        # A restarted fetch counts its bytes from zero again.
        num_bytes = progress.done_bytes - min(num_before, progress.done_bytes - 1)
        num_before = progress.done_bytes
        now_s = time.monotonic()
        next_s = max(now_s, next_s) + num_bytes * seconds_per_byte
        time.sleep(max(0.0, min(next_s, end_s()) - now_s))

    # One connection: several connections would request their chunks at the same moment.
    return replace(settings, num_connections=1, on_progress=pause)
