from __future__ import annotations

import pytest

from benchmarks.join import (
    JOINED,
    NORMAL,
    RATIO,
    RUNNING_RATIO,
    UNDISTURBED_RATIO,
    quantities,
    quantities_of_diloco,
    ratios,
)
from benchmarks.replicas.diloco import Iteration
from benchmarks.replicas.healing import Report, Step
from benchmarks.replicas.steps import StepTimes


def step(began_s: float, committed_step: int, seconds: float = 1.0, *, waited_s: float = 0.0) -> Step:
    times = StepTimes(start_quorum_s=0.0, backward_s=seconds, allreduce_s=0.0, should_commit_s=0.0, optimizer_s=0.0)
    return Step(began_s=began_s, times=times, committed_step=committed_step, waited_s=waited_s)


def report(*steps: Step) -> Report:
    return Report(steps=list(steps), parts=[])


TRAINED = report(step(0.0, 1), step(1.0, 2), step(2.0, 3), step(3.0, 4, 3.0, waited_s=1.0), step(6.1, 5, 1.5))


def test_the_longest_step_while_somebody_joins_beside_the_longer_of_the_normal_ones() -> None:
    found = ratios(TRAINED, report(step(2.5, 4, 3.5)))
    assert found[NORMAL] == pytest.approx(1500.0)
    assert found[RATIO] == pytest.approx(2.0)
    assert found[RUNNING_RATIO] == pytest.approx(2.0 / 1.5)
    assert ratios(TRAINED, report(step(2.5, 77, 3.5)))[RATIO] == pytest.approx(2.0), "it joins another job"
    # The first common step counts from its beginning at the other.
    assert quantities(TRAINED, report(step(2.5, 4, 3.5)))[JOINED] == pytest.approx(3000.0)


def iteration(began_s: float, took_s: float, *, is_sync: bool = False, stolen_s: float = 0.0) -> Iteration:
    return Iteration(began_s=began_s, took_s=took_s, waited_s=0.0, stolen_s=stolen_s, is_sync=is_sync)


def test_of_diloco_the_steps_that_the_host_disturbed_are_left_out_of_one_figure_alone() -> None:
    trained = [
        iteration(0.0, 1.0),
        iteration(1.0, 1.6, stolen_s=0.1),
        iteration(2.6, 1.2, stolen_s=0.01),
        iteration(3.8, 4.0, is_sync=True),
        iteration(7.8, 1.0),
        iteration(8.8, 1.0),
        iteration(9.8, 4.0, is_sync=True),
    ]
    found = quantities_of_diloco(trained, [iteration(0.5, 1.0), iteration(1.5, 6.3, is_sync=True)])
    assert found[RATIO] == pytest.approx(1.6)
    assert found[UNDISTURBED_RATIO] == pytest.approx(1.2)
