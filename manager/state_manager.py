"""The state of one replica: who may change it, who may read it, and when a snapshot shows a whole step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal

import torch.distributed as dist

from ft_transport import (
    CheckpointStore,
    HTTPTransport,
    Incoming,
    PeerError,
    Received,
    SnapshotLease,
    SnapshotLimitError,
    TransportError,
    spans_ranks,
)
from manager.checkpointed_state import CheckpointedState, Recovery
from manager.errors import ManagerError, RecoveryFailedError, RegistryError, StateTornError
from manager.fit import check_fit
from manager.guarded_memory import storages_of_optimizers
from manager.locked_state import checked_step
from manager.snapshots import Snapshotter
from manager.sources import agree_on_step, checked_addresses, failures_elsewhere

logger = logging.getLogger(__name__)

_MAX_SHOWN: Final = 5


class StateManager(CheckpointedState):
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

    def __init__(
        self,
        load_state_dict: Callable[[Any], object] | None = None,
        state_dict: Callable[[], object] | None = None,
        *,
        checkpoint_transport: HTTPTransport[Any] | None = None,
        timeout: timedelta = timedelta(seconds=60),
        prepare_memory: bool = True,
        checkpoint_store: CheckpointStore | None = None,
        save_every: int | None = None,
    ) -> None:
        """Make a manager without state.

        Args:
            load_state_dict: With ``state_dict``, registered under the key ``default`` (as in torchft).
            state_dict: See ``load_state_dict``.
            checkpoint_transport: Serves this replica's snapshots and receives others'. The manager owns it and shuts
                it down.
            timeout: Deadline of every wait for the lock.
            prepare_memory: Whether host memory for as many snapshots as the transport may hold is made ready after
                the first step; otherwise the first ones wait for it, inside `start_step`. The state functions are
                called once for that.
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
            load_state_dict, state_dict, timeout=timeout, checkpoint_store=checkpoint_store, save_every=save_every
        )
        self._transport = checkpoint_transport
        self._snapshotter: Snapshotter | None = None
        if checkpoint_transport is not None:
            if not hasattr(checkpoint_transport, "serve_fresh"):
                raise TypeError(f"expected an HTTPTransport of ft_transport, got {type(checkpoint_transport).__name__}")
            self._snapshotter = Snapshotter(
                lock=self._lock,
                sink=checkpoint_transport,
                state=self.replica_state,
                stable_part=self._stable_part,
                prepare_memory=prepare_memory,
            )
            checkpoint_transport.serve_fresh(self._snapshotter.request)

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
            hold: Keep the state such that a snapshot of it can still be taken (`Snapshotter.settle`), if none was
                asked for yet.

        Returns:
            Whether a snapshot of this step is under way or can still be taken.

        Raises:
            StateTornError: This replica holds part of a state.
            ManagerError: The step is no whole number from 0.
            RegistryError: A state function runs a collective (found at the first step).
            TransportError: More checkpoints in a row could not be saved than the store allows.
        """
        self._refuse_torn_state()
        self._training_thread = threading.get_ident()
        self._step = checked_step(step)
        self._is_past_step = False
        is_kept = False
        if self._snapshotter is not None:
            is_kept = self._snapshotter.boundary(self._step, self._attached_optimizers(), hold=hold)
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
        if self._snapshotter is None:
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
        return self._snapshotter.take(self._step, self._attached_optimizers(), self._timeout)

    # ------------------------------------------------------------------------------------------------------- recovery

    def recover(
        self,
        metadata: str | Sequence[str],
        step: int | Literal["latest"] = "latest",
        timeout: timedelta | None = None,
        *,
        unreachable_timeout: timedelta | None = None,
        is_fresh: bool = False,
        verify: bool = True,
        process_group: dist.ProcessGroup | None = None,
        from_checkpoints: bool = True,
    ) -> Recovery:
        """Receive the state of a peer into this replica's own tensors, and load it.

        From one address comes the state of a rank in the same layout; from the addresses of all ranks of a replica what
        this rank needs of it in its own, whichever that is (``HTTPTransport.fetch_sharded``).

        The lock is held for writing meanwhile: nobody is served what is only half there. If the transfer fails after
        bytes have landed, this replica refuses to step until a recovery succeeds.

        Args:
            metadata: What the peer's transport returned from ``metadata()``; a list of those of all ranks of a replica
                that is sharded in another way.
            step: The step to receive, or the peer's latest.
            timeout: For all of it.
            unreachable_timeout: How long the peer may be out of reach before the first byte; by default ``timeout``.
            is_fresh: Accept ``step`` only as the peer's present state, not as it was at an earlier attempt at it.
            verify: Whether the state is compared with the peer's once it is loaded, every bit of it. Turn it off where
                a load function changes what it takes on purpose.
            process_group: All ranks of this replica, if it has several. Each of them calls this; the latest step is the
                same for all then, and if one of them fails all do. Small collectives run.
            from_checkpoints: Whether a checkpoint will do if no peer has a state.

        With a ``checkpoint_store`` all ranks of the store's group call this. Where a peer fails one of them, all load
        the newest good checkpoint instead.

        Raises:
            RecoveryFailedError: No peer could be recovered from, and there is no checkpoint.
            TransportError: The transfer failed.
            StateTornError: After loading, the state is not what was sent; or another rank of ``process_group`` failed.
            RegistryError: What the peer has does not fit what is registered here (nothing is received then, if modules
                and optimizers show it), or a load function failed.
            LockTimeoutError: Others held the lock until the deadline.
            ManagerError: There is no transport, the address is this replica's own, a state function asked for the
                training thread, or several ranks would each recover a latest step of their own.
        """
        receive = partial(
            self._recover_from_peers,
            metadata,
            step,
            timeout,
            unreachable_timeout=unreachable_timeout,
            is_fresh=is_fresh,
            verify=verify,
            process_group=process_group,
        )
        if self._store is None or not from_checkpoints:
            return receive()
        return self._recover_from_anywhere(receive, self._store, timeout if timeout is not None else self._timeout)

    def _recover_from_anywhere(
        self, receive: Callable[[], Recovery], store: CheckpointStore, timeout: timedelta
    ) -> Recovery:
        """All ranks take the state of their peers, or all take that of a checkpoint."""
        recoveries: list[Recovery] = []
        own_errors: list[Exception] = []

        def recover() -> None:
            try:
                recoveries.append(receive())
            except TransportError as error:
                raise PeerError(f"{type(error).__name__}: {error}") from error
            except Exception as error:
                own_errors.append(error)
                raise

        try:
            store.together("recover from live peers", recover, timeout=2 * timeout)
        except PeerError as error:
            logger.warning("no live peer could be recovered from, checkpoints are tried: %s", error)
            self._note_alone(recoveries, error)
            resumed = self.resume()
            if resumed is None:
                raise RecoveryFailedError(
                    f"expected a live peer or a checkpoint in {store.root}, there is none; from peers: {error}"
                ) from error
            return resumed
        except TransportError as error:
            self._note_alone(recoveries, error)
            # Another rank's trouble is the store's error, one's own is as it would be without a store.
            raise own_errors[0] if own_errors else error from None
        return recoveries[0]

    def _note_alone(self, recoveries: Sequence[Recovery], error: TransportError) -> None:
        """Where this rank has recovered and another has not, it must not step."""
        for recovery in recoveries:
            self._torn = StateTornError(
                step=recovery.step, reason=f"this rank has received it, another of this replica has not: {error}"
            )

    def _recover_from_peers(
        self,
        metadata: str | Sequence[str],
        step: int | Literal["latest"],
        timeout: timedelta | None,
        *,
        unreachable_timeout: timedelta | None,
        is_fresh: bool,
        verify: bool,
        process_group: dist.ProcessGroup | None,
    ) -> Recovery:
        if self._transport is None:
            raise ManagerError("expected a checkpoint_transport to receive with, and this manager has none")
        addresses = checked_addresses(metadata, self._transport.metadata())
        if step != "latest":
            step = checked_step(step)
        total = timeout if timeout is not None else self._timeout
        start_s = time.monotonic()
        if process_group is not None:
            if step == "latest":
                step = agree_on_step(
                    self._transport, addresses, process_group, timeout=total, unreachable_timeout=unreachable_timeout
                )
            return self._recover_together(
                process_group,
                metadata,
                step,
                max(total - timedelta(seconds=time.monotonic() - start_s), timedelta(0)),
                unreachable_timeout=unreachable_timeout,
                is_fresh=is_fresh,
                verify=verify,
            )
        return self._recover(
            metadata, step, total, unreachable_timeout=unreachable_timeout, is_fresh=is_fresh, verify=verify
        )

    def _recover_together(self, process_group: dist.ProcessGroup, *arguments: Any, **keywords: Any) -> Recovery:
        """Recover on all ranks of a replica, or on none: where one failed, the others refuse to step."""
        try:
            recovery = self._recover(*arguments, group_rank=dist.get_rank(process_group), **keywords)
        except Exception as error:
            failures_elsewhere(process_group, error)
            raise
        failures = failures_elsewhere(process_group, None)
        if failures:
            self._torn = StateTornError(
                step=recovery.step, reason=f"this rank has received it, others of this replica have not: {failures}"
            )
            self._refuse_torn_state()
        return recovery

    def _recover(
        self,
        metadata: str | Sequence[str],
        step: int | Literal["latest"],
        total: timedelta,
        *,
        unreachable_timeout: timedelta | None,
        is_fresh: bool,
        verify: bool,
        group_rank: int = 0,
    ) -> Recovery:
        assert self._transport is not None, "it was asked for"
        start_s = time.monotonic()
        source = metadata if isinstance(metadata, str) else f"{metadata[0]} and {len(metadata) - 1} more"
        with self._lock.write(f"receiving step {step} from {source}", total):
            into = self.replica_state()
            if step == "latest" and spans_ranks(into):
                raise ManagerError(
                    "expected process_group=..., or a step, to recover a replica of several ranks: the latest step may "
                    "be another one for each of them"
                )
            remaining = max(total - timedelta(seconds=time.monotonic() - start_s), timedelta(0))
            earlier, self._torn = self._torn, StateTornError(step=step, reason="the transfer was interrupted")
            try:
                received = self._receive(
                    metadata if isinstance(metadata, str) else list(metadata),
                    "latest" if is_fresh else step,
                    into=into,
                    group_rank=group_rank,
                    timeout=remaining,
                    unreachable_timeout=unreachable_timeout,
                    check=partial(self._check_incoming, into=into, step=step),
                    verify=verify,
                )
            except RegistryError as error:
                # Of an earlier attempt, whose snapshot was replaced meanwhile, something may have landed.
                is_touched = getattr(error, "destination_touched", False)
                self._torn = StateTornError(step=step, reason=str(error)) if is_touched else earlier
                raise
            except TransportError as error:
                self._torn = StateTornError(step=step, reason=str(error)) if error.destination_touched else earlier
                raise
            try:
                self._load(received.state)
            except RegistryError as error:
                # Whether or not a load function ran: what fits has been received in place.
                self._torn = StateTornError(step=received.step, reason=str(error))
                raise
            received_s = time.monotonic()
            if verify:
                self._torn = StateTornError(step=received.step, reason="comparing it was interrupted")
                self._refuse_differences(received, source)
                self._torn = None
        loaded_s = time.monotonic()
        logger.info(
            "recovered step %d from %s: %.0f ms to receive and load it, %.0f ms to compare",
            received.step,
            source,
            (received_s - start_s) * 1e3,
            (loaded_s - received_s) * 1e3,
        )
        return Recovery(step=received.step, source=source)

    def shutdown(self, wait: bool = True) -> None:
        """End the threads and the transport. May be called twice.

        Args:
            wait: Whether to return only when the server has ended.
        """
        if self._snapshotter is not None:
            self._snapshotter.close()
        # It may still be saving a snapshot of the transport's.
        self._close_store()
        if self._transport is not None:
            self._transport.serve_fresh(None)
            self._transport.shutdown(wait=wait)

    def _snapshot_lease(self) -> Callable[[], SnapshotLease] | None:
        """See `CheckpointedState`."""
        snapshotter, transport = self._snapshotter, self._transport
        if snapshotter is None or transport is None:
            return None
        step, timeout_s = self._step, self._timeout.total_seconds()
        leased: Future[SnapshotLease] = Future()

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
            taken = snapshotter.take_whole(step, self._attached_optimizers(), self._timeout, when_published=lease)
        except SnapshotLimitError as error:
            logger.debug("step %d: receivers read all snapshots, it is copied once more to be saved: %s", step, error)
            return None
        except TransportError as error:
            taken = Future()
            taken.set_exception(error)
        return await_lease

    def _receive(
        self,
        source: str | list[str],
        step: int | Literal["latest"],
        *,
        group_rank: int,
        verify: bool,
        **keywords: Any,
    ) -> Received[Any]:
        """Receive from one rank in the same layout, or from all ranks in any other."""
        assert self._transport is not None, "it was asked for"
        if isinstance(source, str):
            # Comparing it afterwards reads every byte, too.
            return self._transport.fetch(source, step, verify_late=not verify, **keywords)
        return self._transport.fetch_sharded(
            source,
            step,
            group_rank=group_rank,
            like=self._registry.parameter_finder(),
            is_comparable=verify,
            **keywords,
        )

    def _check_incoming(self, incoming: Incoming, into: Mapping[str, object], step: int | Literal["latest"]) -> None:
        if step not in ("latest", incoming.step):
            raise RegistryError(f"expected the state of step {step}, what comes is of step {incoming.step}")
        check_fit(incoming, self._registry, into)

    def _refuse_differences(self, received: Received[Any], source: str) -> None:
        """Make sure that the load functions have not changed what was received."""
        differences = received.differences(self.replica_state())
        if not differences:
            return
        shown = "; ".join(differences[:_MAX_SHOWN]) + ("; …" if len(differences) > _MAX_SHOWN else "")
        self._torn = StateTornError(
            step=received.step,
            reason=f"after loading, the state is not the one that {source} sent; a load function has changed it, or "
            f"it was damaged on its way: {shown}",
        )
        self._refuse_torn_state()

    def _before_change(self, is_optimizer_step: bool) -> None:
        """Whoever reads the state from where it lies, gets a copy of it before it changes."""
        if self._transport is not None:
            if not is_optimizer_step:
                self._transport.recall()
                return
            optimizers = self._attached_optimizers()
            # One that has got no further tensors steps what it stepped before.
            version = tuple(
                (id(optimizer), sum(len(group["params"]) for group in optimizer.param_groups), len(optimizer.state))
                for optimizer in optimizers
            )
            self._transport.recall(lambda: storages_of_optimizers(optimizers), version=version)

    def _note_replaced(self) -> None:
        if self._snapshotter is not None:
            self._snapshotter.state_replaced()
