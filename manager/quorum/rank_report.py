"""The report of a rank before the replica asks for a quorum, and the report of the whole replica; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from manager.quorum.decision import NO_WHOLE_STATE, Member
from manager.quorum.divergence import Claim
from manager.quorum.structure import UNKNOWN, Structure


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one rank before the replica asks for a quorum, or after a step.

    Attributes:
        step: The committed step of its state, or ``quorum.decision.NO_WHOLE_STATE``.
        lineage: The lineage of that step.
        group: Key of its working process group; empty if it has none.
        num_groups: Number of process groups that it has begun to set up.
        address: Address at which it serves its state.
        can_serve: Whether it can take a snapshot of its present step boundary.
        may_heal: Whether it waits for the quorum, and heals if the replica is behind.
        is_irregular: Whether its optimizers did not each make one step for the last commit.
        claim: Its report on the last state that was to be compared.
        reductions: Its report on the reductions of its last step.
        hyperparameters: Its report on its optimizers' hyperparameters.
        refusals: Its reasons not to commit.
        structure: Structure of its part of the state.
    """

    step: int
    lineage: str
    group: str
    num_groups: int
    address: str
    can_serve: bool = True
    may_heal: bool = True
    is_irregular: bool = False
    claim: Claim = msgspec.field(default_factory=Claim)
    reductions: Claim = msgspec.field(default_factory=Claim)
    hyperparameters: Claim = msgspec.field(default_factory=Claim)
    refusals: tuple[str, ...] = ()
    structure: Structure = ()


def member_of(
    reports: Sequence[RankReport],
    *,
    replica_id: str,
    store_address: str,
    announced_to: frozenset[str],
    rules: tuple[str, ...],
) -> Member:
    """Return the report of the whole replica: ranks with different states have no whole state together.

    Args:
        reports: Reports of all its ranks, in their order.
        replica_id: See `Member`; the same holds for the rest.
        store_address: See above.
        announced_to: See above.
        rules: See above.
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
        replica_id=replica_id,
        step=step,
        lineage=lineage,
        store_address=store_address,
        addresses=tuple(report.address for report in reports),
        group=groups.pop() if len(groups) == 1 else "",
        num_groups=sum(report.num_groups for report in reports),
        can_serve=all(report.can_serve for report in reports),
        may_heal=all(report.may_heal for report in reports),
        announced_to=announced_to,
        rules=rules,
        is_irregular=is_irregular,
        claim=_claim_of_group([report.claim for report in reports]),
        reductions=_claim_of_group([report.reductions for report in reports]),
        hyperparameters=_claim_of_group([report.hyperparameters for report in reports]),
        structure=_structure_of_group([report.structure for report in reports]),
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
