"""A state that replaces the hyperparameters of a process that was started with others says so, once."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
import torch
from quorum_threads import loopback_transport
from torch.optim.lr_scheduler import OneCycleLR

from manager import StateManager

TIMEOUT = timedelta(seconds=20)


def _optimizer(lr: float | torch.Tensor = 0.1, **others: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(torch.nn.Linear(2, 1).parameters(), lr=lr, **others)


def _manager(optimizer: torch.optim.Optimizer, **keywords: Any) -> StateManager:
    manager = StateManager(**keywords)
    manager.register("optimizer", optimizer)
    manager.attach(optimizer)
    return manager


def _loaded(own: torch.optim.Optimizer, other: torch.optim.Optimizer, caplog: pytest.LogCaptureFixture) -> list[str]:
    manager, peer = _manager(own), _manager(other)
    try:
        for _ in range(2):
            manager.load(peer.replica_state())
            for group in other.param_groups:
                group["weight_decay"] *= 2
    finally:
        manager.shutdown()
        peer.shutdown()
    return _warnings(caplog)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if record.name == "manager.state.compatibility"]
    assert all(record.levelno == logging.WARNING for record in found)
    return [record.getMessage() for record in found]


def test_a_changed_learning_rate_is_named_with_both_values_at_the_first_load_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (line,) = _loaded(_optimizer(lr=0.05, betas=(0.5, 0.9), foreach=False), _optimizer(lr=0.1), caplog)
    assert "optimizer.param_groups.0.lr 0.05 by 0.1" in line
    assert "optimizer.param_groups.0.betas (0.5, 0.9) by (0.9, 0.999)" in line
    assert "foreach" not in line


def test_the_same_configuration_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert _loaded(_optimizer(), _optimizer(), caplog) == []


@pytest.mark.parametrize(("own_lr", "is_said"), [(0.1, False), (0.2, True)])
def test_what_a_scheduler_has_changed_is_no_other_configuration(
    own_lr: float, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = _optimizer(), _optimizer()
    OneCycleLR(own, max_lr=own_lr, total_steps=10)
    schedule = OneCycleLR(other, max_lr=0.1, total_steps=10)
    other.step()
    schedule.step()
    lines = _loaded(own, other, caplog)
    assert len(lines) == is_said
    assert all("initial_lr" in line and "group.0.lr" not in line for line in lines)


def test_of_many_the_first_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def optimizer(lr: float) -> torch.optim.Optimizer:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for _ in range(9)]
        return torch.optim.SGD(groups, lr=lr)

    (line,) = _loaded(optimizer(0.1), optimizer(0.2), caplog)
    assert line.count(".lr 0.1 by 0.2") == 5
    assert " and 4 more;" in line


def test_a_process_that_has_trained_has_no_configuration_any_more(caplog: pytest.LogCaptureFixture) -> None:
    manager, peer = _manager(_optimizer(0.1)), _manager(_optimizer(0.2))
    manager.start_step(0)
    manager.start_step(1)
    manager.load(peer.replica_state())
    manager.shutdown()
    peer.shutdown()
    assert _warnings(caplog) == []


def test_a_rate_that_is_a_tensor_is_seen_before_it_is_received_in_place(caplog: pytest.LogCaptureFixture) -> None:
    managers = [
        _manager(
            _optimizer(torch.tensor(lr), capturable=False, foreach=False),
            checkpoint_transport=loopback_transport(),
        )
        for lr in (0.25, 0.5)
    ]
    own, peer = managers
    try:
        peer.start_step(3)
        peer.snapshot().result(20)
        own.recover(peer.metadata(), 3, timeout=TIMEOUT)
    finally:
        for manager in managers:
            manager.shutdown()
    (line,) = _warnings(caplog)
    assert "optimizer.param_groups.0.lr 0.25 by 0.5" in line
