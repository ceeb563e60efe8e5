"""Snapshots at step boundaries: when they are begun, what is copied at once, and what in the background.

At the boundary nothing runs but the training thread, so the state is that of one committed step. Everything that
``forward`` or the user's loop may change afterwards is copied right there. Large tensors that only an attached
optimizer changes are cloned on a thread of our own while forward and backward run; the read section that protects
them is opened before the training thread goes on, and the optimizer's pre-step hook waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.optim import Optimizer

from ft_transport import HeldState, TransportError
from ft_transport.runtime.handler_safety import SafeExecutor
from manager.errors import ManagerError
from manager.snapshots.boundary_keeper import BoundaryKeeper, KeptBoundary
from manager.snapshots.demand import SnapshotDemand
from manager.snapshots.failure_log import FailureLog, is_final
from manager.snapshots.first_steps import FirstSteps
from manager.snapshots.run import BOUNDARY_TIMEOUT, HeldBoundary, Run, copy_and_publish
from manager.snapshots.sink import SnapshotInProgress, SnapshotSink
from manager.snapshots.taking import StateTaking
from manager.state.lock import Section, StateLock

logger = logging.getLogger(__name__)


class SnapshotScheduler:
    """Takes snapshots of one replica's state.

    Any thread may call ``request``, ``settle`` and ``shows_present_state``; the rest belongs to the training thread.

    Args:
        lock: The lock around the state.
        sink: Where snapshots go. Nothing else gives it snapshots of this state.
        state: Calls the state functions.
        keeper: Knows what only optimizers and write sections change.
        pool: One thread, which carries the snapshots through, one after the other. This object ends it.
        prefault: Whether the memory for snapshots is made ready before the first is asked for.
    """

    def __init__(
        self,
        *,
        lock: StateLock,
        sink: SnapshotSink,
        state: Callable[[], object],
        keeper: BoundaryKeeper,
        pool: SafeExecutor,
        prefault: bool = False,
    ) -> None:
        self._lock = lock
        self._sink = sink
        self._taking = StateTaking(sink, state, keeper)
        self._first_steps = FirstSteps(lock, sink, state, prefault=prefault)
        self._mutex = threading.Lock()
        self._demand = SnapshotDemand()
        self._run: Run | None = None
        self._held: HeldBoundary | None = None
        self._settled: Run | None = None
        self._is_closed = False
        self._is_serving = False
        self._failures = FailureLog()
        self._pool = pool

    def request(self, step: int | None = None, *, share: bool = False) -> int | None:
        """Ask for a snapshot that shows the present committed step or a later one; returns at once.

        Args:
            step: A snapshot of just this step, at whose boundary it is taken.
            share: Nothing will change the state before the snapshot has been read, as a rule: better serve it from
                where it lies than copy it.

        Returns:
            The number of snapshots published so far that are too old; any later one will do. ``None`` if ``step`` is
            past.
        """
        with self._mutex:
            demand, run = self._demand, self._run
            if step is not None and not (self._held is not None and step == self._held.run.step):
                is_under_way = run is not None and step == run.step
                if demand.step is not None and step < demand.step and not is_under_way:
                    return None
                demand.want_step(step)
                return self._sink.newest_sequence()
            demand.is_to_share = demand.is_to_share or share
            if demand.published_epoch == demand.epoch and self._sink.newest_step() == demand.step:
                return 0
            if run is None:
                after = self._sink.newest_sequence()
            else:
                # Whether it has been published at this very moment does not matter to these numbers.
                after = run.num_before if run.epoch == demand.epoch else run.num_before + 1
            demand.want_after(after)
            if self._is_serving and self._held is not None and not self._is_closed:
                self._pool.submit(self.settle)
            return after

    def boundary(
        self, step: int, optimizers: Sequence[Optimizer], *, hold: bool = False, is_sync: bool = False
    ) -> bool:
        """Note that ``step`` is committed, and begin a snapshot of it if one was asked for.

        After the first step, the memory for snapshots is made ready before anybody asks. A failure is logged and not
        raised: whoever asks for a snapshot must not be able to stop the training.

        Args:
            step: The committed step that the state shows.
            optimizers: Those that are attached.
            hold: If no snapshot was asked for, keep the state such that one can still be taken: `settle` has to
                follow, and optimizers wait until then.
            is_sync: What seldom changes has just done so. From the first time on, requests of nobody for whom the
                others wait are met at such moments alone: at any other one the next change may be near.

        Returns:
            Whether a snapshot of this step is under way or can still be taken.

        Raises:
            RegistryError: A state function runs a collective.
        """
        self.settle()
        self._first_steps.call_state()
        with self._mutex:
            self._demand.begin_boundary(step)
        if not self._is_closed:
            self._first_steps.prefault()
        with self._mutex:
            if self._is_closed or self._run is not None:
                self._forget_if_interrupted()
                return False
            num_published = self._sink.newest_sequence()
            is_wanted = self._demand.take_boundary(num_published, is_sync=is_sync)
            is_to_share = self._demand.is_to_share
            if not (is_wanted or hold):
                return False
            run = self._run = Run(step, self._demand.epoch, num_published)
        if not is_wanted:
            return self._hold_back(run, lambda: self._taking.keep(optimizers))
        held = self._taking.hold if is_to_share else self._taking.hold_lasting
        if self._hold_back(run, lambda: held(step, optimizers)):
            with self._mutex:
                self._demand.is_to_share = True
            if self.settle():
                return True
        with self._mutex:
            self._demand.is_to_share = False
            run = self._run = Run(step, self._demand.epoch, num_published)
        try:
            self._begin(run, optimizers, BOUNDARY_TIMEOUT)
        except Exception as error:
            self._sink.snapshot_failed(step, error, is_final=is_final(error))
            if not self._failures.not_taken(step, error):
                with self._mutex:
                    self._demand.forget()
            return False
        self._failures.taken()
        return True

    @contextmanager
    def serving(self, step: int, optimizers: Sequence[Optimizer], timeout: timedelta) -> Iterator[None]:
        """Take a snapshot inside as soon as somebody asks: the training thread waits there, and changes nothing.

        Args:
            step: The committed step that the state shows.
            optimizers: Those that are attached.
            timeout: For a snapshot that is under way at the end.

        Raises:
            RegistryError: A state function runs a collective.
        """
        self._is_serving = True
        try:
            self.boundary(step, optimizers, hold=True)
            with self._mutex:
                held = self._held
                is_asked_for = held is not None and self._demand.is_open(held.run.num_before)
            if is_asked_for:
                self.settle()
            yield
        finally:
            self._is_serving = False
            self.settle()
            with self._mutex:
                self._forget_if_interrupted()
                run = self._run
            if run is not None:
                # The next boundary refuses a snapshot while one is under way; it is a copy in memory.
                run.future.wait(timeout.total_seconds())
            # Who asks from here on gets the state of the next boundary, which may be that of another state.
            self.state_replaced()

    def shows_present_state(self) -> bool:
        """Whether a snapshot of the last step boundary is served, or under way."""
        with self._mutex:
            is_under_way = self._run is not None and self._held is None and self._run.epoch == self._demand.epoch
            return is_under_way or self._demand.published_epoch == self._demand.epoch

    def settle(self) -> bool:
        """Begin the snapshot of the state that is held, if somebody has asked for one, or let it go. On any thread.

        Returns:
            Whether a snapshot was begun.
        """
        held: HeldBoundary | None = None
        try:
            with self._mutex:
                held = self._held
                if held is None:
                    return False
                self._held, self._settled = None, held.run
            return self._begin_or_let_go(held)
        finally:
            if held is not None and self._settled is held.run:
                self._settled = None

    def _begin_or_let_go(self, held: HeldBoundary) -> bool:
        with self._mutex:
            is_wanted = self._demand.is_open(held.run.num_before) and not self._is_closed
            is_to_share = self._demand.is_to_share
            # Who asks next may be somebody whom the optimizer does not wait for.
            self._demand.is_to_share = False
        if not is_wanted:
            self._end(held.run)
            if isinstance(held.state, KeptBoundary):
                held.state.let_go()
            held.section.release()
            held.run.future.set_result(None)
            return False
        try:
            section: Section | None = held.section
            kept = held.state
            state = kept if isinstance(kept, HeldState) else self._taking.hold_kept(held.run.step, kept)
            if is_to_share and state.is_shareable:
                unfinished = [self._sink.share_held(state)]
                # From here on a writer calls back what is shared.
                held.section.release()
                section = None
            else:
                unfinished = [self._sink.begin_held(state)]
            try:
                self._pool.submit(self._complete, held.run, unfinished, section)
            except BaseException:
                with suppress(IndexError):
                    unfinished.pop().abandon()
                raise
        except BaseException as error:
            if held.section.is_open:
                held.section.release()
            self._end(held.run)
            self._sink.snapshot_failed(held.run.step, error, is_final=is_final(error))
            held.run.future.set_exception(error)
            self._failures.held_not_taken(held.run.step, error)
            return False
        return True

    def _hold_back(self, run: Run, make: Callable[[], HeldState | KeptBoundary | None]) -> bool:
        section: Section | None = None
        state: HeldState | KeptBoundary | None = None
        try:
            # Inside the caller's own write section nothing may be left for later.
            if not self._lock.write_owned():
                section = self._lock.acquire_read(f"state of step {run.step}", BOUNDARY_TIMEOUT, detached=True)
                state = make()
        except Exception as error:
            level = logging.DEBUG if isinstance(error, (ManagerError, TransportError)) else logging.ERROR
            logger.log(level, "step %d: the state could not be held: %s: %s", run.step, type(error).__name__, error)
        finally:
            if state is None:
                if section is not None:
                    section.release()
                self._end(run)
        if state is None or section is None:
            return False
        with self._mutex:
            self._held = HeldBoundary(run, state, section)
        return True

    def take(
        self,
        step: int,
        optimizers: Sequence[Optimizer],
        timeout: timedelta,
        *,
        may_share: bool = True,
        when_published: Callable[[], None] | None = None,
    ) -> Future[None]:
        """Begin a snapshot of ``step`` in any case.

        Args:
            step: The committed step.
            optimizers: Those that are attached.
            timeout: For the lock.
            may_share: Whether stable tensors may be served from where they lie.
            when_published: See `take_whole`.

        Returns:
            Done when the snapshot can be fetched; carries the error if it failed.

        Raises:
            LockTimeoutError: The one before was not finished in time, or another thread was writing.
            ManagerError: After ``close``.
            TransportError: The state cannot be captured.
        """
        self._first_steps.call_state()
        with self._mutex:
            if self._is_closed:
                raise ManagerError("expected a manager that serves snapshots, and this one has been shut down")
            self._demand.begin_boundary(step)
            self._forget_if_interrupted()
            before = self._run
        if before is not None:
            before.await_end(timeout, self._lock, next_step=step)
        with self._mutex:
            run = self._run = Run(step, self._demand.epoch, self._sink.newest_sequence(), when_published)
        self._begin(run, optimizers, timeout, may_share=may_share)
        return run.future

    def take_whole(
        self, step: int, optimizers: Sequence[Optimizer], timeout: timedelta, *, when_published: Callable[[], None]
    ) -> Future[None]:
        """As `take`, for a reader that needs a copy; where the state is held already, without another look at it.

        Args:
            step: The committed step.
            optimizers: Those that are attached.
            timeout: For the lock.
            when_published: Called on the thread that publishes the snapshot, before anything can take its place.
        """
        with self._mutex:
            held = self._held
            if held is not None and held.run.step == step:
                held.run.when_published = when_published
                # Whoever asked for it to be shared gets the copy.
                self._demand.is_to_share = False
                self._demand.want_after(held.run.num_before)
        self.settle()
        if held is not None and held.run.step == step and not self._is_closed:
            # The quorum thread may have been first, and may not be done with it yet; then it is its snapshot.
            begun = held.run.future
            if not begun.done() or begun.exception() is None:
                return begun
        return self.take(step, optimizers, timeout, may_share=False, when_published=when_published)

    def state_replaced(self) -> None:
        """Note that no snapshot so far, whatever its step, shows the present state."""
        with self._mutex:
            self._demand.epoch += 1

    def close(self) -> None:
        """Finish what is running and end the thread. No further snapshot is begun."""
        with self._mutex:
            self._is_closed = True
        self.settle()
        self._pool.shutdown(wait=True)

    def _forget_if_interrupted(self) -> None:
        """Let a snapshot be begun again where a handler raised while one was. Under the mutex, on the training thread.

        The pool has one thread, so `_forget` runs after every snapshot that was handed to it: one that is still in
        ``_run`` by then was never handed over.
        """
        run = self._run
        if run is not None and self._held is None and not self._is_closed:
            self._pool.submit(self._forget, run)

    def _forget(self, run: Run) -> None:
        with self._mutex:
            # Another thread may be about to hand it over.
            if self._run is not run or self._settled is run:
                return
            self._run = None
        with suppress(InvalidStateError):
            run.future.set_exception(ManagerError(f"the snapshot of step {run.step} was interrupted as it began"))

    def _end(self, run: Run) -> None:
        with self._mutex:
            if self._run is run:
                self._run = None

    def _begin(self, run: Run, optimizers: Sequence[Optimizer], timeout: timedelta, *, may_share: bool = True) -> None:
        section: Section | None = None
        try:
            # Inside the caller's own write section nothing may be left for later: that section may end any time.
            if not self._lock.write_owned():
                section = self._lock.acquire_read(f"snapshot of step {run.step}", timeout, detached=True)
            unfinished = [
                self._taking.begin(
                    run.step, optimizers, may_defer=section is not None, may_share=may_share and section is not None
                )
            ]
            try:
                self._pool.submit(self._complete, run, unfinished, section)
            except BaseException:
                # An exception of a signal handler may come when the work has been handed over already.
                with suppress(IndexError):
                    unfinished.pop().abandon()
                raise
        except BaseException:
            if section is not None and section.is_open:
                section.release()
            self._end(run)
            raise

    def _complete(self, run: Run, unfinished: list[SnapshotInProgress], section: Section | None) -> None:
        """Carry the snapshot through, on the pool's thread."""
        try:
            copy_and_publish(unfinished, section)
            with self._mutex:
                when_published = run.when_published
            if when_published is not None:
                when_published()
        except BaseException as error:
            logger.exception("step %d: the snapshot failed", run.step)
            self._sink.snapshot_failed(run.step, error)
            with self._mutex:
                self._run = None
                # Who asked while it was under way may have been promised a later one.
                if not getattr(error, "retryable", False):
                    self._demand.forget(run.num_before)
            run.future.set_exception(error)
        else:
            with self._mutex:
                self._run = None
                self._demand.published_epoch = run.epoch
            run.future.set_result(None)
