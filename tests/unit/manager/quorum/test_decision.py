from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from manager.errors import QuorumError
from manager.quorum.decision import (
    Decision,
    DoesNotFit,
    Heals,
    Rules,
    StandsBy,
    UpToDate,
    WorldSizeMode,
    commit_refusals,
    decide,
    next_lineage,
)
from manager.quorum.reports import NO_WHOLE_STATE, Member

RULES = Rules(min_replica_size=2)


def member(replica_id: str, step: int = 7, **changes: object) -> Member:
    base = Member(
        replica_id=replica_id,
        step=step,
        lineage="l",
        store_address=f"{replica_id}:1",
        addresses=(f"http://{replica_id}/0", f"http://{replica_id}/1"),
    )
    return structs.replace(base, **changes)  # type: ignore[arg-type]


def decisions(members: list[Member], rules: Rules = RULES) -> dict[str, Decision]:
    return {each.replica_id: decide(members, each.replica_id, rules) for each in members}


def test_all_up_to_date_participate_in_the_order_of_their_names() -> None:
    found = decisions([member("c"), member("a"), member("b")])
    assert [found[name].participating_rank for name in "abc"] == [0, 1, 2]
    assert {each.num_participants for each in found.values()} == {3}
    assert {each.group for each in found.values()} == {found["a"].group}
    assert all(each.role == UpToDate(serves_now=(), serves_next=()) for each in found.values())


def test_who_is_behind_heals_from_one_at_the_newest_step_and_participates() -> None:
    found = decisions([member("a"), member("b", 3), member("c")])
    role = found["b"].role
    assert isinstance(role, Heals)
    assert {source.replica_id for source in role.sources} == {"a", "c"}
    assert (found["b"].step, found["b"].rank, found["b"].num_participants) == (7, 1, 3)
    assert found["a"].role == found["c"].role == UpToDate(serves_now=("b",), serves_next=())


def test_those_who_heal_begin_with_different_sources() -> None:
    members = [member("a"), member("b"), member("c"), *(member(f"x{index}", 0) for index in range(3))]
    first = [found.role.sources[0].replica_id for found in decisions(members).values() if isinstance(found.role, Heals)]
    assert sorted(first) == ["a", "b", "c"]
    # Other ranks of the same replica, and a second attempt, begin elsewhere.
    for changed in ({"group_rank": 1}, {"num_failed_heals": 1}):
        role = decide(members, "x0", RULES, **changed).role  # type: ignore[arg-type]
        assert isinstance(role, Heals)
        assert role.sources[0].replica_id == "b"


def test_the_same_step_with_another_history_heals() -> None:
    found = decisions([member("a"), member("b"), member("z", lineage="of its own")])
    assert isinstance(found["z"].role, Heals)
    assert {each.lineage for each in found.values()} == {"l"}


def test_of_two_histories_with_as_many_holders_everybody_takes_the_same() -> None:
    found = decisions([member("a", lineage="x"), member("b", lineage="w")])
    assert {each.lineage for each in found.values()} == {"w"}
    assert isinstance(found["a"].role, Heals)


def test_a_torn_replica_heals_and_a_quorum_of_torn_ones_is_an_error() -> None:
    assert isinstance(decisions([member("a", 0), member("b", NO_WHOLE_STATE)])["b"].role, Heals)
    with pytest.raises(QuorumError, match="durable checkpoint"):
        decide([member("b", NO_WHOLE_STATE)], "b", RULES)


def test_at_step_0_all_take_the_state_of_one_and_only_once() -> None:
    fresh = [member(name, 0, lineage="") for name in "abc"]
    found = decisions(fresh)
    assert isinstance(found["a"].role, UpToDate)
    assert isinstance(found["b"].role, Heals)
    assert isinstance(found["c"].role, Heals)
    # The step failed, and a newcomer is there: the two that are equal already outweigh however many are not.
    synchronised = [member(name, 0, lineage=found["a"].lineage) for name in "ab"]
    found = decisions([*synchronised, *(member(name, 0, lineage="") for name in "xyz")])
    assert isinstance(found["a"].role, UpToDate)
    assert isinstance(found["b"].role, UpToDate)
    assert isinstance(found["x"].role, Heals)


def test_a_replica_that_comes_back_under_its_id_begins_another_history() -> None:
    """Whoever still holds the first state that it gave must not be taken for one that holds the second."""
    earlier = decisions([member(name, 0, lineage="") for name in "ab"])["b"]
    back, newcomer = member("a", 0, lineage="", num_groups=1), member("c", 0, lineage="")
    later = decisions([back, newcomer])["c"]
    assert later.lineage != earlier.lineage
    held_by = [member("b", 0, lineage=earlier.lineage), *(member(n, 0, lineage=later.lineage) for n in "ac")]
    assert isinstance(decisions(held_by)["b"].role, Heals)


def test_at_step_0_without_init_sync_nobody_heals() -> None:
    found = decisions([member(name, 0, lineage="") for name in "ab"], replace(RULES, init_sync=False))
    assert all(isinstance(each.role, UpToDate) for each in found.values())


def test_who_trains_already_serves_at_the_next_boundary() -> None:
    busy = [member(name, can_serve=False) for name in "ab"]
    first = decisions([*busy, member("x", 0)])
    assert first["x"].role == StandsBy(announced_to=frozenset("ab"), may_heal=True)
    assert first["x"].rank is None
    assert first["a"].role == UpToDate(serves_now=(), serves_next=("x",))
    assert first["a"].group_members == ("a", "b")

    announced = member("x", 0, announced_to=frozenset("ab"))
    second = decisions([*busy, announced])
    assert isinstance(second["x"].role, Heals)
    assert second["a"].role == UpToDate(serves_now=("x",), serves_next=())
    assert second["a"].group_members == ("a", "b", "x")

    # Those who knew are gone.
    third = decisions([member("c", can_serve=False), announced])
    assert third["x"].role == StandsBy(announced_to=frozenset("c"), may_heal=True)


def test_who_is_behind_and_trains_already_stands_by() -> None:
    found = decisions([member("a"), member("b"), member("x", 3, may_heal=False)])
    assert isinstance(found["x"].role, StandsBy)
    assert found["a"].num_participants == 2


def test_without_healing_who_is_behind_takes_no_part() -> None:
    found = decisions([member("a"), member("b", 3, may_heal=False)])
    assert isinstance(found["b"].role, StandsBy)
    assert found["a"].role == UpToDate(serves_now=(), serves_next=())


def test_a_process_group_is_kept_exactly_as_long_as_its_members_hold_it() -> None:
    key = decide([member("a"), member("b")], "a", RULES).group
    held = [member("a", group=key, num_groups=1), member("b", group=key, num_groups=1)]
    assert decide(held, "a", RULES).group == key
    # One of them lost it; one came; one left.
    seen = {key}
    for changed in (
        [held[0], structs.replace(held[1], group="")],
        [*held, member("c")],
        held[:1],
        [held[0], member("c", group=key)],
    ):
        other = decide(changed, "a", RULES).group
        if changed[1:] != [member("c", group=key)]:
            assert other not in seen
        seen.add(other)
    # A second attempt at the same members is another one.
    again = [structs.replace(each, group="", num_groups=2) for each in held]
    assert decide(again, "a", RULES).group not in seen


def test_members_that_hold_different_groups_of_their_number_get_a_new_one() -> None:
    found = decisions([member("a", group="2-one"), member("b", group="2-other")])
    (group,) = {each.group for each in found.values()}
    assert group not in ("2-one", "2-other")


def test_a_group_of_more_members_is_not_taken_for_one_of_fewer() -> None:
    found = decisions([member("a", group="21-one"), member("b", group="21-one")])
    assert all(each.group.startswith("2-") for each in found.values())


def test_of_two_histories_with_as_many_holders_the_one_that_stepped_as_it_committed_counts() -> None:
    for regular, irregular in (("k", "l"), ("l", "k")):
        found = decisions([member("a", lineage=regular), member("b", lineage=irregular, is_irregular=True)])
        assert {each.lineage for each in found.values()} == {regular}
        assert isinstance(found["b"].role, Heals)


def test_spares_hold_the_state_and_contribute_nothing() -> None:
    rules = Rules(min_replica_size=2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
    found = decisions([member(name) for name in "abc"], rules)
    assert [found[name].participating_rank for name in "abc"] == [0, 1, None]
    assert [found[name].rank for name in "abc"] == [0, 1, 2]
    assert found["c"].num_participants == 2
    assert decisions([member("a")], rules)["a"].num_participants == 1


def test_members_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(QuorumError, match=r"same number of ranks.*'b': 1"):
        decide([member("a"), member("b", addresses=("x",))], "a", RULES)
    with pytest.raises(QuorumError, match="'z' among the members"):
        decide([member("a")], "z", RULES)
    with pytest.raises(QuorumError, match="more than once"):
        decide([member("a"), member("a")], "a", RULES)


def test_what_keeps_a_step_from_being_committed() -> None:
    fine = commit_refusals(num_participants=2, min_replica_size=2, errors=(), has_missed_heartbeats=False)
    assert fine == ()
    refusals = commit_refusals(num_participants=1, min_replica_size=2, errors=("lost b",), has_missed_heartbeats=True)
    assert len(refusals) == 3
    assert "lost b" in refusals
    assert any("at least 2 replicas, got 1" in reason for reason in refusals)


def test_a_lineage_tells_histories_apart() -> None:
    ours = next_lineage("l", "2-a", 8)
    assert ours == next_lineage("l", "2-a", 8)
    assert len({ours, next_lineage("l", "2-b", 8), next_lineage("m", "2-a", 8), next_lineage("l", "2-a", 9)}) == 4


FITTING = (("model", "1"), ("own", ""))
OTHER = (("model", "2"), ("own", ""))


def test_who_could_not_load_the_state_takes_no_part_and_nobody_serves_it() -> None:
    other = member("b", 3, structure=(("model", "2"), ("own", "")))
    found = decisions([member("a", structure=FITTING), other, member("c", structure=FITTING)])
    assert found["b"].role == DoesNotFit(holder=member("a", structure=FITTING), parts=("model",))
    assert found["b"].rank is None
    assert found["a"].role == found["c"].role == UpToDate(serves_now=(), serves_next=())
    assert found["a"].group_members == ("a", "c")
    assert found["a"].unfit == found["c"].unfit == ("b",)


@pytest.mark.parametrize(
    "structure", [(), FITTING, (("model", ""), ("own", "")), (("model", "1"), ("own", "3"))], ids=str
)
def test_parts_that_a_replica_says_nothing_of_fit(structure: tuple[tuple[str, str], ...]) -> None:
    found = decisions([member("a", structure=FITTING), member("b", 3, structure=structure)])
    assert isinstance(found["b"].role, Heals)


def test_at_the_beginning_the_state_of_most_counts() -> None:
    odd = member("a", 0, lineage="", structure=(("model", "2"), ("own", "")))
    found = decisions([odd, *(member(name, 0, lineage="", structure=FITTING) for name in "bc")])
    assert isinstance(found["a"].role, DoesNotFit)
    assert isinstance(found["b"].role, UpToDate)
    assert isinstance(found["c"].role, Heals)


def test_one_that_is_ahead_with_another_model_does_not_end_the_others() -> None:
    odd = member("odd", 5000, lineage="", structure=OTHER)
    found = decisions([member("a", structure=FITTING), member("b", structure=FITTING), odd])
    assert isinstance(found["odd"].role, DoesNotFit)
    assert found["a"].role == found["b"].role == UpToDate(serves_now=(), serves_next=())
    assert (found["a"].step, found["a"].group_members) == (7, ("a", "b"))


def test_newcomers_with_another_model_do_not_outvote_the_one_that_has_trained() -> None:
    others = [member(name, 0, lineage="", structure=OTHER) for name in "ab"]
    found = decisions([*others, member("c", structure=FITTING)])
    assert isinstance(found["c"].role, UpToDate)
    assert isinstance(found["a"].role, DoesNotFit)
    assert isinstance(found["b"].role, DoesNotFit)


def test_of_those_at_one_step_the_one_that_looks_different_takes_no_part() -> None:
    newcomer = member("d", 0, structure=FITTING)
    found = decisions(
        [member("a", structure=OTHER), member("b", structure=FITTING), member("c", structure=FITTING), newcomer]
    )
    assert isinstance(found["a"].role, DoesNotFit)
    assert found["b"].group_members == ("b", "c", "d")
    assert isinstance(found["d"].role, Heals)


def test_holders_of_another_order_of_parameters_heal_and_take_over_the_others() -> None:
    def ordered(digest: str) -> tuple[tuple[str, str], ...]:
        return (*FITTING, ("sgd (parameters)", "1"), ("sgd (present order of parameters)", digest))

    rules = replace(RULES, init_sync=False)
    found = decisions(
        [member(name, 0, structure=ordered(digest)) for name, digest in zip("abc", "122", strict=True)], rules
    )
    assert isinstance(found["a"].role, UpToDate)
    for name in "bc":
        role = found[name].role
        assert isinstance(role, Heals)
        assert [source.replica_id for source in role.sources] == ["a"]
    found = decisions([member("a", structure=ordered("1")), member("b", 3, structure=ordered("2"))])
    assert isinstance(found["b"].role, Heals)
    found = decisions([member("a", structure=ordered("1")), member("b", structure=FITTING)])
    assert isinstance(found["b"].role, UpToDate)


def test_other_parameters_or_an_order_that_stays_do_not_fit() -> None:
    for part in ("sgd (parameters)", "sgd (order of parameters)"):
        members = [
            member(name, step, structure=((part, digest),)) for name, step, digest in (("a", 7, "1"), ("b", 3, "2"))
        ]
        assert decisions(members)["b"].role == DoesNotFit(holder=members[0], parts=(part,))
