"""The parts of one replica: its state, its snapshots, and the two ways to recover it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from ft_transport import PeerError, TransportError
from ft_transport.telemetry.metrics import weakly
from manager.errors import ManagerError, RecoveryFailedError
from manager.recovery.checkpoints import Checkpoints, check_store
from manager.recovery.peers import PeerOptions, PeerRecovery, Recovery
from manager.snapshots.scheduler import SnapshotScheduler
from manager.state.registration_check import EncodingCheck
from manager.state.registry import Scope
from manager.state.replica_state import ReplicaState, checked_step, status_report

if TYPE_CHECKING:
    import torch.distributed as dist

    from ft_transport import CheckpointStore, HTTPTransport

logger = logging.getLogger(__name__)


class Replica:
    """The parts of one replica, without state. The managers own one; the training thread calls each method.

    Args:
        timeout: Deadline of every wait for the lock.
        transport: Serves this replica's snapshots and receives others'. `close` shuts it down.
        store: The store of durable checkpoints. `close` closes it.
        prefault: See `StateManager`.
        save_every: See `StateManager`.

    Attributes:
        state: Its state.
        transport: See above; ``None`` without one.
        snapshots: The snapshots that the transport serves; ``None`` without a transport.
        peers: Recovers from live peers; ``None`` without a transport.
        checkpoints: Saves and loads durable checkpoints; ``None`` without a store.
        encodings: Checks that the state can be served and saved.

    Raises:
        ConfigurationError: ``save_every`` without a store, or no positive number.
        TypeError: The transport or the store is not one of ``ft_transport``.
        TransportError: The transport belongs to another replica.
    """

    def __init__(
        self,
        timeout: timedelta,
        transport: HTTPTransport[Any] | None = None,
        store: CheckpointStore | None = None,
        *,
        prefault: bool = False,
        save_every: int | None = None,
    ) -> None:
        if transport is not None and not hasattr(transport, "serve_fresh"):
            raise TypeError(f"expected an HTTPTransport of ft_transport, got {type(transport).__name__}")
        check_store(store, save_every)
        self.state = state = ReplicaState(timeout)
        self.transport = transport
        self.snapshots: SnapshotScheduler | None = None
        self.peers: PeerRecovery | None = None
        self.checkpoints: Checkpoints | None = None
        scopes: list[Scope] = [] if transport is None and store is None else ["replicated"]
        if transport is not None:
            self.snapshots = SnapshotScheduler(state, transport, prefault=prefault)
            self.peers = PeerRecovery(state, transport)
            status = transport.process_status
            status.set_part("manager", status_report(state, ReplicaState.status))
            status.metrics.collect(state.lock.costs.readings)
            status.metrics.collect(weakly(state.readings))
            status.metrics.collect(self.peers.counts.readings)
        if store is not None:
            scopes.append("local")
            self.checkpoints = Checkpoints(state, store, save_every=save_every, snapshots=self.snapshots)
            if transport is not None:
                status = transport.process_status
                status.set_recorders([transport.recorder, store.recorder])
                status.metrics.collect(self.checkpoints.counts.readings)
                status.metrics.follow(store.recorder)
        self.encodings = EncodingCheck(state.registry, state.optimizers, scopes)

    def begin_step(self, step: int, *, hold: bool = False) -> bool:
        """Begin the step boundary of a state that `encodings` has checked."""
        number = checked_step(step)
        if number < self.state.step:
            raise ManagerError(
                f"expected start_step with a step from {self.state.step} on, which this replica shows, got {number}; "
                "to go back, load an earlier state first (recover, resume, load or load_state_dict)"
            )
        self.check_loaders()
        self.state.begin_step(number)
        is_kept = self.snapshots.boundary(hold=hold) if self.snapshots is not None else False
        if self.checkpoints is not None:
            self.checkpoints.boundary()
        return is_kept

    def check_loaders(self) -> None:
        """Refuse a loop that draws its batches in the wrong place; see `LoaderOrder`."""
        self.state.registry.loaders.check(is_saved=self.checkpoints is not None)

    def recover(
        self,
        metadata: str | Sequence[str],
        step: int | Literal["latest"],
        options: PeerOptions,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> Recovery:
        """See `StateManager.recover`."""
        checkpoints = self.checkpoints
        recoveries: list[Recovery] = []
        own_errors: list[Exception] = []

        def receive() -> Recovery:
            if self.peers is None:
                raise ManagerError("expected a checkpoint_transport to receive with, and this manager has none")
            return self.peers.recover(metadata, step, options, process_group=process_group)

        def receive_with_others() -> None:
            try:
                recoveries.append(receive())
            except TransportError as error:
                raise PeerError(f"{type(error).__name__}: {error}") from error
            except Exception as error:
                own_errors.append(error)
                raise

        if checkpoints is None:
            return receive()
        try:
            checkpoints.store.run_on_all_ranks(
                "recover from live peers", receive_with_others, timeout=2 * options.timeout
            )
        except PeerError as error:
            logger.warning("no live peer could be recovered from, checkpoints are tried: %s", error)
            self._note_alone(recoveries, error)
            resumed = checkpoints.resume()
            if resumed is None:
                root = checkpoints.store.root
                raise RecoveryFailedError(
                    f"expected a live peer or a checkpoint in {root}, there is none; from peers: {error}"
                ) from error
            return resumed
        except TransportError as error:
            self._note_alone(recoveries, error)
            # Another rank's error becomes the store's error; an own one is the same as without a store.
            raise own_errors[0] if own_errors else error from None
        return recoveries[0]

    def required_checkpoints(self) -> Checkpoints:
        """Return `checkpoints`.

        Raises:
            ManagerError: This replica has no store.
        """
        if self.checkpoints is None:
            raise ManagerError("expected a checkpoint_store to save to and to load from, and there is none")
        return self.checkpoints

    def closers(self) -> list[Callable[[], object]]:
        """Return functions that close a replica without an owner, the last first. They do not refer to its state."""
        closers: list[Callable[[], object]] = []
        if self.transport is not None:
            closers.append(self.transport.shutdown)
        if self.checkpoints is not None:
            # It may still be saving a snapshot of the transport's.
            closers.append(self.checkpoints.store.close)
        return closers

    def close(self, *, wait: bool) -> None:
        """Close the snapshots, the store and the transport, in this order."""
        with ExitStack() as closing:
            if self.transport is not None:
                closing.callback(self.transport.shutdown, wait=wait)
                closing.callback(self.transport.serve_fresh, None)
            if self.checkpoints is not None:
                # It may still be saving a snapshot of the transport's.
                closing.callback(self.checkpoints.store.close)
            if self.snapshots is not None:
                closing.callback(self.snapshots.close)

    def _note_alone(self, recoveries: Sequence[Recovery], error: TransportError) -> None:
        """Refuse steps of this rank if it has recovered and another rank has not."""
        for recovery in recoveries:
            self.state.mark_partial(
                recovery.step, f"this rank has received it, another of this replica has not: {error}"
            )
