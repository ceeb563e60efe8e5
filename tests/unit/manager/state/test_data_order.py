"""The global random generators as one registered state."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from manager import RandomState


def _draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(())), float(np.random.randn())]


def test_the_same_numbers_come_again() -> None:
    np.random.randn()  # leaves a second number of the pair in the generator
    state = RandomState().state_dict()
    expected = [_draw() for _ in range(3)]
    RandomState().load_state_dict(state)
    assert [_draw() for _ in range(3)] == expected


def test_the_state_is_a_copy_that_later_numbers_do_not_change() -> None:
    state = RandomState().state_dict()
    first = _draw()
    for _ in range(1000):  # more than the generators hold ready
        _draw()
    RandomState().load_state_dict(state)
    assert _draw() == first


def test_generators_that_the_state_lacks_go_on_by_themselves() -> None:
    state = RandomState().state_dict()
    numbers = [_draw() for _ in range(2)]
    RandomState().load_state_dict(state)
    _draw()
    del state["numpy"]
    RandomState().load_state_dict(state)
    again = _draw()
    assert (again[0], again[2]) == (numbers[0][0], numbers[0][2])
    assert again[1] == numbers[1][1]


@pytest.mark.parametrize("num_devices", [2, 1])
def test_devices_are_set_if_there_are_as_many(monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
    seeds = [torch.full((4,), device, dtype=torch.uint8) for device in range(2)]
    was_set: list[list[torch.Tensor]] = []
    # torch.cuda is replaced here: this machine has no such devices.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: seeds)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", was_set.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    state = RandomState().state_dict()
    first = _draw()
    RandomState().load_state_dict(state)
    assert was_set == ([seeds] if num_devices == 2 else [])
    assert _draw() == first
