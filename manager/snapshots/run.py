"""One snapshot on its way: from its beginning at a step boundary until it can be fetched, or has failed."""

from __future__ import annotations

from collections.abc import Callable

# Not the builtin one before Python 3.11.
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from ft_transport import HeldState
from ft_transport.runtime.handler_safety import SafeFuture
from manager.errors import LockTimeoutError
from manager.snapshots.boundary_keeper import KeptBoundary
from manager.snapshots.sink import SnapshotInProgress
from manager.state.lock import Section, StateLock

BOUNDARY_TIMEOUT: Final = timedelta(milliseconds=100)
"""How long a step boundary waits for another thread's write section before it leaves a request to the next one."""


@dataclass(slots=True, eq=False)
class Run:
    """One snapshot, from its beginning on the training thread until it is published or has failed.

    Attributes:
        step: The committed step that it shows.
        epoch: The step boundary at which it was begun.
        num_before: How many snapshots had been published before it.
        when_published: Called on the thread that publishes it, before anything can take its place; set under the
            scheduler's mutex.
        future: Done with it. It cannot be cancelled: what holds the lock has to be carried through.
    """

    step: int
    epoch: int
    num_before: int
    when_published: Callable[[], None] | None = None
    future: SafeFuture[None] = field(default_factory=SafeFuture)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()

    def await_end(self, timeout: timedelta, lock: StateLock, *, next_step: int) -> None:
        """Wait until it is published or has failed, before the snapshot of another step is begun.

        Args:
            timeout: The longest to wait.
            lock: Which keeps it, for the error.
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
    """A state that a snapshot can still be taken of, and the read section that keeps it."""

    run: Run
    state: HeldState | KeptBoundary
    section: Section


def copy_and_publish(unfinished: list[SnapshotInProgress], section: Section | None) -> None:
    """Copy the rest, open the lock, and only then do what needs no lock. Never on the main thread.

    Args:
        unfinished: The snapshot, which is taken out: who finds it gone must not abandon it.
        section: What keeps the state until it is copied; ``None`` if nothing has to.
    """
    in_progress = unfinished.pop()
    try:
        in_progress.copy_deferred()
    finally:
        if section is not None:
            section.release()
    in_progress.publish()
