"""A join beside replicas that train with an asynchronous quorum costs them no standstill, and as a rule no step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quorum_threads import LONG_S, beside
from quorum_threads import Trainer as BaseTrainer
from state_equality import exact

pytestmark = pytest.mark.usefixtures("quorum_ready")

STANDSTILL_S = 5.0
"""Half of the time that members of a process group wait for each other."""
WIDTH = 300
"""So that one weight is not copied at the boundary."""


class OutOfPlace(torch.optim.Optimizer):
    """Its states are other tensors after each step, in a list as well."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                earlier = state.get("momentum", torch.zeros_like(parameter))
                state["momentum"] = earlier * 0.9 + parameter.grad
                state["powers"] = [state["momentum"] ** 2]
                parameter.sub_(group["lr"] * state["momentum"])


class EveryOtherStep(OutOfPlace):
    """Replaces its states in some steps alone, as SOAP and Shampoo do with their preconditioners."""

    num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        kept = {parameter: dict(state) for parameter, state in self.state.items()}
        super().step(closure)
        if self.num_steps % 2:
            for parameter, state in kept.items():
                present = self.state[parameter]
                state["momentum"].copy_(present["momentum"])
                state["powers"][0].copy_(present["powers"][0])
                present.update(state)


class Swapping(OutOfPlace):
    """Gives its parameters other memory, as sharpness-aware minimisation does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        before = [parameter.data.clone() for group in self.param_groups for parameter in group["params"]]
        for parameter, kept in zip(self.param_groups[0]["params"], before, strict=True):
            parameter.data = kept
        super().step(closure)


class Trainer(BaseTrainer):
    """Notes each step: how long it took and whether it was committed."""

    def __init__(self, address: str, name: str, kind: Callable[[Any], torch.optim.Optimizer]) -> None:
        model = torch.nn.Linear(WIDTH, WIDTH)
        super().__init__(address, name, model, kind(model.parameters()))
        self.steps: list[tuple[float, bool]] = []

    def backward(self) -> None:
        self.model(torch.ones(2, WIDTH)).square().mean().backward()

    def step(self) -> bool:
        began_s = time.monotonic()
        is_committed = super().step()
        self.steps.append((time.monotonic() - began_s, is_committed))
        return is_committed

    def state(self) -> Any:
        return exact([self.model.state_dict(), self.optimizer.state_dict()])


def _join(address: str, kind: Callable[[Any], torch.optim.Optimizer], num_joins: int) -> tuple[Trainer, list[bool]]:
    """Let one newcomer after the other join a replica that trains; returns that, and whether the states were equal."""
    healthy = Trainer(address, "healthy", kind)
    kept: dict[int, Any] = {}

    def step() -> None:
        healthy.step()
        kept[healthy.manager.current_step()] = healthy.state()

    def join() -> list[bool]:
        return [_equals(Trainer(address, f"newcomer {number}", kind), kept) for number in range(num_joins)]

    try:
        return healthy, beside(step, join, num_steps=6)
    finally:
        healthy.manager.shutdown()


def _equals(newcomer: Trainer, kept: dict[int, Any]) -> bool:
    try:
        while not newcomer.step():
            pass
        step, own = newcomer.manager.current_step(), newcomer.state()
        # One more, so that the other replica has made the step by then.
        newcomer.step()
        until_s = time.monotonic() + LONG_S
        while step not in kept and time.monotonic() < until_s:
            newcomer.step()
        return bool(kept[step] == own)
    finally:
        newcomer.manager.shutdown()


def test_a_join_costs_no_step_where_steps_replace_the_tensors_of_optimizer_states(address: str) -> None:
    healthy, are_equal = _join(address, EveryOtherStep, 1)
    assert are_equal == [True]
    assert all(is_committed for _, is_committed in healthy.steps)
    assert max(length_s for length_s, _ in healthy.steps) < STANDSTILL_S


def test_a_join_costs_one_step_once_where_steps_give_parameters_other_memory(address: str) -> None:
    healthy, are_equal = _join(address, Swapping, 2)
    assert are_equal == [True, True]
    assert sum(not is_committed for _, is_committed in healthy.steps) <= 1
    assert max(length_s for length_s, _ in healthy.steps) < STANDSTILL_S


def test_nobody_waits_for_a_source_that_gives_the_step_up(address: str) -> None:
    """Before the members of the process group have met: the newcomer waits for it there."""
    healthy = Trainer(address, "healthy", torch.optim.SGD)
    server = healthy.manager._replica.transport.server
    take = server.take

    def give_up(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    def step() -> None:
        if not healthy.step():
            server.take = take

    def newcomer() -> None:
        joining = Trainer(address, "newcomer", torch.optim.SGD)
        try:
            while not joining.step():
                pass
        finally:
            joining.manager.shutdown()

    server.take = give_up
    try:
        beside(step, newcomer, num_steps=3)
    finally:
        healthy.manager.shutdown()
    assert sum(not is_committed for _, is_committed in healthy.steps) == 1
    assert max(length_s for length_s, _ in healthy.steps) < STANDSTILL_S
