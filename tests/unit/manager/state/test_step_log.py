"""An optimizer that does not step once for each commit is described, and the last steps are logged."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from manager.state import step_log
from manager.state.step_log import StepLedger, StepLog


def _optimizers() -> tuple[Optimizer, Optimizer]:
    weights = torch.nn.Parameter(torch.zeros(2))
    return SGD([weights]), Adam([weights])


def test_nothing_is_expected_before_the_first_commit_and_after_another_state() -> None:
    ledger, (first, second) = StepLedger(), _optimizers()
    ledger.stepped(first)
    assert ledger.irregularity([first, second]) == ""
    ledger.committed()
    ledger.replaced()
    assert ledger.irregularity([first, second]) == ""


@pytest.mark.parametrize(
    ("steps", "said"),
    [((1, 1), ""), ((0, 1), "SGD 0: 0, Adam 1: 1"), ((2, 1), "SGD 0: 2, Adam 1: 1"), ((0, 0), "SGD 0: 0, Adam 1: 0")],
)
def test_each_optimizer_steps_once_for_a_commit(steps: tuple[int, int], said: str) -> None:
    ledger, optimizers = StepLedger(), _optimizers()
    ledger.committed()
    for optimizer, number in zip(optimizers, steps, strict=True):
        for _ in range(number):
            ledger.stepped(optimizer)
        assert ledger.num_steps(optimizer) == number
    assert ledger.irregularity(optimizers) == said


def test_an_optimizer_that_is_attached_twice_tells_of_each_step_twice() -> None:
    ledger, (first, _) = StepLedger(), _optimizers()
    ledger.committed()
    ledger.stepped(first)
    assert ledger.irregularity([first, first]) == "SGD 0: 0.5"
    ledger.stepped(first)
    assert ledger.irregularity([first, first]) == ""


def test_nothing_is_expected_of_an_optimizer_that_steps_freely() -> None:
    ledger, (first, second) = StepLedger(), _optimizers()
    ledger.let_step_freely([second])
    ledger.committed()
    ledger.stepped(first)
    assert ledger.irregularity([first, second]) == ""
    assert ledger.steps_with_commits(first)
    assert not ledger.steps_with_commits(second)


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
