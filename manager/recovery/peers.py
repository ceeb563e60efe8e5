"""Recovers from live peers: receives a peer's state from its memory into this replica's own tensors, and loads it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import ft_transport
from ft_transport import TransportError
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.runtime.deadline import Deadline
from ft_transport.state.placements import spans_ranks
from ft_transport.telemetry.metrics import MetricValues
from ft_transport.telemetry.recorder import phase
from manager.errors import LockTimeoutError, ManagerError, RegistryError, StateMismatchError, StateTornError
from manager.recovery.rank_agreement import agree_on_step, recover_on_all_ranks
from manager.state.compatibility import check_fit
from manager.state.optimizer_states import MIN_DEFERRED_BYTES, memory_at, memory_of_optimizers, tensors_in
from manager.state.parameter_order import TAKEN_OVER, USER_KEY, OrderTakenOverError, incoming_names
from manager.state.registry import listed
from manager.state.replica_state import ReplicaState, checked_step

if TYPE_CHECKING:
    import torch.distributed as dist

    from ft_transport import HTTPTransport, Received
    from ft_transport.state.matching import Incoming

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LAYOUT_ADVICE: Final = "to recover from a replica of another layout, pass the addresses of all its ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The result of `Manager.recover` or `Manager.resume`.

    Attributes:
        step: The committed step of the loaded state.
        source: The address or directory from which the state was loaded.
    """

    step: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    """Options of receiving the state of a peer.

    Attributes:
        timeout: Deadline of the whole recovery.
        unreachable_timeout: How long the peer may be unreachable before the first byte; ``None`` for ``timeout``.
        progress_timeout: How long the transfer may pause between two bytes; ``None`` for ``timeout``.
        in_quorum: Whether the quorum started this recovery. Then the step must be the peer's present step. If the
            recovery fails, the received data is not overwritten, and the next recovery requests only the rest. Until
            then the mark of a partial state (`StateTornError`) keeps this replica from stepping.
        verify: Whether the loaded state is compared with the peer's.
        max_bytes_per_s: Maximum rate of a recovery before the quorum, in bytes per second; ``None`` for other
            recoveries. After a recovery with this limit, the recovery in the quorum receives only later changes.
        is_kept: Whether the state is a kept one (`Keeping`). If steps change less than half of it, the recovery in the
            quorum receives only later changes.
        others: Addresses of further peers with the same state; the receiver reads from all of them.
        relays: Addresses of all replicas that receive this state now, including this one.
    """

    timeout: timedelta
    unreachable_timeout: timedelta | None = None
    progress_timeout: timedelta | None = None
    in_quorum: bool = False
    verify: bool = True
    max_bytes_per_s: float | None = None
    is_kept: bool = False
    others: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()


class PeerRecovery:
    """Receives a peer's state with a transport and loads the state. Only the training thread may call it.

    Attributes:
        counts: Metrics: the number of states that were received and loaded.
    """

    def __init__(self, state: ReplicaState, transport: HTTPTransport[Any]) -> None:
        self._state = state
        self._transport = transport
        self._part = ft_transport.PartialState()
        self._before: Received[Any] | None = None
        self.counts = MetricValues("peers")

    def prefault(self, num_bytes: int) -> None:
        """Allocate and touch memory for the parts of the next received state for which this replica has no tensors."""
        self._transport.prefault_receive(num_bytes)

    @property
    def knows_most(self) -> bool:
        """Whether a recovery before the quorum has received the state, so that only later changes are missing."""
        return self._before is not None

    def discard_partial(self) -> None:
        """Overwrite the data that failed recoveries in a quorum received, unless a complete state has replaced it."""
        part, self._part = self._part, ft_transport.PartialState()
        if self._state.partial is None:
            return
        try:
            with self._state.lock.write("overwriting a part of a state", self._state.timeout):
                part.discard()
        except LockTimeoutError as error:
            logger.warning(
                "a failed recovery left a partly received state, which could not be overwritten; this replica refuses "
                "to step: %s",
                error,
            )

    def recover(
        self,
        metadata: str | Sequence[str],
        step: int | Literal["latest"],
        options: PeerOptions,
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> Recovery:
        """Recover like `StateManager.recover`, but from live peers only, without a checkpoint."""
        deadline = Deadline.after(options.timeout)
        with self._transport.recorder.begin("heal", phase="rendezvous") as recording:
            if options.max_bytes_per_s is not None:
                recording.note(warm_join="before the first quorum, while the others train")
            addresses = _checked_addresses(metadata, self._transport.metadata())
            source: str | list[str] = metadata if isinstance(metadata, str) else addresses
            if step != "latest":
                step = checked_step(step)
            if process_group is None:
                recovery = self._recover_alone(source, step, options, deadline)
            else:
                group = RankGroup.of(process_group, keys=self._transport.keys)
                ranks = Agreement(group, "recover", options.timeout)
                if step == "latest":
                    step = agree_on_step(ranks, self._transport, addresses, timeout=options.timeout)
                recover = partial(self._recover, source, step, options, deadline, ranks.rank)
                recovery, failures = recover_on_all_ranks(ranks, recover, timeout=options.timeout)
                if failures:
                    reason = f"this rank has received the state, other ranks of this replica have not: {failures}"
                    self._state.mark_partial(recovery.step, reason)
                    self._state.refuse_partial()
            recording.describe(step=recovery.step)
            return recovery

    def recover_kept(
        self,
        address: str | list[str],
        step: int,
        options: PeerOptions,
        source: str,
        load_local: Callable[[Mapping[str, Any]], None],
        *,
        group_rank: int = 0,
    ) -> Recovery:
        """Recover a kept step, like `recover`.

        Args:
            address: The address of this process's own transport; or those of all parts, for another layout.
            step: The step.
            options: The options.
            source: Names the origin of the state in logs and errors.
            load_local: Loads the local state from the received state.
            group_rank: This rank.
        """
        with self._transport.recorder.begin("heal", phase="rendezvous") as recording:
            recording.note(tier=source)
            deadline = Deadline.after(options.timeout)
            recovery = self._recover(address, step, options, deadline, group_rank, named=source, load_local=load_local)
            recording.describe(step=recovery.step)
            return recovery

    def _recover_alone(
        self, source: str | list[str], step: int | Literal["latest"], options: PeerOptions, deadline: Deadline
    ) -> Recovery:
        """Recover. If a tensor that was assumed to be unchanged differs, receive the complete state instead."""
        was_known = self._before is not None
        try:
            return self._recover(source, step, options, deadline)
        except StateTornError as error:
            if not was_known:
                raise
            logger.warning("receiving the complete state again: %s", error)
        return self._recover(source, step, options, deadline)

    def _recover(
        self,
        source: str | list[str],
        step: int | Literal["latest"],
        options: PeerOptions,
        deadline: Deadline,
        group_rank: int = 0,
        *,
        named: str = "",
        load_local: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> Recovery:
        state = self._state
        start_s = time.monotonic()
        named = named or (source if isinstance(source, str) else f"{source[0]} and {len(source) - 1} more")
        phase("lock")
        with state.lock.write(f"receiving step {step} from {named}", deadline.cap(options.timeout)):
            state.note_configured()
            into = state.content()
            if step == "latest" and spans_ranks(into) and options.max_bytes_per_s is None:
                raise ManagerError(
                    "expected process_group=..., or a step, to recover a replica of several ranks: each rank could "
                    "receive a different latest step"
                )
            earlier = state.partial
            if earlier is None:
                # A complete state has replaced the partial state.
                self._part = ft_transport.PartialState()
            state.mark_partial(step, "the transfer was interrupted")
            # Unless this recovery succeeds, its tensors have unknown values afterwards.
            before, self._before = self._before, None
            try:
                receive = partial(self._receive, source, step, options, deadline, group_rank=group_rank)
                try:
                    received = receive(into=into, before=before)
                except OrderTakenOverError:
                    # The partial state refers to the earlier order of parameters.
                    self._part = ft_transport.PartialState()
                    received = receive(into=state.content(), before=None)
            except (RegistryError, TransportError) as error:
                # An earlier attempt may have overwritten tensors, with data of a snapshot that was replaced since.
                if getattr(error, "destination_touched", False):
                    state.mark_partial(step, str(error))
                else:
                    state.partial = earlier
                raise
            phase("load")
            try:
                state.load(received.state)
                if load_local is not None:
                    load_local(received.state)
            except RegistryError as error:
                # Tensors have been overwritten in place even if no load function ran.
                state.mark_partial(received.step, str(error))
                raise
            received_s = time.monotonic()
            if options.verify:
                phase("compare")
                state.mark_partial(received.step, "the comparison after loading was interrupted")
                self._refuse_differences(received, named)
                state.partial = None
        is_own = options.is_kept and isinstance(source, str)
        is_early = options.max_bytes_per_s is not None or (is_own and self._is_mostly_lasting(received.state))
        if is_early and options.verify:
            self._before = received
        recovery, end_s = Recovery(step=received.step, source=named), time.monotonic()
        self.counts.add("recoveries_total")
        logger.info(
            "recovered step %d from %s: %.0f ms to receive and load the state, %.0f ms to compare it",
            recovery.step,
            named,
            (received_s - start_s) * 1e3,
            (end_s - received_s) * 1e3,
            # Plain values only: formatters write all fields of a record as JSON.
            extra={"recovery": asdict(recovery), "seconds": end_s - start_s},
        )
        return recovery

    def _is_mostly_lasting(self, content: Mapping[str, Any]) -> bool:
        """Return whether optimizers change less than half of the bytes of a state."""
        stepped = memory_of_optimizers(self._state.optimizers())
        memories = {memory for each in tensors_in(content[USER_KEY]) if (memory := memory_at(each)) is not None}
        num_bytes = [num for _, _, num in memories]
        return 2 * sum(num for _, _, num in memories & stepped) < sum(num_bytes)

    def _receive(
        self,
        source: str | list[str],
        step: int | Literal["latest"],
        options: PeerOptions,
        deadline: Deadline,
        *,
        group_rank: int,
        into: Mapping[str, object],
        before: Received[Any] | None,
    ) -> Received[Any]:
        """Receive the state from one rank of a peer with this layout, or from all ranks of one with another layout."""
        asked = "latest" if options.in_quorum else step
        keywords: Any = {
            "into": into,
            "timeout": ft_transport.FetchTimeout(
                total=deadline.cap(options.timeout),
                unreachable=options.unreachable_timeout,
                progress=options.progress_timeout,
            ),
            # With ``verify``, `_refuse_differences` compares every byte after loading.
            "is_comparable": options.verify,
            "check": partial(self.check_incoming, into=into, step=step),
        }
        if isinstance(source, str):
            if options.max_bytes_per_s is not None:
                keywords["max_bytes_per_s"] = options.max_bytes_per_s
            sources: str | tuple[str, ...] = source
            if options.others or options.relays:
                keywords["relays"] = options.relays
                sources = (source, *options.others)
            known = None
            if before is not None and options.verify:
                stepped = memory_of_optimizers(self._state.optimizers())
                known = before.but_for(lambda own: own.nbytes < MIN_DEFERRED_BYTES or memory_at(own) in stepped)
            if not options.in_quorum:
                self._part.discard()
                return self._transport.fetch(sources, asked, known=known, **keywords)
            if known is not None:
                self._part = ft_transport.PartialState(known)
            return self._transport.fetch(sources, asked, known=self._part, **keywords)
        self._part = ft_transport.PartialState()
        like = self._state.registry.parameter_finder()
        return self._transport.fetch_sharded(source, asked, group_rank=group_rank, like=like, **keywords)

    def check_incoming(self, incoming: Incoming, into: Mapping[str, object], step: int | Literal["latest"]) -> None:
        """Make sure, before data arrives, that this replica can load a state.

        Raises:
            RegistryError: It is another step.
            StateMismatchError: The state does not fit.
            OrderTakenOverError: The optimizers' parameters have another order now; ``into`` is outdated.
        """
        if step not in ("latest", incoming.step):
            raise RegistryError(f"expected the state of step {step}, got that of step {incoming.step}")
        state = self._state
        try:
            has_taken_over = state.take_over_order(incoming_names(incoming, state.registry))
            if not has_taken_over:
                check_fit(incoming, state.registry, into, note=_LAYOUT_ADVICE)
        except RegistryError as error:
            raise StateMismatchError(error.reason, keys=error.keys) from None
        if has_taken_over:
            raise OrderTakenOverError(TAKEN_OVER)

    def _refuse_differences(self, received: Received[Any], source: str) -> None:
        """Check that the loaded state equals the received state; if not, mark the state as partial and raise."""
        # A kept state has the local state, too, which is compared with itself.
        differences = received.differences({**received.state, **self._state.content_like(received.state)})
        if differences:
            self._state.mark_partial(
                received.step,
                f"the loaded state differs from the state that {source} sent; a load function has changed it, or it "
                f"was damaged in the transfer: {listed(differences, '; ')}",
            )
            self._state.refuse_partial()


def _checked_addresses(metadata: str | Sequence[str], own: str) -> list[str]:
    """Return the addresses as a list; ``TypeError`` if there are none, ``ManagerError`` for this rank's own address."""
    addresses: Any = [metadata] if isinstance(metadata, str) else metadata
    if not isinstance(addresses, Sequence) or not addresses or not all(isinstance(each, str) for each in addresses):
        raise TypeError(f"expected the address that a peer's metadata() returned, got {metadata!r}")
    if own.rstrip("/") in (address.rstrip("/") for address in addresses):
        raise ManagerError(f"expected the address of another replica to recover from, got this replica's own {own}")
    return list(addresses)
