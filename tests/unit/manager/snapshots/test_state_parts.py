"""The plan of a step boundary."""

from __future__ import annotations

import torch

from manager.snapshots.state_parts import BoundaryPlan
from manager.state.registry import StateRegistry


def test_a_parameter_that_module_and_optimizer_list_is_watched_once() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    registry = StateRegistry()
    registry.register("model", model.load_state_dict, model.state_dict, is_stable=True)
    registry.register("optimizer", optimizer.load_state_dict, optimizer.state_dict)

    plan = BoundaryPlan.make((), registry.entries("replicated"), [optimizer], set())

    assert [*map(id, plan.watched)] == [*map(id, model.parameters())]
