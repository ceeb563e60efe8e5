"""A replica's state beside what is registered: gradients that belong to another state count for nothing."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.optim import SGD

from manager.state.replica_state import ReplicaState


def test_gradients_of_what_is_registered_and_attached_are_zero_in_their_place() -> None:
    state = ReplicaState(timedelta(seconds=5))
    model, apart = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.ones(3))
    state.registry.register_object("model", model)
    with state.attach((SGD([apart]),), every_commit=True):
        model.weight.grad, apart.grad = torch.ones(1, 2), torch.ones(3)
        seen = [model.weight.grad, apart.grad]
        state.forget_gradients()
        assert [each.count_nonzero().item() for each in seen] == [0, 0]
        assert model.weight.grad is seen[0]
        assert model.bias.grad is None, "none is made where there was none"
