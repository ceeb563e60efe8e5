"""How a replica comes back: from the memory of its live peers, or else from the newest good checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from ft_transport import PeerError, TransportError, spans_ranks
from ft_transport.coordination.consensus import RankGroup
from manager.errors import ManagerError, RecoveryFailedError, RegistryError, StateMismatchError, StateTornError
from manager.recovery.checkpointed_state import CheckpointedState, Recovery
from manager.recovery.sources import RecoveringRanks, checked_addresses
from manager.state.compatibility import check_fit
from manager.state.locked_state import checked_step

if TYPE_CHECKING:
    import torch.distributed as dist

    from ft_transport import CheckpointStore, HTTPTransport, Incoming, Received

logger = logging.getLogger(__name__)

_LAYOUT_ADVICE: Final = "replicas of another layout are recovered from by the addresses of all their ranks"
_MAX_SHOWN: Final = 5


class RecoverableState(CheckpointedState):
    """State that can be received from a peer's transport."""

    def __init__(
        self,
        load_state_dict: Callable[[Any], object] | None = None,
        state_dict: Callable[[], object] | None = None,
        *,
        checkpoint_transport: HTTPTransport[Any] | None,
        timeout: timedelta,
        checkpoint_store: CheckpointStore | None,
        save_every: int | None,
    ) -> None:
        """See `StateManager`."""
        super().__init__(
            load_state_dict, state_dict, timeout=timeout, checkpoint_store=checkpoint_store, save_every=save_every
        )
        if checkpoint_transport is not None and not hasattr(checkpoint_transport, "serve_fresh"):
            raise TypeError(f"expected an HTTPTransport of ft_transport, got {type(checkpoint_transport).__name__}")
        self._transport = checkpoint_transport

    def recover(
        self,
        metadata: str | Sequence[str],
        step: int | Literal["latest"] = "latest",
        timeout: timedelta | None = None,
        *,
        unreachable_timeout: timedelta | None = None,
        progress_timeout: timedelta | None = None,
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
            progress_timeout: How long a transfer may go without a byte of the state, its beginning included; by default
                ``timeout``.
            is_fresh: Accept ``step`` only as the peer's present state, not as it was at an earlier attempt at it.
            verify: Whether the state is compared with the peer's once it is loaded, every bit of it. Turn it off where
                a load function changes what it takes on purpose.
            process_group: All ranks of this replica, if it has several. Each of them calls this; the latest step is the
                same for all then, and if one of them fails all do. They agree through its store; no collective runs.
            from_checkpoints: Whether a checkpoint will do if no peer has a state.

        With a ``checkpoint_store`` all ranks of the store's group call this. Where a peer fails one of them, all load
        the newest good checkpoint instead.

        Raises:
            RecoveryFailedError: No peer could be recovered from, and there is no checkpoint.
            TransportError: The transfer failed.
            StateTornError: After loading, the state is not what was sent; or another rank of ``process_group`` failed.
            StateMismatchError: What the peer has does not fit what is registered here, as modules and optimizers show;
                nothing is received then.
            RegistryError: A load function failed.
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
            progress_timeout=progress_timeout,
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
            store.run_on_all_ranks("recover from live peers", recover, timeout=2 * timeout)
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
        progress_timeout: timedelta | None,
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
            ranks = RecoveringRanks(RankGroup.of(process_group), total)
            if step == "latest":
                step = ranks.agree_on_step(
                    self._transport, addresses, timeout=total, unreachable_timeout=unreachable_timeout
                )
            return self._recover_together(
                ranks,
                metadata,
                step,
                max(total - timedelta(seconds=time.monotonic() - start_s), timedelta(0)),
                unreachable_timeout=unreachable_timeout,
                progress_timeout=progress_timeout,
                is_fresh=is_fresh,
                verify=verify,
            )
        return self._recover(
            metadata,
            step,
            total,
            unreachable_timeout=unreachable_timeout,
            progress_timeout=progress_timeout,
            is_fresh=is_fresh,
            verify=verify,
        )

    def _recover_together(self, ranks: RecoveringRanks, *arguments: Any, **keywords: Any) -> Recovery:
        """Recover on all ranks of a replica, or on none: where one failed, the others refuse to step."""
        recovery, failures = ranks.run(partial(self._recover, *arguments, group_rank=ranks.rank, **keywords))
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
        progress_timeout: timedelta | None,
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
                    progress_timeout=progress_timeout,
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
        try:
            check_fit(incoming, self._registry, into, note=_LAYOUT_ADVICE)
        except RegistryError as error:
            raise StateMismatchError(error.reason, keys=error.keys) from None

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
