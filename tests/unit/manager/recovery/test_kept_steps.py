"""All ranks decide alike whether a step was kept by all, in whatever order they report and give up."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
import torch.distributed as dist

from ft_transport.coordination.ranks import RankGroup
from ft_transport.runtime.signal_safe import SafeEvent
from manager.recovery.kept_steps import KeptSteps

TIMEOUT = timedelta(seconds=5)


def ranks(size: int) -> list[KeptSteps]:
    store = dist.HashStore()
    groups = [RankGroup(rank=rank, size=size, global_ranks=tuple(range(size)), shared=store) for rank in range(size)]
    return [KeptSteps(group, TIMEOUT) for group in groups]


@pytest.fixture
def stopped() -> SafeEvent:
    """A wait for the decision looks once."""
    event = SafeEvent()
    event.set()
    return event


def test_ranks_that_stop_waiting_learn_of_a_decision_that_another_has_seen(stopped: SafeEvent) -> None:
    first, second, last = ranks(3)
    assert first.report(10, stopped) is None
    assert second.report(10, stopped) is None
    assert last.report(10, stopped) is True
    # Both give up at once, and neither may drop the step.
    assert first.give_up(10)
    assert second.give_up(10)


def test_a_rank_that_reports_too_late_learns_that_the_others_have_given_up(stopped: SafeEvent) -> None:
    first, second, last = ranks(3)
    assert first.report(10, stopped) is None
    assert not first.give_up(10)
    assert second.report(10, stopped) is False
    assert last.report(10, stopped) is False


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_in_every_order_all_ranks_decide_alike(order: tuple[int, ...], stopped: SafeEvent) -> None:
    members = ranks(3)
    for step in range(1, 5):
        decisions = {}
        for rank in order[: 3 if step % 2 else 2]:
            decisions[rank] = members[rank].report(step, stopped)
        for rank in range(3):
            decisions[rank] = members[rank].give_up(step)
        assert set(decisions.values()) == {bool(step % 2)}


def test_a_step_of_another_history_is_decided_again(stopped: SafeEvent) -> None:
    first, second = ranks(2)
    assert first.report(10, stopped) is None
    assert second.report(10, stopped) is True
    for member in (first, second):
        member.begin_history()
    assert first.report(10, stopped) is None
    assert not first.give_up(10)
    assert second.report(10, stopped) is False


def test_a_rank_alone_needs_no_store(stopped: SafeEvent) -> None:
    (alone,) = ranks(1)
    assert alone.report(10, stopped) is True
    assert alone.give_up(10)
