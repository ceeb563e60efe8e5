"""Decides from the members' reports which replicas train the next step, which heal first, and from which sources.

Every member computes the decision by itself from the same list of reports. The module is pure: it does not wait, read a
clock or use the network. The reports come from the Lighthouse (``manager.quorum.lighthouse``).

A committed state has a step and a *lineage*: a digest of all process groups that averaged its gradients since step 0.
Replicas with the same step and lineage have the same replicated state. The step number alone does not guarantee that: a
stopped replica may wake up and commit a step that the others have repeated without it. Then its lineage differs from
theirs, and it heals like a replica that is behind.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from manager.errors import HyperparametersDivergedError, QuorumError, StatesDivergedError
from manager.quorum.reports import (
    NO_WHOLE_STATE,
    Divergence,
    Member,
    find_divergence,
    is_in_other_order,
    misfits,
    usual_structure,
)

_AVERAGED: Final = "the tensors that were averaged for it"


class WorldSizeMode(Enum):
    """The number of replicas that contribute to a step; names and meaning as in torchft.

    Attributes:
        DYNAMIC: All replicas in the quorum.
        FIXED_WITH_SPARES: ``min_replica_size``; the others have the same state and contribute zeros.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UpToDate:
    """The replica already has the common state.

    Attributes:
        serves_now: The replicas that heal at this step boundary.
        serves_next: The replicas that will heal at the next step boundary.
    """

    serves_now: tuple[str, ...]
    serves_next: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heals:
    """The replica receives the state before it trains.

    Attributes:
        sources: The replicas with the state, in the order of attempts; rotated so that healing replicas spread over
            them.
        receivers: All replicas that heal now, including this one; they relay received bytes to each other.
    """

    sources: tuple[Member, ...]
    receivers: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StandsBy:
    """The replica takes no part in this step: its possible sources train already.

    Attributes:
        announced_to: Replicas that have learned of it now, and take a snapshot at the next step boundary.
        may_heal: Whether all of its ranks wait; otherwise none of them asks again in this step.
    """

    announced_to: frozenset[str]
    may_heal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DoesNotFit:
    """The replica could not load the common state: it takes no part, and no other replica waits for it.

    Attributes:
        holder: A replica with the common state.
        parts: The parts that differ from the replica's own.
    """

    holder: Member
    parts: tuple[str, ...]


Role: TypeAlias = UpToDate | Heals | StandsBy | DoesNotFit


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One replica's part in a step.

    Attributes:
        step: The committed step that all members show after healing.
        lineage: The lineage of that step.
        group: Key of the step's process group. A replica that has this group already does not set it up again.
        group_members: The group's members in the order of their ranks.
        group_addresses: For each member, the address of the rank with the asking rank's number.
        store_address: Address of the store where the process group meets.
        rank: The replica's rank in the group; ``None`` if it stands by.
        num_participants: Number of contributing replicas.
        participating_rank: The replica's rank among them; ``None`` if it contributes zeros or stands by.
        role: The replica's task before it trains.
        divergence: The result of a comparison that found differences.
        unfit: Replicas whose role is `DoesNotFit`.
    """

    step: int
    lineage: str
    group: str
    group_members: tuple[str, ...]
    group_addresses: tuple[str, ...]
    store_address: str
    rank: int | None
    num_participants: int
    participating_rank: int | None
    role: Role
    divergence: Divergence | None = None
    unfit: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings that must be equal on all replicas of a job: they change a step's result or its participants.

    Attributes:
        min_replica_size: The smallest number of replicas that commits.
        world_size_mode: See `WorldSizeMode`.
        init_sync: Whether all replicas take the state of one of them at step 0.
        compare_every: Replicas compare their states at multiples of this step number.
    """

    min_replica_size: int
    world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    init_sync: bool = True
    compare_every: int | None = None

    def told(self) -> tuple[str, ...]:
        """Return the rules as text, each with its name, for reports."""
        return (
            f"min_replica_size={self.min_replica_size}",
            f"world_size_mode={self.world_size_mode.name}",
            f"init_sync={self.init_sync}",
            f"compare_every={self.compare_every}",
        )


@dataclass(frozen=True, slots=True)
class _Target:
    """The common state of the next step, and the replicas that have it."""

    step: int
    lineage: str
    holders: tuple[Member, ...] = field(default=())


def decide(
    members: Collection[Member], own_id: str, rules: Rules, *, group_rank: int = 0, num_failed_heals: int = 0
) -> Decision:
    """Decide what the replica ``own_id`` does in this step.

    Args:
        members: The quorum, in any order; the same on all members.
        own_id: The asking replica.
        rules: The same on all members.
        group_rank: The asking rank within its replica. Each rank starts with another source.
        num_failed_heals: Number of failed heals in a row. Each attempt starts with another source.

    Raises:
        QuorumError: The replica is no member, the members' settings differ, or no member has a whole state.
        StatesDivergedError: The members' states differ, and no majority agrees.
    """
    ordered = sorted(members, key=lambda member: member.replica_id)
    _check(ordered, own_id)
    divergence = _find_divergence(ordered)
    if divergence is not None and not divergence.has_majority:
        is_of_hyperparameters = divergence.compared == "hyperparameters"
        kind = HyperparametersDivergedError if is_of_hyperparameters else StatesDivergedError
        raise kind(
            step=divergence.step,
            replicas=tuple(sorted(divergence.replicas)),
            store_address=next(each.store_address for each in ordered if each.replica_id in divergence.replicas),
            tensors=(_AVERAGED,) if divergence.compared == "reductions" else (),
        )
    sound = [member for member in ordered if divergence is None or member.replica_id not in divergence.replicas]
    target, unfit = _choose_fitting_target(sound, ordered, rules)
    holding = {member.replica_id for member in target.holders}
    sources = {
        member.replica_id: () if member.replica_id in unfit else _sources(member, target.holders)
        for member in ordered
        if member.replica_id not in holding
    }
    healing = [replica_id for replica_id, found in sources.items() if found]
    standing_by = [replica_id for replica_id, found in sources.items() if not found]
    joined = [member for member in ordered if member.replica_id not in standing_by]
    names = tuple(member.replica_id for member in joined)
    rank = names.index(own_id) if own_id in names else None
    num_participants = len(joined)
    if rules.world_size_mode is WorldSizeMode.FIXED_WITH_SPARES:
        num_participants = min(num_participants, rules.min_replica_size)
    role: Role
    if own_id in holding:
        waiting = tuple(
            member.replica_id
            for member in ordered
            if member.replica_id in standing_by and member.may_heal and member.replica_id not in unfit
        )
        role = UpToDate(serves_now=tuple(healing), serves_next=waiting)
    elif own_id in unfit:
        role = DoesNotFit(holder=target.holders[0], parts=unfit[own_id])
    elif sources[own_id]:
        first = healing.index(own_id) + group_rank + num_failed_heals
        receivers = tuple(member for member in ordered if member.replica_id in healing)
        role = Heals(sources=_rotated(sources[own_id], first), receivers=receivers)
    else:
        own = next(member for member in ordered if member.replica_id == own_id)
        role = StandsBy(announced_to=frozenset(holding), may_heal=own.may_heal)
    return Decision(
        step=target.step,
        lineage=target.lineage,
        group=_group_key(joined),
        group_members=names,
        group_addresses=tuple(member.addresses[group_rank] for member in joined),
        # The store of a replica that already has the state: it has existed longest.
        store_address=target.holders[group_rank % len(target.holders)].store_address,
        rank=rank,
        num_participants=num_participants,
        participating_rank=rank if rank is not None and rank < num_participants else None,
        role=role,
        divergence=divergence,
        unfit=tuple(unfit),
    )


def next_lineage(lineage: str, group: str, step: int) -> str:
    """Return the lineage of a state whose gradients ``group`` averaged and which is committed as ``step``."""
    return hashlib.blake2b(f"{lineage}\0{group}\0{step}".encode(), digest_size=8).hexdigest()


def commit_refusals(
    *, num_participants: int, min_replica_size: int, errors: Sequence[str], has_missed_heartbeats: bool
) -> tuple[str, ...]:
    """Return the reasons why a replica does not commit a step; empty if it commits.

    Args:
        num_participants: Number of contributing replicas.
        min_replica_size: The smallest number that commits.
        errors: This replica's errors in this step.
        has_missed_heartbeats: Whether the Lighthouse may have declared the replica dead since the step began, so that
            the others may have continued without it.
    """
    refusals = list(errors)
    if num_participants < min_replica_size:
        refusals.append(f"expected at least {min_replica_size} replicas, got {num_participants}")
    if has_missed_heartbeats:
        refusals.append("this replica was silent for so long that the others may have gone on without it")
    return tuple(refusals)


def _find_divergence(ordered: Sequence[Member]) -> Divergence | None:
    """Compare the members' digests of one step; causes of different states come before the states."""
    return (
        find_divergence("reductions", {member.replica_id: member.reductions for member in ordered})
        or find_divergence("state", {member.replica_id: member.claim for member in ordered})
        or find_divergence("hyperparameters", {member.replica_id: member.hyperparameters for member in ordered})
    )


def _check(ordered: Sequence[Member], own_id: str) -> None:
    ids = [member.replica_id for member in ordered]
    if own_id not in ids:
        raise QuorumError(f"expected replica {own_id!r} among the members of its quorum, got {ids}")
    twice = [replica_id for replica_id, count in Counter(ids).items() if count > 1]
    if twice:
        raise QuorumError(f"expected every replica once in a quorum, got {twice} more than once")
    sizes = {member.replica_id: len(member.addresses) for member in ordered}
    if len(set(sizes.values())) > 1:
        raise QuorumError(f"expected replicas with the same number of ranks, got {sizes}")
    _check_rules(ordered)


def _check_rules(ordered: Sequence[Member]) -> None:
    """Refuse replicas that would compute different steps from the same gradients."""
    common = set(ordered[0].rules).intersection(*(member.rules for member in ordered))
    differing = {
        member.replica_id: ", ".join(rule for rule in member.rules if rule not in common) or "none of these"
        for member in ordered
        if set(member.rules) != common
    }
    if differing:
        raise QuorumError(
            f"expected replicas with the same rules, got {differing}; give all of them the same arguments of Manager"
        )


def _choose_fitting_target(
    sound: Sequence[Member], ordered: Sequence[Member], rules: Rules
) -> tuple[_Target, dict[str, tuple[str, ...]]]:
    """Choose the common state, and find members that could not load it. The structure of the majority counts."""
    # Members that have committed a step: newcomers with another model may outnumber them.
    trained = [member for member in sound if member.step > 0] or sound
    usual = usual_structure([member.structure for member in trained])
    if usual is None:
        usual = _choose_target(sound, rules).holders[0].structure
    unfit = {member.replica_id: parts for member in ordered if (parts := misfits(member.structure, usual))}
    fitting = [member for member in sound if member.replica_id not in unfit]
    target = _choose_target(fitting, rules)
    first = next((each for each in target.holders if not is_in_other_order(each.structure, usual)), target.holders[0])
    # Holders with another order of parameters heal and take over this order: states are compared by position.
    holders = [each for each in target.holders if not is_in_other_order(each.structure, first.structure)]
    return _Target(target.step, target.lineage, tuple(holders)), unfit


def _choose_target(ordered: Sequence[Member], rules: Rules) -> _Target:
    step = max(member.step for member in ordered)
    if step == NO_WHOLE_STATE:
        raise QuorumError(
            f"expected a replica that holds a whole state, and none of {[member.replica_id for member in ordered]} "
            "does; load a durable checkpoint"
        )
    newest = [member for member in ordered if member.step == step]
    if step == 0 and rules.init_sync:
        synchronised = [member for member in newest if member.lineage]
        if not synchronised:
            # No member knows yet whose weights count.
            first = next((member for member in newest if member.can_serve), newest[0])
            # A replica may have returned under its id with other weights; then its number of groups has grown.
            return _Target(step, next_lineage("", f"{first.replica_id}\0{first.num_groups}", 0), (first,))
        newest = synchronised
    numbers = Counter(member.lineage for member in newest)
    irregular = {member.lineage for member in newest if member.is_irregular}
    # Between lineages of equal numbers, one without irregular steps wins.
    lineage = min(numbers, key=lambda lineage: (-numbers[lineage], lineage in irregular, lineage))
    return _Target(step, lineage, tuple(member for member in newest if member.lineage == lineage))


def _sources(member: Member, holders: Sequence[Member]) -> tuple[Member, ...]:
    """Return the holders that can serve ``member`` now: neither they nor the member may have begun the step."""
    if not member.may_heal:
        return ()
    return tuple(holder for holder in holders if holder.can_serve or holder.replica_id in member.announced_to)


def _group_key(joined: Sequence[Member]) -> str:
    """Return the key of the group that all members already have, or a new, unique key.

    A key starts with the number of its members: if that many members have it, none is missing.
    """
    held = {member.group for member in joined}
    prefix = f"{len(joined)}-"
    if len(held) == 1 and (key := next(iter(held))).startswith(prefix):
        return key
    said = [(member.replica_id, member.num_groups, member.group) for member in joined]
    return prefix + hashlib.blake2b(repr(said).encode(), digest_size=8).hexdigest()


def _rotated(sources: tuple[Member, ...], first: int) -> tuple[Member, ...]:
    start = first % len(sources)
    return sources[start:] + sources[:start]
