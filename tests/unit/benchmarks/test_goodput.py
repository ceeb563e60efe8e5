"""Goodput counts committed work, the work that a restart repeats only once; a standstill is found at its kill."""

from __future__ import annotations

import pytest

from benchmarks.goodput import GOODPUT, LONGEST, NEXT, STEP, History, quantities
from benchmarks.replicas.dying import Commit


def commits(*times_s: float, first: int = 1) -> list[Commit]:
    return [Commit(step=step, at_s=at_s) for step, at_s in enumerate(times_s, first)]


def test_what_is_left_of_the_work_of_two_replicas() -> None:
    survivor = commits(0, 1, 2, 3, 4, 6.5, 7.5, 8.5, 11.5, 12.5, 13.5)
    victim = commits(0, 1, 2, 3, 4) + commits(11.5, 12.5, 13.5, first=9)
    history = History({"a": survivor, "b": victim}, kills_s=[(4.2, "b")], began_s=0.0, ended_s=14.2)
    found = quantities(history, is_lossy=False)
    assert found[STEP] == pytest.approx(1.0)
    assert found[NEXT] == pytest.approx(2.3)
    assert found[LONGEST] == pytest.approx(3.0)
    assert found[GOODPUT] == pytest.approx((6 + 3) / 20)


def test_steps_that_a_restart_repeats_are_no_work() -> None:
    ranks = {name: commits(0, 1, 2, 3, 4) + commits(8, 9, 10, 11, first=3) for name in "ab"}
    history = History(ranks, kills_s=[(4.0, "b")], began_s=0.0, ended_s=14.0)
    found = quantities(history, is_lossy=True)
    assert found[GOODPUT] == pytest.approx((1 + 1) / 20)
    assert found[NEXT] == pytest.approx(4.0)


def test_a_survivor_that_never_commits_again_stands_still_to_the_end() -> None:
    history = History({"a": commits(0, 1, 2), "b": commits(0, 1, 2)}, kills_s=[(2.0, "b")], began_s=0.0, ended_s=20.0)
    assert quantities(history, is_lossy=False)[LONGEST] == pytest.approx(10.0)
