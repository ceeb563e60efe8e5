"""The open requests for snapshots, and the jobs that answer them."""

from __future__ import annotations

import heapq
import logging
import weakref
from collections.abc import Callable

# Before Python 3.11 this is not the builtin one.
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from ft_transport import CollectiveRefusedError, UnsupportedLeafError
from ft_transport.runtime.signal_safe import SafeFuture
from manager.errors import LockTimeoutError, RegistryError
from manager.snapshots.boundary_copy import BoundaryCopy
from manager.state.lock import Section, StateLock
from manager.state.replica_state import ReplicaState

if TYPE_CHECKING:
    from ft_transport import HTTPTransport
    from ft_transport.state.snapshot import HeldState
    from ft_transport.transfer.server import SnapshotInProgress, SnapshotLease

logger = logging.getLogger(__name__)

BOUNDARY_TIMEOUT: Final = timedelta(milliseconds=100)
"""How long a step boundary waits for another thread's write section before it leaves a request to the next one."""
_PREFAULTED_AT_BOUNDARIES: Final = (2, 4)
"""First and last attempt. By then one step has been taken as a rule, so that the optimizers have made their states."""
_MAX_WANTED_STEPS: Final = 16
"""Maximum future steps that receivers may request; further ones are forgotten, the latest first."""


@dataclass(slots=True)
class SnapshotRequests:
    """The requests that no snapshot has met yet. Not thread-safe: the scheduler's mutex protects it.

    A request is stored as the number that it was given, until more snapshots than that have been published: so one that
    fails or comes too early does not drop it.

    Attributes:
        step: The committed step of the state; ``None`` before the first boundary.
        epoch: Counts possible changes of the state: the same step number can stand for two states.
        published_epoch: The epoch of the newest snapshot.
        is_to_share: Whether a snapshot should be served from live memory.
    """

    step: int | None = None
    epoch: int = 0
    published_epoch: int = -1
    is_to_share: bool = False
    _has_syncs: bool = False
    _wanted_after: int = -1
    _wanted_steps: list[int] = field(default_factory=list)

    def add_step(self, step: int, job: SnapshotJob | None) -> bool:
        """Add a request for a snapshot of exactly this step, taken at its boundary; return false if it is past.

        Args:
            step: The step.
            job: The snapshot that is under way.
        """
        if self.step is not None and step < self.step and (job is None or step != job.step):
            return False
        if self.step is None or step > self.step:
            self._wanted_steps = heapq.nsmallest(_MAX_WANTED_STEPS, {*self._wanted_steps, step})
        return True

    def add(self, job: SnapshotJob | None, num_published: Callable[[], int]) -> int:
        """Add a request for a snapshot of the present state or a later one.

        Args:
            job: The snapshot that is under way.
            num_published: Returns the number of published snapshots.

        Returns:
            The number of snapshots, published or under way, that are too old.
        """
        # The numbers of a job hold whether or not it has been published at this very moment.
        after = num_published() if job is None else job.num_before + (job.epoch != self.epoch)
        self.add_after(after)
        return after

    def add_after(self, num_published: int) -> None:
        """Add a request for a snapshot after the first ``num_published``."""
        self._wanted_after = max(self._wanted_after, num_published)

    def begin_boundary(self, step: int) -> None:
        """Note that the state shows ``step`` from here on."""
        self.step = step
        self.epoch += 1

    def take_boundary(self, num_published: int, *, is_sync: bool) -> bool:
        """Return whether a snapshot of the present boundary is wanted; drop requests that only earlier ones could meet.

        Args:
            num_published: Number of published snapshots.
            is_sync: Whether tensors that seldom change have just changed. From the first time on, a request without a
                step waits for such a moment, unless it is to be shared: at any other, the next change may be near.
        """
        assert self.step is not None, "the boundary has begun"
        self._has_syncs = self._has_syncs or is_sync
        is_urgent = is_sync or not self._has_syncs or self.step in self._wanted_steps
        if num_published > self._wanted_after:
            self._wanted_after = -1
        is_wanted = self._wanted_after >= 0 or self.step in self._wanted_steps
        self._wanted_steps = [wanted for wanted in self._wanted_steps if wanted > self.step]
        if not is_wanted:
            self.is_to_share = False
        return is_wanted and (is_urgent or self.is_to_share)

    def is_open(self, num_before: int) -> bool:
        """Return whether a request waits for the snapshot that follows ``num_before`` others."""
        return self._wanted_after >= num_before

    def forget(self, num_before: int | None = None) -> None:
        """Drop all requests, because the snapshot failed for good.

        Args:
            num_before: Number of snapshots before the failed one. Requests that were promised a later one stay open.
        """
        if num_before is None or self._wanted_after <= num_before:
            self._wanted_after = -1


@dataclass(slots=True, eq=False)
class SnapshotJob:
    """One snapshot, from its beginning on the training thread until it is published or has failed.

    Attributes:
        step: The committed step of the state.
        epoch: The step boundary at which it was begun.
        num_before: Number of snapshots published before it.
        leased: Gets a lease of the snapshot on the thread that publishes it, before another snapshot can replace it;
            set under the scheduler's mutex.
        future: Done when the snapshot is. It cannot be cancelled: a snapshot that holds the lock has to be completed.
    """

    step: int
    epoch: int
    num_before: int
    leased: SafeFuture[SnapshotLease] | None = None
    future: SafeFuture[None] = field(default_factory=SafeFuture)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()

    def await_end(self, timeout: timedelta, lock: StateLock, *, next_step: int) -> None:
        """Wait until it is published or has failed, before the snapshot of another step is begun.

        Args:
            timeout: The longest wait.
            lock: The lock that it holds, for the error.
            next_step: The other step.

        Raises:
            LockTimeoutError: It was not finished in time.
        """
        try:
            self.future.exception(timeout.total_seconds())
        except FutureTimeoutError:
            raise LockTimeoutError(
                wanted=f"begin a snapshot of step {next_step} after that of step {self.step}",
                waited_s=timeout.total_seconds(),
                holders=lock.holders(),
            ) from None


@dataclass(frozen=True, slots=True, eq=False)
class HeldBoundary:
    """A state from which a snapshot can still be taken, and the read section that protects it."""

    job: SnapshotJob
    state: HeldState | BoundaryCopy
    section: Section


def copy_and_publish(unfinished: list[SnapshotInProgress], section: Section | None) -> None:
    """Copy the rest, open the lock, and only then do what needs no lock. Never on the main thread.

    Args:
        unfinished: The snapshot; this takes it out, so that the thread which handed it over does not abandon it.
        section: The read section that guards the state until it is copied; ``None`` if nothing is copied.
    """
    in_progress = unfinished.pop()
    try:
        in_progress.copy_deferred()
    finally:
        if section is not None:
            section.release()
    in_progress.publish()


class FailureLog:
    """Logs each reason why a snapshot could not be taken once, although it recurs at every step.

    One scheduler owns it. Its methods but `taken` are called while the error is handled.
    """

    def __init__(self) -> None:
        self._is_postponed = False
        self._last_failure = ""

    def not_taken(self, step: int, error: Exception) -> bool:
        """Log why no snapshot was begun at a boundary at which one was wanted.

        Args:
            step: The committed step.
            error: The reason.

        Returns:
            Whether it may work at the next boundary.
        """
        if isinstance(error, LockTimeoutError) or getattr(error, "retryable", False):
            # Once, and not at every step while a slow receiver occupies the places.
            level = logging.DEBUG if self._is_postponed else logging.WARNING
            logger.log(level, "step %d: no snapshot yet for those who asked for one: %s", step, error)
            self._is_postponed = True
            return True
        # The same failure may come at every step: one traceback is enough.
        is_new = str(error) != self._last_failure
        self._last_failure = str(error)
        logger.error(
            "step %d: no snapshot could be taken for those who asked for one: %s", step, error, exc_info=is_new
        )
        return False

    def held_not_taken(self, step: int, error: BaseException) -> None:
        """Log why no snapshot of a held state was begun."""
        level = logging.DEBUG if self._is_postponed else logging.WARNING
        logger.log(level, "step %d: no snapshot for those who asked for one: %s", step, error)
        self._is_postponed = bool(getattr(error, "retryable", False))

    def taken(self) -> None:
        """Note that a snapshot was begun at a boundary."""
        self._is_postponed = False


def is_final(error: BaseException) -> bool:
    """Return whether a snapshot of this state fails at every boundary: because of a leaf or a state function."""
    return isinstance(error, (UnsupportedLeafError, RegistryError))


class FirstSteps:
    """Calls the state functions once, outside of the lock, and prefaults memory for snapshots, at the first boundaries.

    Owned by the training thread.

    Args:
        state: The state.
        transport: Makes memory for snapshots ready.
        prefault: Whether to prefault memory.
    """

    def __init__(self, state: ReplicaState, transport: HTTPTransport[Any], *, prefault: bool) -> None:
        self._state = state
        self._transport = transport
        self._is_called = False
        self._is_prefaulted = not prefault
        self._num_boundaries = 0

    def call_state(self) -> None:
        """Call the state functions for the first time, outside of every section.

        DCP's ``get_optimizer_state_dict`` makes the states of an optimizer that has none, by a step of it, which would
        wait inside a read section for that section's own end.

        Raises:
            RegistryError: A state function runs a collective.
        """
        if self._is_called:
            return
        try:
            self._state.content()
        except Exception as error:
            self._is_called = True
            if isinstance(error.__cause__, CollectiveRefusedError):
                raise  # On every rank alike, and at the start, when the user can fix it.
            logger.debug("the state functions failed at their first call: %s", error)
        # Not if a handler ended the call: the next one would be made inside a section.
        self._is_called = True

    def prefault(self) -> None:
        """Make memory for snapshots of this state ready after the first step; called at each boundary.

        Raises:
            RegistryError: A state function runs a collective.
        """
        self._num_boundaries += 1
        first, last = _PREFAULTED_AT_BOUNDARIES
        if self._is_prefaulted or not first <= self._num_boundaries <= last:
            return
        try:
            with self._state.lock.read("size of snapshots", BOUNDARY_TIMEOUT):
                self._transport.prefault(self._state.content())
            self._is_prefaulted = True
        except Exception as error:
            if isinstance(error.__cause__, CollectiveRefusedError):
                raise  # It comes this late only if the first call ran otherwise.
            # If the failure lasts, requests for snapshots report it.
            level = logging.DEBUG if self._num_boundaries > first else logging.WARNING
            logger.log(level, "the memory for snapshots could not be prefaulted: %s", error)


def weak_request(method: Callable[[int | None], int | None]) -> Callable[[int | None], int | None]:
    """Return ``SnapshotScheduler.request`` for a server, which must not keep the state alive."""
    reference = weakref.WeakMethod(method)

    def request(step: int | None) -> int | None:
        alive = reference()
        if alive is not None:
            return alive(step)
        # The server is about to be shut down. Until then it serves what it has.
        return 0 if step is None else None

    return request
