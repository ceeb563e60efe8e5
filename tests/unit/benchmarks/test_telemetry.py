from __future__ import annotations

import pytest

from benchmarks.report import Group, Sample
from benchmarks.telemetry import ALONE, ANSWERS, MEAN, PROCESSOR, WATCHED, judge


def group_of(alone: list[float], watched: list[float], answers: float) -> Group:
    group = Group("telemetry", "1000", "title")
    for kind, values in ((ALONE, alone), (WATCHED, watched)):
        for number, value in enumerate(values):
            group.add(kind, MEAN, Sample(number, value))
            group.add(kind, PROCESSOR, Sample(number, value))
    group.add(WATCHED, ANSWERS, Sample(0, answers))
    return group


@pytest.mark.parametrize(
    ("watched", "answers", "met"),
    [
        ([30.2, 30.2, 30.2], 2.0, [True, True, True]),
        ([30.2, 99.0, 30.2], 2.0, [True, True, True]),  # somebody else's burst
        ([30.4, 30.4, 30.4], 2.0, [False, False, True]),
        ([30.0, 30.0, 30.0], 11.0, [True, True, False]),
    ],
)
def test_a_watched_step_may_take_a_hundredth_more(watched: list[float], answers: float, met: list[bool]) -> None:
    verdicts = judge(group_of([30.0, 30.0, 30.0], watched, answers))
    assert [verdict.met for verdict in verdicts] == met
