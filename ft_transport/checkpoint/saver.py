"""The saves of a store: a thread runs one after the other, replaces a dead writer process, and shows its health.

All ranks exchange the health of their writers and saves at every step, and before a save begins.
"""

from __future__ import annotations

import logging
import queue
import time
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch

from ft_transport.checkpoint.collective_write import CollectiveWrite
from ft_transport.checkpoint.inventory import Inventory
from ft_transport.checkpoint.manifest import Trust
from ft_transport.checkpoint.save_job import MAX_TIMEOUTS, SaveJob, SaveMeans, StagedState
from ft_transport.checkpoint.settings import StoreSettings
from ft_transport.checkpoint.writer_process import WriterProcess
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.errors import (
    CheckpointError,
    DeadlineExceededError,
    RankFailedError,
    RankGoneError,
    SaveInProgressError,
    TransportError,
    WriterFailedError,
)
from ft_transport.runtime.signal_safe import LazyThread, SafeFuture
from ft_transport.runtime.threads import at_exit
from ft_transport.settings import check_duration

logger = logging.getLogger(__name__)

_EXIT_S: Final = 60.0
"""How long the process waits for its last save at exit."""
_IDLE_S: Final = 0.2
"""How often an idle thread checks its writer."""


class SaveHandle:
    """A save that runs in the background of training. Thread-safe.

    Attributes:
        step: Its step.
        is_skipped: Whether nothing is saved: the save before was not finished, or the checkpoint is the resumed one.
    """

    def __init__(self, step: int, *, is_skipped: bool = False) -> None:
        self.step = step
        self.is_skipped = is_skipped
        self.future: Future[None] = SafeFuture()
        self.future.set_running_or_notify_cancel()
        if is_skipped:
            self.future.set_result(None)

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self.future.done()

    def result(self, timeout: timedelta | None = None) -> None:
        """Wait until the checkpoint is complete.

        Args:
            timeout: ``None`` waits as long as the ranks show heartbeats.

        Raises:
            TransportError: The save failed; the same error on every rank.
            DeadlineExceededError: The save is still running.
        """
        if timeout is not None:
            check_duration("timeout", timeout, at_least=timedelta(0))
        try:
            self.future.result(None if timeout is None else timeout.total_seconds())
        except FutureTimeoutError:
            if self.future.done():
                raise  # This is the save's own error.
            raise DeadlineExceededError(f"expected the checkpoint within {timeout}", step=self.step) from None

    def exception(self) -> BaseException | None:
        """Wait, and return the error of the save, ``None`` if it succeeded."""
        return self.future.exception()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """The result of `CheckpointStore.check_health`; the same on every rank.

    Attributes:
        dead_writers: Ranks whose writer process is dead, and is being replaced.
        num_failed_saves: Number of saves in a row that failed.
    """

    dead_writers: tuple[int, ...]
    num_failed_saves: int

    @property
    def is_good(self) -> bool:
        """Whether all writers are alive, and no save has failed."""
        return not self.dead_writers and not self.num_failed_saves


class _Pulse(NamedTuple):
    """The state of one rank, for the others.

    Attributes:
        is_writer_dead: Whether its writer process is dead, or was since the last pulse.
        num_failed: Number of saves in a row that failed.
        is_fatal: Whether ``num_failed`` exceeds the limit.
        is_busy: Whether a save is running.
    """

    is_writer_dead: bool
    num_failed: int
    is_fatal: bool
    is_busy: bool


class BackgroundSaver:
    """Runs saves one after the other on its own thread. Only the training thread calls the methods, on all ranks alike.

    Args:
        group: The ranks.
        inventory: Retires old checkpoints when a newer one is complete.
        consolidate: Path of the part of the state that also goes to consolidated files.
        settings: The store's settings.
        trust: Signs checkpoints.
    """

    def __init__(
        self,
        group: RankGroup,
        inventory: Inventory,
        consolidate: str | None,
        settings: StoreSettings,
        *,
        trust: Trust,
    ) -> None:
        self._inventory = inventory
        self._settings = settings
        agreement = Agreement(group, "background", settings.timeout)
        self._means = SaveMeans(
            agreement=agreement,
            collective=CollectiveWrite(agreement, inventory.directory, all_write=True),
            writer=WriterProcess(is_private=settings.private),
            settings=settings,
            trust=trust,
            consolidate=consolidate,
            retire_old=inventory.retire_old,
        )
        self._health = Agreement(group, "health", settings.timeout)
        self._under_way: tuple[Any, list[torch.Tensor]] | None = None
        self._current: SaveHandle | None = None
        self._is_planned = False
        self._num_failed = 0
        self._seen_writer = 0
        self._fatal: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[SaveJob, SaveHandle] | None] = queue.SimpleQueue()
        self._thread: Final = LazyThread(self._run, "ft-transport-save")
        _savers.add(self)

    def start(self, agreement: Agreement) -> None:
        """Start the writers and the thread, and connect the ranks, so that the first step need not."""
        agreement.run_on_all_ranks("start the writer", self._means.start_writer)
        self._exchange_pulses()
        self._thread.start()

    def submit(self, step: int, staged: StagedState, *, overwrite: bool) -> SaveHandle:
        """Start a save, while no other save runs; arguments as for `SaveJob`.

        Waits for the plan of a first save, and of a save after a failure.

        Raises:
            CheckpointError: The state can never be saved; the path names why.
        """
        self._thread.start()
        job, handle = SaveJob(self._means, step, staged, overwrite=overwrite), SaveHandle(step)
        # In this order: nothing would end a save that is waited for and never reached the thread.
        self._jobs.put((job, handle))
        self._current = handle
        if not self._is_planned:
            job.planned.result()
            error = handle.exception() if handle.done() else None
            # A rank that failed this time may succeed the next time.
            if isinstance(error, CheckpointError) and error.path is not None and not isinstance(error, RankFailedError):
                self._num_failed = max(0, self._num_failed - 1)
                raise error
            self._is_planned = error is None
        return handle

    def wait(self) -> None:
        """Wait until no save is running."""
        if self._current is not None:
            self._current.exception()

    def check_health(self) -> StoreHealth:
        """See ``CheckpointStore.check_health``."""
        pulses: list[_Pulse] = []
        if self._under_way is not None:
            (work, gathered), self._under_way = self._under_way, None
            try:
                self._health.exchange.wait(work)
                pulses = [_Pulse(*each.tolist()) for each in gathered]
            except RankGoneError as error:
                # A rank was late, and gloo has closed the group; the remaining ranks report this through the store.
                logger.warning("the ranks of the store have lost each other: %s", error)
                self._meet_again()
        self._under_way = self._health.exchange.begin_all_gather(self._pulse())
        self._raise_fatal(pulses)
        return StoreHealth(
            dead_writers=tuple(rank for rank, pulse in enumerate(pulses) if pulse.is_writer_dead),
            num_failed_saves=max((pulse.num_failed for pulse in pulses), default=0),
        )

    def admits(self, step: int) -> bool:
        """Return whether a save may start; the same on all ranks.

        Raises:
            SaveInProgressError: The save before is not finished, and the policy is to refuse.
            TransportError: Too many saves have failed.
        """
        if self._settings.busy == "wait":
            self.wait()
            self._raise_own_fatal()
            return True
        try:
            pulses = self._exchange_pulses()
        except RankGoneError:
            self._meet_again()
            pulses = self._exchange_pulses()
        self._raise_fatal(pulses)
        if not any(pulse.is_busy for pulse in pulses):
            # Other ranks may have learned of the end of the save a moment before this rank.
            self.wait()
            return True
        if self._settings.busy == "error":
            raise SaveInProgressError("expected the save before to be finished", step=step)
        logger.warning("step %d is not saved: the save before is not finished", step)
        return False

    def close(self) -> None:
        """End the thread after its last save, and the writer process; close the connections. Idempotent."""
        self._jobs.put(None)
        self._thread.join()
        self._means.agreement.close()
        self._means.writer.close()
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            with suppress(TransportError):
                self._health.exchange.wait(under_way[0])
        self._health.close()

    def finish_at_exit(self, deadline_s: float) -> None:
        """End the thread as `close` does, but wait no longer than until ``deadline_s``, by the monotonic clock."""
        thread = self._thread
        if thread.is_alive():
            self._jobs.put(None)
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                logger.warning("the process ends, and a checkpoint that is being saved is given up")

    def _pulse(self) -> torch.Tensor:
        writer, before = self._means.writer, self._seen_writer
        number = self._seen_writer = writer.number
        pulse = _Pulse(
            # Also true for a writer that was replaced since the last pulse.
            is_writer_dead=number > 0 and (number != before > 0 or not writer.is_alive()),
            num_failed=self._num_failed,
            is_fatal=self._fatal is not None,
            is_busy=self._current is not None and not self._current.done(),
        )
        return torch.tensor(pulse, dtype=torch.int64)

    def _exchange_pulses(self) -> list[_Pulse]:
        return [_Pulse(*each.tolist()) for each in self._health.exchange.all_gather(self._pulse())]

    def _meet_again(self) -> None:
        self._under_way = None
        self._health.run_on_all_ranks("meet again", lambda: None)
        self._health.reconnect()

    def _raise_fatal(self, pulses: list[_Pulse]) -> None:
        """Raise, once, if too many saves of a rank have failed."""
        if any(pulse.is_fatal for pulse in pulses):
            # Another rank may have learned of the end of the save a moment before this rank.
            self.wait()
            self._raise_own_fatal()
            raise CheckpointError("expected fewer saves in a row to fail; see the warnings of the other ranks")

    def _raise_own_fatal(self) -> None:
        fatal, self._fatal = self._fatal, None
        if fatal is not None:
            # A trainer that continues nevertheless may fail as many times again.
            num_failed, self._num_failed = self._num_failed, 0
            raise CheckpointError(
                f"{num_failed} saves in a row have failed, {self._settings.max_failed_saves} are allowed; the last "
                f"one: {type(fatal).__name__}: {fatal}"
            ) from fatal

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                self._replace_writer()
                continue
            if job is None:
                return
            self._save(*job)
            del job

    def _save(self, job: SaveJob, handle: SaveHandle) -> None:
        allowed = self._settings.max_failed_saves
        try:
            job.run()
        except BaseException as error:
            self._num_failed += 1
            if self._num_failed > allowed:
                self._fatal = error
            text = "step %d could not be saved (%d in a row, %d are allowed): %s"
            logger.warning(text, handle.step, self._num_failed, allowed, error)
            self._is_planned = False
            handle.future.set_exception(error)
            job.end()
        else:
            self._num_failed = 0
            handle.future.set_result(None)
            job.end()
            timeout_s = MAX_TIMEOUTS * self._settings.timeout.total_seconds()
            self._means.agreement.showing_life(self._inventory.delete_retired, timeout_s)

    def _replace_writer(self) -> None:
        if self._means.writer.number:
            try:
                self._means.start_writer()
            except WriterFailedError as error:
                logger.warning("the writer process could not be replaced yet: %s", error)


_savers: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()


@at_exit
def _finish_all() -> None:
    """Finish all saves at exit: a thread that is cut off inside torch while the interpreter ends aborts the process."""
    deadline_s = time.monotonic() + _EXIT_S
    for saver in list(_savers):
        saver.finish_at_exit(deadline_s)
