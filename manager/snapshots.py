"""Snapshots at step boundaries: when they are begun, what is copied at once, and what in the background.

At the boundary nothing runs but the training thread, so the state is that of one committed step. Everything that
``forward`` or the user's loop may change afterwards is copied right there. Large tensors that only an attached
optimizer changes are cloned on a thread of our own while forward and backward run; the read section that protects
them is opened before the training thread goes on, and the optimizer's pre-step hook waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch.optim import Optimizer

from manager.errors import LockTimeoutError
from manager.rwlock import Section, StateLock

logger = logging.getLogger(__name__)

MIN_DEFERRED_BYTES: Final = 64 << 10
"""Smaller tensors are copied at the boundary: that takes no longer than handing them to another thread."""


class SnapshotInProgress(Protocol):
    """As ``ft_transport.SnapshotInProgress``."""

    def copy_deferred(self) -> None:
        """Copies what was left for later, under the read lock."""

    def publish(self) -> None:
        """Serves it."""

    def abandon(self) -> None:
        """Gives everything back."""


class SnapshotSink(Protocol):
    """Where snapshots go; ``ft_transport.HTTPTransport`` is one."""

    def begin_snapshot(
        self, step: int, state: object, *, deferrable: Callable[[torch.Tensor], bool] | None = None
    ) -> SnapshotInProgress:
        """Copies what is not deferrable."""

    def newest_sequence(self) -> int:
        """How many snapshots were published."""

    def newest_step(self) -> int | None:
        """Step of the newest one."""


class Snapshotter:
    """Takes snapshots of one replica's state. ``request`` may be called by any thread, the rest by the training thread.

    Args:
        lock: The lock around the state.
        sink: Where snapshots go.
        state: Calls the state functions.
    """

    def __init__(self, *, lock: StateLock, sink: SnapshotSink, state: Callable[[], object]) -> None:
        """Take none yet."""
        self._lock = lock
        self._sink = sink
        self._state = state
        self._mutex = threading.Lock()
        self._is_wanted = False
        self._current_step: int | None = None
        self._running: tuple[int, Future[None]] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ft-transport-snapshot")

    def request(self) -> int:
        """Ask for a snapshot that shows the present committed step or a later one; returns at once.

        Returns:
            The number of snapshots published so far that are too old; any later one will do.
        """
        with self._mutex:
            published = self._sink.newest_sequence()
            if published and self._sink.newest_step() == self._current_step:
                return 0
            running = self._running
            if running is not None and not running[1].done():
                if running[0] == self._current_step:
                    return published
                published += 1
            self._is_wanted = True
            return published

    def boundary(self, step: int, optimizers: Iterable[Optimizer]) -> None:
        """Note that ``step`` is committed, and begin a snapshot of it if one was asked for.

        A failure is logged and not raised: whoever asks for a snapshot must not be able to stop the training.
        """
        with self._mutex:
            self._current_step = step
            running = self._running
            if not self._is_wanted or (running is not None and not running[1].done()):
                return
            self._is_wanted = False
        try:
            self._begin(step, optimizers)
        except Exception as error:
            if getattr(error, "retryable", False):
                logger.warning("step %d: no snapshot yet for those who asked for one: %s", step, error)
                with self._mutex:
                    self._is_wanted = True
            else:
                logger.exception("step %d: no snapshot could be taken for those who asked for one", step)

    def take(self, step: int, optimizers: Iterable[Optimizer], timeout: timedelta) -> Future[None]:
        """Begin a snapshot of ``step`` in any case.

        Returns:
            Done when the snapshot can be fetched; carries the error if it failed.

        Raises:
            LockTimeoutError: The one before was not finished in time.
            TransportError: The state cannot be captured.
        """
        with self._mutex:
            self._current_step = step
            running = self._running
        if running is not None:
            try:
                running[1].exception(timeout.total_seconds())
            except TimeoutError:
                raise LockTimeoutError(
                    wanted=f"begin a snapshot of step {step} after that of step {running[0]}",
                    waited_s=timeout.total_seconds(),
                    holders=self._lock.holders(),
                ) from None
        return self._begin(step, optimizers)

    def close(self) -> None:
        """Finish what is running and end the thread."""
        self._pool.shutdown(wait=True)

    def _begin(self, step: int, optimizers: Iterable[Optimizer]) -> Future[None]:
        what = f"snapshot of step {step}"
        if self._lock.write_owned():
            # Inside the caller's own write section nothing may be left for later: the section ends when he says.
            in_progress = self._sink.begin_snapshot(step, self._state())
            return self._submit(step, in_progress, None)
        section = self._lock.acquire_read(what, detached=True)
        try:
            in_progress = self._sink.begin_snapshot(step, self._state(), deferrable=_guarded_by(optimizers))
        except BaseException:
            section.release()
            raise
        return self._submit(step, in_progress, section)

    def _submit(self, step: int, in_progress: SnapshotInProgress, section: Section | None) -> Future[None]:
        try:
            future = self._pool.submit(_complete, step, in_progress, section)
        except BaseException:
            in_progress.abandon()
            if section is not None:
                section.release()
            raise
        with self._mutex:
            self._running = (step, future)
        return future


def _complete(step: int, in_progress: SnapshotInProgress, section: Section | None) -> None:
    """Copies the rest, opens the lock, and only then does what needs no lock."""
    try:
        try:
            in_progress.copy_deferred()
        finally:
            if section is not None:
                section.release()
        in_progress.publish()
    except Exception:
        logger.exception("step %d: the snapshot failed", step)
        raise


def _guarded_by(optimizers: Iterable[Optimizer]) -> Callable[[torch.Tensor], bool]:
    """Says of a tensor whether it is large and belongs to one of the optimizers, parameter or state."""
    guarded: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            guarded.update(_storage(parameter) for parameter in group["params"])
        for values in optimizer.state.values():
            guarded.update(_storage(value) for value in _tensors_of(values))

    def deferrable(tensor: torch.Tensor) -> bool:
        return tensor.nbytes >= MIN_DEFERRED_BYTES and _storage(tensor) in guarded

    return deferrable


def _tensors_of(values: Any) -> list[torch.Tensor]:
    if not isinstance(values, dict):
        return []
    return [value for value in values.values() if isinstance(value, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage().data_ptr()
