"""What a step takes: until its commit, and from boundary to boundary."""

from __future__ import annotations

import pytest

from manager.state import step_log
from manager.state.step_log import StepLog


def test_a_step_lasts_from_boundary_to_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(step_log.time, "monotonic", lambda: now_s)
    log = StepLog()
    assert log.begin() is None
    now_s += 0.02
    assert log.end(0) == pytest.approx(0.02)
    [step] = log.recent()
    assert (step.length_s, step.period_s) == (pytest.approx(0.02), 0)

    now_s += 0.298  # the optimizer's step, the data, an evaluation
    assert log.begin() == pytest.approx(0.318)
    assert log.begin() is None  # the step was abandoned: it has no end
    now_s += 0.01
    log.end(1, cause="no")
    first, second = log.recent()
    assert first.period_s == pytest.approx(0.318)
    assert (second.step, second.length_s, second.is_committed) == (1, pytest.approx(0.01), False)


def test_without_a_quorum_a_step_ends_at_the_next_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(step_log.time, "monotonic", lambda: now_s)
    log = StepLog()
    log.boundary(0, 0)
    now_s += 0.5
    log.boundary(0, 1)
    [step] = log.recent()
    assert step.length_s == step.period_s == 0.5
