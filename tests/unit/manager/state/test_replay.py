"""Recorded steps that are made later give the weights and states of the steps themselves, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from manager.state.replay import (
    Replay,
    ReplayRefusedError,
    check_replayable,
    load_optimizer_states,
    load_rest,
)
from manager.state.replica_state import ReplicaState

NUM_STEPS = 12
BASE = 5
MANY = 1 << 30


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 3))


def tensors_of(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    states = [value for each in model.parameters() for value in optimizer.state[each].values()]
    return [*model.parameters(), *states]


def assert_equal(own: list[Any], other: list[Any]) -> None:
    assert len(own) == len(other)
    for one, two in zip(own, other, strict=True):
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
        (torch.optim.Rprop, {}),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else "",
)
def test_steps_made_later_are_equal_bit_for_bit(kind: Callable[..., Optimizer], keywords: dict[str, Any]) -> None:
    model, other = make_model(), make_model()
    # A tensor as learning rate is changed in place by a scheduler.
    optimizer = kind(model.parameters(), **copy.deepcopy(keywords))
    following = kind(other.parameters(), **copy.deepcopy(keywords))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    replay = Replay([following], MANY)
    for step in range(NUM_STEPS):
        if step == BASE:
            other.load_state_dict(model.state_dict())
            following.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            replay.begin()
        model(torch.randn(8, 10)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if step >= BASE:
            for own, theirs in zip(other.parameters(), model.parameters(), strict=True):
                assert theirs.grad is not None
                own.grad = theirs.grad.clone()
            following.param_groups[0]["lr"] = copy.deepcopy(optimizer.param_groups[0]["lr"])
            replay.record(following)
            assert all(each.grad is None for each in other.parameters())
            following.step()  # leaves everything as it is
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert replay.num_recorded == replay.num_steps_behind == NUM_STEPS - BASE
    replay.run()
    replay.finish()
    assert replay.num_steps_behind == 0
    assert_equal(tensors_of(other, following), tensors_of(model, optimizer))


def test_a_backward_in_progress_goes_on_while_steps_are_made() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    replay = Replay([optimizer], MANY)
    model(torch.randn(8, 10)).square().mean().backward()
    replay.record(optimizer)
    replay.begin()
    loss = model(torch.randn(8, 10)).square().mean()
    before = model[0].weight.clone()  # type: ignore[index]
    replay.run()
    assert not torch.equal(model[0].weight, before)  # type: ignore[index]
    loss.backward()  # no "modified by an inplace operation"


def test_gradients_are_copied_and_given_back_after_the_step() -> None:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    bucket = torch.ones(8)
    parameters[0].grad, parameters[1].grad = views = bucket[:4], bucket[4:]
    replay = Replay([optimizer], MANY)
    replay.record(optimizer)
    assert parameters[0].grad is parameters[1].grad is None
    replay.give_back()
    assert all(each.grad is view for each, view in zip(parameters, views, strict=True))
    bucket.fill_(7)  # The next step reduces into the same memory.
    assert [each.tolist() for each in replay._records[0].gradients.values()] == [[1.0] * 4] * 2


def test_sparse_gradients_and_later_optimizers_are_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ReplayRefusedError, match="sparse"):
        Replay([optimizer], MANY).record(optimizer)
    assert embedding.weight.grad is not None
    with pytest.raises(ReplayRefusedError, match="was attached after the first step"):
        Replay([], MANY).record(optimizer)


def test_more_bytes_than_allowed_are_refused_and_steps_that_were_made_need_none() -> None:
    parameter = nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    replay = Replay([optimizer], 1000)
    replay.begin()
    for _ in range(5):
        for _ in range(2):
            parameter.grad = torch.ones(100)
            replay.record(optimizer)
        replay.run()
    assert replay.peak_bytes == 800
    for _ in range(2):
        parameter.grad = torch.ones(100)
        replay.record(optimizer)
    parameter.grad = torch.ones(100)
    with pytest.raises(ReplayRefusedError, match=r"1200 bytes, more than replay_bytes \(1000\)"):
        replay.record(optimizer)


class OwnSGD(torch.optim.SGD):
    """A user's optimizer."""


def state_with(optimizer: Optimizer, model: nn.Module, **options: Any) -> ReplicaState:
    state = ReplicaState(timedelta(seconds=5))
    state.registry.register_object("model", model)
    state.registry.register_object("optimizer", optimizer)
    state.attach((optimizer,), **{"every_commit": True, **options})
    return state


def refusal_of(state: ReplicaState) -> str:
    with pytest.raises(ReplayRefusedError) as caught:
        check_replayable(state, state.registry.state_dict())
    return str(caught.value)


def test_what_optimizers_may_not_explain_is_refused() -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    check_replayable(state := state_with(sgd, model), state.registry.state_dict())
    refusal = refusal_of(state_with(OwnSGD(model.parameters(), lr=0.1), model))
    assert "OwnSGD may compute more" in refusal
    assert refusal.endswith("name its class in replay_optimizers")
    check_replayable(state := state_with(OwnSGD(model.parameters()), model), state.registry.state_dict(), [OwnSGD])
    refusal = refusal_of(state_with(torch.optim.LBFGS(model.parameters()), model))
    assert "LBFGS may compute more" in refusal
    assert "replay_optimizers" not in refusal
    assert "does not step with each commit" in refusal_of(state_with(sgd, model, every_commit=False))
    assert "no optimizer is attached" in refusal_of(ReplicaState(timedelta(seconds=5)))
    state = state_with(sgd, model)
    state.attach((torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1),), every_commit=True)
    assert "the state of SGD is not registered" in refusal_of(state)
    state = state_with(sgd, model)
    state.registry.register_object("other", torch.optim.SGD(model.parameters(), lr=0.1))
    assert "an optimizer is registered, but not attached" in refusal_of(state)
    state = state_with(hooked := torch.optim.SGD(model.parameters(), lr=0.1), model)
    hooked.register_step_post_hook(lambda *_: None)
    assert "SGD has step hooks" in refusal_of(state)
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    state = state_with(fused, model)
    state.registry.register_object("scaler", torch.amp.GradScaler("cpu"))
    assert "the gradient scaler passes values to AdamW" in refusal_of(state)
    state = state_with(sgd, model)
    state.registry.register("again", lambda _state: None, lambda: {"weights": list(model.parameters())})
    assert "the state function of 'again' returns tensors of an attached optimizer" in refusal_of(state)


def test_what_is_received_twice_is_loaded_only_where_it_differs() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = state_with(optimizer, model)
    loaded: list[Any] = []
    parts = {"same": 1, "other": 2}
    for key, part in parts.items():
        state.registry.register(key, loaded.append, lambda part=part: part)
    received = {**state.registry.state_dict(), "other": 3}
    received["optimizer"] = copy.deepcopy(received["optimizer"])
    received["optimizer"]["param_groups"][0]["lr"] = 0.5  # type: ignore[index]
    load_rest(state.registry, received)
    assert loaded == [3]
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state


def test_states_are_loaded_without_hyperparameters() -> None:
    model = make_model()
    source = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 10)).square().mean().backward()
    source.step()
    other = make_model()
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.7)
    load_optimizer_states(state_with(optimizer, other).registry, {"optimizer": source.state_dict(), "model": {}})
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert_equal(tensors_of(other, optimizer)[4:], tensors_of(model, source)[4:])
