"""The saves of a store: a thread runs them one after the other, and replaces a writer process that has died.

At every step, and before a save begins, all ranks exchange the health of their writer processes and saves.
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
from ft_transport.checkpoint.retention import Retention
from ft_transport.checkpoint.save_job import MAX_TIMEOUTS, SaveJob, SaveResources
from ft_transport.checkpoint.settings import StoreSettings
from ft_transport.checkpoint.staging import StagedState
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
"""How long a process that exits waits for its last save."""
_IDLE_S: Final = 0.2
"""How often the idle thread of a store checks that its writer process is alive."""


class SaveHandle:
    """A save that runs in the background of training. Thread-safe.

    Attributes:
        step: The step that is saved.
        is_skipped: Whether nothing is saved, because an earlier save was still running, or because training has just
            resumed from the checkpoint of this step.
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
            timeout: How long to wait; ``None`` waits as long as all ranks send heartbeats.

        Raises:
            TransportError: The save failed; the same error on every rank.
            DeadlineExceededError: The save was still running when ``timeout`` had passed.
        """
        if timeout is not None:
            check_duration("timeout", timeout, at_least=timedelta(0))
        try:
            self.future.result(None if timeout is None else timeout.total_seconds())
        except FutureTimeoutError:
            if self.future.done():
                raise  # The save itself failed with a TimeoutError.
            raise DeadlineExceededError(
                f"expected the checkpoint to be complete within {timeout}", step=self.step
            ) from None

    def exception(self) -> BaseException | None:
        """Wait until the save has ended, and return its error; ``None`` if the save succeeded."""
        return self.future.exception()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """The result of `CheckpointStore.check_health`; the same on every rank.

    Attributes:
        dead_writers: Ranks whose writer process has died. The store replaces these processes.
        num_failed_saves: Number of saves that failed since the last one that succeeded.
        num_failed_uploads: Number of uploads that failed since the last one that succeeded.
    """

    dead_writers: tuple[int, ...]
    num_failed_saves: int
    num_failed_uploads: int = 0

    @property
    def is_good(self) -> bool:
        """True if every writer process is alive, and the last save and the last upload succeeded."""
        return not self.dead_writers and not self.num_failed_saves and not self.num_failed_uploads


class _Pulse(NamedTuple):
    """The health of one rank's saves, which the rank sends to the other ranks.

    Attributes:
        is_writer_dead: Whether the rank's writer process is dead, or was replaced since the last pulse.
        num_failed: Number of saves that failed since the last one that succeeded.
        is_fatal: Whether ``num_failed`` exceeds ``StoreSettings.max_failed_saves``.
        is_busy: Whether a save is running.
        num_failed_uploads: Number of uploads that failed since the last one that succeeded.
    """

    is_writer_dead: bool
    num_failed: int
    is_fatal: bool
    is_busy: bool
    num_failed_uploads: int


class BackgroundSaver:
    """Runs saves one after the other on its own thread.

    Only the training thread calls the methods, in the same order on all ranks.

    Args:
        group: The ranks that save together.
        inventory: The checkpoints of the root.
        consolidate: Path of the part of the state that is also written to consolidated files; ``None`` for no part.
        settings: The store's settings.
        trust: Signs checkpoints if a job token is set.
        retention: Uploads complete checkpoints and deletes old ones.
    """

    def __init__(
        self,
        group: RankGroup,
        inventory: Inventory,
        consolidate: str | None,
        settings: StoreSettings,
        *,
        trust: Trust,
        retention: Retention,
    ) -> None:
        self._retention = retention
        self._settings = settings
        agreement = Agreement(group, "background", settings.timeout)
        self._resources = SaveResources(
            agreement=agreement,
            collective=CollectiveWrite(agreement, inventory.root, all_write=True),
            writer=WriterProcess(is_private=settings.private),
            settings=settings,
            trust=trust,
            consolidate=consolidate,
            completed=self._retention.completed,
            take_damage=inventory.take_damage,
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
        """Start the writer processes and the thread, and connect the ranks, before the first step needs them."""
        agreement.run_on_all_ranks("start the writer", self._resources.start_writer)
        self._exchange_pulses()
        self._thread.start()

    def submit(self, step: int, staged: StagedState, *, overwrite: bool) -> SaveHandle:
        """Start a save. No other save may be running.

        For the first save, and for a save after a failed one, this call waits until the ranks have planned the save,
        so that a state that can never be saved raises an error here.

        Args:
            step: The committed step.
            staged: The copied state of this rank.
            overwrite: Whether the save may replace a checkpoint of this step.

        Raises:
            CheckpointError: The state can never be saved; ``path`` names the value.
        """
        self._thread.start()
        job, handle = SaveJob(self._resources, step, staged, overwrite=overwrite), SaveHandle(step)
        # The job is queued first. If `_current` were set first, an interrupt in between would let `wait` hang.
        self._jobs.put((job, handle))
        self._current = handle
        if not self._is_planned:
            job.planned.result()
            error = handle.exception() if handle.done() else None
            # A `RankFailedError` may not occur again, so it is not raised here, and counts as a failed save.
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
        """Return the health of all ranks at the time of the previous call; see ``CheckpointStore.check_health``."""
        pulses: list[_Pulse] = []
        if self._under_way is not None:
            (work, gathered), self._under_way = self._under_way, None
            try:
                self._health.exchange.wait(work)
                pulses = [_Pulse(*each.tolist()) for each in gathered]
            except RankGoneError as error:
                # A rank was late, and gloo closed all connections. The ranks connect again, or report who is missing.
                logger.warning("the ranks of the store have lost their connections: %s", error)
                self._reconnect()
        self._under_way = self._health.exchange.begin_all_gather(self._pulse())
        self._raise_fatal(pulses)
        return StoreHealth(
            dead_writers=tuple(rank for rank, pulse in enumerate(pulses) if pulse.is_writer_dead),
            num_failed_saves=max((pulse.num_failed for pulse in pulses), default=0),
            num_failed_uploads=max((pulse.num_failed_uploads for pulse in pulses), default=0),
        )

    def admits(self, step: int) -> bool:
        """Return whether a save may start; the same on all ranks. With ``busy="wait"``, waits for the running save.

        Raises:
            SaveInProgressError: A save is still running, and ``StoreSettings.busy`` is ``error``.
            TransportError: More saves in a row have failed than ``StoreSettings.max_failed_saves`` allows.
        """
        if self._settings.busy == "wait":
            self.wait()
            self._raise_own_fatal()
            return True
        try:
            pulses = self._exchange_pulses()
        except RankGoneError:
            self._reconnect()
            pulses = self._exchange_pulses()
        self._raise_fatal(pulses)
        if not any(pulse.is_busy for pulse in pulses):
            # The save has ended on the other ranks, so it ends here within a moment.
            self.wait()
            return True
        if self._settings.busy == "error":
            raise SaveInProgressError("expected the previous save to have ended, it is still running", step=step)
        logger.warning("step %d is not saved: the previous save is still running", step)
        return False

    def close(self) -> None:
        """Finish the running save, end the thread and the writer process, and close the connections. Idempotent."""
        self._jobs.put(None)
        self._thread.join()
        self._resources.agreement.close()
        self._resources.writer.close()
        self._retention.close(MAX_TIMEOUTS * self._settings.timeout.total_seconds())
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            with suppress(TransportError):
                self._health.exchange.wait(under_way[0])
        self._health.close()

    def finish_at_exit(self, deadline_s: float) -> None:
        """Let the thread finish its save and end, but wait at most until ``deadline_s`` (monotonic seconds)."""
        thread = self._thread
        if thread.is_alive():
            self._jobs.put(None)
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                logger.warning(
                    "the process ends while a save is still running; the checkpoint of that save stays incomplete"
                )

    def _pulse(self) -> torch.Tensor:
        writer, before = self._resources.writer, self._seen_writer
        number = self._seen_writer = writer.number
        pulse = _Pulse(
            # Also true if the writer process died and was replaced since the last pulse.
            is_writer_dead=number > 0 and (number != before > 0 or not writer.is_alive()),
            num_failed=self._num_failed,
            is_fatal=self._fatal is not None,
            is_busy=self._current is not None and not self._current.done(),
            num_failed_uploads=self._retention.num_failed_uploads,
        )
        return torch.tensor(pulse, dtype=torch.int64)

    def _exchange_pulses(self) -> list[_Pulse]:
        return [_Pulse(*each.tolist()) for each in self._health.exchange.all_gather(self._pulse())]

    def _reconnect(self) -> None:
        self._under_way = None
        self._health.run_on_all_ranks("reconnect", lambda: None)
        self._health.reconnect()

    def _raise_fatal(self, pulses: list[_Pulse]) -> None:
        """Raise an error, once, if too many saves in a row have failed on any rank."""
        if any(pulse.is_fatal for pulse in pulses):
            # The failed save has ended on another rank, so it ends here within a moment.
            self.wait()
            self._raise_own_fatal()
            raise CheckpointError("too many saves in a row have failed on another rank; see the warnings of that rank")

    def _raise_own_fatal(self) -> None:
        fatal, self._fatal = self._fatal, None
        if fatal is not None:
            # If the trainer continues in spite of the error, the count starts at 0.
            num_failed, self._num_failed = self._num_failed, 0
            raise CheckpointError(
                f"expected at most {self._settings.max_failed_saves} failed saves in a row, got {num_failed}; the last "
                f"one failed with {type(fatal).__name__}: {fatal}"
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
            self._resources.agreement.showing_life(self._retention.delete_retired, timeout_s)

    def _replace_writer(self) -> None:
        if self._resources.writer.number:
            try:
                self._resources.start_writer()
            except WriterFailedError as error:
                logger.warning("the writer process could not be replaced yet: %s", error)


_savers: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()


@at_exit
def _finish_all() -> None:
    """Finish all saves at exit: Python would abort if the interpreter ended while a thread runs inside torch."""
    deadline_s = time.monotonic() + _EXIT_S
    for saver in list(_savers):
        saver.finish_at_exit(deadline_s)
