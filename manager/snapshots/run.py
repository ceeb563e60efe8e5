"""One snapshot from its beginning at a step boundary until it can be fetched, and the log of failures."""

from __future__ import annotations

import logging

# Before Python 3.11 this is not the builtin one.
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ft_transport import UnsupportedLeafError
from ft_transport.runtime.handler_safety import SafeFuture
from manager.errors import LockTimeoutError, RegistryError
from manager.snapshots.boundary_keeper import KeptBoundary
from manager.state.lock import Section, StateLock

if TYPE_CHECKING:
    from ft_transport.state.snapshot import HeldState
    from ft_transport.transfer.server import SnapshotInProgress, SnapshotLease

logger = logging.getLogger(__name__)

BOUNDARY_TIMEOUT: Final = timedelta(milliseconds=100)
"""How long a step boundary waits for another thread's write section before it leaves a request to the next one."""


@dataclass(slots=True, eq=False)
class Run:
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

    run: Run
    state: HeldState | KeptBoundary
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
