"""The snapshots of one replica's state, and the memory that is shared with receivers until it changes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ft_transport import SnapshotLimitError, TransportError
from ft_transport.runtime.handler_safety import SafeExecutor, SafeFuture
from manager.snapshots.boundary_keeper import BoundaryKeeper
from manager.snapshots.scheduler import SnapshotScheduler
from manager.state.guarded_memory import storages_of_optimizers
from manager.state.replica_state import ReplicaState, StateObserver

if TYPE_CHECKING:
    from ft_transport import HTTPTransport, SnapshotLease

logger = logging.getLogger(__name__)


class StateSnapshots(StateObserver):
    """Has snapshots of a state taken and served by a transport. Belongs to the training thread.

    Args:
        state: The state.
        transport: Serves the snapshots; this object becomes its source of fresh ones.
        prefault: Whether the memory for snapshots is made resident before the first is asked for.

    Attributes:
        keeper: Knows what only optimizers and write sections change.
        scheduler: Says when a snapshot is taken; its ``request`` may be called by any thread.

    Raises:
        TransportError: The transport serves another state.
    """

    def __init__(self, state: ReplicaState, transport: HTTPTransport[Any], *, prefault: bool) -> None:
        self._state = state
        self._transport = transport
        self.keeper = BoundaryKeeper(state.registry, state.counters)
        self.scheduler = SnapshotScheduler(
            lock=state.lock,
            sink=transport,
            state=state.content,
            keeper=self.keeper,
            pool=SafeExecutor(1, "ft-transport-snapshot"),
            prefault=prefault,
        )
        transport.serve_fresh(_weak_request(self.scheduler.request))
        state.add_observer(self)

    def boundary(self, *, hold: bool) -> bool:
        """See `SnapshotScheduler.boundary`."""
        return self.scheduler.boundary(self._state.step, self._state.optimizers(), hold=hold)

    def serving(self, timeout: timedelta) -> AbstractContextManager[None]:
        """See `SnapshotScheduler.serving`."""
        return self.scheduler.serving(self._state.step, self._state.optimizers(), timeout)

    def take(self) -> Future[None]:
        """Begin a snapshot of the present step; the result is done when it can be fetched."""
        return self.scheduler.take(self._state.step, self._state.optimizers(), self._state.timeout)

    def lease(self) -> Callable[[], SnapshotLease] | None:
        """Begin a snapshot of the present step for a reader on this host.

        Returns:
            Waits for the snapshot and leases it; ``None`` where receivers read as many as the transport may hold.
        """
        step, timeout_s = self._state.step, self._state.timeout.total_seconds()
        leased: Future[SnapshotLease] = SafeFuture()

        def lease() -> None:
            # At once: the next snapshot may take the place of one that nobody reads.
            try:
                leased.set_result(self._transport.lease(step))
            except TransportError as error:
                leased.set_exception(error)

        def await_lease() -> SnapshotLease:
            taken.result(timeout_s)
            return leased.result(timeout_s)

        try:
            taken = self.scheduler.take_whole(step, self._state.optimizers(), self._state.timeout, when_published=lease)
        except SnapshotLimitError as error:
            logger.debug("step %d: receivers read all snapshots, it is copied once more to be saved: %s", step, error)
            return None
        except TransportError as error:
            taken = SafeFuture()
            taken.set_exception(error)
        return await_lease

    def before_change(self, is_optimizer_step: bool) -> None:
        """Materialize what is shared with receivers before it changes."""
        if not is_optimizer_step:
            self.keeper.forget_lesson()
            self._transport.materialize()
            return
        self.keeper.learn()
        # Which tensors these are is looked at only where something is shared: they may be others at every step.
        self._transport.materialize(lambda: storages_of_optimizers(self._stepping()))

    def _stepping(self) -> list[Optimizer]:
        """Whose step it is that announces itself; all, where it may be anybody's."""
        stepping = self._state.lock.stepping()
        return [stepping] if isinstance(stepping, Optimizer) else self._state.optimizers()

    def synchronized(self) -> None:
        """Take the snapshots that others have asked for: what seldom changes has just done so. See `guard_diloco`."""
        self.scheduler.boundary(self._state.step, self._state.optimizers(), is_sync=True)

    def replaced(self) -> None:
        """Note that no snapshot so far shows the present state."""
        self.scheduler.state_replaced()

    def close(self) -> None:
        """Finish the snapshot that is under way, and end the thread."""
        self.scheduler.close()


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
