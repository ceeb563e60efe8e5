"""Tensors on a device are compared and digested through buffers, as if they were on the host.

There is no device here: see ``stand_in_device``.
"""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from stand_in_device import OnAnother, OnDevice, StandInAccelerator, StandInEvent
from state_tools import CHUNK_BYTES, file_of_state, manifest_of

from ft_transport.state import bounce_buffers
from ft_transport.state import comparison as module
from ft_transport.state.blocks import FlatState
from ft_transport.state.comparison import TensorDigests, find_differences
from ft_transport.state.flatten import flatten


def _flatten_on_device(state: object) -> FlatState:
    """As ``flatten`` does if each third tensor is on the host, and the others are on two devices."""
    flat = flatten(state)
    for number, source in enumerate(flat.blocks.sources):
        if number % 3:
            flat.blocks.sources[number] = source.as_subclass(OnDevice if number % 3 == 1 else OnAnother)
            addresses = flat.blocks.addresses.tolist()
            addresses[number] = 0
            flat.blocks.addresses[:] = array("q", addresses)
    return flat


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> StandInAccelerator:
    OnDevice.accelerator = StandInAccelerator()
    monkeypatch.setattr(OnDevice, "stream", None)
    monkeypatch.setattr(module, "flatten", _flatten_on_device)
    monkeypatch.setattr(module, "Accelerator", lambda: OnDevice.accelerator)
    # Buffers for two chunks, so that a state takes many.
    for each in (module, bounce_buffers):
        monkeypatch.setattr(each, "HALF_BYTES", 2 * CHUNK_BYTES)
    monkeypatch.setattr(bounce_buffers.BounceBuffers.__init__, "__kwdefaults__", {"half_bytes": 2 * CHUNK_BYTES})
    return OnDevice.accelerator


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    sizes = [1, 100, CHUNK_BYTES, 3 * CHUNK_BYTES, 17, 0, 5 * CHUNK_BYTES + 3, *([1000] * 40)]
    found: dict[str, Any] = {
        str(number): torch.randint(256, (size,), generator=generator, dtype=torch.uint8)
        for number, size in enumerate(sizes)
    }
    return {
        **found,
        "half": torch.randn(999, generator=generator).to(torch.bfloat16),
        "cut": torch.ones(50, 60)[:, ::2],
    }


def test_an_equal_state_has_no_differences(on_device: StandInAccelerator) -> None:
    assert find_differences(manifest_of(file_of_state(state())), state(), num_threads=2) == ()
    copies = [line for line in on_device.log if line.startswith("copy")]
    assert len(copies) > 10, "the tensors went through the buffers"


@pytest.mark.parametrize("name", ["1", "2", "3", "6", "46", "half", "cut"])
def test_a_changed_bit_is_found_wherever_it_is(on_device: StandInAccelerator, name: str) -> None:
    changed = state()
    changed[name][-1] += 1
    assert len(find_differences(manifest_of(file_of_state(state())), changed, num_threads=2)) == 1


def test_work_that_is_queued_before_counts(on_device: StandInAccelerator) -> None:
    own, right = state(), state()["1"]
    own["1"].zero_()
    on_device.current_stream(OnDevice.device).queue.append(lambda: own["1"].copy_(right))
    assert find_differences(manifest_of(file_of_state(state())), own, num_threads=2) == ()


def test_a_buffer_is_not_read_before_the_device_has_filled_it(
    on_device: StandInAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInEvent, "synchronize", lambda self: None)
    assert find_differences(manifest_of(file_of_state(state())), state(), num_threads=2), "the stand-in shows it"


def test_digests_are_those_of_the_host(on_device: StandInAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.zeros(10)
    on_device.current_stream(OnDevice.device).queue.append(lambda: parameter.fill_(2.0))
    digests = TensorDigests({"host": torch.ones(3), "device": parameter, **state()}, lambda _tensor: True).compute()
    # Where the device runs nothing, the host would digest zeros.
    assert parameter.tolist() == [2.0] * 10
    monkeypatch.setattr(module, "flatten", flatten)
    expected = TensorDigests({"host": torch.ones(3), "device": parameter, **state()}, lambda _tensor: True).compute()
    assert digests == expected
    assert len(digests) == 2 + len(state())
