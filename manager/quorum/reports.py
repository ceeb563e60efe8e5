"""The replicas' reports before a step, and comparisons of what they report. Pure: no I/O, no clocks, no torch.

Replicas with the same step and lineage should have the same bits in everything that optimizers change. A bit flip in
memory, a library that computes differently, or a bug here makes one of them differ, and nothing else would show it.
``manager.state.compatibility`` describes the structures of states.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import msgspec

NO_WHOLE_STATE: Final = -1
"""The step of a replica with a partial state: behind all others."""
UNKNOWN: Final = ""
"""Digest of a part that is not compared."""
_NAMES_SUFFIX: Final = " (parameters)"
_ORDER_SUFFIX: Final = " (order of parameters)"
_PRESENT_ORDER_SUFFIX: Final = " (present order of parameters)"
_OPTIONAL: Final = (_NAMES_SUFFIX, _ORDER_SUFFIX, _PRESENT_ORDER_SUFFIX)
"""Suffixes of parts that exist only where the optimizer itself is registered, instead of functions of it."""
_MAX_SHOWN: Final = 5

Structure: TypeAlias = tuple[tuple[str, str], ...]
"""Sorted pairs of a part's name and a digest of its structure; `UNKNOWN` fits every digest."""
Tables: TypeAlias = Mapping[str, Mapping[str, str]]
"""Dtype and shape of each part's tensors by name; empty for a part that is not compared."""
Compared: TypeAlias = Literal["state", "reductions", "hyperparameters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One replica's digest at a step boundary.

    Attributes:
        step: The committed step of that boundary; -1 without a digest.
        lineage: The lineage of that step.
        tensors: Digest of the names of the digested tensors. A replica whose ``forward`` changes some tensors leaves
            them out; then it is not comparable with others.
        digest: Digest of these tensors.
    """

    step: int = -1
    lineage: str = ""
    tensors: str = ""
    digest: str = ""


class StateReport(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's, or one rank's, report of its state at a step boundary.

    Attributes:
        step: The committed step of its state, or `NO_WHOLE_STATE`.
        lineage: Digest of the history of that step; empty before the first commit.
        group: Key of its working process group; empty without one.
        num_groups: Number of process groups that it has begun to set up; distinguishes attempts.
        can_serve: Whether it can take a snapshot of its present step boundary.
        may_heal: Whether it waits for the decision and heals if it is behind; otherwise it then takes no part.
        is_irregular: Whether an optimizer did not make exactly one step for the last commit.
        claim: Digest of its state at the last compared step.
        reductions: Digest of the reductions of its last step.
        hyperparameters: Digest of its optimizers' hyperparameters, if its last step was committed.
        structure: Digests of the structure of its state.
    """

    step: int = NO_WHOLE_STATE
    lineage: str = ""
    group: str = ""
    num_groups: int = 0
    can_serve: bool = True
    may_heal: bool = True
    is_irregular: bool = False
    claim: Claim = Claim()
    reductions: Claim = Claim()
    hyperparameters: Claim = Claim()
    structure: Structure = ()


class RankReport(StateReport, frozen=True, kw_only=True):
    """The report of one rank before the replica asks for a quorum, or after a step.

    Attributes:
        address: Address at which it serves its state.
        refusals: Its reasons not to commit.
    """

    address: str = ""
    refusals: tuple[str, ...] = ()


class Member(StateReport, frozen=True, kw_only=True):
    """The report of one replica in its request for a quorum.

    Attributes:
        replica_id: Unique among live replicas.
        store_address: ``host:port`` of the store where its process groups may meet.
        addresses: The address of each of its ranks, which serves the rank's state.
        announced_to: The replicas that learned in the previous quorum that it needs a snapshot.
        rules: Its ``decision.Rules`` as text; must be the same on all members.
        process: Its process and host, for messages.
        number: Ascends with each report of its process, so that no earlier one counts again.
        signature: Proves the job token.
    """

    replica_id: str
    store_address: str
    addresses: tuple[str, ...]
    announced_to: frozenset[str] = frozenset()
    rules: tuple[str, ...] = ()
    process: str = ""
    number: int = 0
    signature: str = ""


# Unused: built here, before several threads import modules with decoders of types that contain it; ``msgspec.convert``
# has no prebuilt decoder, but reuses the type information that this one caches.
_member_decoder: Final = msgspec.json.Decoder(Member)


def member_of(reports: Sequence[RankReport], **fields: Any) -> Member:
    """Return the report of the whole replica: ranks with different states have no whole state together.

    Args:
        reports: Reports of all its ranks, in their order.
        **fields: The fields of `Member` that no rank reports.
    """
    states = {(report.step, report.lineage, report.is_irregular) for report in reports}
    step, lineage, is_irregular = states.pop()
    if states and step == 0 and all(other == 0 for other, _, _ in states):
        # Only some ranks received the state of another replica: all begin again.
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
        may_heal=all(report.may_heal for report in reports),
        is_irregular=is_irregular,
        claim=_claim_of_group([report.claim for report in reports]),
        reductions=_claim_of_group([report.reductions for report in reports]),
        hyperparameters=_claim_of_group([report.hyperparameters for report in reports]),
        structure=_structure_of_group([report.structure for report in reports]),
        **fields,
    )


def _structure_of_group(structures: Sequence[Structure]) -> Structure:
    """Return one structure for ranks with parts of different shapes.

    Entries that one rank does not compare, or does not have, are compared by none.
    """
    parts = [dict(each) for each in structures]
    keys = dict.fromkeys(key for each in parts for key in each)
    joined = {key: [each.get(key, UNKNOWN) for each in parts] for key in keys}
    return tuple(sorted((key, UNKNOWN if UNKNOWN in each else "-".join(each)) for key, each in joined.items()))


def _claim_of_group(claims: Sequence[Claim]) -> Claim:
    if len({(claim.step, claim.lineage) for claim in claims}) > 1:
        return Claim()
    # Ranks hold parts of different shapes, so each has names and digests of its own.
    return replace(
        claims[0],
        tensors="-".join(claim.tensors for claim in claims),
        digest="-".join(claim.digest for claim in claims),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A difference between replicas.

    Attributes:
        step: The compared step.
        replicas: The replicas that differ from the majority; without a majority all compared replicas.
        has_majority: Whether more than half agree.
        majority: The replicas that agree.
        compared: The kind of digests.
    """

    step: int
    replicas: frozenset[str]
    has_majority: bool
    majority: frozenset[str] = frozenset()
    compared: Compared = "state"


def find_divergence(compared: Compared, claims: Mapping[str, Claim]) -> Divergence | None:
    """Compare the newest comparable claims.

    Args:
        compared: The kind of digests.
        claims: Claims by replica.

    Returns:
        The difference; ``None`` if all agree, or fewer than two replicas are comparable.
    """
    newest = max((claim.step for claim in claims.values()), default=-1)
    at_newest = {replica: claim for replica, claim in claims.items() if claim.step == newest >= 0}
    # Another lineage is another state anyway, and leads to a heal.
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
        return Divergence(step=newest, replicas=frozenset(digests), has_majority=False, compared=compared)
    differing = frozenset(replica for replica, each in digests.items() if each != digest)
    return Divergence(
        step=newest,
        replicas=differing,
        has_majority=True,
        majority=frozenset(digests.keys() - differing),
        compared=compared,
    )


def structure_of(tables: Tables) -> Structure:
    """Return the digests of the tables."""
    return tuple(sorted((key, _digest(table) if table else UNKNOWN) for key, table in tables.items()))


def misfits(own: Structure, other: Structure) -> tuple[str, ...]:
    """Return the parts of ``own`` that could not load ``other``'s, sorted. Empty structures fit."""
    return tuple(key for key in _differing(own, other) if not key.endswith(_PRESENT_ORDER_SUFFIX))


def is_in_other_order(own: Structure, other: Structure) -> bool:
    """Return whether optimizers of ``own`` have another order of parameters, which a heal takes over."""
    return any(key.endswith(_PRESENT_ORDER_SUFFIX) for key in _differing(own, other))


def order_tables(key: str, names: Sequence[Sequence[str]], *, may_change: bool) -> Tables:
    """Describe the order of an optimizer's parameters.

    Args:
        key: The optimizer's key.
        names: Its parameters' names, by group.
        may_change: Whether a replica that heals takes over another order; otherwise the order is compared.
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
    """Return the structure that more than half of the replicas fit; ``None`` without one."""
    for structure in structures:
        if structure and 2 * sum(not misfits(each, structure) for each in structures) > len(structures):
            return structure
    return None


def describe(parts: tuple[str, ...], own: Tables, other: Tables | None) -> str:
    """Describe the differences.

    Args:
        parts: The result of `misfits`.
        own: This replica's tables.
        other: The other replica's tables; ``None`` if unknown.
    """
    if other is None:
        return f"another state under {list(parts)}"
    told = []
    missing, unexpected = (
        sorted(key for key in one.keys() - two.keys() if not key.endswith(_OPTIONAL))
        for one, two in ((own, other), (other, own))
    )
    if missing or unexpected:
        told.append(f"keys that are registered here alone: {missing}, there alone: {unexpected}")
    for key in parts:
        mine, theirs = own.get(key, {}), other.get(key, {})
        told += [
            f"{key}.{name} is {mine.get(name, 'missing')} here and {theirs.get(name, 'missing')} there"
            for name in {**mine, **theirs}
            if key in own and key in other and mine.get(name) != theirs.get(name)
        ]
    if not told:
        told.append(f"another state under {list(parts)} on another rank, or had one before")
    more = f"; and {len(told) - _MAX_SHOWN} more" if len(told) > _MAX_SHOWN else ""
    return "; ".join(told[:_MAX_SHOWN]) + more


def _digest(table: Mapping[str, str]) -> str:
    return hashlib.blake2b(repr(sorted(table.items())).encode(), digest_size=8).hexdigest()
