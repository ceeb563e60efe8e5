"""All ranks decide alike whether a step was kept by all, in whatever order they report and give up."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ft_transport import ConfigurationError
from ft_transport.coordination.ranks import RankGroup
from ft_transport.runtime.signal_safe import SafeEvent
from manager.recovery.kept_steps import KeepSettings, KeptSteps

TIMEOUT = timedelta(seconds=5)
LONG_S = 20.0


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


def test_a_rank_alone_needs_no_store_and_keeps_only_what_it_reports(stopped: SafeEvent) -> None:
    (alone,) = ranks(1)
    assert alone.report(10, stopped) is True
    assert alone.give_up(20) is False


def test_no_rank_waits_for_a_step_that_another_has_declined_while_it_waits_itself() -> None:
    first, second = ranks(2)
    never = SafeEvent()
    with ThreadPoolExecutor(2) as pool:
        # Each waits for the other, at different steps, as after a snapshot that failed on one rank only.
        waiting = pool.submit(first.exchange, 8, b"first", [0, 1], never)
        second.decline(8)
        later = pool.submit(second.exchange, 10, b"second", [0, 1], never)
        assert waiting.result(LONG_S) is None
        assert not first.give_up(8)
        assert first.exchange(10, b"first", [0, 1], never) == [b"first", b"second"]
        assert later.result(LONG_S) == [b"first", b"second"]


def test_an_exchange_ends_with_a_decision_and_with_a_stop(stopped: SafeEvent) -> None:
    first, second = ranks(2)
    assert first.exchange(5, b"", [0, 1], stopped) is None
    assert not second.give_up(5)
    assert first.exchange(5, b"", [0, 1], SafeEvent()) is None


def test_each_history_has_a_name_of_its_own_the_same_on_all_ranks() -> None:
    members = ranks(3)
    names = []
    for _ in range(3):
        (name,) = {each.history_name() for each in members}
        names.append(name)
        for each in members:
            each.begin_history()
    assert len(set(names)) == 3


def test_what_was_declined_in_an_earlier_history_is_not_posted_in_the_next(stopped: SafeEvent) -> None:
    first, second = ranks(2)
    first.decline(6)
    for each in (first, second):
        each.begin_history()
    first.post_declined()
    assert second.report(6, stopped) is None
    assert first.report(6, stopped) is True


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"copies": 2}, "keep_every with copies"),
        ({"domain": "rack"}, "keep_every with copies"),
        ({"every": 1, "copies": 0}, "copies"),
        ({"every": 1, "copies": 2.5}, "copies"),
        ({"every": 1, "domain": ""}, "a name as failure_domain"),
        ({"every": 1, "domain": 7}, "a name as failure_domain"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        KeepSettings(**settings)
