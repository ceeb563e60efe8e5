"""Which kept steps ranks can load, from what each of them holds."""

from __future__ import annotations

from ft_transport.transfer.kept_part import KeptPart
from manager.recovery.kept_resume import loadable_steps, owners_of


def part(step: int, rank: int, num_ranks: int = 2, history: str = "a", twins: tuple[int, ...] = ()) -> KeptPart:
    return KeptPart(step=step, rank=rank, num_ranks=num_ranks, history=history, twins=twins)


def test_the_newest_step_of_which_all_parts_exist_comes_first() -> None:
    held = [[part(10, 0), part(20, 0)], [part(10, 1), part(20, 1), part(30, 1)]]
    loadable, missing = loadable_steps(held, 2)
    assert [each.step for each in loadable] == [20, 10]
    assert [(each.step, each.ranks) for each in missing] == [(30, [0])]


def test_parts_of_two_histories_are_never_combined() -> None:
    held = [[part(30, 0, history="a"), part(20, 0, history="a")], [part(30, 1, history="b"), part(20, 1, history="a")]]
    loadable, missing = loadable_steps(held, 2)
    assert [(each.step, each.history) for each in loadable] == [(20, "a")]
    assert [(each.step, each.ranks) for each in missing] == [(30, [0]), (30, [1])]


def test_a_part_may_be_a_copy_on_another_rank() -> None:
    held = [[], [part(10, 1), part(10, 0)]]
    assert [each.step for each in loadable_steps(held, 2)[0]] == [10]


def test_a_copy_with_holes_needs_a_twin() -> None:
    sparse = part(10, 0, 4, twins=(2,))
    others = [part(10, 1, 4), part(10, 3, 4)]
    assert loadable_steps([[sparse], others], 4)[0] == []
    assert len(loadable_steps([[sparse], [*others, part(10, 2, 4)]], 4)[0]) == 1
    # The twin itself has holes.
    assert loadable_steps([[sparse], [*others, part(10, 2, 4, twins=(0,))]], 4)[0] == []


def test_parts_of_the_present_number_of_ranks_come_before_others() -> None:
    held = [[part(10, 0, 1), part(10, 0, 2)], [part(10, 1, 2)]]
    assert [each.num_ranks for each in loadable_steps(held, 2)[0]] == [2, 1]
    assert [each.num_ranks for each in loadable_steps(held, 1)[0]] == [1, 2]


def test_each_rank_owns_its_part_and_other_parts_belong_to_a_holder() -> None:
    held = [[part(10, 1, 4), part(10, 2, 4, twins=(0,))], [part(10, 0, 4), part(10, 2, 4), part(10, 3, 4)]]
    assert owners_of(held, part(10, 0, 4), 2) == [1, 0, 1, 1]
    assert owners_of(held, part(10, 0, 4), 4) == [0, 1, 2, 3]
