"""States of real training objects make the trip, and the fresh object that loads one goes on bit for bit."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from state_equality import exact
from state_tools import round_trip
from torch import nn
from torch.optim import lr_scheduler, swa_utils

_OPTIMIZERS = sorted(
    name
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)
    np.random.seed(11)
    random.seed(11)


def _model(name: str) -> nn.Module:
    if name == "SparseAdam":
        return nn.Embedding(10, 4, sparse=True)
    # Muon takes matrices only.
    return nn.Sequential(nn.Linear(4, 5, bias=name != "Muon"), nn.Tanh(), nn.Linear(5, 2, bias=name != "Muon"))


def _loss(model: nn.Module, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    if isinstance(model, nn.Embedding):
        return model(torch.randint(10, (3,), generator=generator)).square().sum()
    return model(torch.randn(6, 4, generator=generator)).square().mean()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model, number)
        loss.backward()
        return loss

    optimizer.step(closure)


def _optimizer(name: str, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    return optimizer


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in _OPTIMIZERS),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"capturable": False, "foreach": True}),
        ("Adam", {"fused": True}),
        ("RMSprop", {"momentum": 0.5, "centered": True}),
    ],
)
def test_every_optimizer_continues_as_if_nothing_had_happened(name: str, options: dict[str, Any]) -> None:
    model = _model(name)
    optimizer = _optimizer(name, model, **options)
    for number in range(2):
        _step(model, optimizer, number)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    received = round_trip(state)
    assert exact(received) == exact(state)

    fresh_model = _model(name)
    fresh_optimizer = _optimizer(name, fresh_model, **options)
    fresh_model.load_state_dict(received["model"])
    fresh_optimizer.load_state_dict(received["optimizer"])
    before = exact(model.state_dict())
    for number in range(2, 4):
        _step(model, optimizer, number)
        _step(fresh_model, fresh_optimizer, number)
    assert exact(model.state_dict()) != before
    assert exact(fresh_model.state_dict()) == exact(model.state_dict())
    assert exact(fresh_optimizer.state_dict()) == exact(optimizer.state_dict())


_SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 7, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=2, mode="triangular2"),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.7)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.7)], optimizer=o
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.02, anneal_epochs=4),
}


def test_no_scheduler_of_torch_is_forgotten() -> None:
    names = {
        name
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value) and issubclass(value, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert names - {"LRScheduler", "LRSchedulerBase"} <= set(_SCHEDULERS)


@pytest.mark.parametrize("name", sorted(_SCHEDULERS))
def test_every_scheduler_continues_as_if_nothing_had_happened(name: str) -> None:
    def step() -> None:
        for one_optimizer, one_scheduler in pairs:
            one_optimizer.step()
            one_scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))

    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.05, momentum=0.9)
        return optimizer, _SCHEDULERS[name](optimizer)

    pairs = [make()]
    optimizer, scheduler = pairs[0]
    step()
    step()
    state = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    if name == "SWALR" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("torch 2.9 has a function in the state of SWALR, which has no encoding")
    received = round_trip(state)
    assert exact(received) == exact(state)
    # What was sent is a copy: the sender's own steps do not reach the receiver.
    received = copy.deepcopy(received)
    pairs.append(make())
    pairs[1][0].load_state_dict(received["optimizer"])
    pairs[1][1].load_state_dict(received["scheduler"])
    step()
    step()
    assert exact(pairs[1][0].state_dict()) == exact(optimizer.state_dict())
    assert exact(pairs[1][1].state_dict()) == exact(scheduler.state_dict())
    assert scheduler.state_dict() != state["scheduler"] or name == "ChainedScheduler"


def test_random_number_generators_continue() -> None:
    generator = torch.Generator().manual_seed(3)
    numpy_generator = np.random.default_rng(5)
    torch.randn(3, generator=generator)
    random.gauss(0, 1)
    state = {
        "torch": torch.get_rng_state(),
        "generator": generator.get_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "numpy generator": numpy_generator.bit_generator.state,
    }
    received = round_trip(state)
    assert exact(received) == exact(state)

    def draw() -> object:
        return exact([torch.randn(3), torch.randn(3, generator=generator), random.gauss(0, 1), np.random.randn(2),
                      numpy_generator.normal(size=2)])  # fmt: skip

    expected = draw()
    assert draw() != expected
    torch.set_rng_state(received["torch"])
    generator.set_state(received["generator"])
    random.setstate(received["python"])
    np.random.set_state(received["numpy"])
    numpy_generator.bit_generator.state = received["numpy generator"]
    assert draw() == expected


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_continues_in_the_middle_of_an_epoch(num_workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return stateful.StatefulDataLoader(
            list(range(24)),
            batch_size=2,
            shuffle=True,
            num_workers=num_workers,
            generator=torch.Generator().manual_seed(4),
        )

    loader = make()
    batches = iter(loader)
    seen = [next(batches) for _ in range(3)]
    state = loader.state_dict()
    received = round_trip(state)
    assert exact(received) == exact(state)
    fresh = make()
    fresh.load_state_dict(received)
    rest, fresh_rest = list(batches), list(fresh)
    assert len(seen) + len(rest) == 12
    assert exact(fresh_rest) == exact(rest)
    assert exact(fresh.state_dict()) == exact(loader.state_dict())
