"""Open requests for snapshots, snapshots in progress, and what a scheduler does at the first boundaries."""

from __future__ import annotations

import heapq
import logging
import weakref
from collections.abc import Callable

# Before Python 3.11 this is not the builtin one.
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from ft_transport import CollectiveRefusedError, UnsupportedLeafError
from ft_transport.runtime.signal_safe import SafeFuture
from manager.errors import LockTimeoutError, RegistryError
from manager.snapshots.boundary_copy import BoundaryCopy
from manager.state.lock import Section, StateLock
from manager.state.replica_state import ReplicaState

if TYPE_CHECKING:
    from ft_transport.state.copying import CopiesInFlight, Marks
    from ft_transport.state.snapshot import HeldState
    from ft_transport.transfer.server import SnapshotLease, StateServer

logger = logging.getLogger(__name__)

BOUNDARY_TIMEOUT: Final = timedelta(milliseconds=100)
"""Longest wait of a step boundary for another thread's write section. Then a request waits for the next boundary."""
_PREFAULTED_AT_BOUNDARIES: Final = (2, 4)
"""First and last boundary at which memory is prefaulted. By the first, optimizers have usually made their states."""
_MAX_WANTED_STEPS: Final = 16
"""Maximum number of future steps that receivers may request. If there are more, the latest steps are dropped."""


@dataclass(slots=True)
class OpenRequests:
    """The requests for which no snapshot has been published. Not thread-safe: the scheduler's mutex protects this.

    A request without a step is stored as a number: how many published snapshots are too old for it. The request stays
    open until more snapshots have been published, so a failed snapshot does not drop the request.

    Attributes:
        step: The committed step of the state; ``None`` before the first boundary.
        epoch: Number of times that the state may have changed. Two states may have the same step, but not the same
            epoch.
        published_epoch: Epoch of the newest published snapshot.
        is_to_share: Whether the next snapshot is to be served from live memory.
    """

    step: int | None = None
    epoch: int = 0
    published_epoch: int = -1
    is_to_share: bool = False
    _has_syncs: bool = False
    _wanted_after: int = -1
    _wanted_steps: list[int] = field(default_factory=list)

    def add_step(self, step: int, job: SnapshotJob | None) -> bool:
        """Request a snapshot of exactly this step, to be taken at its boundary.

        Args:
            step: The step.
            job: The snapshot in progress, if any.

        Returns:
            False if the boundary of this step is past.
        """
        if self.step is not None and step < self.step and (job is None or step != job.step):
            return False
        if self.step is None or step > self.step:
            self._wanted_steps = heapq.nsmallest(_MAX_WANTED_STEPS, {*self._wanted_steps, step})
        return True

    def add(self, job: SnapshotJob | None, num_published: Callable[[], int]) -> int:
        """Request a snapshot of the present state or a later one.

        Args:
            job: The snapshot in progress, if any.
            num_published: Function that returns the number of published snapshots.

        Returns:
            The number of snapshots, published or in progress, that are too old for this request.
        """
        # The numbers in a job are right even if its snapshot is published at this moment.
        after = num_published() if job is None else job.num_before + (job.epoch != self.epoch)
        self.add_after(after)
        return after

    def add_after(self, num_published: int) -> None:
        """Request any snapshot that is published after the first ``num_published``."""
        self._wanted_after = max(self._wanted_after, num_published)

    def begin_boundary(self, step: int) -> None:
        """Record that the state shows ``step`` from now on."""
        self.step = step
        self.epoch += 1

    def take_boundary(self, num_published: int, *, is_sync: bool) -> bool:
        """Return whether to take a snapshot at the present boundary; drop the requests that are met or past.

        Args:
            num_published: Number of published snapshots.
            is_sync: Whether a synchronization has just changed tensors that seldom change. After the first
                synchronization, a request without a step waits for the next synchronization: at other boundaries, the
                tensors may be about to change. A request for a shared snapshot does not wait.
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
        """Return whether an open request needs the snapshot that will be published after the first ``num_before``."""
        return self._wanted_after >= num_before

    def forget(self, num_before: int | None = None) -> None:
        """Drop the requests for any step, after a snapshot has failed in a way that will recur.

        Args:
            num_before: Number of snapshots published before the failed one. A request for a later snapshot than the
                failed one stays open.
        """
        if num_before is None or self._wanted_after <= num_before:
            self._wanted_after = -1


@dataclass(slots=True, eq=False)
class SnapshotJob:
    """A snapshot in progress, from its start on the training thread until it is published or has failed.

    Attributes:
        step: The committed step of the state.
        epoch: The epoch of the state (see `OpenRequests`).
        num_before: Number of snapshots published before this one.
        leased: Future for a lease of the snapshot, if any. The publishing thread completes it before another snapshot
            can replace this one. This field is written under the scheduler's mutex.
        future: Completes when the snapshot is published or has failed. It cannot be cancelled: a snapshot that holds
            the lock must be completed.
    """

    step: int
    epoch: int
    num_before: int
    leased: SafeFuture[SnapshotLease] | None = None
    future: SafeFuture[None] = field(default_factory=SafeFuture)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()

    def await_end(self, timeout: timedelta, lock: StateLock, *, next_step: int) -> None:
        """Wait until this snapshot is published or has failed, so that the next one can begin.

        Args:
            timeout: The longest wait.
            lock: The state's lock, whose holders the error names.
            next_step: Step of the next snapshot, for the error.

        Raises:
            LockTimeoutError: The snapshot was not finished in time.
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
    """The state of the present boundary, unchanged until the optimizer steps, so that a snapshot can still be taken.

    Attributes:
        job: The snapshot that begins if a request arrives.
        state: Copies of the boundary, or a description of the tensors to copy.
        section: The read section that keeps the rest of the state unchanged.
        marks: The events on the training thread's streams at the boundary.
    """

    job: SnapshotJob
    state: HeldState | BoundaryCopy
    section: Section
    marks: Marks


class CopyInProgress(Protocol):
    """A snapshot whose tensors are not all copied yet: a ``SnapshotInProgress``, or one for the keeper."""

    def copy_deferred(self) -> CopiesInFlight | None:
        """Copies the rest, under the read lock, and returns the copies from devices that are not complete."""

    def publish(self) -> None:
        """Completes the snapshot. Needs no lock."""

    def abandon(self) -> None:
        """Frees the memory of the snapshot."""


_Copy = TypeVar("_Copy", bound=CopyInProgress)


def begin_copy(
    lock: StateLock,
    what: str,
    timeout: timedelta,
    take: Callable[[bool], _Copy],
    submit: Callable[[list[_Copy], Section | None], object],
) -> None:
    """Begin a snapshot on the training thread, and pass it to another thread, which calls `copy_and_publish`.

    Args:
        lock: The state's lock.
        what: Names the snapshot in errors of the lock.
        timeout: Longest wait for the read section.
        take: Takes the snapshot. Its argument says whether tensors may be copied later.
        submit: Passes the snapshot and its read section to the other thread.

    Raises:
        LockTimeoutError: Another thread held the write lock until the deadline.
        TransportError: The state cannot be captured.
    """
    section: Section | None = None
    unfinished: list[_Copy] = []
    is_passed = False
    try:
        # Inside the caller's own write section, everything is copied now: no read section could protect it later.
        if not lock.write_owned():
            section = lock.acquire_read(what, timeout, detached=True)
        unfinished.append(take(section is not None))
        is_passed = True
        submit(unfinished, section)
    except BaseException:
        take_back(unfinished, section, is_passed=is_passed)
        raise


def take_back(unfinished: list[_Copy], section: Section | None, *, is_passed: bool) -> None:
    """Abandon a snapshot after an error at its beginning, and release its read section.

    Does nothing if another thread already copies the snapshot, which then needs the section.

    Args:
        unfinished: A list with the snapshot; empty if there is none, or if the other thread has it.
        section: The section, which may be closed already.
        is_passed: Whether the snapshot may have been passed to the other thread.
    """
    is_own = not is_passed
    with suppress(IndexError):
        unfinished.pop().abandon()
        is_own = True
    if is_own and section is not None and section.is_open:
        section.release()


def copy_and_publish(state: ReplicaState, unfinished: list[_Copy], section: Section | None) -> None:
    """Copy the rest of a snapshot's tensors, release the read section, and publish the snapshot.

    Do not call this on the main thread, where a signal handler may interrupt it.

    Args:
        state: The replica's state, whose writers wait for copies from devices.
        unfinished: A list with the snapshot. This function empties the list. If an error then occurs on the thread that
            began the snapshot, that thread finds the list empty, and does not abandon the snapshot.
        section: The read section that guards the state until it is copied; ``None`` if nothing is left to copy.
    """
    in_progress = unfinished.pop()
    try:
        try:
            in_flight = in_progress.copy_deferred()
            if in_flight is not None:
                state.order_writes_after(in_flight)
        finally:
            if section is not None:
                section.release()
    except BaseException:
        in_progress.abandon()
        raise
    in_progress.publish()


class FailureLog:
    """Logs why snapshots could not be taken, without a warning or traceback at every step for the same reason.

    A scheduler calls `not_taken` and `held_not_taken` while it handles the error, in an ``except`` block.
    """

    def __init__(self) -> None:
        self._is_postponed = False
        self._last_failure = ""

    def not_taken(self, step: int, error: Exception) -> bool:
        """Log why no snapshot was begun at a boundary, although a request was open.

        Args:
            step: The committed step.
            error: The reason.

        Returns:
            Whether a snapshot may succeed at the next boundary.
        """
        if isinstance(error, LockTimeoutError) or getattr(error, "retryable", False):
            # One warning, and not one at every step while slow receivers read all the snapshots that may exist.
            level = logging.DEBUG if self._is_postponed else logging.WARNING
            logger.log(level, "step %d: the requested snapshot has to wait for a later step: %s", step, error)
            self._is_postponed = True
            return True
        # The same failure may recur at every step: one traceback is enough.
        is_new = str(error) != self._last_failure
        self._last_failure = str(error)
        logger.error("step %d: the requested snapshot could not be taken: %s", step, error, exc_info=is_new)
        return False

    def held_not_taken(self, step: int, error: BaseException) -> None:
        """Log why no snapshot of a `HeldBoundary` was begun, although a request was open."""
        level = logging.DEBUG if self._is_postponed else logging.WARNING
        logger.log(
            level, "step %d: the requested snapshot of the state at the boundary could not be taken: %s", step, error
        )
        self._is_postponed = bool(getattr(error, "retryable", False))

    def taken(self) -> None:
        """Record that a snapshot was begun, so that the next failure is logged as a warning."""
        self._is_postponed = False


def is_final(error: BaseException) -> bool:
    """Return whether the error will recur at every boundary: it is due to a leaf's type or to a state function."""
    return isinstance(error, (UnsupportedLeafError, RegistryError))


class FirstSteps:
    """Prepares snapshots at the first boundaries: calls the state functions once, and prefaults memory.

    Only the training thread may use this object.

    Args:
        state: The replica's state.
        server: Prefaults the memory.
        prefault: Whether to prefault memory.
    """

    def __init__(self, state: ReplicaState, server: StateServer, *, prefault: bool) -> None:
        self._state = state
        self._server = server
        self._is_called = False
        self._is_prefaulted = not prefault
        self._num_boundaries = 0

    def call_state(self) -> None:
        """Call the state functions for the first time, outside of every section of the lock.

        DCP's ``get_optimizer_state_dict`` steps an optimizer that has no states, to create them. Inside a read section,
        that step would wait for the section itself to end.

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
                raise  # Every rank raises this, and at the start of training, when the user can fix it.
            logger.debug("the state functions failed at their first call: %s", error)
        # Skipped if a signal handler raised during the call: then the next boundary makes the first call.
        self._is_called = True

    def prefault(self) -> None:
        """Prefault memory for snapshots of this state, once, after the first step. Call this at each boundary.

        Raises:
            RegistryError: A state function runs a collective.
        """
        self._num_boundaries += 1
        first, last = _PREFAULTED_AT_BOUNDARIES
        if self._is_prefaulted or not first <= self._num_boundaries <= last:
            return
        try:
            with self._state.lock.read("size of snapshots", BOUNDARY_TIMEOUT):
                self._server.prefault(self._state.content())
            self._is_prefaulted = True
        except Exception as error:
            if isinstance(error.__cause__, CollectiveRefusedError):
                raise  # The first call, in `call_state`, ran no collective.
            # If the cause persists, the next snapshot fails with the same error.
            level = logging.DEBUG if self._num_boundaries > first else logging.WARNING
            logger.log(level, "the memory for snapshots could not be prefaulted: %s", error)


def weak_request(method: Callable[[int | None], int | None]) -> Callable[[int | None], int | None]:
    """Return a function that calls ``SnapshotScheduler.request`` as long as the scheduler exists.

    The server stores this function, and must not keep the scheduler and its state alive.
    """
    reference = weakref.WeakMethod(method)

    def request(step: int | None) -> int | None:
        alive = reference()
        if alive is not None:
            return alive(step)
        # The server will be shut down soon. Until then, it serves the snapshots that it has.
        return 0 if step is None else None

    return request
