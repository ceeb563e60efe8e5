"""Who trains the next step, who has to be healed first and from whom: decided from what the members said, and no more.

Every member computes the decision by itself from the same list, so nobody has to be told. Nothing here waits, reads a
clock or knows a network; the members come from the Lighthouse (``manager.quorum.lighthouse``).

A committed state is named by its step and its *lineage*, a digest of all process groups that it was averaged in since
step 0. Replicas with the same step and lineage hold the same replicated state. A step number alone does not say so: a
replica that was stopped while the others gave up on it may wake up and commit a step that they have repeated without
it. Its lineage then differs from theirs, and it is healed like one that is behind.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from manager.errors import HyperparametersDivergedError, QuorumError, StatesDivergedError
from manager.quorum.divergence import Claim, Divergence, find_divergence
from manager.quorum.structure import Structure, is_in_other_order, misfits, usual_structure

NO_WHOLE_STATE: Final = -1
"""The step of a member that holds part of a state: behind everybody."""
_AVERAGED: Final = "the tensors that were averaged for it"


class WorldSizeMode(Enum):
    """How many replicas contribute to a step; names and meaning as in torchft.

    Attributes:
        DYNAMIC: All that are there.
        FIXED_WITH_SPARES: ``min_replica_size``; the others hold the same state and contribute zeros.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What one replica says of itself when it asks for a quorum.

    Attributes:
        replica_id: Unique among the replicas that live.
        step: The committed step that it holds, or `NO_WHOLE_STATE`.
        lineage: Names the history of that step; empty before the first commit.
        store_address: ``host:port`` of the store where its process groups may meet.
        addresses: Where each of its group ranks serves its state.
        group: Key of the process group that it holds and that works; empty if there is none.
        num_groups: How many process groups it has begun to set up. It tells two attempts apart.
        can_serve: It can take a snapshot of the step boundary that it is at.
        may_heal: It waits for the decision, and heals if it is behind; otherwise it takes no part then.
        announced_to: The replicas that know since the quorum before that it needs a snapshot.
        rules: What it says of `Rules`; the same on all members.
        is_irregular: Its optimizers did not each make one step for the last commit.
        process: Its process and host; for messages.
        claim: What it says of the last state that was to be compared.
        reductions: What it says of the reductions of its last step.
        hyperparameters: What it says of its optimizers' hyperparameters, if its last step was committed.
        structure: What its state looks like (``manager.quorum.structure``).
    """

    replica_id: str
    step: int
    lineage: str
    store_address: str
    addresses: tuple[str, ...]
    group: str = ""
    num_groups: int = 0
    can_serve: bool = True
    may_heal: bool = True
    announced_to: frozenset[str] = frozenset()
    rules: tuple[str, ...] = ()
    is_irregular: bool = False
    process: str = ""
    claim: Claim = field(default_factory=Claim)
    reductions: Claim = field(default_factory=Claim)
    hyperparameters: Claim = field(default_factory=Claim)
    structure: Structure = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpToDate:
    """The replica holds the state that everybody will hold.

    Attributes:
        serves_now: The replicas that heal from its kind at this step boundary.
        serves_next: The replicas that will heal at the next one.
    """

    serves_now: tuple[str, ...]
    serves_next: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heals:
    """The replica receives the state before it trains.

    Attributes:
        sources: The holders, in the order in which they are asked; rotated, so that healing replicas spread over them.
        receivers: All replicas that heal now, this one too: they pass on to each other what they have received.
    """

    sources: tuple[Member, ...]
    receivers: tuple[Member, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StandsBy:
    """The replica takes no part in this step: those who could serve it train already.

    Attributes:
        announced_to: Replicas that know now, and take a snapshot at the next step boundary.
        may_heal: Whether all of its ranks wait; otherwise none of them asks again in this step.
    """

    announced_to: frozenset[str]
    may_heal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DoesNotFit:
    """The replica could not load the state that the others hold: it takes no part, and nobody waits for it.

    Attributes:
        holder: A replica that holds it.
        parts: What differs from the replica's own.
    """

    holder: Member
    parts: tuple[str, ...]


Role: TypeAlias = UpToDate | Heals | StandsBy | DoesNotFit


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one replica does in a step.

    Attributes:
        step: The committed step that everybody holds once healing is over.
        lineage: Its lineage.
        group: Key of the process group of this step. It is set up afresh unless the replica holds it already.
        group_members: Its members in the order of their ranks.
        group_addresses: For each member, the address of its rank that has the asking rank's number.
        store_address: Where the process group meets.
        rank: The replica's rank in it; ``None`` if it stands by.
        num_participants: How many replicas contribute.
        participating_rank: The replica's rank among them; ``None`` if it contributes zeros or stands by.
        role: What it has to do before it trains.
        divergence: Replicas whose state was compared, and differs from that of most.
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
    """What all replicas of a job agree on, because it changes what a step computes or who takes part.

    Attributes:
        min_replica_size: Fewer replicas than this do not commit.
        world_size_mode: See `WorldSizeMode`.
        init_sync: At step 0 the others take the state of one replica.
        compare_every: States of the steps that it divides are compared.
    """

    min_replica_size: int
    world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    init_sync: bool = True
    compare_every: int | None = None

    def told(self) -> tuple[str, ...]:
        """Return the rules as members tell them to each other, each by its name."""
        return (
            f"min_replica_size={self.min_replica_size}",
            f"world_size_mode={self.world_size_mode.name}",
            f"init_sync={self.init_sync}",
            f"compare_every={self.compare_every}",
        )


@dataclass(frozen=True, slots=True)
class _Target:
    """The state that everybody shall hold, and who does."""

    step: int
    lineage: str
    holders: tuple[Member, ...] = field(default=())


def decide(
    members: Collection[Member], own_id: str, rules: Rules, *, group_rank: int = 0, num_failed_heals: int = 0
) -> Decision:
    """Decide what the replica ``own_id`` does in this step.

    Args:
        members: The quorum; the same for everybody, in any order.
        own_id: Which of them is asking.
        rules: The same for everybody.
        group_rank: Which rank of its replica asks. Others begin with other sources.
        num_failed_heals: How often in a row the replica could not be healed. The next attempt begins with another
            source.

    Raises:
        QuorumError: The replica is no member, the members do not belong together, or none of them holds a state.
        StatesDivergedError: Their states differ, and no majority agrees.
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
        # Of a holder, since it has been there longest. Another replica's would do as well.
        store_address=target.holders[group_rank % len(target.holders)].store_address,
        rank=rank,
        num_participants=num_participants,
        participating_rank=rank if rank is not None and rank < num_participants else None,
        role=role,
        divergence=divergence,
        unfit=tuple(unfit),
    )


def next_lineage(lineage: str, group: str, step: int) -> str:
    """The lineage of a state after it was averaged in the process group ``group`` and committed as ``step``."""
    return hashlib.blake2b(f"{lineage}\0{group}\0{step}".encode(), digest_size=8).hexdigest()


def commit_refusals(
    *, num_participants: int, min_replica_size: int, errors: Sequence[str], has_missed_heartbeats: bool
) -> tuple[str, ...]:
    """Why a replica does not commit a step; empty if it does.

    Args:
        num_participants: How many replicas contributed.
        min_replica_size: How many are needed.
        errors: What went wrong in this step on this replica.
        has_missed_heartbeats: The Lighthouse may have taken the replica for dead since the step began, so that the
            others may have gone on without it.
    """
    refusals = list(errors)
    if num_participants < min_replica_size:
        refusals.append(f"expected at least {min_replica_size} replicas, got {num_participants}")
    if has_missed_heartbeats:
        refusals.append("this replica was silent for so long that the others may have gone on without it")
    return tuple(refusals)


def _find_divergence(ordered: Sequence[Member]) -> Divergence | None:
    """Compare what the members say of one step; what made their states differ comes before the states."""
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
    """Refuses replicas that would compute different steps from the same gradients."""
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
    """Choose the state, and tell who could not load it: what most replicas look like counts, or else the newest."""
    # Those that have committed a step; newcomers with another model may be more.
    trained = [member for member in sound if member.step > 0] or sound
    usual = usual_structure([member.structure for member in trained])
    if usual is None:
        usual = _choose_target(sound, rules).holders[0].structure
    unfit = {member.replica_id: parts for member in ordered if (parts := misfits(member.structure, usual))}
    fitting = [member for member in sound if member.replica_id not in unfit]
    target = _choose_target(fitting, rules)
    first = next((each for each in target.holders if not is_in_other_order(each.structure, usual)), target.holders[0])
    # Holders of another order heal, and take over this one: states are compared, and received together, by position.
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
            # Nobody has been told yet whose weights count.
            first = next((member for member in newest if member.can_serve), newest[0])
            # A replica may have come back under its id with other weights; its number of groups has grown then.
            return _Target(step, next_lineage("", f"{first.replica_id}\0{first.num_groups}", 0), (first,))
        newest = synchronised
    numbers = Counter(member.lineage for member in newest)
    irregular = {member.lineage for member in newest if member.is_irregular}
    # Between as many replicas, one that made the step as it was committed is better than one that did not.
    lineage = min(numbers, key=lambda lineage: (-numbers[lineage], lineage in irregular, lineage))
    return _Target(step, lineage, tuple(member for member in newest if member.lineage == lineage))


def _sources(member: Member, holders: Sequence[Member]) -> tuple[Member, ...]:
    """Who can serve ``member`` right now, by replica id: it must not have begun to train, and neither must they."""
    if not member.may_heal:
        return ()
    return tuple(holder for holder in holders if holder.can_serve or holder.replica_id in member.announced_to)


def _group_key(joined: Sequence[Member]) -> str:
    """The key that all of them hold already if nothing has changed, or else one that never was.

    It begins with the number of its members: if as many hold it, none of them is missing.
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
