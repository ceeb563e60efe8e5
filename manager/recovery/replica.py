"""The parts of one replica: its state, its snapshots, recovery from peers, and its checkpoints."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ft_transport import PeerError, TransportError
from ft_transport.settings import check_duration
from ft_transport.telemetry.metrics import weakly
from manager.errors import ManagerError, RecoveryFailedError
from manager.recovery.checkpoints import Checkpoints, ResumeKeys, check_interval, check_store
from manager.recovery.kept_steps import NOT_KEPT, KeepSettings
from manager.recovery.local_state import LocalState
from manager.recovery.peers import PeerOptions, PeerRecovery, Recovery
from manager.recovery.preemption import Preemption
from manager.recovery.rank_agreement import replica_ranks
from manager.snapshots.scheduler import SnapshotScheduler
from manager.state.registration_check import EncodingCheck
from manager.state.registry import Scope
from manager.state.replica_state import ReplicaState, checked_step, status_report

if TYPE_CHECKING:
    import signal

    import torch.distributed as dist

    from ft_transport import CheckpointStore, HTTPTransport
    from manager.recovery.keeping import Keeping

logger = logging.getLogger(__name__)

_SHARE_FOR_COPIES = 0.7
"""Share of a grace period's rest in which a preempted rank waits for copies of its state."""


class Replica:
    """Creates and connects the parts of one replica for a manager. Only the training thread may call its methods.

    Args:
        timeout: Deadline of every wait for the lock.
        transport: Serves this replica's snapshots and receives snapshots of peers. `close` shuts it down.
        store: The store of durable checkpoints. `close` closes it.
        prefault: As for `StateManager`.
        save_every: As for `StateManager`.
        keep: How often to keep the state beyond the death of this process, and where.

    Attributes:
        state: The registered state, with its lock.
        transport: The given transport; ``None`` without one.
        snapshots: Takes the snapshots that the transport serves; ``None`` without a transport.
        peers: Recovers from live peers; ``None`` without a transport.
        local: Saves and loads local state.
        keeping: Keeps states beyond the death of this process; ``None`` without ``keep_every``.
        preemption: Learns of preemptions; ``None`` if none are expected.
        checkpoints: Saves and loads durable checkpoints; ``None`` without a store.
        encodings: Checks that the state can be served and saved.

    Raises:
        ConfigurationError: ``save_every`` was given without a store, or ``keep_every`` without a transport; or one of
            them is not a positive whole number.
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
        keep: KeepSettings = NOT_KEPT,
    ) -> None:
        if transport is not None and not hasattr(transport, "serve_fresh"):
            raise TypeError(f"expected an HTTPTransport of ft_transport, got {type(transport).__name__}")
        check_store(store, save_every)
        check_interval("keep_every", keep.every, needs="checkpoint_transport", given=transport)
        self.state = state = ReplicaState(timeout)
        self.transport = transport
        self.snapshots: SnapshotScheduler | None = None
        self.peers: PeerRecovery | None = None
        self.local = LocalState(state.registry)
        self.keeping: Keeping | None = None
        self.preemption: Preemption | None = None
        self.checkpoints: Checkpoints | None = None
        scopes: list[Scope] = [] if transport is None and store is None else ["replicated"]
        if store is not None or keep.every is not None:
            scopes.append("local")
        if transport is not None:
            self.snapshots = SnapshotScheduler(state, transport, prefault=prefault)
            self.peers = PeerRecovery(state, transport)
            status = transport.process_status
            status.set_part("manager", status_report(state, ReplicaState.status))
            status.metrics.collect(state.lock.costs.readings)
            status.metrics.collect(weakly(state.readings))
            status.metrics.collect(self.peers.counts.readings)
            if keep.every is not None:
                from manager.recovery.keeping import Keeping  # noqa: PLC0415 - it imports the server

                copier = self.snapshots.copier
                self.keeping = Keeping(state, transport, self.peers, copier, self.local, settings=keep)
                status.set_part("kept", status_report(self.keeping, Keeping.status))
                status.metrics.collect(self.keeping.counts.readings)
        if store is not None:
            self.checkpoints = Checkpoints(
                state, store, save_every=save_every, snapshots=self.snapshots, local=self.local
            )
            if transport is not None:
                status = transport.process_status
                status.set_recorders([transport.recorder, store.recorder])
                status.metrics.collect(self.checkpoints.counts.readings)
                status.metrics.follow(store.recorder)
        self.encodings = EncodingCheck(state.registry, scopes)

    def begin_step(self, step: int, *, hold: bool = False) -> bool:
        """Begin a step: take a requested snapshot, and save a checkpoint if due. Call ``encodings.check`` before.

        Args:
            step: The number of committed steps that the state contains.
            hold: Whether a snapshot of this step can still begin later in the step (`SnapshotScheduler.settle`).

        Returns:
            Whether a snapshot of this step has begun or can still begin.
        """
        number = checked_step(step)
        if number < self.state.step:
            raise ManagerError(
                f"expected start_step with a step of at least {self.state.step} (this replica's last step), got "
                f"{number}; to go back, load an earlier state first (recover, resume, load or load_state_dict)"
            )
        self.check_loaders()
        self.state.begin_step(number)
        if self.state.follows:
            return False
        is_served = self.snapshots.boundary(hold=hold) if self.snapshots is not None else False
        if self.keeping is not None:
            self.keeping.boundary()
        if self.checkpoints is not None:
            self.checkpoints.boundary()
        return is_served

    def expect_preemption(
        self, signals: Sequence[signal.Signals], is_announced: Callable[[], bool] | None, grace: timedelta
    ) -> Preemption:
        """Begin to watch for preemptions; see `StateManager.on_preemption`."""
        check_duration("grace", grace, at_least=timedelta(0))
        if signals and threading.current_thread() is not threading.main_thread():
            raise ManagerError(
                "expected the main thread to call on_preemption: Python lets no other set signal handlers; elsewhere, "
                "pass signals=() and is_announced"
            )
        if self.preemption is not None:
            raise ManagerError("expected one call of on_preemption, got a second one")
        keys = self.transport.keys if self.transport is not None else None
        self.preemption = Preemption(replica_ranks(keys), signals, is_announced, grace, self.state.timeout)
        return self.preemption

    def end_if_preempted(self, step: int, leave: Callable[[], None]) -> None:
        """If a preemption is announced, and all ranks stop at this boundary, keep and save the state, and end.

        Args:
            step: The committed step of the state.
            leave: Called first, so that other replicas do not wait for this one.

        Raises:
            PreemptedExit: This process has to end.
        """
        preemption = self.preemption
        if preemption is None or not preemption.stops_at(step):
            return
        leave()
        try:
            self.state.begin_step(checked_step(step))
            self.state.require_step(None)
            if self.keeping is not None:
                self.keeping.keep_now()
            if self.checkpoints is not None and not self.checkpoints.store.is_read_only:
                self.checkpoints.save(wait=True, overwrite=True)
            if self.keeping is not None:
                # The rest of the time is for the end of the process.
                self.keeping.wait_for_copies(_SHARE_FOR_COPIES * preemption.left)
        except (ManagerError, TransportError) as error:
            logger.error("step %d: the state could not be saved before the preemption: %s", step, error)
        logger.warning("step %d: this process ends, because it is preempted", step)
        preemption.exit(step)

    def check_loaders(self) -> None:
        """Raise ``LoaderOrderError`` if the loop drew a batch too early, or from an outdated iterator."""
        self.state.registry.loaders.check(is_saved=self.checkpoints is not None or self.keeping is not None)

    def recover(
        self,
        metadata: str | Sequence[str],
        step: int | Literal["latest"],
        options: PeerOptions,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> Recovery:
        """Recover the state; `StateManager.recover` describes the arguments and errors."""
        checkpoints = self.checkpoints
        recoveries: list[Recovery] = []

        def receive() -> Recovery:
            if self.peers is None:
                raise ManagerError("expected a checkpoint_transport to receive with, and this manager has none")
            return self.peers.recover(metadata, step, options, process_group=process_group)

        def receive_with_others() -> None:
            try:
                recoveries.append(receive())
            except TransportError as error:
                raise PeerError(f"{type(error).__name__}: {error}") from error

        if checkpoints is None:
            return receive()
        try:
            checkpoints.store.run_on_all_ranks(
                "recover from live peers", receive_with_others, timeout=2 * options.timeout
            )
        except PeerError as error:
            logger.warning("recovery from live peers failed, loading a checkpoint instead: %s", error)
            self._note_alone(recoveries, error)
            resumed = checkpoints.resume()
            if resumed is None:
                root = checkpoints.store.root
                raise RecoveryFailedError(
                    f"expected a live peer or a checkpoint in {root}, but there is no checkpoint, and no peer "
                    f"served the state: {error}"
                ) from error
            return resumed
        except TransportError as error:
            self._note_alone(recoveries, error)
            raise
        return recoveries[0]

    def resume(self, keys: ResumeKeys) -> Recovery | None:
        """Load the newest kept state or durable checkpoint; see `StateManager.resume`."""
        keeping, checkpoints = self.keeping, self.checkpoints
        if keeping is None:
            return self.required_checkpoints().resume(keys)
        ranks = keeping.agreement()
        resumed = keeping.resume(ranks, at_least=checkpoints.newest() if checkpoints is not None else 0)
        if resumed is None and checkpoints is not None:
            try:
                resumed = checkpoints.resume(keys)
            except (ManagerError, TransportError) as error:
                # A rank whose own load failed raises another error than the other ranks.
                logger.warning("no checkpoint could be loaded; looking for an older kept state: %s", error)
                resumed = keeping.resume(ranks, at_least=0)
                if resumed is None:
                    raise
        if resumed is None and keeping.has_failed:
            # On all ranks, although some have changed no tensor: a start at step 0 would lose the state unnoticed.
            self.state.mark_partial("latest", "the kept states are damaged, and no checkpoint exists")
            self.state.refuse_partial()
        return resumed

    def required_checkpoints(self) -> Checkpoints:
        """Return `checkpoints`, or raise ``ManagerError`` if this replica has no store."""
        if self.checkpoints is None:
            raise ManagerError("expected a checkpoint_store to save to and to load from, and this manager has none")
        return self.checkpoints

    def closers(self) -> list[Callable[[], object]]:
        """Return closers for `Unclosed`, which calls them in reverse order. No closer refers to the replica's state."""
        closers: list[Callable[[], object]] = []
        if self.transport is not None:
            closers.append(self.transport.shutdown)
        if self.keeping is not None:
            closers.append(partial(self.keeping.kept.close, is_over=False))
        if self.checkpoints is not None:
            # The store may still be saving a snapshot of the transport, and closes first.
            closers.append(self.checkpoints.store.close)
        return closers

    def close(self, *, wait: bool, is_over: bool = True) -> None:
        """Close the snapshots, the store and the transport, in this order.

        Args:
            wait: Whether to wait until the transport's server has ended.
            is_over: Whether the training has ended, so that no restarted process needs the kept states.
        """
        with ExitStack() as closing:
            if self.transport is not None:
                closing.callback(self.transport.shutdown, wait=wait)
                closing.callback(self.transport.serve_fresh, None)
            if self.checkpoints is not None:
                # The store may still be saving a snapshot of the transport, and closes first.
                closing.callback(self.checkpoints.store.close)
            if self.snapshots is not None:
                closing.callback(self.snapshots.close)
            if self.keeping is not None:
                # First: what copies the state ends with `snapshots`, and the last kept snapshot may still need it.
                closing.callback(self.keeping.close, is_over=is_over)
            if self.preemption is not None:
                closing.callback(self.preemption.close)

    def _note_alone(self, recoveries: Sequence[Recovery], error: TransportError) -> None:
        """Mark this rank's state as partial if this rank has recovered and another rank has not."""
        for recovery in recoveries:
            self.state.mark_partial(
                recovery.step, f"this rank has received the state, another rank of this replica has not: {error}"
            )
