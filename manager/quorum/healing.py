"""Brings this replica to the common state of a quorum: before its first quorum as far as possible, and in a quorum.

In a quorum all replicas wait for one that heals. Work before the quorum costs the others nothing:

- If much of the state seldom changes (frozen weights, or DiLoCo's synchronised ones), the newcomer receives it from a
  running replica, at a rate that the replica hardly notices. In the quorum it receives only the changes since.
- If every step changes all of the state, an early copy would be outdated at once and would cost the other replica
  memory and time. Then the newcomer only makes the memory for the state resident.

The Lighthouse's status page, which is not authenticated, names the running replicas. With a job token the answering
replica proves the token; without one the page is as trustworthy as a quorum. The received state is a whole, verified
state of one step: in the quorum the newcomer is like any replica that is some steps behind.
"""

from __future__ import annotations

import inspect
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
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
from manager.quorum.members import RunningMember
from manager.quorum.quorum_round import Participant, format_error
from manager.recovery.peers import PeerOptions
from manager.state.optimizer_states import Memory, memory_at, memory_of_optimizers, tensors_in
from manager.state.registration_check import nonfinite_parameters

logger = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 3
"""A replica gives up after as many failed rounds in a row, each over all sources."""
_SHARE_WITHOUT_PROGRESS: Final = 0.25
"""A source that sends nothing for this share of the remaining time is dropped for the next one. A source that sends may
use all of the time: with shares for each source, many sources would leave each too little."""

_MAX_SHOWN: Final = 5
_MAX_PROBED_AT_ONCE: Final = 16
_HEAL_PROBE_S: Final = 0.5
_JOIN_PROBE_S: Final = 0.2
"""Limits of a probe for a closed port."""

_PERMANENT: Final = (PeerAuthenticationError, StateMismatchError, StateNotServedError, UnknownHostError)
_HOPELESS: Final = "no further attempt can succeed: "
"""Start of the last reason if no source can ever deliver. Ranks exchange reasons as text."""
_LEAST_LASTING_SHARE: Final = 0.5
"""Receive early only if at least this share of the state seldom changes."""
_MAX_SOURCES: Final = 2
_SHARE_OF_CALL: Final = 0.5
"""Maximum share of the caller's remaining time in ``start_quorum``."""
_PATIENCE: Final = 2.0
"""A transfer may take this many times as long as its rate limit implies."""
_BYTES_PER_S: Final = 4e8

_STAND_IN_SHAPE: Final = (64, 64)

_own_random = random.Random()
"""Separate from the process's generator, which the trainer uses."""


def _listening(addresses: Sequence[str]) -> list[str]:
    """Return the addresses with an open port: a request to a source that has just died would wait."""
    with SafeExecutor(min(len(addresses), _MAX_PROBED_AT_ONCE), "ft-transport-probe") as pool:
        is_gone = list(pool.map(lambda address: nobody_listens(address, _HEAL_PROBE_S), addresses))
    return [address for address, gone in zip(addresses, is_gone, strict=True) if not gone]


class Healer:
    """Receives the state that this replica lacks in a quorum. For the training thread alone.

    Args:
        participant: This replica in its quorum.

    Attributes:
        num_failures: Number of failed attempts in a row.
        source: The replicas that served the last state.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._reasons: list[str] = []
        self.source = ""
        self.num_failures = 0

    def receive(self, decision: Decision, role: Heals) -> tuple[str, ...]:
        """Receive the state: from all sources at once, together with other healing replicas; or from one by one.

        The quorum may include a replica that died within the last ``heartbeat_timeout``: a source with a closed port is
        tried after the others.

        Args:
            decision: Names the state.
            role: The sources in order, and the other healing replicas.

        Returns:
            The reasons of all failures; empty after a success.
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
            if waiting and address not in postponed and nobody_listens(address, _HEAL_PROBE_S):
                postponed.add(address)
                waiting.append(source)
                continue
            left = timedelta(seconds=max(0.0, deadline_s - time.monotonic()))
            # Sources with closed ports are no alternative to this one.
            has_others = any(each.addresses[group_rank] not in postponed for each in waiting)
            options = self._options(left, left * _SHARE_WITHOUT_PROGRESS if has_others else None)
            failure = self._failure_from(address, decision, options, source.replica_id)
            if failure is None:
                return ()
            failures.append(failure[0])
            num_permanent += failure[1]
        if failures and num_permanent == len(failures):
            failures[-1] = _HOPELESS + failures[-1]
        return tuple(failures)

    def _receive_together(self, decision: Decision, role: Heals) -> bool:
        """Receive the state from all sources and from other healing replicas at once; return whether that succeeded."""
        group_rank = self._participant.membership.group_rank
        listening = _listening([source.addresses[group_rank] for source in role.sources])
        if not listening:
            return False
        timeout = self._participant.config.timeout
        options = self._options(
            timeout,
            timeout * _SHARE_WITHOUT_PROGRESS,
            others=tuple(listening[1:]),
            relays=tuple(receiver.addresses[group_rank] for receiver in role.receivers),
        )
        from_all = f"{len(listening)} sources, {len(role.receivers)} replicas together,"
        if self._failure_from(listening[0], decision, options, from_all) is not None:
            logger.warning("%s: the sources are asked one by one", self._participant.name)
            return False
        self.source = ", ".join(source.replica_id for source in role.sources)
        return True

    def _options(
        self,
        timeout: timedelta,
        progress_timeout: timedelta | None,
        others: tuple[str, ...] = (),
        relays: tuple[str, ...] = (),
    ) -> PeerOptions:
        config = self._participant.config
        return PeerOptions(
            timeout=timeout,
            unreachable_timeout=config.connect_timeout,
            progress_timeout=progress_timeout,
            in_quorum=True,
            verify=config.verify_heal,
            others=others,
            relays=relays,
        )

    def _failure_from(
        self, address: str, decision: Decision, options: PeerOptions, source: str
    ) -> tuple[str, bool] | None:
        """Receive the state from an address; return the failure and if it is permanent, or ``None`` after a success."""
        participant, start_s = self._participant, time.monotonic()
        try:
            with participant.watch.waiting(f"{participant.name}: receiving step {decision.step} from {address}"):
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
        """Reset the failures: all ranks of the replica have healed."""
        self._reasons.clear()
        self.num_failures = 0

    def warn_of_damage(self, decision: Decision) -> None:
        """Log parameters of the received state with a NaN or an infinity, which the source has as well."""
        state = self._participant.state
        damaged = nonfinite_parameters(state.registry, state.optimizers())
        if damaged:
            more = f" and {len(damaged) - _MAX_SHOWN} more" if len(damaged) > _MAX_SHOWN else ""
            logger.error(
                "%s: the state of step %d that %s served holds NaN or infinity in %s%s, and training does not mend it; "
                "load a durable checkpoint from before",
                self._participant.name,
                decision.step,
                self.source,
                ", ".join(damaged[:_MAX_SHOWN]),
                more,
            )

    def failed(self, step: int, reasons: tuple[str, ...], *, agreed: tuple[str, ...]) -> None:
        """Count a failure of any rank of the replica.

        Args:
            step: The step to receive.
            reasons: The reasons on this rank.
            agreed: The reasons of all ranks, the same on each of them.

        Raises:
            HealFailedError: The limit is reached, or no further attempt of a rank can succeed.
        """
        self._reasons.extend(reasons)
        self.num_failures += 1
        is_hopeless = any(_HOPELESS in reason for reason in agreed)
        if is_hopeless or self.num_failures >= MAX_ATTEMPTS:
            every = tuple(self._reasons)
            self.succeeded()
            self._participant.peers.discard_partial()
            raise HealFailedError(step=step, reasons=every)


class WarmJoin:
    """Prepares a newcomer before its first quorum, while the other replicas train. For the training thread alone.

    Args:
        participant: This replica in its quorum.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._is_over = not participant.config.warm_join

    def run(self, deadline: Deadline) -> None:
        """Prepare, once, if other replicas train and this one is behind. Failures are logged; the quorum heals anyway.

        Args:
            deadline: The caller's deadline; at most half of the remaining time is used.
        """
        participant = self._participant
        if self._is_over:
            return
        self._is_over = True
        sources = self._sources(participant.membership.running_members(), participant.membership.group_rank)
        if not sources:
            return
        began_s = time.monotonic()
        try:
            with participant.watch.waiting(f"{participant.name}: getting ready while the others train"):
                self._get_ready(sources, deadline)
        except (TransportError, ManagerError) as error:
            logger.warning(
                "%s: joins without what it could have got before, after %.1f s: %s",
                participant.name,
                time.monotonic() - began_s,
                format_error(error),
            )

    def _sources(self, members: Sequence[RunningMember], group_rank: int) -> list[str]:
        """Return addresses with the newest state, in random order so that newcomers spread over them."""
        state = self._participant.state
        if not members:
            return []
        own_step = state.step if state.partial is None else 0
        # The step of the majority, so that a single false report cannot mislead newcomers.
        newest = max(Counter(member.step for member in members).items(), key=lambda each: (each[1], each[0]))[0]
        if newest <= own_step:
            return []
        found = [
            member.addresses[group_rank]
            for member in members
            if member.step == newest and len(member.addresses) > group_rank
        ]
        _own_random.shuffle(found)
        listening = [address for address in found[: 2 * _MAX_SOURCES] if not nobody_listens(address, _JOIN_PROBE_S)]
        return listening[:_MAX_SOURCES]

    def _get_ready(self, sources: Sequence[str], deadline: Deadline) -> None:
        participant, state = self._participant, self._participant.state
        with state.lock.read("size of the state"):
            content = state.content()
            num_bytes, num_lasting_bytes = self._sizes(content)
        if num_lasting_bytes < _LEAST_LASTING_SHARE * num_bytes:
            num_missing_bytes = missing_bytes(state.optimizers()) + copied_bytes(content)
            participant.peers.prefault(num_missing_bytes)
            logger.info(
                "%s: every step changes most of the state, which is received in the quorum; %d bytes are made ready",
                participant.name,
                num_missing_bytes,
            )
            return
        self._recover(sources, num_bytes, deadline)

    def _sizes(self, content: Mapping[str, object]) -> tuple[int, int]:
        """Return the bytes of the state, and of the part that neither optimizer steps nor ``forward`` change."""
        participant = self._participant
        stepped = memory_of_optimizers(participant.state.optimizers())
        lasting = participant.snapshots.copier.stable(content) - stepped
        memories = set(filter(None, map(memory_at, tensors_in(content))))
        return sum(map(_length, memories)), sum(map(_length, memories & lasting))

    def _recover(self, sources: Sequence[str], num_bytes: int, deadline: Deadline) -> None:
        participant, config = self._participant, self._participant.config
        # Under DiLoCo the next snapshot comes with the next synchronisation.
        timeout = max(config.timeout, config.quorum_timeout)
        bytes_per_s = _BYTES_PER_S
        if config.world_size not in (None, 1):
            # The other ranks wait up to ``timeout``.
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
                "%s: has got step %d from %s in %.1f s, while the others trained",
                participant.name,
                recovery.step,
                address,
                time.monotonic() - began_s,
            )
            return


def missing_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Return the future size of the states of optimizers that have not stepped yet; torch's own classes only."""
    num_bytes = 0.0
    for optimizer in optimizers:
        if optimizer.state or not type(optimizer).__module__.startswith("torch.optim"):
            continue
        for group in optimizer.param_groups:
            num_bytes += _state_share(optimizer, group) * sum(map(_length, map(memory_at, group["params"])))
    return int(num_bytes)


def copied_bytes(content: object) -> int:
    """Return the size of tensors that cannot receive in place: on a device, or not row-major."""
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
    """Return the bytes of state for each byte of a parameter, from a trial with a small one."""
    if not group["params"]:
        return 0.0
    try:
        stand_in = torch.nn.Parameter(torch.zeros(_STAND_IN_SHAPE, dtype=group["params"][0].dtype))
        made: Any = type(optimizer)
        taken = inspect.signature(made).parameters
        tried = made([stand_in], **{name: value for name, value in group.items() if name in taken and name != "params"})
        stand_in.grad = torch.zeros_like(stand_in)
        tried.step()
    except Exception as error:
        logger.debug("the state of %s is not known before its first step: %s", type(optimizer).__name__, error)
        return 0.0
    return sum(tensor.nbytes for tensor in tensors_in(list(tried.state.values()))) / stand_in.nbytes
