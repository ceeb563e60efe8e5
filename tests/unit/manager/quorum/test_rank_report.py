"""What the ranks of a replica say of themselves becomes what the replica says."""

from __future__ import annotations

from typing import Any

import pytest

from manager.quorum.decision import NO_WHOLE_STATE, Member
from manager.quorum.divergence import Claim
from manager.quorum.rank_report import RankReport, member_of
from manager.quorum.structure import UNKNOWN


def report(rank: int, **fields: Any) -> RankReport:
    return RankReport(
        **{"step": 7, "lineage": "a", "group": "g", "num_groups": 2, "address": f"http://r{rank}/", **fields}
    )


def whole(*reports: RankReport) -> Member:
    return member_of(
        reports, replica_id="r:1", store_address="host:1", announced_to=frozenset({"other"}), rules=("rule",)
    )


def test_ranks_that_agree_are_one_member_with_all_their_addresses() -> None:
    assert whole(report(0), report(1)) == Member(
        replica_id="r:1",
        step=7,
        lineage="a",
        store_address="host:1",
        addresses=("http://r0/", "http://r1/"),
        group="g",
        num_groups=4,
        announced_to=frozenset({"other"}),
        rules=("rule",),
        claim=Claim(tensors="-", digest="-"),
        reductions=Claim(tensors="-", digest="-"),
        hyperparameters=Claim(tensors="-", digest="-"),
    )


@pytest.mark.parametrize("fields", [{"step": 8}, {"lineage": "b"}, {"is_irregular": True}])
def test_ranks_that_hold_different_states_hold_no_whole_one(fields: dict[str, Any]) -> None:
    member = whole(report(0), report(1, **fields))
    assert (member.step, member.lineage, member.is_irregular) == (NO_WHOLE_STATE, "", False)


def test_ranks_at_the_first_step_begin_again_whatever_their_lineage() -> None:
    member = whole(report(0, step=0, lineage=""), report(1, step=0))
    assert (member.step, member.lineage) == (0, "")


def test_what_one_rank_cannot_do_the_replica_cannot() -> None:
    member = whole(report(0), report(1, group="", can_serve=False, may_heal=False))
    assert (member.group, member.can_serve, member.may_heal) == ("", False, False)


def test_a_part_that_one_rank_does_not_have_is_not_compared() -> None:
    member = whole(report(0, structure=(("a", "1"), ("b", "2"))), report(1, structure=(("a", "3"),)))
    assert member.structure == (("a", "1-3"), ("b", UNKNOWN))
