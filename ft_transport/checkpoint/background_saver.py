"""The thread of a store: it saves what the trainer has handed over, and replaces a writer that has died."""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from ft_transport.checkpoint.handles import SaveHandle
from ft_transport.checkpoint.save import Saver, SaveRequest, SnapshotFile
from ft_transport.checkpoint.writer_process import WriterProcess
from ft_transport.errors import CheckpointError, WriterFailedError
from ft_transport.runtime.at_exit import at_exit

logger = logging.getLogger(__name__)

_EXIT_S: Final = 60.0
"""How long a process that ends waits for what it is still saving."""
_IDLE_S: Final = 0.2
"""How often an idle thread looks at its writer."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A save that has been copied already.

    Attributes:
        request: What to save; its snapshots are an error if they could not be taken.
        snapshots: Turns what was copied into snapshots, by part.
        release: Gives the memory back.
    """

    request: SaveRequest
    snapshots: Callable[[], list[SnapshotFile]]
    release: Callable[[], None]


class Pulse(NamedTuple):
    """The state of one rank, for the others.

    Attributes:
        is_writer_dead: Whether its writer process is dead, or was since the last pulse.
        num_failed: How many saves have failed in a row.
        is_fatal: Whether these are too many.
        is_busy: Whether a save is going on.
    """

    is_writer_dead: bool
    num_failed: int
    is_fatal: bool
    is_busy: bool


class BackgroundSaver:
    """Runs saves one after the other. `submit` and `wait` belong to the training thread.

    Args:
        saver: Used by this thread alone, once it runs.
        writer: The saver's.
        after_save: Called after each save that went well, when its handle is done.
        max_failed_saves: More in a row are fatal.
    """

    def __init__(
        self, saver: Saver, writer: WriterProcess, *, after_save: Callable[[], None], max_failed_saves: int
    ) -> None:
        self._saver = saver
        self._writer = writer
        self._after_save = after_save
        self._max_failed_saves = max_failed_saves
        self._current: SaveHandle | None = None
        self._num_failed = 0
        self._seen_writer = 0
        self._fatal: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[SaveJob, SaveHandle] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        _savers.add(self)

    def start(self) -> None:
        """Starts the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ft-transport-save", daemon=True)
            self._thread.start()

    def submit(self, job: SaveJob) -> SaveHandle:
        """Begins a save; nothing else is being saved."""
        self.start()
        handle = self._current = SaveHandle(job.request.step)
        self._jobs.put((job, handle))
        return handle

    def wait(self) -> None:
        """Returns when nothing is being saved."""
        if self._current is not None:
            self._current.exception()

    def pulse(self) -> Pulse:
        """How this rank is. Called by the training thread."""
        number, before = self._writer.number, self._seen_writer
        self._seen_writer = number
        return Pulse(
            # Also of one that has been replaced since the last pulse.
            is_writer_dead=number > 0 and (number != before > 0 or not self._writer.is_alive()),
            num_failed=self._num_failed,
            is_fatal=self._fatal is not None,
            is_busy=self._current is not None and not self._current.done(),
        )

    def raise_fatal(self) -> None:
        """Raises where too many saves have failed, once.

        Raises:
            CheckpointError: Its cause is the error of the last one.
        """
        fatal, self._fatal = self._fatal, None
        if fatal is not None:
            # Whoever goes on nevertheless has as many again.
            num_failed, self._num_failed = self._num_failed, 0
            raise CheckpointError(
                f"{num_failed} saves in a row have failed, {self._max_failed_saves} are allowed; the last one: "
                f"{type(fatal).__name__}: {fatal}"
            ) from fatal

    def close(self) -> None:
        """Ends the thread after what it has to save."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def finish_at_exit(self, deadline_s: float) -> None:
        """As `close`, but waits no longer than until ``deadline_s``, of the monotonic clock."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._jobs.put(None)
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                logger.warning("the process ends, and a checkpoint that is being saved is given up")

    def _run(self) -> None:
        while True:
            try:
                work = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                self._replace_writer()
                continue
            if work is None:
                return
            self._save(*work)
            del work

    def _save(self, job: SaveJob, handle: SaveHandle) -> None:
        try:
            try:
                self._saver.save(_with_snapshots(job))
            finally:
                job.release()
        except BaseException as error:
            self._num_failed += 1
            if self._num_failed > self._max_failed_saves:
                self._fatal = error
            logger.warning(
                "step %d could not be saved (%d in a row, %d are allowed): %s",
                handle.step,
                self._num_failed,
                self._max_failed_saves,
                error,
            )
            handle.future.set_exception(error)
            self._saver.let_go()
        else:
            self._num_failed = 0
            handle.future.set_result(None)
            self._saver.let_go()
            self._saver.showing_life(self._after_save)

    def _replace_writer(self) -> None:
        if self._writer.number and not self._writer.is_alive():
            try:
                self._saver.start_writer()
            except WriterFailedError as error:
                logger.warning("the writer process could not be replaced yet: %s", error)


_savers: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()


@at_exit
def _finish_all() -> None:
    """A thread that is cut off inside torch, while the interpreter ends, aborts the process."""
    deadline_s = time.monotonic() + _EXIT_S
    for saver in list(_savers):
        saver.finish_at_exit(deadline_s)


def _with_snapshots(job: SaveJob) -> SaveRequest:
    """What to save with its snapshots, or with why there are none: the other ranks are told."""
    if isinstance(job.request.snapshots, Exception):
        return job.request
    try:
        return dataclasses.replace(job.request, snapshots=job.snapshots())
    except Exception as error:
        return dataclasses.replace(job.request, snapshots=error)
