"""Recovery from the memory of live peers: receives their state into this replica's own tensors, and loads it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import ft_transport
from ft_transport import TransportError
from ft_transport.coordination.ranks import RankGroup
from ft_transport.state.placements import spans_ranks
from ft_transport.telemetry.metrics import MetricValues
from ft_transport.telemetry.recorder import phase
from manager.errors import LockTimeoutError, ManagerError, RegistryError, StateMismatchError, StateTornError
from manager.recovery.rank_agreement import RecoveringRanks
from manager.recovery.values import PeerOptions, Recovery, shown
from manager.state.compatibility import check_fit
from manager.state.optimizer_states import MIN_DEFERRED_BYTES, memory_at, memory_of_optimizers
from manager.state.parameter_order import TAKEN_OVER, OrderTakenOverError, incoming_names
from manager.state.replica_state import ReplicaState, checked_step

if TYPE_CHECKING:
    import torch.distributed as dist

    from ft_transport import HTTPTransport, Received
    from ft_transport.state.matching import Incoming

logger = logging.getLogger(__name__)

_LAYOUT_ADVICE: Final = "replicas of another layout are recovered from by the addresses of all their ranks"


class PeerRecovery:
    """Receives a peer's state and loads it. Owned by the training thread.

    Args:
        state: This replica's state.
        transport: Receives.

    Attributes:
        counts: States that were received and loaded.
    """

    def __init__(self, state: ReplicaState, transport: HTTPTransport[Any]) -> None:
        self._state = state
        self._transport = transport
        self._part = ft_transport.PartialState()
        self._before: Received[Any] | None = None
        self.counts = MetricValues("peers")

    def prefault(self, num_bytes: int) -> None:
        """Prefault memory for the parts of the next state that have no place yet; takes as long as touching it does."""
        self._transport.prefault_receive(num_bytes)

    @property
    def knows_most(self) -> bool:
        """Return whether an earlier recovery received the state, except for later changes."""
        return self._before is not None

    def discard_partial(self) -> None:
        """Overwrite the data of attempts in a quorum, unless a whole state has replaced it since."""
        part, self._part = self._part, ft_transport.PartialState()
        if self._state.partial is None:
            return
        try:
            with self._state.lock.write("overwriting a part of a state", self._state.timeout):
                part.discard()
        except LockTimeoutError as error:
            logger.warning("what was received of a state could not be overwritten; no step is taken with it: %s", error)

    def recover(
        self,
        metadata: str | Sequence[str],
        step: int | Literal["latest"],
        options: PeerOptions,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> Recovery:
        """See `StateManager.recover`. Takes no checkpoint."""
        with self._transport.recorder.begin("heal", phase="rendezvous") as recording:
            if options.is_warm:
                recording.note(warm_join="before the first quorum, while the others train")
            recovery = self._recover_from(metadata, step, options, process_group)
            recording.describe(step=recovery.step)
            return recovery

    def _recover_from(
        self,
        metadata: str | Sequence[str],
        step: int | Literal["latest"],
        options: PeerOptions,
        process_group: dist.ProcessGroup | None,
    ) -> Recovery:
        addresses = _checked_addresses(metadata, self._transport.metadata())
        source: str | list[str] = metadata if isinstance(metadata, str) else addresses
        if step != "latest":
            step = checked_step(step)
        if process_group is None:
            return self._recover_once_more(source, step, options)
        start_s = time.monotonic()
        ranks = RecoveringRanks(RankGroup.of(process_group, keys=self._transport.keys), options.timeout)
        if step == "latest":
            step = ranks.agree_on_step(self._transport, addresses, timeout=options.timeout)
        return self._recover_on_all_ranks(
            ranks, source, step, replace(options, timeout=_left(options.timeout, start_s))
        )

    def _recover_once_more(
        self, source: str | list[str], step: int | Literal["latest"], options: PeerOptions
    ) -> Recovery:
        """Recover; restart if a tensor that was assumed to be unchanged differs."""
        start_s = time.monotonic()
        was_known = self._before is not None
        try:
            return self._recover(source, step, options)
        except StateTornError as error:
            if not was_known:
                raise
            logger.warning("the state is received once more, all of it: %s", error)
        return self._recover(source, step, replace(options, timeout=_left(options.timeout, start_s)))

    def _recover_on_all_ranks(
        self, ranks: RecoveringRanks, source: str | list[str], step: int, options: PeerOptions
    ) -> Recovery:
        """Recover on all ranks of a replica, or on none: if one rank failed, the others refuse to step."""
        recovery, failures = ranks.run(partial(self._recover, source, step, options, group_rank=ranks.rank))
        if failures:
            self._state.mark_partial(
                recovery.step, f"this rank has received it, others of this replica have not: {failures}"
            )
            self._state.refuse_partial()
        return recovery

    def _recover(
        self, source: str | list[str], step: int | Literal["latest"], options: PeerOptions, *, group_rank: int = 0
    ) -> Recovery:
        state = self._state
        start_s = time.monotonic()
        named = source if isinstance(source, str) else f"{source[0]} and {len(source) - 1} more"
        phase("lock")
        with state.lock.write(f"receiving step {step} from {named}", options.timeout):
            state.note_configured()
            into = state.content()
            if step == "latest" and spans_ranks(into) and not options.is_warm:
                raise ManagerError(
                    "expected process_group=..., or a step, to recover a replica of several ranks: the latest step may "
                    "be another one for each of them"
                )
            earlier = state.partial
            if earlier is None:
                # A whole state has replaced the part since.
                self._part = ft_transport.PartialState()
            state.mark_partial(step, "the transfer was interrupted")
            # In any case the tensors are unknown afterwards, but for what is noted at the end.
            before, self._before = self._before, None
            try:
                receive = partial(self._receive, source, step, group_rank=group_rank, before=before)
                try:
                    received = receive(into, replace(options, timeout=_left(options.timeout, start_s)))
                except OrderTakenOverError:
                    # The partial state has the places of the earlier order.
                    self._part = ft_transport.PartialState()
                    left = _left(options.timeout, start_s)
                    received = receive(state.content(), replace(options, timeout=left), before=None)
            except (RegistryError, TransportError) as error:
                # Data of an earlier attempt, whose snapshot was replaced meanwhile, may have landed.
                if getattr(error, "destination_touched", False):
                    state.mark_partial(step, str(error))
                else:
                    state.partial = earlier
                raise
            phase("load")
            try:
                state.load(received.state)
            except RegistryError as error:
                # Whether or not a load function ran: data that fits has been received in place.
                state.mark_partial(received.step, str(error))
                raise
            received_s = time.monotonic()
            if options.verify:
                phase("compare")
                state.mark_partial(received.step, "comparing it was interrupted")
                self._refuse_differences(received, named)
                state.partial = None
        if options.is_warm and options.verify:
            self._before = received
        recovery, end_s = Recovery(step=received.step, source=named), time.monotonic()
        self.counts.add("recoveries_total")
        logger.info(
            "recovered step %d from %s: %.0f ms to receive and load it, %.0f ms to compare",
            recovery.step,
            named,
            (received_s - start_s) * 1e3,
            (end_s - received_s) * 1e3,
            # Plain values only: formatters write all fields of a record as JSON.
            extra={"recovery": asdict(recovery), "seconds": end_s - start_s},
        )
        return recovery

    def _receive(
        self,
        source: str | list[str],
        step: int | Literal["latest"],
        into: Mapping[str, object],
        options: PeerOptions,
        *,
        group_rank: int,
        before: Received[Any] | None,
    ) -> Received[Any]:
        """Receive from one rank in the same layout, or from all ranks in any other."""
        asked = "latest" if options.in_quorum else step
        keywords: Any = {
            "into": into,
            "timeout": ft_transport.FetchTimeout(
                total=options.timeout, unreachable=options.unreachable_timeout, progress=options.progress_timeout
            ),
            # It compares every byte after loading.
            "is_comparable": options.verify,
            "check": partial(self._check_incoming, into=into, step=step),
        }
        if isinstance(source, str):
            if options.max_bytes_per_s is not None:
                keywords["max_bytes_per_s"] = options.max_bytes_per_s
            sources: str | tuple[str, ...] = source
            if options.others or options.relays:
                keywords["relays"] = options.relays
                sources = (source, *options.others)
            known = self._but_for_steps(before) if before is not None and options.verify else None
            if not options.in_quorum:
                self._part.discard()
                return self._transport.fetch(sources, asked, known=known, **keywords)
            if known is not None:
                self._part = ft_transport.PartialState(known)
            return self._transport.fetch(sources, asked, known=self._part, **keywords)
        self._part = ft_transport.PartialState()
        return self._transport.fetch_sharded(
            source,
            asked,
            group_rank=group_rank,
            like=self._state.registry.parameter_finder(),
            **keywords,
        )

    def _but_for_steps(self, before: Received[Any]) -> Received[Any]:
        """Return the received state without the tensors that optimizers step."""
        stepped = memory_of_optimizers(self._state.optimizers())
        return before.but_for(lambda own: own.nbytes < MIN_DEFERRED_BYTES or memory_at(own) in stepped)

    def _check_incoming(self, incoming: Incoming, into: Mapping[str, object], step: int | Literal["latest"]) -> None:
        if step not in ("latest", incoming.step):
            raise RegistryError(f"expected the state of step {step}, what comes is of step {incoming.step}")
        state = self._state
        try:
            if state.take_over_order(incoming_names(incoming, state.registry)):
                raise OrderTakenOverError(TAKEN_OVER)
            check_fit(incoming, state.registry, into, note=_LAYOUT_ADVICE)
        except OrderTakenOverError:
            raise
        except RegistryError as error:
            raise StateMismatchError(error.reason, keys=error.keys) from None

    def _refuse_differences(self, received: Received[Any], source: str) -> None:
        """Check that the load functions have not changed the received state."""
        differences = received.differences(self._state.content_like(received.state))
        if differences:
            self._state.mark_partial(
                received.step,
                f"after loading, the state is not the one that {source} sent; a load function has changed it, or it "
                f"was damaged on its way: {shown(differences)}",
            )
            self._state.refuse_partial()


def _left(timeout: timedelta, start_s: float) -> timedelta:
    return max(timeout - timedelta(seconds=time.monotonic() - start_s), timedelta(0))


def _checked_addresses(metadata: str | Sequence[str], own: str) -> list[str]:
    """Return the addresses that a caller named.

    Args:
        metadata: One address, or several.
        own: This rank's address, which is no source.

    Raises:
        TypeError: The values are no addresses.
        ManagerError: One of them is this rank's own.
    """
    addresses: Any = [metadata] if isinstance(metadata, str) else metadata
    if not isinstance(addresses, Sequence) or not addresses or not all(isinstance(each, str) for each in addresses):
        raise TypeError(f"expected the address that a peer's metadata() returned, got {metadata!r}")
    if own.rstrip("/") in (address.rstrip("/") for address in addresses):
        raise ManagerError(f"expected the address of another replica to recover from, got this one's own {own}")
    return list(addresses)
