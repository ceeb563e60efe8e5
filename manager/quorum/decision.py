"""Decides from the members' reports which replicas train the next step, which heal first, and from which sources.

Every member computes the decision on its own, from the same reports, which the Lighthouse sends to all of them
(``manager.quorum.lighthouse``). The module is pure: it does not wait, read a clock or use the network.

A committed state has a step and a *lineage*: a digest of the process groups that averaged gradients since step 0.
Replicas with the same step and lineage have the same replicated state. The step number alone does not guarantee that. A
replica that was suspended may continue, and commit a step that the other replicas have repeated without it. Its lineage
then differs from theirs, so it heals like a replica that is behind.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from manager.errors import HyperparametersDivergedError, QuorumError, StatesDivergedError
from manager.quorum.followers import Followers, sources_of
from manager.quorum.reports import (
    NO_WHOLE_STATE,
    Divergence,
    Following,
    Member,
    digest_of,
    find_divergence,
    is_in_other_order,
    misfits,
    usual_structure,
)

_AVERAGED: Final = "the tensors that were averaged in it"


class WorldSizeMode(Enum):
    """How many replicas contribute to a step. Names and meanings are those of torchft.

    Attributes:
        DYNAMIC: All replicas of the quorum contribute.
        FIXED_WITH_SPARES: Only ``min_replica_size`` replicas contribute. The other replicas are spares: they have the
            same state, and contribute zeros.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class UpToDate:
    """The role of a replica that has the common state already.

    Attributes:
        serves_now: The ids of replicas that heal from this replica at this step boundary.
        serves_next: The ids of replicas that heal from this replica at the next step boundary.
        following: The ids of those served now that follow: no replica waits for them.
        may_lend: Whether the snapshot for them may be the memory itself. If one of them begins to follow, it reads for
            several steps.
    """

    serves_now: tuple[str, ...]
    serves_next: tuple[str, ...]
    following: frozenset[str] = frozenset()
    may_lend: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Heals:
    """The role of a replica that receives the common state before it trains.

    Attributes:
        sources: The replicas that can serve the state, in the order in which this replica tries them. Each healing
            replica has another order, to spread the load.
        receivers: All replicas that heal now, including this one. They relay received bytes to each other.
        is_following: Whether this replica receives only what no optimizer computes, and no replica waits for the rest.
    """

    sources: tuple[Member, ...]
    receivers: tuple[Member, ...] = ()
    is_following: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Follows:
    """The role of a replica that takes part in the step without contributing; see `Following`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandsBy:
    """The role of a replica that is behind and takes no part in this step, because no source can serve it now.

    Attributes:
        announced_to: The ids of replicas that take a snapshot for this replica at the next step boundary.
        awaits_receivers: Whether none of these replicas can take a snapshot before its other receivers have ended.
        may_heal: Whether every rank of the replica can still heal in this step. If not, the replica asks for no further
            quorum in this step.
    """

    announced_to: frozenset[str]
    awaits_receivers: bool = False
    may_heal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DoesNotFit:
    """The role of a replica that could not load the common state. It takes no part, and no other replica waits for it.

    Attributes:
        holder: A replica that has the common state.
        parts: The names of the parts of the state that do not fit this replica.
    """

    holder: Member
    parts: tuple[str, ...]


Role: TypeAlias = UpToDate | Heals | Follows | StandsBy | DoesNotFit


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The result of a quorum for one rank of one replica: the common state, the process group and the replica's role.

    Attributes:
        step: The committed step of the common state. All members have this state after healing.
        lineage: The lineage of the common state.
        group: Key of the process group for the step. A replica that has this group already does not set it up again.
        group_members: The ids of the replicas in the process group, by rank in the group.
        group_addresses: The addresses of the ranks in the process group, by rank in the group.
        store_address: Address of the key-value store through which the process group is set up.
        rank: The replica's rank in the process group; ``None`` if it takes no part in the step.
        num_participants: Number of replicas that contribute gradients.
        participating_rank: The replica's rank among the replicas that contribute; ``None`` if it contributes zeros or
            takes no part.
        role: The task of the replica before it trains.
        divergence: The difference that a comparison of the members' states found; ``None`` if it found none.
        unfit: The ids of replicas whose role is `DoesNotFit`.
        compares_next: Whether all replicas compare their states at the next step boundary, for one that follows.
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
    compares_next: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings that must be equal on all replicas, since they affect which replicas train, or a step's result.

    Attributes:
        min_replica_size: The smallest number of replicas that can commit a step.
        world_size_mode: How many replicas contribute to a step.
        init_sync: Whether all replicas receive the initial state of one of them at step 0.
        compare_every: Interval of the comparisons of the replicas' states, in steps; ``None`` for no comparisons.
    """

    min_replica_size: int
    world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    init_sync: bool = True
    compare_every: int | None = None

    def as_text(self) -> tuple[str, ...]:
        """Return the rules for a report, each as text ``name=value``."""
        return (
            f"min_replica_size={self.min_replica_size}",
            f"world_size_mode={self.world_size_mode.name}",
            f"init_sync={self.init_sync}",
            f"compare_every={self.compare_every}",
        )


def decide(
    members: Collection[Member], own_id: str, rules: Rules, *, group_rank: int = 0, num_failed_heals: int = 0
) -> Decision:
    """Decide what one replica does in the next step.

    Args:
        members: The reports of the quorum's members, in any order. All members must pass the same reports.
        own_id: The id of the replica.
        rules: The replica's rules.
        group_rank: The caller's rank within the replica. Each rank tries a different source first.
        num_failed_heals: Number of failed heals in a row. Each attempt tries a different source first.

    Raises:
        QuorumError: The replica is not a member; a replica is a member twice; the members have different rules or
            numbers of ranks; or the states of all members are partial.
        StatesDivergedError: The members' states differ, and no majority agrees.
    """
    ordered = sorted(members, key=lambda member: member.replica_id)
    _check(ordered, own_id)
    # The state of a replica that follows has not been compared yet.
    voters = [each for each in ordered if each.following <= Following.WOULD and each.step != NO_WHOLE_STATE]
    if not voters:
        raise QuorumError(
            f"expected a replica with a whole state, but none of {[member.replica_id for member in ordered]} has one; "
            "load a durable checkpoint"
        )
    divergence = _find_divergence(voters)
    if divergence is not None and not divergence.majority:
        kind = HyperparametersDivergedError if divergence.compared == "hyperparameters" else StatesDivergedError
        raise kind(
            step=divergence.step,
            replicas=tuple(sorted(divergence.replicas)),
            store_address=next(each.store_address for each in ordered if each.replica_id in divergence.replicas),
            tensors=(_AVERAGED,) if divergence.compared == "reductions" else (),
        )
    sound = [member for member in voters if divergence is None or member.replica_id not in divergence.replicas]
    lineage, holders, unfit = _choose_fitting_state(sound, ordered, rules)
    followers = Followers.of(ordered, holders, unfit, min_replica_size=rules.min_replica_size)
    holding = {member.replica_id for member in holders} | followers.verified
    sources = {
        member.replica_id: () if member.replica_id in unfit else sources_of(member, holders)
        for member in ordered
        if member.replica_id not in holding and member.replica_id not in followers.recording
    }
    healing = [replica_id for replica_id, found in sources.items() if found]
    standing_by = [replica_id for replica_id, found in sources.items() if not found]
    joined = [member for member in ordered if member.replica_id not in standing_by]
    names = tuple(member.replica_id for member in joined)
    rank = names.index(own_id) if own_id in names else None
    participants = [name for name in names if name not in followers.passive]
    if rules.world_size_mode is WorldSizeMode.FIXED_WITH_SPARES:
        participants = participants[: rules.min_replica_size]
    role: Role
    own = next(member for member in ordered if member.replica_id == own_id)
    if own_id in holding:
        may_heal = {member.replica_id for member in ordered if member.may_heal and member.replica_id not in unfit}
        waiting = tuple(name for name in (*standing_by, *sorted(followers.unserved)) if name in may_heal)
        # A verified replica took no snapshot at this boundary, and a full one can take none.
        now = () if own.is_full or own_id in followers.verified else tuple(healing)
        role = UpToDate(
            serves_now=now,
            serves_next=waiting,
            following=followers.passive.intersection(now),
            may_lend=followers.beginning.isdisjoint(healing),
        )
    elif own_id in unfit:
        role = DoesNotFit(holder=holders[0], parts=unfit[own_id])
    elif own_id in followers.recording:
        role = Follows()
    elif sources[own_id]:
        is_following = own_id in followers.passive
        # Newcomers that follow come one by one, and read for many steps.
        place = zlib.crc32(own_id.encode()) if is_following else healing.index(own_id)
        receivers = tuple(each for each in ordered if each.replica_id in {*healing} - followers.passive)
        found = sources[own_id]
        first = (place + group_rank + num_failed_heals) % len(found)
        role = Heals(sources=found[first:] + found[:first], receivers=receivers, is_following=is_following)
    else:
        awaits = all(holder.is_full for holder in holders)
        role = StandsBy(announced_to=frozenset(holding), awaits_receivers=awaits, may_heal=own.may_heal)
    return Decision(
        step=holders[0].step,
        lineage=lineage,
        group=_group_key(joined),
        group_members=names,
        group_addresses=tuple(member.addresses[group_rank] for member in joined),
        # The store of a replica with the common state, because such a replica has been running for longest.
        store_address=holders[group_rank % len(holders)].store_address,
        rank=rank,
        num_participants=len(participants),
        participating_rank=participants.index(own_id) if own_id in participants else None,
        role=role,
        divergence=divergence,
        unfit=tuple(unfit),
        compares_next=followers.compare_next,
    )


def next_lineage(lineage: str, group: str, step: int) -> str:
    """Return the lineage of a state after one more step.

    Args:
        lineage: The lineage before the step.
        group: Key of the process group that averaged the gradients of the step.
        step: The committed step of the new state.
    """
    return hashlib.blake2b(f"{lineage}\0{group}\0{step}".encode(), digest_size=8).hexdigest()


def commit_refusals(
    *, num_participants: int, min_replica_size: int, errors: Sequence[str], has_missed_heartbeats: bool
) -> tuple[str, ...]:
    """Return the reasons why a replica does not commit a step; empty if it commits.

    Args:
        num_participants: Number of replicas that contributed.
        min_replica_size: The smallest number of contributing replicas that can commit.
        errors: The errors of this replica in this step.
        has_missed_heartbeats: Whether the Lighthouse may have declared the replica dead since the step began. Then the
            other replicas may have continued without it.
    """
    refusals = list(errors)
    if num_participants < min_replica_size:
        refusals.append(f"expected at least {min_replica_size} replicas, got {num_participants}")
    if has_missed_heartbeats:
        refusals.append("this replica sent no heartbeats for so long that the others may have continued without it")
    return tuple(refusals)


def _find_divergence(ordered: Sequence[Member]) -> Divergence | None:
    """Compare the members' digests, those of reductions first: different reductions explain different states."""
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
    common = set(ordered[0].rules).intersection(*(member.rules for member in ordered))
    differing = {
        member.replica_id: ", ".join(rule for rule in member.rules if rule not in common) or "none of these"
        for member in ordered
        if set(member.rules) != common
    }
    if differing:
        raise QuorumError(
            f"expected replicas with the same rules, got {differing}; pass the same arguments to every Manager"
        )


def _choose_fitting_state(
    sound: Sequence[Member], ordered: Sequence[Member], rules: Rules
) -> tuple[str, list[Member], dict[str, tuple[str, ...]]]:
    """Choose the common state, and find the members that could not load it.

    Args:
        sound: The members whose state does not differ from that of the majority.
        ordered: All members.
        rules: The rules.

    Returns:
        The lineage of the common state; the holders, which have that state already; and for each member that could not
        load it, the names of the parts that do not fit.
    """
    # Prefer the structure of members that have committed a step: newcomers with another model may outnumber them.
    trained = [member for member in sound if member.step > 0] or sound
    usual = usual_structure([member.structure for member in trained])
    if usual is None:
        usual = _choose_state(sound, rules)[1][0].structure
    unfit = {member.replica_id: parts for member in ordered if (parts := misfits(member.structure, usual))}
    fitting = [member for member in sound if member.replica_id not in unfit]
    lineage, holders = _choose_state(fitting, rules)
    first = next((each for each in holders if not is_in_other_order(each.structure, usual)), holders[0])
    # Holders with another order of parameters heal, and so change to this order: states are compared by position.
    return lineage, [each for each in holders if not is_in_other_order(each.structure, first.structure)], unfit


def _choose_state(ordered: Sequence[Member], rules: Rules) -> tuple[str, list[Member]]:
    """Choose the newest state. Return its lineage, and the members that have this state, all at the same step."""
    step = max(member.step for member in ordered)
    newest = [member for member in ordered if member.step == step]
    if step == 0 and rules.init_sync:
        synchronised = [member for member in newest if member.lineage]
        if not synchronised:
            # No initial state is chosen yet: choose that of one member.
            first = next((member for member in newest if member.can_serve), newest[0])
            # The number of groups distinguishes this state from an earlier one of a replica that reuses its id.
            return next_lineage("", f"{first.replica_id}\0{first.num_groups}", 0), [first]
        newest = synchronised
    numbers = Counter(member.lineage for member in newest)
    irregular = {member.lineage for member in newest if member.is_irregular}
    # The lineage of most members wins; between equal numbers, one without irregular steps.
    lineage = min(numbers, key=lambda lineage: (-numbers[lineage], lineage in irregular, lineage))
    return lineage, [member for member in newest if member.lineage == lineage]


def _group_key(joined: Sequence[Member]) -> str:
    """Return the key of the process group that exactly these members have already; otherwise a new, unique key.

    A key starts with the number of the group's members. So if that many replicas have the key, the group is complete.
    """
    keys = {member.group for member in joined}
    prefix = f"{len(joined)}-"
    if len(keys) == 1 and (key := next(iter(keys))).startswith(prefix):
        return key
    return prefix + digest_of([(member.replica_id, member.num_groups, member.group) for member in joined])
