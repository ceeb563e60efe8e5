"""Receives the state that this replica lacks: `Healer` within a quorum, `prepare_newcomer` before the first one.

All replicas of a quorum wait until the slowest replica has healed. But no replica waits for a newcomer before the
newcomer's first quorum, so the newcomer prepares during that time:

- Most of the state may seldom change: frozen weights, or weights that DiLoCo synchronises. Then a newcomer receives the
  state early from a running replica, at a rate that the sender hardly notices. In the quorum it receives only what is
  missing.
- Every step may change most of the state. Then an early copy would be outdated at once, and cost the sender memory and
  time. So the newcomer only allocates and touches the memory for the state.

The addresses of running replicas come from the Lighthouse's status page, which is not authenticated. With a job token,
the sender proves that it has the token. Without a token, the page is as trustworthy as a quorum. A newcomer always
receives a complete, verified state of one step. So in the quorum it heals like any replica that is some steps behind.
"""

from __future__ import annotations

import inspect
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ft_transport import PeerAuthenticationError, StateNotServedError, TransportError, UnknownHostError
from ft_transport.coordination.store import nobody_listens
from ft_transport.runtime.deadline import Deadline
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.telemetry.recorder import current
from manager.errors import HealFailedError, ManagerError, QuorumError, StateMismatchError
from manager.quorum.decision import Decision, Heals
from manager.quorum.quorum_round import Participant, format_error
from manager.recovery.peers import PeerOptions
from manager.state.optimizer_states import Memory, memory_at, memory_of_optimizers, tensors_in
from manager.state.registration_check import nonfinite_parameters

logger = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 3
"""A replica gives up after this number of failed heals in a row. Each heal tries all sources."""
_SHARE_WITHOUT_PROGRESS: Final = 0.25
"""If a source sends nothing for this share of the remaining time, the next source replaces it. A source that sends may
use all of the time: an equal share for each of many sources would be too short."""

_MAX_SHOWN: Final = 5
_MAX_PROBED_AT_ONCE: Final = 16
_PROBE_S: Final = 0.5
"""Limit of a probe for a closed port."""

_PERMANENT: Final = (PeerAuthenticationError, StateMismatchError, StateNotServedError, UnknownHostError)
_HOPELESS: Final = "no further attempt can succeed: "
"""Prefix of the last reason if no source can ever serve the state. A prefix, because ranks exchange reasons as text."""
_LEAST_LASTING_SHARE: Final = 0.5
"""A newcomer receives the state early only if at least this share of its bytes seldom changes."""
_MAX_SOURCES: Final = 2
_SHARE_OF_CALL: Final = 0.5
"""Share of the caller's remaining time in ``start_quorum`` that the preparation of a newcomer may use."""
_PATIENCE: Final = 2.0
"""A transfer may take this many times as long as its rate limit implies."""
_BYTES_PER_S: Final = 4e8
_STAND_IN_SHAPE: Final = (64, 64)
_own_random = random.Random()
"""Separate from the random generator of the process, which the trainer uses."""


def _listening(addresses: Sequence[str]) -> list[str]:
    """Return the addresses with an open port. A request to a source that has just died could take long."""
    with SafeExecutor(min(len(addresses), _MAX_PROBED_AT_ONCE), "ft-transport-probe") as pool:
        is_closed = list(pool.map(lambda address: nobody_listens(address, _PROBE_S), addresses))
    return [address for address, closed in zip(addresses, is_closed, strict=True) if not closed]


class Healer:
    """Receives the common state of a quorum. For the training thread only.

    Args:
        participant: This replica and its quorum.

    Attributes:
        num_failures: Number of failed heals in a row.
        source: The ids of the replicas that served the last received state, as text.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._reasons: list[str] = []
        self.source = ""
        self.num_failures = 0

    def receive(self, decision: Decision, role: Heals) -> tuple[str, ...]:
        """Receive the state: from all sources at once if several replicas heal, otherwise from one after another.

        A source that died within the last ``heartbeat_timeout`` may still be a member of the quorum. So a source with a
        closed port is tried last.

        Args:
            decision: The decision with the step and lineage of the state.
            role: The sources, in the order of attempts, and the other healing replicas.

        Returns:
            One reason for each failed attempt; empty after a success.
        """
        participant, group_rank = self._participant, self._participant.membership.group_rank
        deadline_s = time.monotonic() + participant.config.timeout.total_seconds()
        failures: list[str] = []
        is_alone = len(role.receivers) <= 1 or participant.peers.knows_most
        if not is_alone and self._receive_together(decision, role):
            return ()
        num_permanent = 0
        waiting, postponed = deque(role.sources), set[str]()
        while waiting:
            source = waiting.popleft()
            address = source.addresses[group_rank]
            if waiting and address not in postponed and nobody_listens(address, _PROBE_S):
                postponed.add(address)
                waiting.append(source)
                continue
            left = timedelta(seconds=max(0.0, deadline_s - time.monotonic()))
            # A source with a closed port is no alternative, so it does not shorten this attempt.
            has_alternative = any(each.addresses[group_rank] not in postponed for each in waiting)
            options = self._options(left, left * _SHARE_WITHOUT_PROGRESS if has_alternative else None)
            failure = self._failure_from(address, decision, options, source.replica_id)
            if failure is None:
                return ()
            failures.append(failure[0])
            num_permanent += failure[1]
        if failures and num_permanent == len(failures):
            failures[-1] = _HOPELESS + failures[-1]
        return tuple(failures)

    def _receive_together(self, decision: Decision, role: Heals) -> bool:
        """Receive the state from all sources and all other healing replicas at once. Return whether that succeeded."""
        group_rank = self._participant.membership.group_rank
        listening = _listening([source.addresses[group_rank] for source in role.sources])
        if not listening:
            return False
        timeout = self._participant.config.timeout
        options = replace(
            self._options(timeout, timeout * _SHARE_WITHOUT_PROGRESS),
            others=tuple(listening[1:]),
            relays=tuple(receiver.addresses[group_rank] for receiver in role.receivers),
        )
        from_all = f"{len(listening)} sources, {len(role.receivers)} replicas together,"
        if self._failure_from(listening[0], decision, options, from_all) is not None:
            logger.warning("%s: now tries each source alone", self._participant.name)
            return False
        self.source = ", ".join(source.replica_id for source in role.sources)
        return True

    def _options(self, timeout: timedelta, progress_timeout: timedelta | None) -> PeerOptions:
        config = self._participant.config
        return PeerOptions(
            timeout=timeout,
            unreachable_timeout=config.connect_timeout,
            progress_timeout=progress_timeout,
            in_quorum=True,
            verify=config.verify_heal,
        )

    def _failure_from(
        self, address: str, decision: Decision, options: PeerOptions, source: str
    ) -> tuple[str, bool] | None:
        """Receive the state from one address.

        Returns:
            ``None`` after a success; otherwise the reason for the failure, and whether a retry would fail as well.
        """
        participant, start_s = self._participant, time.monotonic()
        try:
            with participant.waiting(f"{participant.name}: receiving step {decision.step} from {address}"):
                participant.peers.recover(address, decision.step, options)
            lineage = participant.state.lineage
            if lineage != decision.lineage:
                raise QuorumError(f"expected lineage {decision.lineage!r} of step {decision.step}, got {lineage!r}")
        except (TransportError, ManagerError) as error:
            if (recording := current()) is not None:
                recording.retry(error, peer=address)
            reason = format_error(error)
            logger.warning("%s: healing from %s failed: %s", participant.name, source, reason)
            return f"{source} at {address}: {reason}", isinstance(error, _PERMANENT)
        self.source = source
        logger.info(
            "%s: healed to step %d from %s in %.1f ms",
            participant.name,
            decision.step,
            source,
            (time.monotonic() - start_s) * 1e3,
        )
        return None

    def succeeded(self) -> None:
        """Reset the count of failures, after all ranks of the replica have healed."""
        self._reasons.clear()
        self.num_failures = 0

    def warn_of_damage(self, decision: Decision) -> None:
        """Log which parameters of the received state contain NaN or infinity. The source has the same values."""
        state = self._participant.state
        damaged = nonfinite_parameters(state.registry, state.optimizers())
        if damaged:
            more = f" and {len(damaged) - _MAX_SHOWN} more" if len(damaged) > _MAX_SHOWN else ""
            logger.error(
                "%s: the state of step %d that %s served contains NaN or infinity in %s%s; training cannot "
                "repair this, so load an older durable checkpoint",
                self._participant.name,
                decision.step,
                self.source,
                ", ".join(damaged[:_MAX_SHOWN]),
                more,
            )

    def failed(self, step: int, reasons: tuple[str, ...], *, agreed: tuple[str, ...]) -> None:
        """Count a failed heal. If one rank of the replica fails to heal, all its ranks call this method.

        Args:
            step: The step of the state that was not received.
            reasons: Why this rank failed.
            agreed: The reasons of all ranks. All ranks receive the same ones, so they give up together.

        Raises:
            HealFailedError: This was the last attempt, or a rank knows that no further attempt can succeed.
        """
        self._reasons.extend(reasons)
        self.num_failures += 1
        if self.num_failures >= MAX_ATTEMPTS or any(_HOPELESS in reason for reason in agreed):
            all_reasons = tuple(self._reasons)
            self.succeeded()
            self._participant.peers.discard_partial()
            raise HealFailedError(step=step, reasons=all_reasons)


def prepare_newcomer(participant: Participant, deadline: Deadline) -> None:
    """Prepare this replica before its first quorum, if it is behind running replicas. For the training thread only.

    A failure is only logged, because the replica can still heal in the quorum.

    Args:
        participant: This replica and its quorum.
        deadline: The caller's deadline. The preparation uses at most half of the remaining time.
    """
    sources = _newest_replicas(participant)
    if not sources:
        return
    began_s = time.monotonic()
    try:
        with participant.waiting(f"{participant.name}: preparing to join while the other replicas train"):
            _prepare(participant, sources, deadline)
    except (TransportError, ManagerError) as error:
        logger.warning(
            "%s: the preparation before the first quorum failed after %.1f s; this replica heals in the quorum: %s",
            participant.name,
            time.monotonic() - began_s,
            format_error(error),
        )


def _newest_replicas(participant: Participant) -> list[str]:
    """Return up to two addresses of replicas with the newest state, at random, so that newcomers spread out."""
    state, group_rank = participant.state, participant.membership.group_rank
    members = participant.membership.running_members()
    if not members:
        return []
    own_step = state.step if state.partial is None else 0
    # The most frequent step, so that a single false report cannot mislead newcomers.
    newest = max(Counter(member.step for member in members).items(), key=lambda each: (each[1], each[0]))[0]
    if newest <= own_step:
        return []
    found = [
        member.addresses[group_rank]
        for member in members
        if member.step == newest and len(member.addresses) > group_rank
    ]
    _own_random.shuffle(found)
    listening = [address for address in found[: 2 * _MAX_SOURCES] if not nobody_listens(address, _PROBE_S)]
    return listening[:_MAX_SOURCES]


def _prepare(participant: Participant, sources: Sequence[str], deadline: Deadline) -> None:
    state = participant.state
    with state.lock.read("size of the state"):
        content = state.content()
        num_bytes, num_lasting_bytes = _sizes(participant, content)
    if num_lasting_bytes < _LEAST_LASTING_SHARE * num_bytes:
        num_missing_bytes = missing_bytes(state.optimizers()) + copied_bytes(content)
        participant.peers.prefault(num_missing_bytes)
        logger.info(
            "%s: every step changes most of the state, so this replica receives the state in the quorum, and now "
            "only allocates %d bytes for it",
            participant.name,
            num_missing_bytes,
        )
        return
    _receive_early(participant, sources, num_bytes, deadline)


def _sizes(participant: Participant, content: Mapping[str, object]) -> tuple[int, int]:
    """Return the size of the state, and of the part that neither optimizer steps nor ``forward`` change."""
    stepped = memory_of_optimizers(participant.state.optimizers())
    lasting = participant.snapshots.copier.stable(content) - stepped
    memories = set(filter(None, map(memory_at, tensors_in(content))))
    return sum(map(_length, memories)), sum(map(_length, memories & lasting))


def _receive_early(participant: Participant, sources: Sequence[str], num_bytes: int, deadline: Deadline) -> None:
    config = participant.config
    # Under DiLoCo a source takes its next snapshot only at the next synchronisation.
    timeout = max(config.timeout, config.quorum_timeout)
    bytes_per_s = _BYTES_PER_S
    if config.world_size not in (None, 1):
        # The other ranks of this replica wait up to ``config.timeout`` for this one.
        longest = config.timeout
        bytes_per_s = max(bytes_per_s, 2 * _PATIENCE * num_bytes / longest.total_seconds())
    else:
        longest = timeout + timedelta(seconds=_PATIENCE * num_bytes / bytes_per_s)
    left = deadline.left()
    end_s = time.monotonic() + min(longest, left * _SHARE_OF_CALL if left is not None else longest).total_seconds()
    for number, address in enumerate(sources):
        began_s = time.monotonic()
        options = PeerOptions(
            timeout=timedelta(seconds=max(0.0, end_s - began_s)),
            unreachable_timeout=config.connect_timeout,
            progress_timeout=timeout,
            max_bytes_per_s=bytes_per_s,
        )
        try:
            recovery = participant.peers.recover(address, "latest", options)
        except TransportError:
            if number + 1 == len(sources) or time.monotonic() >= end_s:
                raise
            continue
        logger.info(
            "%s: received step %d from %s in %.1f s, while the other replicas trained",
            participant.name,
            recovery.step,
            address,
            time.monotonic() - began_s,
        )
        return


def missing_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Return how many bytes the optimizers will allocate in their first step.

    Only torch's own optimizers count, and only those that have not made a step yet.
    """
    num_bytes = 0.0
    for optimizer in optimizers:
        if optimizer.state or not type(optimizer).__module__.startswith("torch.optim"):
            continue
        for group in optimizer.param_groups:
            num_bytes += _state_share(optimizer, group) * sum(map(_length, map(memory_at, group["params"])))
    return int(num_bytes)


def copied_bytes(content: object) -> int:
    """Return the size of the tensors that cannot receive in place, because they are on a device or not row-major."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors_in(content))
    memories = {
        memory_at(tensor)
        for tensor in local
        if tensor.layout is torch.strided and not tensor.is_meta and not (tensor.is_cpu and tensor.is_contiguous())
    }
    return sum(map(_length, memories))


def _length(memory: Memory | None) -> int:
    return memory[2] if memory is not None else 0


def _state_share(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Return the bytes of optimizer state for each byte of a parameter, measured by one step on a small parameter."""
    if not group["params"]:
        return 0.0
    try:
        stand_in = torch.nn.Parameter(torch.zeros(_STAND_IN_SHAPE, dtype=group["params"][0].dtype))
        kind: Any = type(optimizer)
        accepted = inspect.signature(kind).parameters.keys() - {"params"}
        trial = kind([stand_in], **{name: value for name, value in group.items() if name in accepted})
        stand_in.grad = torch.zeros_like(stand_in)
        trial.step()
    except Exception as error:
        logger.debug(
            "the size of the state of %s is unknown before its first step: %s", type(optimizer).__name__, error
        )
        return 0.0
    return sum(tensor.nbytes for tensor in tensors_in(list(trial.state.values()))) / stand_in.nbytes
