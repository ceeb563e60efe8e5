"""The thread of a store: it runs one save after the other, replaces a dead writer process, and shows its health.

All ranks exchange the health of their writers and saves at every step, and before a save begins.
"""

from __future__ import annotations

import logging
import queue
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from ft_transport.checkpoint.collective_write import CollectiveWrite
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.inventory import Inventory
from ft_transport.checkpoint.manifest import Trust
from ft_transport.checkpoint.save_job import MAX_TIMEOUTS, SaveHandle, SaveJob, SaveMeans
from ft_transport.checkpoint.settings import BusyPolicy, StoreSettings
from ft_transport.checkpoint.staging import StagedState
from ft_transport.checkpoint.writer_process import WriterProcess
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.errors import (
    CheckpointError,
    RankFailedError,
    RankGoneError,
    SaveInProgressError,
    TransportError,
    WriterFailedError,
)
from ft_transport.runtime.signal_safe import LazyThread
from ft_transport.runtime.threads import at_exit

logger = logging.getLogger(__name__)

_EXIT_S: Final = 60.0
"""How long the process waits for its last save at exit."""
_IDLE_S: Final = 0.2
"""How often an idle thread checks its writer."""


class Pulse(NamedTuple):
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
    """Runs saves one after the other. Only the training thread calls `submit` and `wait`.

    Args:
        group: The ranks.
        directory: Used on the first rank only.
        inventory: Retires old checkpoints when a newer one is complete.
        consolidate: Path of the part of the state that also goes to consolidated files.
        settings: The store's settings.
        trust: Signs checkpoints.

    Attributes:
        writer: This rank's writer process.
        start_writer: See `SaveMeans`; called before the thread starts.
    """

    def __init__(
        self,
        group: RankGroup,
        directory: NumberedDirectory,
        inventory: Inventory,
        consolidate: str | None,
        settings: StoreSettings,
        *,
        trust: Trust,
    ) -> None:
        self.writer: Final = WriterProcess(is_private=settings.private)
        self._inventory = inventory
        self._max_failed_saves = settings.max_failed_saves
        self._timeout_s = settings.timeout.total_seconds()
        self._agreement = Agreement(group, "background", settings.timeout)
        self._means = SaveMeans(
            agreement=self._agreement,
            collective=CollectiveWrite(self._agreement, directory, all_write=True),
            directory=directory,
            writer=self.writer,
            settings=settings,
            trust=trust,
            consolidate=consolidate,
            retire_old=inventory.retire_old,
        )
        self.start_writer: Final = self._means.start_writer
        self._current: SaveHandle | None = None
        self._is_planned = False
        self._num_failed = 0
        self._seen_writer = 0
        self._fatal: BaseException | None = None
        self._jobs: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._thread: Final = LazyThread(self._run, "ft-transport-save")
        _savers.add(self)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, step: int, staged: StagedState, *, overwrite: bool) -> SaveHandle:
        """Start a save, while no other save runs; arguments as for `SaveJob`.

        Waits for the plan of a first save, and of a save after a failure.

        Raises:
            CheckpointError: The state can never be saved; the path names why.
        """
        self.start()
        job = SaveJob(self._means, step, staged, overwrite=overwrite)
        handle = job.handle
        # In this order: nothing would end a save that is waited for and never reached the thread.
        self._jobs.put(job)
        self._current = handle
        if not self._is_planned:
            handle.planned.result()
            self._refuse_unsavable(handle)
        return handle

    def _refuse_unsavable(self, handle: SaveHandle) -> None:
        error = handle.exception() if handle.done() else None
        # A rank that failed this time may succeed the next time.
        if isinstance(error, CheckpointError) and error.path is not None and not isinstance(error, RankFailedError):
            self._num_failed = max(0, self._num_failed - 1)
            raise error
        self._is_planned = error is None

    def wait(self) -> None:
        """Wait until no save is running."""
        if self._current is not None:
            self._current.exception()

    def pulse(self) -> Pulse:
        """Return this rank's state. Called by the training thread."""
        number, before = self.writer.number, self._seen_writer
        self._seen_writer = number
        return Pulse(
            # Also true for a writer that was replaced since the last pulse.
            is_writer_dead=number > 0 and (number != before > 0 or not self.writer.is_alive()),
            num_failed=self._num_failed,
            is_fatal=self._fatal is not None,
            is_busy=self._current is not None and not self._current.done(),
        )

    def raise_fatal(self) -> None:
        """Raise, once, if too many saves have failed.

        Raises:
            CheckpointError: Its cause is the error of the last save.
        """
        fatal, self._fatal = self._fatal, None
        if fatal is not None:
            # A trainer that continues nevertheless may fail as many times again.
            num_failed, self._num_failed = self._num_failed, 0
            raise CheckpointError(
                f"{num_failed} saves in a row have failed, {self._max_failed_saves} are allowed; the last one: "
                f"{type(fatal).__name__}: {fatal}"
            ) from fatal

    def close(self) -> None:
        """End the thread after its last save, and the writer process. Idempotent."""
        self._jobs.put(None)
        self._thread.join()
        self._agreement.close()
        self.writer.close()

    def finish_at_exit(self, deadline_s: float) -> None:
        """End the thread as `close` does, but wait no longer than until ``deadline_s``, by the monotonic clock."""
        thread = self._thread
        if thread.is_alive():
            self._jobs.put(None)
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                logger.warning("the process ends, and a checkpoint that is being saved is given up")

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                self._replace_writer()
                continue
            if job is None:
                return
            self._save(job)
            del job

    def _save(self, job: SaveJob) -> None:
        try:
            job.run()
        except BaseException as error:
            self._num_failed += 1
            if self._num_failed > self._max_failed_saves:
                self._fatal = error
            logger.warning(
                "step %d could not be saved (%d in a row, %d are allowed): %s",
                job.handle.step,
                self._num_failed,
                self._max_failed_saves,
                error,
            )
            self._is_planned = False
            job.handle.end(error)
            job.drop()
        else:
            self._num_failed = 0
            job.handle.end(None)
            job.drop()
            self._agreement.showing_life(self._inventory.delete_retired, MAX_TIMEOUTS * self._timeout_s)

    def _replace_writer(self) -> None:
        if self.writer.number and not self.writer.is_alive():
            try:
                self.start_writer()
            except WriterFailedError as error:
                logger.warning("the writer process could not be replaced yet: %s", error)


_savers: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()


@at_exit
def _finish_all() -> None:
    """Finish all saves at exit: a thread that is cut off inside torch while the interpreter ends aborts the process."""
    deadline_s = time.monotonic() + _EXIT_S
    for saver in list(_savers):
        saver.finish_at_exit(deadline_s)


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


class Health:
    """Exchanges the pulses of all ranks. For the training thread; all ranks make the same calls.

    Args:
        agreement: The group's agreement, for this purpose only.
        background: This rank's saves.
    """

    def __init__(self, agreement: Agreement, background: BackgroundSaver) -> None:
        self._agreement = agreement
        self._background = background
        self._under_way: tuple[Any, list[torch.Tensor]] | None = None

    def connect(self) -> None:
        """Make the connections, so that the first step need not."""
        self._pulses()

    def check(self) -> StoreHealth:
        """See ``CheckpointStore.check_health``."""
        pulses: list[Pulse] = []
        if self._under_way is not None:
            (work, gathered), self._under_way = self._under_way, None
            try:
                self._agreement.exchange.wait(work)
                pulses = [Pulse(*each.tolist()) for each in gathered]
            except RankGoneError as error:
                # A rank was late, and gloo has closed the group; the remaining ranks report this through the store.
                logger.warning("the ranks of the store have lost each other: %s", error)
                self._meet_again()
        self._under_way = self._agreement.exchange.begin_all_gather(self._own())
        if any(pulse.is_fatal for pulse in pulses):
            self._raise_fatal()
        return StoreHealth(
            dead_writers=tuple(rank for rank, pulse in enumerate(pulses) if pulse.is_writer_dead),
            num_failed_saves=max((pulse.num_failed for pulse in pulses), default=0),
        )

    def admits(self, step: int, busy: BusyPolicy) -> bool:
        """Return whether a save may start; the same on all ranks.

        Raises:
            SaveInProgressError: The save before is not finished, and the policy is to refuse.
            TransportError: Too many saves have failed.
        """
        if busy == "wait":
            self._background.wait()
            self._background.raise_fatal()
            return True
        try:
            pulses = self._pulses()
        except RankGoneError:
            self._meet_again()
            pulses = self._pulses()
        if any(pulse.is_fatal for pulse in pulses):
            self._raise_fatal()
        if not any(pulse.is_busy for pulse in pulses):
            # Other ranks may have learned of the end of the save a moment before this rank.
            self._background.wait()
            return True
        if busy == "error":
            raise SaveInProgressError("expected the save before to be finished", step=step)
        logger.warning("step %d is not saved: the save before is not finished", step)
        return False

    def close(self) -> None:
        """Wait for the current save, and close the connections."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            with suppress(TransportError):
                self._agreement.exchange.wait(under_way[0])
        self._agreement.close()

    def _own(self) -> torch.Tensor:
        return torch.tensor(self._background.pulse(), dtype=torch.int64)

    def _pulses(self) -> list[Pulse]:
        return [Pulse(*each.tolist()) for each in self._agreement.exchange.all_gather(self._own())]

    def _meet_again(self) -> None:
        self._under_way = None
        self._agreement.run_on_all_ranks("meet again", lambda: None)
        self._agreement.reconnect()

    def _raise_fatal(self) -> None:
        # Another rank may have learned of the end of the save a moment before this rank.
        self._background.wait()
        self._background.raise_fatal()
        raise CheckpointError("expected fewer saves in a row to fail; see the warnings of the other ranks")
