"""Which replicas follow, which contribute, and when a comparison makes one that follows count."""

from __future__ import annotations

import pytest
from msgspec import structs

from manager.errors import QuorumError
from manager.quorum.decision import (
    Decision,
    Follows,
    Heals,
    Rules,
    StandsBy,
    UpToDate,
    WorldSizeMode,
    decide,
)
from manager.quorum.reports import NO_WHOLE_STATE, Claim, Following, Member, RankReport, member_of

RULES = Rules(min_replica_size=2)
CLAIM = Claim(step=7, lineage="l", tensors="t", digest="d")


def member(replica_id: str, following: Following = Following.NO, **changes: object) -> Member:
    base = Member(
        replica_id=replica_id,
        step=7,
        lineage="l",
        store_address=f"{replica_id}:1",
        addresses=(f"http://{replica_id}/0",),
        following=following,
    )
    return structs.replace(base, **changes)  # type: ignore[arg-type]


def newcomer(following: Following = Following.WOULD, **changes: object) -> Member:
    return member("n", following, **{"step": 0, "lineage": "", **changes})


def decisions(*members: Member, rules: Rules = RULES) -> dict[str, Decision]:
    return {each.replica_id: decide(members, each.replica_id, rules) for each in members}


def test_a_newcomer_that_would_follow_receives_without_contributing() -> None:
    found = decisions(member("a"), newcomer(), member("z"))
    role = found["n"].role
    assert isinstance(role, Heals)
    assert role.is_following
    assert role.receivers == ()
    assert {each.num_participants for each in found.values()} == {2}
    assert [found[name].participating_rank for name in "anz"] == [0, None, 1]
    assert [found[name].rank for name in "anz"] == [0, 1, 2]
    assert found["a"].role == UpToDate(serves_now=("n",), serves_next=(), following=frozenset("n"), may_lend=False)


def test_newcomers_that_come_one_by_one_begin_with_different_sources() -> None:
    first = set()
    for number in range(20):
        alone = structs.replace(newcomer(), replica_id=f"n{number}")
        role = decide([member("a"), member("b"), alone], alone.replica_id, RULES).role
        assert isinstance(role, Heals)
        first.add(role.sources[0].replica_id)
    assert first == {"a", "b"}


def test_one_that_has_the_state_already_is_no_follower() -> None:
    found = decisions(member("a"), member("b"), member("n", Following.WOULD))
    assert {each.num_participants for each in found.values()} == {3}
    assert isinstance(found["n"].role, UpToDate)


@pytest.mark.parametrize("steps", [(0, 0, 0), (0, 3, 3)])
def test_at_step_0_and_without_enough_others_a_newcomer_heals(steps: tuple[int, int, int]) -> None:
    first, *others = steps
    members = [newcomer(step=first), *(member(name, step=step) for name, step in zip("ab", others, strict=True))]
    found = decisions(*members[: 3 if not others[0] else 2])
    assert not any(isinstance(each.role, Heals) and each.role.is_following for each in found.values())


def test_without_a_source_now_it_stands_by_until_the_next_boundary() -> None:
    found = decisions(member("a", can_serve=False), member("b", can_serve=False), newcomer())
    assert isinstance(found["n"].role, StandsBy)
    assert {each.num_participants for each in found.values()} == {2}


def test_a_source_that_other_receivers_keep_busy_is_asked_for_nothing() -> None:
    found = decisions(member("a", is_full=True), member("b"), newcomer())
    role = found["n"].role
    assert isinstance(role, Heals)
    assert [source.replica_id for source in role.sources] == ["b"]
    assert found["a"].role == UpToDate(serves_now=(), serves_next=(), may_lend=False)


def test_a_newcomer_stands_by_while_all_sources_are_busy() -> None:
    announced = newcomer(announced_to=frozenset("ab"))
    found = decisions(member("a", is_full=True), member("b", is_full=True), announced)
    assert found["n"].role == StandsBy(announced_to=frozenset("ab"), awaits_receivers=True, may_heal=True)
    assert found["a"].role == UpToDate(serves_now=(), serves_next=("n",))
    assert {each.num_participants for each in found.values()} == {2}


def test_one_that_has_caught_up_records_on_while_all_sources_are_busy() -> None:
    found = decisions(member("a", is_full=True), member("n", Following.CAUGHT_UP), rules=Rules(min_replica_size=1))
    assert found["n"].role == Follows()
    # The source makes room for it, and no state is compared before it has the rest.
    assert found["a"].role == UpToDate(serves_now=(), serves_next=("n",))
    assert not found["a"].compares_next


def test_one_that_records_takes_part_and_receives_nothing() -> None:
    found = decisions(member("a"), member("b"), member("n", Following.RECORDS, may_heal=False))
    assert found["n"].role == Follows()
    assert found["n"].participating_rank is None
    assert found["n"].group == found["a"].group
    assert found["a"].role == UpToDate(serves_now=(), serves_next=())
    assert not found["a"].compares_next


def test_one_that_recorded_other_steps_heals() -> None:
    for changes in ({"lineage": "of its own"}, {"step": 6}, {"step": NO_WHOLE_STATE}):
        found = decisions(member("a"), member("b"), member("n", Following.RECORDS, **changes))
        role = found["n"].role
        assert isinstance(role, Heals)
        assert not role.is_following
        assert found["a"].num_participants == 3


def test_one_that_has_caught_up_receives_the_rest_and_all_compare() -> None:
    found = decisions(member("a"), member("b"), member("n", Following.CAUGHT_UP))
    role = found["n"].role
    assert isinstance(role, Heals)
    assert role.is_following
    assert all(each.compares_next for each in found.values())
    assert found["a"].role == UpToDate(serves_now=("n",), serves_next=(), following=frozenset("n"), may_lend=True)
    # Where nobody can serve now, it goes on recording.
    found = decisions(member("a", can_serve=False), member("n", Following.CAUGHT_UP), rules=Rules(min_replica_size=1))
    assert found["n"].role == Follows()


@pytest.mark.parametrize(
    ("own", "role", "num_participants"),
    [
        (CLAIM, UpToDate, 3),
        (Claim(), Follows, 2),
        (Claim(step=5, lineage="k", tensors="t", digest="d"), Follows, 2),
        (Claim(step=7, lineage="l", tensors="t", digest="another"), Heals, 3),
        (Claim(step=7, lineage="l", tensors="others", digest="d"), Heals, 3),
    ],
)
def test_only_an_equal_digest_makes_it_count(own: Claim, role: type, num_participants: int) -> None:
    found = decisions(member("a", claim=CLAIM), member("b", claim=CLAIM), member("n", Following.COMPARES, claim=own))
    assert isinstance(found["n"].role, role)
    assert {each.num_participants for each in found.values()} == {num_participants}
    assert all(each.divergence is None for each in found.values()), "it has no vote"
    # It may be compared again.
    assert found["a"].compares_next == (role is Follows)


@pytest.mark.parametrize("num_newcomers", [1, 2])
def test_after_a_difference_its_digest_has_no_vote_either(num_newcomers: int) -> None:
    other = Claim(step=7, lineage="l", tensors="t", digest="another")
    partial = [
        structs.replace(member(f"n{number}", step=NO_WHOLE_STATE, claim=other), lineage="l")
        for number in range(num_newcomers)
    ]
    found = decisions(member("a", claim=CLAIM), *partial, rules=Rules(min_replica_size=1))
    assert isinstance(found["a"].role, UpToDate)
    assert {type(found[each.replica_id].role) for each in partial} == {Heals}
    assert {each.step for each in found.values()} == {7}


def test_if_too_few_others_are_left_it_heals() -> None:
    for following in (Following.RECORDS, Following.CAUGHT_UP, Following.COMPARES):
        found = decisions(member("a"), member("n", following))
        role = found["n"].role
        assert isinstance(role, Heals)
        assert not role.is_following
        assert found["a"].num_participants == 2


def test_a_verified_one_serves_nobody_at_that_boundary() -> None:
    members = [member("a", claim=CLAIM), member("m", step=0, lineage=""), member("n", Following.COMPARES, claim=CLAIM)]
    found = decisions(*members, rules=Rules(min_replica_size=1))
    assert found["n"].role == UpToDate(serves_now=(), serves_next=())
    assert found["a"].role == UpToDate(serves_now=("m",), serves_next=())
    role = found["m"].role
    assert isinstance(role, Heals)
    assert [source.replica_id for source in role.sources] == ["a"]


def test_its_digest_has_no_vote_against_a_single_other() -> None:
    other = Claim(step=7, lineage="l", tensors="t", digest="another")
    found = decisions(
        member("a", claim=CLAIM), member("n", Following.COMPARES, claim=other), rules=Rules(min_replica_size=1)
    )
    assert isinstance(found["n"].role, Heals)
    assert isinstance(found["a"].role, UpToDate)


@pytest.mark.parametrize("following", [Following.RECORDS, Following.CAUGHT_UP, Following.COMPARES])
def test_a_state_that_was_not_compared_is_never_the_common_one(following: Following) -> None:
    with pytest.raises(QuorumError, match="expected a replica with a whole state"):
        decide([member("m", following), member("n", following)], "n", RULES)


def test_spares_are_chosen_among_those_that_have_the_state() -> None:
    rules = Rules(min_replica_size=2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
    found = decisions(member("a", Following.RECORDS), member("b"), member("c"), member("d"), rules=rules)
    assert [found[name].participating_rank for name in "abcd"] == [None, 0, 1, None]


def test_a_replica_follows_as_its_slowest_rank() -> None:
    reports = [RankReport(following=each) for each in (Following.CAUGHT_UP, Following.RECORDS)]
    joined = member_of(reports, replica_id="n", store_address="n:1")
    assert joined.following is Following.RECORDS
