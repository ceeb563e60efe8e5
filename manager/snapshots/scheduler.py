"""Snapshots at step boundaries: when they begin, what is copied at once, and what in the background.

At the boundary only the training thread runs, so the state is that of one committed step. Everything that ``forward``
or the user's loop may change afterwards is copied at the boundary. Large tensors that only an attached optimizer
changes are cloned on a background thread while forward and backward run; the read section that protects them is opened
before the training thread goes on, and the optimizer's pre-step hook waits for it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ft_transport import TransportError
from ft_transport.runtime.handler_safety import SafeExecutor, SafeFuture
from ft_transport.state.snapshot import HeldState
from manager.errors import ManagerError
from manager.snapshots.boundary_keeper import BoundaryKeeper, KeptBoundary
from manager.snapshots.demand import SnapshotDemand
from manager.snapshots.first_steps import FirstSteps
from manager.snapshots.run import BOUNDARY_TIMEOUT, FailureLog, HeldBoundary, Run, copy_and_publish, is_final
from manager.snapshots.taking import taking_at_once, taking_in_place, taking_kept, taking_lasting
from manager.state.guarded_memory import storages_of_optimizers
from manager.state.lock import Section
from manager.state.replica_state import ReplicaState, StateObserver, checked_step

if TYPE_CHECKING:
    from ft_transport import HTTPTransport
    from ft_transport.transfer.server import SnapshotInProgress, SnapshotLease

logger = logging.getLogger(__name__)


class SnapshotScheduler(StateObserver):
    """Takes snapshots of one replica's state, and materializes shared memory before it changes.

    Any thread may call ``request``, ``settle`` and ``shows_present_state``; the training thread calls the rest.

    Args:
        state: The state.
        transport: Serves the snapshots; this object becomes its source of fresh ones.
        prefault: Whether memory for snapshots is made ready before the first request.

    Attributes:
        keeper: Knows the memory that only optimizers and write sections change.

    Raises:
        TransportError: The transport serves another state.
    """

    def __init__(self, state: ReplicaState, transport: HTTPTransport[Any], *, prefault: bool = False) -> None:
        self._state = state
        self._lock = state.lock
        self._server = transport.server
        self.keeper = BoundaryKeeper(state.registry, state.counters)
        self._first_steps = FirstSteps(state, transport, prefault=prefault)
        self._mutex = threading.Lock()
        self._demand = SnapshotDemand()
        self._run: Run | None = None
        self._held: HeldBoundary | None = None
        self._settled: Run | None = None
        self._is_closed = False
        self._is_serving = False
        self._failures = FailureLog()
        # One thread: it completes the snapshots, one after the other.
        self._pool = SafeExecutor(1, "ft-transport-snapshot")
        transport.serve_fresh(_weak_request(self.request))
        state.add_observer(self)

    def request(self, step: int | None = None, *, share: bool = False) -> int | None:
        """Request a snapshot of the present committed step or a later one; return at once.

        Args:
            step: Request a snapshot of exactly this step, taken at its boundary.
            share: Serve it from live memory, without a copy, because usually nothing changes the state before the
                receiver has read it.

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
                return self._server.newest_sequence()
            demand.is_to_share = demand.is_to_share or share
            if demand.published_epoch == demand.epoch and self._server.newest_step() == demand.step:
                return 0
            if run is None:
                after = self._server.newest_sequence()
            else:
                # These numbers hold whether or not it has been published at this very moment.
                after = run.num_before if run.epoch == demand.epoch else run.num_before + 1
            demand.want_after(after)
            if self._is_serving and self._held is not None and not self._is_closed:
                self._pool.submit(self.settle)
            return after

    def boundary(self, *, hold: bool = False, is_sync: bool = False) -> bool:
        """Note that the state shows another committed step, and begin a snapshot of it if a request is open.

        A failure is logged and not raised: no request may stop the training.

        Args:
            hold: If no request is open, keep the state such that `settle` can still begin a snapshot of it. `settle`
                has to follow; optimizers wait until then.
            is_sync: Whether a synchronization has just changed tensors that seldom change. From the first one on, only
                such a boundary answers a request without a step, of a receiver for which no replica waits: at any
                other, the next change may be near.

        Returns:
            Whether a snapshot of this step is under way or can still be taken.

        Raises:
            RegistryError: A state function runs a collective.
        """
        step = self._state.step
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
            num_published = self._server.newest_sequence()
            is_wanted = self._demand.take_boundary(num_published, is_sync=is_sync)
            is_to_share = self._demand.is_to_share
            if not (is_wanted or hold):
                return False
            run = self._run = Run(step, self._demand.epoch, num_published)
        is_held = self._hold_back(run, is_wanted=is_wanted, is_to_share=is_to_share)
        if not is_wanted:
            return is_held
        if is_held:
            with self._mutex:
                self._demand.is_to_share = True
            if self.settle():
                return True
        with self._mutex:
            self._demand.is_to_share = False
            run = self._run = Run(step, self._demand.epoch, num_published)
        try:
            self._begin(run, BOUNDARY_TIMEOUT)
        except Exception as error:
            self._server.snapshot_failed(step, error, is_final=is_final(error))
            if not self._failures.not_taken(step, error):
                with self._mutex:
                    self._demand.forget()
            return False
        self._failures.taken()
        return True

    @contextmanager
    def serving(self, timeout: timedelta) -> Iterator[None]:
        """Begin a snapshot inside at the first request: the training thread waits there, and changes nothing.

        Args:
            timeout: For a snapshot that is under way at the end.

        Raises:
            RegistryError: A state function runs a collective.
        """
        self._is_serving = True
        try:
            self.boundary(hold=True)
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
            # A later request gets the state of the next boundary, which may be another state.
            self.replaced()

    def shows_present_state(self) -> bool:
        """Whether a snapshot of the last step boundary is served, or under way."""
        with self._mutex:
            is_under_way = self._run is not None and self._held is None and self._run.epoch == self._demand.epoch
            return is_under_way or self._demand.published_epoch == self._demand.epoch

    def settle(self) -> bool:
        """Begin the snapshot of the held state if a request is open, or release the state. On any thread.

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
            # The next request may come from a receiver that the optimizer does not wait for.
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
            if isinstance(kept, HeldState):
                state: HeldState | None = kept
            else:
                state = self._server.hold(taking_kept(held.run.step, kept, self.keeper))
            assert state is not None, "all of a kept boundary is deferrable"
            share = is_to_share and state.is_shareable
            unfinished = [self._server.take(state, share=share)]
            if share:
                # From here on, a writer materializes the shared memory first.
                held.section.release()
                section = None
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
            self._server.snapshot_failed(held.run.step, error, is_final=is_final(error))
            held.run.future.set_exception(error)
            self._failures.held_not_taken(held.run.step, error)
            return False
        return True

    def _hold_back(self, run: Run, *, is_wanted: bool, is_to_share: bool) -> bool:
        """Keep the state such that a snapshot can still be taken; return whether it is kept."""
        section: Section | None = None
        state: HeldState | KeptBoundary | None = None
        try:
            # Inside the caller's own write section nothing may be left for later.
            if not self._lock.write_owned():
                section = self._lock.acquire_read(f"state of step {run.step}", BOUNDARY_TIMEOUT, detached=True)
                if not is_wanted:
                    state = self.keeper.keep(self._state.optimizers())
                else:
                    choose = taking_in_place if is_to_share else taking_lasting
                    taking = choose(self._state, self.keeper)
                    state = self._server.hold(taking) if taking is not None else None
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

    def take(self, step: int | None = None) -> Future[None]:
        """See `StateManager.snapshot`."""
        state = self._state
        state.refuse_partial()
        state.assume_training_thread()
        if step is not None:
            state.step = checked_step(step)
            state.is_past_step = False
        if state.is_past_step:
            raise ManagerError(
                f"expected the number of committed steps: an optimizer has stepped since step {state.step} began; call "
                "start_step first, or pass the step"
            )
        return self._take(may_share=True)

    def take_leased(self, leased: SafeFuture[SnapshotLease]) -> Future[None]:
        """Take a leased copy for a reader; without another look at the state if it is held already.

        Args:
            leased: Gets a lease of the snapshot when it is published.
        """
        step = self._state.step
        with self._mutex:
            held = self._held
            if held is not None and held.run.step == step:
                held.run.leased = leased
                # A request to share it gets the copy as well.
                self._demand.is_to_share = False
                self._demand.want_after(held.run.num_before)
        self.settle()
        if held is not None and held.run.step == step and not self._is_closed:
            # The quorum thread may have begun a snapshot first, and not be done with it yet; then use that snapshot.
            begun = held.run.future
            if not begun.done() or begun.exception() is None:
                return begun
        return self._take(may_share=False, leased=leased)

    def before_change(self, is_optimizer_step: bool) -> None:
        """Materialize shared memory before it changes."""
        if not is_optimizer_step:
            self.keeper.forget_lesson()
            self._server.materialize()
            return
        self.keeper.learn()
        # Called only if memory is shared: the tensors may be others at every step.
        self._server.materialize(self._changing_storages)

    def synchronized(self) -> None:
        """Answer open requests: a synchronization has just changed tensors that seldom change. See `guard_diloco`."""
        self.boundary(is_sync=True)

    def replaced(self) -> None:
        """Note that no snapshot so far, whatever its step, shows the present state."""
        with self._mutex:
            self._demand.epoch += 1

    def close(self) -> None:
        """Finish what is running and end the thread. No further snapshot is begun."""
        with self._mutex:
            self._is_closed = True
        self.settle()
        self._pool.shutdown(wait=True)

    def _take(self, *, may_share: bool, leased: SafeFuture[SnapshotLease] | None = None) -> Future[None]:
        """Begin a snapshot in any case; ``may_share`` as in `taking_at_once`."""
        step, timeout = self._state.step, self._state.timeout
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
            run = self._run = Run(step, self._demand.epoch, self._server.newest_sequence(), leased)
        self._begin(run, timeout, may_share=may_share)
        return run.future

    def _changing_storages(self) -> set[int]:
        """Return the storages that the announced optimizer steps; those of all optimizers, if none is named."""
        stepping = self._lock.stepping()
        return storages_of_optimizers([stepping] if isinstance(stepping, Optimizer) else self._state.optimizers())

    def _forget_if_interrupted(self) -> None:
        """Allow a new snapshot if a handler raised while one was begun. Under the mutex, on the training thread.

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

    def _begin(self, run: Run, timeout: timedelta, *, may_share: bool = True) -> None:
        section: Section | None = None
        try:
            # Inside the caller's own write section nothing may be left for later: that section may end any time.
            if not self._lock.write_owned():
                section = self._lock.acquire_read(f"snapshot of step {run.step}", timeout, detached=True)
            taking = taking_at_once(self._state, self.keeper, may_defer=section is not None, may_share=may_share)
            unfinished = [self._server.take(taking)]
            try:
                self._pool.submit(self._complete, run, unfinished, section)
            except BaseException:
                # A signal handler may raise when the work has been handed over already.
                with suppress(IndexError):
                    unfinished.pop().abandon()
                raise
        except BaseException:
            if section is not None and section.is_open:
                section.release()
            self._end(run)
            raise

    def _complete(self, run: Run, unfinished: list[SnapshotInProgress], section: Section | None) -> None:
        """Complete the snapshot, on the pool's thread."""
        try:
            copy_and_publish(unfinished, section)
            with self._mutex:
                leased = run.leased
            if leased is not None:
                self._lease_to(leased, run.step)
        except BaseException as error:
            logger.exception("step %d: the snapshot failed", run.step)
            self._server.snapshot_failed(run.step, error)
            with self._mutex:
                self._run = None
                # A request during the snapshot may have been promised a later one.
                if not getattr(error, "retryable", False):
                    self._demand.forget(run.num_before)
            run.future.set_exception(error)
        else:
            with self._mutex:
                self._run = None
                self._demand.published_epoch = run.epoch
            run.future.set_result(None)

    def _lease_to(self, leased: SafeFuture[SnapshotLease], step: int) -> None:
        """Lease the snapshot at once: without a reader, the next one may replace it."""
        try:
            leased.set_result(self._server.lease(step))
        except TransportError as error:
            leased.set_exception(error)


def _weak_request(method: Callable[[int | None], int | None]) -> Callable[[int | None], int | None]:
    """Return ``SnapshotScheduler.request`` for a server, which must not keep the state alive."""
    reference = weakref.WeakMethod(method)

    def request(step: int | None) -> int | None:
        alive = reference()
        if alive is not None:
            return alive(step)
        # The server is about to be shut down. Until then it serves what it has.
        return 0 if step is None else None

    return request
