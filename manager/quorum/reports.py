"""The reports that replicas send with each request for a quorum, and the comparison of these reports.

Replicas with the same step and lineage should have the same bits in all tensors that optimizers change. A bit flip in
memory, a library that computes differently, or a bug in this package makes one replica differ. Only a comparison shows
such a difference. ``manager.state.compatibility`` makes the descriptions of states that are compared here.

This module is pure: no I/O, no clocks, no torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, Literal, TypeAlias

import msgspec

NO_WHOLE_STATE: Final = -1
"""The reported step of a replica with a partial state; less than every real step."""
UNKNOWN: Final = ""
"""Replaces the digest of a part that is not compared."""
_NAMES_SUFFIX: Final = " (parameters)"
_ORDER_SUFFIX: Final = " (order of parameters)"
_PRESENT_ORDER_SUFFIX: Final = " (present order of parameters)"
_OPTIONAL: Final = (_NAMES_SUFFIX, _ORDER_SUFFIX, _PRESENT_ORDER_SUFFIX)
"""Suffixes of parts that a replica lacks if functions are registered in place of the optimizer itself."""
_MAX_SHOWN: Final = 5

Structure: TypeAlias = tuple[tuple[str, str], ...]
"""The structure of a state: for each part its name and a digest of its table, sorted; `UNKNOWN` fits every digest."""
Tables: TypeAlias = Mapping[str, Mapping[str, str]]
"""By name of a part of the state: dtype and shape of each tensor, by its name; empty if the part is not compared."""
Compared: TypeAlias = Literal["state", "reductions", "hyperparameters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One replica's digest of its state, or of a part of it, at a step boundary. ``Claim()`` contains no digest.

    Attributes:
        step: The committed step at that step boundary; -1 without a digest.
        lineage: The lineage of the state at that step.
        tensors: Digest of the names of the digested tensors. Only claims with the same names are compared: a replica
            leaves out tensors that its ``forward`` changes.
        digest: Digest of the values of these tensors.
    """

    step: int = -1
    lineage: str = ""
    tensors: str = ""
    digest: str = ""


class Following(IntEnum):
    """How a replica gets the state. If the ranks of a replica differ, the smallest value counts.

    Attributes:
        NO: It has the state, or waits for it in a quorum.
        WOULD: The same, but if it is behind, it follows.
        RECORDS: It takes part in the steps without contributing, and records them, while it receives an earlier state.
        CAUGHT_UP: It has made the recorded steps. It lacks only what no optimizer computes.
        COMPARES: It seems to have the state. It does not contribute before that was compared with another replica's.
    """

    NO = 0
    WOULD = 1
    RECORDS = 2
    CAUGHT_UP = 3
    COMPARES = 4


class StateReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report about the state at a step boundary. The sender is a replica, or one of its ranks.

    Attributes:
        step: The last committed step of the sender's state, or `NO_WHOLE_STATE`.
        lineage: Digest of the process groups that averaged the gradients of all steps so far; empty before the first
            commit.
        group: Key of the sender's working process group; empty without one.
        num_groups: Number of process groups that the sender has begun to set up.
        can_serve: Whether the sender can take a snapshot of its present step boundary.
        is_full: Whether the sender cannot take a snapshot now because receivers still read the maximum number of them.
        may_heal: Whether the sender heals in this quorum if it is behind. If not, a sender that is behind takes no part
            in the step.
        is_irregular: Whether an optimizer did not make exactly one step for the last commit.
        claim: Digest of the sender's state at the last compared step.
        reductions: Digest of the reductions of the sender's last step.
        hyperparameters: Digest of the sender's hyperparameters; empty if its last step was not committed.
        structure: Digests of the structure of the sender's state.
        following: How the sender gets the state. A sender that follows reports the step and lineage that it will have.
    """

    step: int = NO_WHOLE_STATE
    lineage: str = ""
    group: str = ""
    num_groups: int = 0
    can_serve: bool = True
    is_full: bool = False
    may_heal: bool = True
    is_irregular: bool = False
    claim: Claim = Claim()
    reductions: Claim = Claim()
    hyperparameters: Claim = Claim()
    structure: Structure = ()
    following: Following = Following.NO


class RankReport(StateReport, frozen=True, kw_only=True):
    """The report of one rank to rank 0 of its replica, for a quorum or for a vote.

    Attributes:
        address: Address at which the rank serves its state.
        refusals: In a vote, the rank's reasons to vote against the commit or the heal.
    """

    address: str = ""
    refusals: tuple[str, ...] = ()


class Member(StateReport, frozen=True, kw_only=True):
    """The report of one replica in its request for a quorum.

    Attributes:
        replica_id: The replica's id, unique among live replicas.
        store_address: ``host:port`` of the replica's key-value store, through which a process group can be set up.
        addresses: The addresses at which its ranks serve their state, by rank.
        announced_to: The replicas that learned in the previous quorum that the reporting replica needs a snapshot.
        rules: The replica's ``decision.Rules`` as text, which must be the same on all members.
        process: Process id and host of the replica, for messages.
        number: Number of the report, which ascends within the sending process. A report with a lower number than an
            earlier one is ignored.
        signature: Signature with the job token; empty without a token.
    """

    replica_id: str
    store_address: str
    addresses: tuple[str, ...]
    announced_to: frozenset[str] = frozenset()
    rules: tuple[str, ...] = ()
    process: str = ""
    number: int = 0
    signature: str = ""


# Built only to make msgspec cache the type information of `Member` while one thread runs: ``msgspec.convert`` in
# ``members`` has no decoder of its own, and its first use of a type is not thread-safe.
_member_decoder: Final = msgspec.json.Decoder(Member)


def member_of(reports: Sequence[RankReport], **fields: Any) -> Member:
    """Combine the reports of all ranks of a replica. If their states differ, the replica's state is partial.

    Args:
        reports: The reports, by rank.
        **fields: The fields of `Member` that ranks do not report.
    """
    states = {(report.step, report.lineage, report.is_irregular) for report in reports}
    step, lineage, is_irregular = states.pop()
    if states and step == 0 and all(other == 0 for other, _, _ in states):
        # Only some ranks have received the initial state of another replica: all ranks have to receive it again.
        lineage, is_irregular = "", False
    elif states:
        step, lineage, is_irregular = NO_WHOLE_STATE, "", False
    groups = {report.group for report in reports}
    return Member(
        step=step,
        lineage=lineage,
        addresses=tuple(report.address for report in reports),
        group=groups.pop() if len(groups) == 1 else "",
        num_groups=sum(report.num_groups for report in reports),
        can_serve=all(report.can_serve for report in reports),
        is_full=any(report.is_full for report in reports),
        may_heal=all(report.may_heal for report in reports),
        is_irregular=is_irregular,
        claim=_claim_of_group([report.claim for report in reports]),
        reductions=_claim_of_group([report.reductions for report in reports]),
        hyperparameters=_claim_of_group([report.hyperparameters for report in reports]),
        structure=_structure_of_group([report.structure for report in reports]),
        following=min(report.following for report in reports),
        **fields,
    )


def _structure_of_group(structures: Sequence[Structure]) -> Structure:
    """Combine the structures of a replica's ranks, whose parts may have different shapes.

    A part that one rank lacks or does not compare is not compared at all.
    """
    parts = [dict(each) for each in structures]
    keys = dict.fromkeys(key for each in parts for key in each)
    joined = {key: [each.get(key, UNKNOWN) for each in parts] for key in keys}
    return tuple(sorted((key, UNKNOWN if UNKNOWN in each else "-".join(each)) for key, each in joined.items()))


def _claim_of_group(claims: Sequence[Claim]) -> Claim:
    if len({(claim.step, claim.lineage) for claim in claims}) > 1:
        return Claim()
    # The ranks' parts of the state may differ, so the digests of all ranks are compared.
    return replace(
        claims[0],
        tensors="-".join(claim.tensors for claim in claims),
        digest="-".join(claim.digest for claim in claims),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The result of a comparison that found a difference between replicas.

    Attributes:
        step: The compared step.
        replicas: The replicas that differ from the majority; without a majority, all compared replicas.
        majority: The replicas that agree, if they are more than half of the compared ones; otherwise empty.
        compared: The kind of values that differ.
    """

    step: int
    replicas: frozenset[str]
    majority: frozenset[str] = frozenset()
    compared: Compared = "state"


def find_divergence(compared: Compared, claims: Mapping[str, Claim]) -> Divergence | None:
    """Compare the claims of replicas about the newest step. Claims about different tensors are not comparable.

    Args:
        compared: The kind of values that the claims are about.
        claims: The claims, by replica id.

    Returns:
        The difference; ``None`` if all claims agree, or if fewer than two are comparable.
    """
    newest = max((claim.step for claim in claims.values()), default=-1)
    at_newest = {replica: claim for replica, claim in claims.items() if claim.step == newest >= 0}
    # Replicas of different lineages are not compared: they have different states, and some of them heal anyway.
    kinds = Counter((claim.lineage, claim.tensors) for claim in at_newest.values())
    if not kinds:
        return None
    kind = min(kinds, key=lambda each: (-kinds[each], each))
    digests = {replica: claim.digest for replica, claim in at_newest.items() if (claim.lineage, claim.tensors) == kind}
    numbers = Counter(digests.values())
    if len(numbers) < 2:
        return None
    digest, number = numbers.most_common(1)[0]
    if 2 * number <= len(digests):
        return Divergence(step=newest, replicas=frozenset(digests), compared=compared)
    differing = frozenset(replica for replica, each in digests.items() if each != digest)
    return Divergence(
        step=newest,
        replicas=differing,
        majority=frozenset(digests.keys() - differing),
        compared=compared,
    )


def structure_of(tables: Tables) -> Structure:
    """Return the structure of a state: the digests of its tables."""
    return tuple(sorted((key, digest_of(sorted(table.items())) if table else UNKNOWN) for key, table in tables.items()))


def misfits(own: Structure, other: Structure) -> tuple[str, ...]:
    """Compare two structures of states. An empty structure fits every other one.

    Returns:
        The sorted names of the parts that keep a replica with one structure from loading a state with the other.
    """
    return tuple(key for key in _differing(own, other) if not key.endswith(_PRESENT_ORDER_SUFFIX))


def is_in_other_order(own: Structure, other: Structure) -> bool:
    """Return whether an optimizer has its parameters in different orders. A heal takes over the order of its source."""
    return any(key.endswith(_PRESENT_ORDER_SUFFIX) for key in _differing(own, other))


def order_tables(key: str, names: Sequence[Sequence[str]], *, may_change: bool) -> Tables:
    """Return tables that describe the order of an optimizer's parameters.

    Args:
        key: The key under which the optimizer is registered.
        names: The names of its parameters, by parameter group.
        may_change: Whether a heal changes the order to that of the received state. If not, replicas with different
            orders do not fit.
    """
    places = {
        f"param_groups.{group}.params.{position}": name
        for group, names_of_group in enumerate(names)
        for position, name in enumerate(names_of_group)
    }
    if not may_change:
        return {f"{key}{_ORDER_SUFFIX}": places}
    groups = {name: f"in param_groups.{group}" for group, names_of_group in enumerate(names) for name in names_of_group}
    return {f"{key}{_NAMES_SUFFIX}": groups, f"{key}{_PRESENT_ORDER_SUFFIX}": places}


def _differing(own: Structure, other: Structure) -> list[str]:
    if not own or not other:
        return []
    mine, theirs = dict(own), dict(other)
    return [key for key in sorted({*mine, *theirs}) if not _fits(_part(mine, key), _part(theirs, key))]


def _part(structure: Mapping[str, str], key: str) -> str | None:
    return structure.get(key, UNKNOWN if key.endswith(_OPTIONAL) else None)


def _fits(own: str | None, other: str | None) -> bool:
    if own is None or other is None:
        return False
    return own == other or UNKNOWN in {own, other}


def usual_structure(structures: Sequence[Structure]) -> Structure | None:
    """Return the structure that fits more than half of the replicas; ``None`` if no structure does."""
    for structure in structures:
        if structure and 2 * sum(not misfits(each, structure) for each in structures) > len(structures):
            return structure
    return None


def describe(parts: tuple[str, ...], own: Tables, other: Tables | None) -> str:
    """Describe the differences between two replicas' states, for a message.

    Args:
        parts: The names of the parts that differ: the result of `misfits`.
        own: The tables of this replica.
        other: The tables of the other replica; ``None`` if they are unknown.
    """
    if other is None:
        return f"different states under the keys {list(parts)}"
    texts = []
    missing, unexpected = (
        sorted(key for key in one.keys() - two.keys() if not key.endswith(_OPTIONAL))
        for one, two in ((own, other), (other, own))
    )
    if missing or unexpected:
        texts.append(f"keys registered only here: {missing}, only there: {unexpected}")
    for key in parts:
        mine, theirs = own.get(key, {}), other.get(key, {})
        texts += [
            f"{key}.{name} is {mine.get(name, 'missing')} here and {theirs.get(name, 'missing')} there"
            for name in {**mine, **theirs}
            if key in own and key in other and mine.get(name) != theirs.get(name)
        ]
    if not texts:
        texts.append(f"different states under the keys {list(parts)} on another rank, or at the last step boundary")
    more = f"; and {len(texts) - _MAX_SHOWN} more" if len(texts) > _MAX_SHOWN else ""
    return "; ".join(texts[:_MAX_SHOWN]) + more


def digest_of(value: object) -> str:
    """Return a short digest of the ``repr`` of a value."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
