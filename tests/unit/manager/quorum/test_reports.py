"""Reports of ranks become one report of their replica, and comparisons of reports show which replicas differ."""

from __future__ import annotations

from typing import Any

import pytest

from manager.quorum.reports import (
    NO_WHOLE_STATE,
    UNKNOWN,
    Claim,
    Divergence,
    Member,
    RankReport,
    find_divergence,
    member_of,
)


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


def claims(**digests: str) -> dict[str, Claim]:
    return {name: Claim(step=8, lineage="x", digest=digest) for name, digest in digests.items()}


@pytest.mark.parametrize("digests", [{}, {"a": "1"}, {"a": "1", "b": "1"}, {"a": "1", "b": "1", "c": "1"}])
def test_equal_digests_show_nothing(digests: dict[str, str]) -> None:
    assert find_divergence("state", claims(**digests)) is None


def test_the_majority_names_who_differs() -> None:
    found = find_divergence("state", claims(a="1", b="2", c="1", d="3", e="1"))
    assert found == Divergence(step=8, replicas=frozenset("bd"), majority=frozenset("ace"))


@pytest.mark.parametrize(
    "digests", [{"a": "1", "b": "2"}, {"a": "1", "b": "1", "c": "2", "d": "2"}, {"a": "1", "b": "2", "c": "3"}]
)
def test_half_is_no_majority(digests: dict[str, str]) -> None:
    assert find_divergence("state", claims(**digests)) == Divergence(step=8, replicas=frozenset(digests))


def test_only_the_newest_step_of_one_history_is_compared() -> None:
    mixed = {
        **claims(a="1", b="1"),
        "older": Claim(step=4, lineage="w", digest="2"),
        "other": Claim(step=8, lineage="y", digest="3"),
        "new": Claim(),
    }
    assert find_divergence("state", mixed) is None
    assert find_divergence("state", {"new": Claim(), "newer": Claim()}) is None


def test_replicas_that_digested_different_tensors_are_not_compared() -> None:
    mixed = {**claims(a="1", b="1"), "fewer": Claim(step=8, lineage="x", tensors="w", digest="2")}
    assert find_divergence("state", mixed) is None
