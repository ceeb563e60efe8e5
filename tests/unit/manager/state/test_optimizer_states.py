"""What torch's loader of optimizers changes is put back, wherever the optimizer is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from interruptions import HandlerError, at_every_place

from manager.errors import RegistryError
from manager.state.registry import StateRegistry


class Adding(torch.optim.SGD):
    """Adds to the state that torch has loaded."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for each in self.state.values():
            each["made"] = torch.tensor(1, dtype=torch.int8)


class Trainer:
    """A state object of a user's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers = {"main": [optimizer]}
        self.itself = self

    def state_dict(self) -> dict[str, Any]:
        return self.optimizers["main"][0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizers["main"][0].load_state_dict(state)


def optimizer_of(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))])


def received() -> dict[str, Any]:
    state = optimizer_of().state_dict()
    return {**state, "state": {0: {"momentum_buffer": torch.tensor([1 / 3, 2 / 3])}}}


def _load(optimizer: torch.optim.Optimizer) -> Callable[[Any], object]:
    def load(state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)

    return load


@pytest.mark.parametrize(
    "load_of",
    [lambda each: each.load_state_dict, lambda each: Trainer(each).load_state_dict, _load],
    ids=["its own method", "an object that has it", "a function that refers to it"],
)
def test_an_optimizer_takes_what_came_whoever_loads_it(
    load_of: Callable[[torch.optim.Optimizer], Callable[[Any], object]],
) -> None:
    registry, optimizer, state = StateRegistry(), optimizer_of(), received()
    registry.register("optimizer", load_of(optimizer), dict)
    registry.load_state_dict({"optimizer": state})
    (own,) = optimizer.state.values()
    assert own["momentum_buffer"] is state["state"][0]["momentum_buffer"]
    # Afterwards it loads as torch does.
    optimizer.load_state_dict(state)
    (own,) = optimizer.state.values()
    assert own["momentum_buffer"].dtype is torch.bfloat16


def test_an_attached_optimizer_takes_what_came_where_nothing_refers_to_it() -> None:
    registry, optimizer, state = StateRegistry(), optimizer_of(), received()
    found = [optimizer]
    registry.register("optimizer", partial(lambda get, each: get().load_state_dict(each), found.pop), dict)
    registry.load_state_dict({"optimizer": state}, optimizers=[optimizer])
    assert optimizer.state[optimizer.param_groups[0]["params"][0]] == state["state"][0]


def test_what_the_class_and_the_user_add_stays() -> None:
    registry, optimizer, state = StateRegistry(), optimizer_of(Adding), received()

    def note(_optimizer: torch.optim.Optimizer) -> None:
        (own,) = optimizer.state.values()
        own["seen"] = own["momentum_buffer"].dtype

    optimizer.register_load_state_dict_post_hook(note)
    registry.register_object("optimizer", optimizer)
    registry.load_state_dict({"optimizer": state})
    (own,) = optimizer.state.values()
    assert (own["made"].dtype, own["seen"]) == (torch.int8, torch.float32)


def test_after_an_interrupted_load_torch_loads_as_ever() -> None:
    optimizers = [optimizer_of()]

    def load() -> None:
        registry = StateRegistry()
        registry.register_object("optimizer", optimizers[0])
        registry.load_state_dict({"optimizer": received()})

    def check() -> None:
        optimizer = optimizers.pop()
        optimizer.load_state_dict(received())
        assert next(iter(optimizer.state.values()))["momentum_buffer"].dtype == torch.bfloat16
        optimizers.append(optimizer_of())

    modules = ("manager.state.optimizer_states", "contextlib")
    at_every_place(load, check, at_least=50, modules=modules, errors=(HandlerError, RegistryError))
