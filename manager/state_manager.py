"""The state of one replica: who may change it, who may read it, and when a snapshot shows a whole step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ft_transport import SnapshotLimitError, TransportError
from ft_transport.runtime.handler_safety import SafeFuture
from manager.errors import ManagerError
from manager.recovery.recoverable_state import RecoverableState
from manager.snapshots.boundary_keeper import BoundaryKeeper
from manager.snapshots.scheduler import SnapshotScheduler
from manager.state.guarded_memory import storages_of_optimizers
from manager.state.locked_state import checked_step
from manager.state.ownership import Unclosed, ends_what_it_owns, weak_request
from manager.state.reentrancy import interrupts_own_call

if TYPE_CHECKING:
    from ft_transport import CheckpointStore, HTTPTransport, SnapshotLease

logger = logging.getLogger(__name__)


class StateManager(RecoverableState):
    """Holds the lock over a replica's state, and connects the trainer with the transport.

    ``Manager`` adds the quorum; everything here works without one.

    A training loop looks like this::

        manager = Manager(checkpoint_transport=HTTPTransport())
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        with manager.attach(optimizer):
            for step in range(num_steps):
                manager.start_step(step)
                loss(model).backward()
                optimizer.step()

    `start_step` is the step boundary: what is registered then shows the committed step, and a snapshot that somebody
    asked for begins there. The thread that calls it is the training thread. Locking methods may be called from any
    thread; registering, attaching, `start_step`, `snapshot`, `load` and `recover` belong to the training thread.
    """

    @ends_what_it_owns
    def __init__(
        self,
        load_state_dict: Callable[[Any], object] | None = None,
        state_dict: Callable[[], object] | None = None,
        *,
        checkpoint_transport: HTTPTransport[Any] | None = None,
        timeout: timedelta = timedelta(seconds=60),
        prefault: bool = False,
        checkpoint_store: CheckpointStore | None = None,
        save_every: int | None = None,
    ) -> None:
        """Make a manager without state.

        Args:
            load_state_dict: With ``state_dict``, registered under the key ``default`` (as in torchft).
            state_dict: See ``load_state_dict``.
            checkpoint_transport: Serves this replica's snapshots and receives others'. The manager owns it and shuts
                it down, also where this constructor raises.
            timeout: Deadline of every wait for the lock.
            prefault: Whether host memory for as many snapshots as the transport may hold is made ready after
                the first step: as much as the state, each time. Otherwise the first copy waits for its memory, inside
                `start_step` or `save`. Turn it on where that pause matters: a manager without a quorum that is
                recovered from, or one with a ``checkpoint_store``. In a quorum the state is served without a copy.
            checkpoint_store: Where durable checkpoints go, made for all ranks of this replica. The manager owns it and
                closes it.
            save_every: Save a checkpoint at the beginning of every step whose number this divides.

        Raises:
            ValueError: Only one of the two functions was given.
            ConfigError: ``save_every`` without a store.
            TypeError: The transport is none of ``ft_transport``.
            TransportError: The transport belongs to another manager.
        """
        super().__init__(
            load_state_dict,
            state_dict,
            checkpoint_transport=checkpoint_transport,
            timeout=timeout,
            checkpoint_store=checkpoint_store,
            save_every=save_every,
        )
        self._snapshot_scheduler: SnapshotScheduler | None = None
        self._keeper: BoundaryKeeper | None = None
        if checkpoint_transport is not None:
            self._keeper = BoundaryKeeper(self._registry, self.state_dict)
            self._snapshot_scheduler = SnapshotScheduler(
                lock=self._lock,
                sink=checkpoint_transport,
                state=self.replica_state,
                keeper=self._keeper,
                prefault=prefault,
            )
            checkpoint_transport.serve_fresh(weak_request(self._snapshot_scheduler.request))
        self._unclosed = Unclosed(self)
        if checkpoint_transport is not None:
            self._unclosed.add(checkpoint_transport.shutdown)
        if checkpoint_store is not None:
            # It may still be saving a snapshot of the transport's.
            self._unclosed.add(checkpoint_store.close)

    def metadata(self) -> str:
        """Return the address that peers recover from.

        Raises:
            ManagerError: There is no transport.
        """
        if self._transport is None:
            raise ManagerError("expected a checkpoint_transport to serve this replica's state, and there is none")
        return self._transport.metadata()

    # ------------------------------------------------------------------------------------------------------ snapshots

    def start_step(self, step: int, *, hold: bool = False) -> bool:
        """The step boundary. Call it at the top of every iteration, before data is drawn and ``forward`` runs.

        Args:
            step: How many steps are committed: the state shows exactly these.
            hold: Keep the state such that a snapshot of it can still be taken (`SnapshotScheduler.settle`), if none was
                asked for yet.

        Returns:
            Whether a snapshot of this step is under way or can still be taken.

        Raises:
            StateTornError: This replica holds part of a state.
            ManagerError: The step is no whole number from 0, or below the one before; or a quorum is used.
            RegistryError: A state function runs a collective (found at the first step).
            TransportError: More checkpoints in a row could not be saved than the store allows.
        """
        self._refuse_start_step()
        number = checked_step(step)
        if number < self._step:
            raise ManagerError(
                f"expected start_step with a step from {self._step} on, which this replica shows, got {number}; to go "
                "back, load an earlier state first (recover, resume, load or load_state_dict)"
            )
        return self._begin_step(number, hold=hold)

    def _refuse_start_step(self) -> None:
        """For ``Manager``, whose steps may begin in another way."""

    def _begin_step(self, step: int, *, hold: bool = False) -> bool:
        self._refuse_torn_state()
        self._training_thread = threading.get_ident()
        self._step = step
        self._is_past_step = False
        is_kept = False
        if self._snapshot_scheduler is not None:
            is_kept = self._snapshot_scheduler.boundary(self._step, self._attached_optimizers(), hold=hold)
        self._at_boundary()
        return is_kept

    def snapshot(self, step: int | None = None) -> Future[None]:
        """Take a snapshot now; the training thread calls this between two steps.

        Args:
            step: The committed step. By default the one that `start_step` was given, if no attached optimizer has
                stepped since.

        Returns:
            Done when the snapshot can be fetched.

        Raises:
            ManagerError: There is no transport, it has been shut down, or which step the state shows is not known.
            LockTimeoutError: The snapshot before was not finished, or another thread was writing, until the deadline.
            TransportError: The state cannot be captured.
        """
        self._refuse_torn_state()
        if self._snapshot_scheduler is None:
            raise ManagerError("expected a checkpoint_transport to serve the snapshot, and this manager has none")
        if self._training_thread is None:
            self._training_thread = threading.get_ident()
        if step is not None:
            self._step = checked_step(step)
            self._is_past_step = False
        if self._is_past_step:
            raise ManagerError(
                f"expected the number of committed steps: an optimizer has stepped since step {self._step} began; call "
                "start_step first, or pass the step"
            )
        return self._snapshot_scheduler.take(self._step, self._attached_optimizers(), self._timeout)

    # -------------------------------------------------------------------------------------------------------- the end

    def shutdown(self, wait: bool = True) -> None:
        """Leave the job, end the threads and the transport. May be called twice, and from a signal handler.

        In a handler that has interrupted another call of this package it returns at once, and the end is made when the
        handler has returned: that call may hold locks that the end needs.

        Args:
            wait: Whether to return only when the server has ended.
        """
        if interrupts_own_call():
            threading.Thread(target=self._shut_down, args=(wait,), name="ft-transport-shutdown").start()
        else:
            self._shut_down(wait)

    def _shut_down(self, wait: bool) -> None:
        self._unclosed.forget()
        with ExitStack() as closing:
            if self._transport is not None:
                closing.callback(self._transport.shutdown, wait=wait)
                closing.callback(self._transport.serve_fresh, None)
            # It may still be saving a snapshot of the transport's.
            closing.callback(self._close_store)
            if self._snapshot_scheduler is not None:
                closing.callback(self._snapshot_scheduler.close)

    def _snapshot_lease(self) -> Callable[[], SnapshotLease] | None:
        """See `CheckpointedState`."""
        snapshot_scheduler, transport = self._snapshot_scheduler, self._transport
        if snapshot_scheduler is None or transport is None:
            return None
        step, timeout_s = self._step, self._timeout.total_seconds()
        leased: Future[SnapshotLease] = SafeFuture()

        def lease() -> None:
            # At once: the next snapshot may take the place of one that nobody reads.
            try:
                leased.set_result(transport.lease(step))
            except TransportError as error:
                leased.set_exception(error)

        def await_lease() -> SnapshotLease:
            taken.result(timeout_s)
            return leased.result(timeout_s)

        try:
            taken = snapshot_scheduler.take_whole(
                step, self._attached_optimizers(), self._timeout, when_published=lease
            )
        except SnapshotLimitError as error:
            logger.debug("step %d: receivers read all snapshots, it is copied once more to be saved: %s", step, error)
            return None
        except TransportError as error:
            taken = SafeFuture()
            taken.set_exception(error)
        return await_lease

    def _before_change(self, is_optimizer_step: bool) -> None:
        """Readers of the state from where it lies get a copy of it before it changes."""
        if self._keeper is not None:
            if is_optimizer_step:
                self._keeper.learn()
            else:
                self._keeper.forget_lesson()
        if self._transport is not None:
            if not is_optimizer_step:
                self._transport.materialize()
                return
            # Which tensors these are is looked at only where something is shared: they may be others at every step.
            self._transport.materialize(lambda: storages_of_optimizers(self._attached_optimizers()))

    def _note_replaced(self) -> None:
        if self._snapshot_scheduler is not None:
            self._snapshot_scheduler.state_replaced()
