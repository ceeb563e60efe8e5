"""The first quorum refuses by name what a loop forgot to register."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from quorum_threads import lighthouse, make_manager
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR

from manager import Manager, RegistryError

pytest.importorskip("torchft")

pytestmark = pytest.mark.usefixtures("quorum_ready")


@pytest.fixture
def address() -> Iterator[str]:
    with lighthouse() as at:
        yield at


# ------------------------------------------------------------------------------------- refused by the first quorum


class Parts:
    """A model, an optimizer of it, and a manager that nothing is registered with yet."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.kept: list[object] = []

    def register(self, **others: Any) -> None:
        for key, value in {"model": self.model, "optimizer": self.optimizer, **others}.items():
            self.manager.register(key, value)
        self.manager.attach(self.optimizer)

    def step(self) -> None:
        self.manager.start_quorum()
        self.model(torch.randn(4, 3)).square().mean().backward()
        for parameter in self.model.parameters():
            self.manager.allreduce(parameter.grad)
        assert self.manager.should_commit()


@pytest.fixture
def parts(address: str) -> Iterator[Parts]:
    manager = make_manager(address, "replica_0")
    yield Parts(manager)
    manager.shutdown()


def _scheduler(parts: Parts) -> None:
    parts.kept.append(CosineAnnealingLR(parts.optimizer, 100))
    parts.register()


def _schedulers_of_a_registered_optimizer(parts: Parts) -> None:
    first, second = LinearLR(parts.optimizer), StepLR(parts.optimizer, 3)
    parts.kept.append(SequentialLR(parts.optimizer, [first, second], milestones=[5]))
    parts.manager.register("model", parts.model)
    parts.manager.register("optimizer", parts.optimizer)


def _optimizer(parts: Parts) -> None:
    parts.manager.register("model", parts.model)


def _second_optimizer(parts: Parts) -> None:
    parts.optimizer = torch.optim.AdamW(parts.model[0].parameters())
    parts.kept.append(torch.optim.SGD(parts.model[1].parameters(), lr=0.1))
    parts.register()


def _module_of_a_registered_optimizer(parts: Parts) -> None:
    parts.manager.register("model", parts.model[0])
    parts.manager.register("optimizer", parts.optimizer)


@pytest.mark.parametrize(
    ("set_up", "named"),
    [
        (_scheduler, "CosineAnnealingLR, which sets the learning rates of the attached AdamW"),
        (_schedulers_of_a_registered_optimizer, "LinearLR and SequentialLR and StepLR, .* of the registered AdamW"),
        (_optimizer, "AdamW, an optimizer of 4 parameters of 'model'"),
        (_second_optimizer, "SGD, an optimizer of 2 parameters of 'model'"),
        (_module_of_a_registered_optimizer, r"parameter 2 of group 0 \[1, 3\] of the registered AdamW"),
    ],
)
def test_what_is_forgotten_is_refused_by_the_first_quorum(
    parts: Parts, set_up: Callable[[Parts], None], named: str
) -> None:
    set_up(parts)
    with pytest.raises(RegistryError, match=named):
        parts.manager.start_quorum()


def _registered_scheduler(parts: Parts) -> None:
    first, second = LinearLR(parts.optimizer), StepLR(parts.optimizer, 3)
    parts.register(scheduler=SequentialLR(parts.optimizer, [first, second], milestones=[5]))


def _scheduler_in_a_function(parts: Parts) -> None:
    scheduler = StepLR(parts.optimizer, 3)
    parts.kept.append(scheduler)
    parts.register()
    parts.manager.register_state_dict_fn(
        "rest", lambda state: scheduler.load_state_dict(state["lr"]), lambda: {"lr": scheduler.state_dict()}
    )


def _scheduler_that_is_gone(parts: Parts) -> None:
    StepLR(parts.optimizer, 3)
    parts.register()


def _optimizer_in_a_function(parts: Parts) -> None:
    optimizer = parts.optimizer
    parts.manager.register("model", parts.model)
    parts.manager.register_state_dict_fn(
        "rest", lambda state: optimizer.load_state_dict(state[0]), lambda: [optimizer.state_dict()]
    )


def _no_optimizer(parts: Parts) -> None:
    """Parameters may be stepped by hand."""
    parts.optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    parts.manager.register("model", parts.model)


def _frozen_parameters(parts: Parts) -> None:
    parts.model[1].requires_grad_(False)
    parts.kept.append(parts.optimizer)
    parts.optimizer = torch.optim.AdamW(parts.model[0].parameters())
    parts.register()


def _optimizer_made_anew(parts: Parts) -> None:
    parts.kept.append(parts.optimizer)
    parts.optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.1)
    parts.register()


@pytest.mark.parametrize(
    "set_up",
    [
        _registered_scheduler,
        _scheduler_in_a_function,
        _scheduler_that_is_gone,
        _optimizer_in_a_function,
        _no_optimizer,
        _frozen_parameters,
        _optimizer_made_anew,
    ],
)
def test_what_is_not_forgotten_is_not_missed(
    parts: Parts, set_up: Callable[[Parts], None], caplog: pytest.LogCaptureFixture
) -> None:
    set_up(parts)
    parts.manager.start_quorum()
    assert parts.manager.should_commit()
    assert not [record for record in caplog.records if "registered" in record.getMessage()]
