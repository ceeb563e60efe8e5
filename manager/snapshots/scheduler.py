"""Takes snapshots at step boundaries (before ``forward``), if receivers have requested any.

At a boundary only the training thread runs, so the state is that of one committed step. That thread copies what
``forward`` or the training loop may change afterwards. During forward and backward, a background thread copies the
large tensors that only an attached optimizer changes, under a read lock, for which the optimizer's next step waits. Of
tensors on a device, the thread only queues the copies (`CopiesInFlight`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ft_transport import TransportError
from ft_transport.runtime.signal_safe import SafeFuture
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.state.snapshot import HeldState
from manager.errors import ManagerError
from manager.snapshots.boundary_copy import BoundaryCopier, BoundaryCopy
from manager.snapshots.requests import (
    BOUNDARY_TIMEOUT,
    FailureLog,
    FirstSteps,
    HeldBoundary,
    OpenRequests,
    SnapshotJob,
    begin_copy,
    copy_and_publish,
    is_final,
    take_back,
    weak_request,
)
from manager.state.lock import Section
from manager.state.optimizer_guard import StateObserver
from manager.state.optimizer_states import storages_of_optimizers
from manager.state.replica_state import ReplicaState

if TYPE_CHECKING:
    from ft_transport import HTTPTransport
    from ft_transport.state.copying import Marks
    from ft_transport.transfer.server import SnapshotInProgress, SnapshotLease

logger = logging.getLogger(__name__)


class SnapshotScheduler(StateObserver):
    """Takes snapshots of one replica's state. Copies live memory that is being served, before the replica changes it.

    Only the training thread may call methods other than ``request``, ``settle`` and ``shows_present_state``.

    Args:
        transport: Serves the snapshots, and passes the receivers' requests to `request`.
        prefault: Whether to prefault memory for snapshots before the first request.

    Attributes:
        copier: Copies the memory that a snapshot could not read later, because the training loop may change it.

    Raises:
        ConfigurationError: The transport serves another state already.
    """

    def __init__(self, state: ReplicaState, transport: HTTPTransport[Any], *, prefault: bool = False) -> None:
        self._state = state
        self._lock = state.lock
        self._server = transport.server
        self.copier = BoundaryCopier(state)
        self._first_steps = FirstSteps(state, self._server, prefault=prefault)
        self._mutex = threading.Lock()
        self._requests = OpenRequests()
        self._job: SnapshotJob | None = None
        self._held: HeldBoundary | None = None
        self._settled: SnapshotJob | None = None
        self._is_closed = False
        self._is_serving = False
        self._was_full = False
        self._failures = FailureLog()
        self._pool = SafeExecutor(1, "ft-transport-snapshot")  # one thread, so one snapshot at a time
        transport.serve_fresh(weak_request(self.request))
        state.add_observer(self)

    def request(self, step: int | None = None, *, share: bool = False) -> int | None:
        """Request a snapshot, without waiting for it.

        Args:
            step: Step of the snapshot, taken at the boundary of this step; ``None`` for the present or any later step.
            share: Whether to serve the snapshot from live memory: receivers usually read it before the state changes.

        Returns:
            How many published snapshots are too old: any later one meets the request. ``None`` if ``step`` is past.
        """
        with self._mutex:
            requests, held = self._requests, self._held
            if step is not None and not (held is not None and step == held.job.step):
                return self._server.newest_sequence() if requests.add_step(step, self._job) else None
            requests.is_to_share = requests.is_to_share or share
            if requests.published_epoch == requests.epoch and self._server.newest_step() == requests.step:
                return 0
            after = requests.add(self._job, self._server.newest_sequence)
            if self._is_serving and held is not None and not self._is_closed:
                self._pool.submit(self.settle)
            return after

    def boundary(self, *, hold: bool = False, is_sync: bool = False) -> bool:
        """Begin a snapshot of the committed step if a request is open. A failure is logged, and training continues.

        Args:
            hold: Whether to keep the state unchanged if no request is open. Optimizers then wait until `settle` is
                called, which can still begin a snapshot.
            is_sync: See `OpenRequests.take_boundary`.

        Returns:
            Whether a snapshot of this step is in progress or can still be taken.

        Raises:
            RegistryError: A state function runs a collective.
        """
        step = self._state.step
        self.settle()
        self._first_steps.call_state()
        with self._mutex:
            self._requests.begin_boundary(step)
        if not self._is_closed:
            self._first_steps.prefault()
        # As it is now: if a receiver ends later in the step, this boundary can still not be served.
        self._was_full = self._server.is_full()
        with self._mutex:
            if self._is_closed or self._job is not None:
                self._forget_if_interrupted()
                return False
            num_published = self._server.newest_sequence()
            is_wanted = self._requests.take_boundary(num_published, is_sync=is_sync)
            is_to_share = self._requests.is_to_share
            if not (is_wanted or hold):
                return False
            job = self._job = SnapshotJob(step, self._requests.epoch, num_published)
        is_held = self._hold_back(job, is_wanted=is_wanted, is_to_share=is_to_share)
        if not is_wanted:
            return is_held
        if is_held:
            with self._mutex:
                self._requests.is_to_share = True
            if self.settle():
                return True
        with self._mutex:
            self._requests.is_to_share = False
            job = self._job = SnapshotJob(step, self._requests.epoch, num_published)
        try:
            self._begin(job, BOUNDARY_TIMEOUT)
        except Exception as error:
            self._server.snapshot_failed(step, error, is_final=is_final(error))
            if not self._failures.not_taken(step, error):
                with self._mutex:
                    self._requests.forget()
            return False
        self._failures.taken()
        return True

    @contextmanager
    def serving(self, timeout: timedelta) -> Iterator[None]:
        """Return a context in which the first request begins a snapshot at once.

        The beginning of the context may raise the errors of `boundary`. The training thread must not change the state
        inside. The end of the context waits for a snapshot in progress, up to ``timeout``.
        """
        self._is_serving = True
        try:
            self.boundary(hold=True)
            with self._mutex:
                held = self._held
                is_asked_for = held is not None and self._requests.is_open(held.job.num_before)
            if is_asked_for:
                self.settle()
            yield
        finally:
            self._is_serving = False
            self.settle()
            with self._mutex:
                self._forget_if_interrupted()
                job = self._job
            if job is not None:  # While a snapshot is in progress, the next boundary could not begin one.
                job.future.wait(timeout.total_seconds())
            # Requests from now on need a snapshot of the next boundary: the state may change before it.
            self.replaced()

    def shows_present_state(self) -> bool:
        """Return whether a snapshot of the last step boundary is published or in progress."""
        with self._mutex:
            is_under_way = self._job is not None and self._held is None and self._job.epoch == self._requests.epoch
            return is_under_way or self._requests.published_epoch == self._requests.epoch

    def is_full(self) -> bool:
        """Return whether no snapshot of the last step boundary can be taken before receivers of others have ended."""
        return self._was_full and not self.shows_present_state()

    def settle(self) -> bool:
        """If a request is open, begin a snapshot of the boundary, and return true. Else let the state change again."""
        held: HeldBoundary | None = None
        try:
            with self._mutex:
                held = self._held
                if held is None:
                    return False
                self._held, self._settled = None, held.job
            return self._begin_held(held)
        finally:
            if held is not None and self._settled is held.job:
                self._settled = None

    def _begin_held(self, held: HeldBoundary) -> bool:
        with self._mutex:
            is_wanted = self._requests.is_open(held.job.num_before) and not self._is_closed
            is_to_share = self._requests.is_to_share
            # Whether to share the next snapshot depends on the next requests only.
            self._requests.is_to_share = False
        if not is_wanted:
            self._end(held.job)
            if isinstance(held.state, BoundaryCopy):
                held.state.recycle()
            held.section.release()
            held.job.future.set_result(None)
            return False
        unfinished: list[SnapshotInProgress] = []
        is_passed = False
        try:
            state: HeldState | BoundaryCopy | None = held.state
            if isinstance(state, BoundaryCopy):
                state = self._server.hold(self.copier.capture_copy(held.job.step, state), held.marks)
            assert isinstance(state, HeldState), "all tensors of a copied boundary may be copied later"
            share = is_to_share and state.is_shareable
            unfinished.append(self._server.take(state, share=share))
            if share:
                # The lock is not needed: a writer copies the shared memory before it changes that memory.
                held.section.release()
            is_passed = True
            self._pool.submit(self._complete, held.job, unfinished, None if share else held.section)
        except BaseException as error:
            take_back(unfinished, held.section, is_passed=is_passed)
            self._end(held.job)
            self._server.snapshot_failed(held.job.step, error, is_final=is_final(error))
            self._failures.held_not_taken(held.job.step, error)
            # The traceback refers to this frame, and so to the held copies, which would live until garbage collection.
            held.job.future.set_exception(error.with_traceback(None))
            return False
        return True

    def _hold_back(self, job: SnapshotJob, *, is_wanted: bool, is_to_share: bool) -> bool:
        """Keep the state unchanged until `settle` is called; return whether it can be kept."""
        section: Section | None = None
        state: HeldState | BoundaryCopy | None = None
        marks: Marks = {}
        try:
            # Inside the caller's own write section, no read section can protect the state until later.
            if not self._lock.write_owned():
                section = self._lock.acquire_read(f"state of step {job.step}", BOUNDARY_TIMEOUT, detached=True)
                if not is_wanted:
                    state = self.copier.copy()
                else:
                    capture = self.copier.capture_in_place() if is_to_share else self.copier.capture_stable()
                    state = self._server.hold(capture) if capture is not None else None
                if state is not None:
                    # The first parameter of a group stands for all: one that is on another device is marked later.
                    groups = [group["params"] for each in self._state.optimizers() for group in each.param_groups]
                    marks = self._server.mark({parameters[0].device for parameters in groups if parameters})
        except Exception as error:
            state = None
            level = logging.DEBUG if isinstance(error, (ManagerError, TransportError)) else logging.ERROR
            reason = f"{type(error).__name__}: {error}"
            logger.log(level, "step %d: the state could not be kept for a later snapshot: %s", job.step, reason)
        finally:
            if state is None:
                if section is not None:
                    section.release()
                self._end(job)
        if state is None or section is None:
            return False
        with self._mutex:
            self._held = HeldBoundary(job, state, section, marks)
        return True

    def take(
        self, step: int | None = None, *, may_share: bool = True, leased: SafeFuture[SnapshotLease] | None = None
    ) -> Future[None]:
        """Begin a snapshot even if no request is open; see `StateManager.snapshot` and `BoundaryCopier.capture`."""
        self._state.require_step(step)
        step, timeout = self._state.step, self._state.timeout
        self._first_steps.call_state()
        with self._mutex:
            if self._is_closed:
                raise ManagerError("expected a running manager to take a snapshot, but this one has been shut down")
            self._requests.begin_boundary(step)
            self._forget_if_interrupted()
            before = self._job
        if before is not None:
            before.await_end(timeout, self._lock, next_step=step)
        with self._mutex:
            job = self._job = SnapshotJob(step, self._requests.epoch, self._server.newest_sequence(), leased)
        self._begin(job, timeout, may_share=may_share)
        return job.future

    def take_leased(self, leased: SafeFuture[SnapshotLease]) -> Future[None]:
        """Begin a snapshot that is a copy of the state, and put a lease of the snapshot into ``leased``."""
        step = self._state.step
        with self._mutex:
            held = self._held
            if held is not None and held.job.step == step:
                held.job.leased = leased
                # Receivers that requested a shared snapshot read this copy instead.
                self._requests.is_to_share = False
                self._requests.add_after(held.job.num_before)
        self.settle()
        if held is not None and held.job.step == step and not self._is_closed:
            # The quorum thread may have begun this snapshot first, and it may still be in progress.
            begun = held.job.future
            if not begun.done() or begun.exception() is None:
                return begun
        return self.take(may_share=False, leased=leased)

    def before_change(self, is_optimizer_step: bool) -> None:
        """Before the calling thread changes memory from which snapshots are served, copy that memory."""
        if not is_optimizer_step:
            self.copier.expect_changes()
            self._server.materialize()
            return
        self.copier.learn_changes()
        # Lists the storages only if memory is shared: each step may have other tensors, and the list takes time.
        self._server.materialize(self._changing_storages() if self._server.is_sharing() else frozenset())

    def replaced(self) -> None:
        """Record that the state was replaced: no snapshot shows it yet, not even one of the same step."""
        with self._mutex:
            self._requests.epoch += 1

    def close(self) -> None:
        """Complete the snapshots in progress, refuse further ones, and end the background thread."""
        with self._mutex:
            self._is_closed = True
        self.settle()
        self._pool.shutdown(wait=True)

    def _changing_storages(self) -> set[int]:
        """Return the storages of the stepping optimizer, or of all optimizers if none is known to step."""
        stepping = self._lock.stepping()
        return storages_of_optimizers([stepping] if isinstance(stepping, Optimizer) else self._state.optimizers())

    def _forget_if_interrupted(self) -> None:
        """Clear a job whose start a signal handler interrupted. Called under the mutex, on the training thread.

        The pool's one thread runs `_forget` after all submitted jobs: a job still in ``_job`` was never submitted.
        """
        job = self._job
        if job is not None and self._held is None and not self._is_closed:
            self._pool.submit(self._forget, job)

    def _forget(self, job: SnapshotJob) -> None:
        with self._mutex:
            # Another thread, in `settle`, may be about to hand the job to the pool.
            if self._job is not job or self._settled is job:
                return
            self._job = None
        with suppress(InvalidStateError):
            job.future.set_exception(ManagerError(f"the snapshot of step {job.step} was interrupted while it began"))

    def _end(self, job: SnapshotJob) -> None:
        with self._mutex:
            if self._job is job:
                self._job = None

    def _begin(self, job: SnapshotJob, timeout: timedelta, *, may_share: bool = True) -> None:
        def take(may_defer: bool) -> SnapshotInProgress:
            return self._server.take(self.copier.capture(may_defer=may_defer, may_share=may_share))

        try:
            what = f"snapshot of step {job.step}"
            begin_copy(self._lock, what, timeout, take, partial(self._pool.submit, self._complete, job))
        except BaseException:
            self._end(job)
            raise

    def _complete(self, job: SnapshotJob, unfinished: list[SnapshotInProgress], section: Section | None) -> None:
        """Complete and publish the snapshot, on the pool's thread."""
        try:
            copy_and_publish(self._state, unfinished, section)
            with self._mutex:
                leased = job.leased
            if leased is not None:
                try:
                    leased.set_result(self._server.lease(job.step))
                except TransportError as error:
                    leased.set_exception(error)
        except BaseException as error:
            logger.exception("step %d: the snapshot failed", job.step)
            self._server.snapshot_failed(job.step, error)
            with self._mutex:
                self._job = None
                # A request that arrived during this snapshot may wait for the next one, and stays open.
                if not getattr(error, "retryable", False):
                    self._requests.forget(job.num_before)
            # The traceback refers to this frame, and so to the snapshot, which would live until garbage collection.
            job.future.set_exception(error.with_traceback(None))
        else:
            with self._mutex:
                self._job = None
                self._requests.published_epoch = job.epoch
            job.future.set_result(None)
