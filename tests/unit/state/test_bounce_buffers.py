"""Copies to and from a device go through two buffers, none of which is used again before the device is done with it.

There is no device here: see ``stand_in_device``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stand_in_device import OnAnother, OnDevice, StandInAccelerator, StandInEvent, StandInStream

from ft_transport.state import bounce_buffers as module
from ft_transport.state.bounce_buffers import BitCopier, BounceBuffers, Pair
from ft_transport.state.copying import Marks, mark

HALF_BYTES = 4096
EMPTY: Any = torch.empty


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> BounceBuffers:
    def page_locked(num_bytes: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        made: torch.Tensor = EMPTY(num_bytes, dtype=dtype)
        return made

    monkeypatch.setattr(module.torch, "empty", page_locked)
    monkeypatch.setattr(module, "_LEAST_BYTES", HALF_BYTES)
    OnDevice.accelerator = StandInAccelerator()
    return BounceBuffers(OnDevice.accelerator, half_bytes=HALF_BYTES)  # type: ignore[arg-type]


def tensors(kind: type[torch.Tensor]) -> list[torch.Tensor]:
    """Of many sizes: below, at and above a buffer, and none."""
    sizes = [1, 3, 1000, HALF_BYTES // 4, 5000, 0, 17, *([100] * 50), 3 * HALF_BYTES // 4]
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).as_subclass(kind) for size in sizes]


def blank(sources: list[torch.Tensor], kind: type[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros(source.shape).as_subclass(kind) for source in sources]


def marks(*kinds: type[OnDevice]) -> Marks:
    return mark(OnDevice.accelerator, [kind.device for kind in kinds or (OnDevice,)])  # type: ignore[arg-type]


def are_equal(pairs: list[Pair]) -> bool:
    return all(torch.equal(*(each.as_subclass(torch.Tensor) for each in pair)) for pair in pairs)


@pytest.mark.parametrize("is_to_device", [True, False])
def test_tensors_of_all_sizes_arrive(buffers: BounceBuffers, is_to_device: bool) -> None:
    there, here = (OnDevice, torch.Tensor) if is_to_device else (torch.Tensor, OnDevice)
    sources = tensors(here)
    pairs = list(zip(blank(sources, there), sources, strict=True))
    (buffers.to_device if is_to_device else buffers.to_host)(pairs, marks())
    assert are_equal(pairs)
    assert OnDevice.accelerator.is_idle()


def test_copies_come_after_the_work_that_is_queued_and_not_after_later_work(buffers: BounceBuffers) -> None:
    training = OnDevice.accelerator.current_stream(OnDevice.device)
    target, source = torch.zeros(2000), torch.ones(2000)
    training.queue.append(lambda: target.fill_(7.0))
    after = marks()
    ran: list[bool] = []
    training.queue.append(lambda: ran.append(True))
    buffers.to_device([(target.as_subclass(OnDevice), source)], after)
    assert torch.equal(target, source)
    back = torch.zeros(2000)
    buffers.to_host([(back, target.as_subclass(OnDevice))], after)
    assert torch.equal(back, source)
    assert not ran


def test_a_copier_copies_in_the_order_of_the_calls_and_says_what_failed() -> None:
    OnDevice.accelerator = StandInAccelerator()
    copier = BitCopier([OnDevice.device, torch.device("cpu")], OnDevice.accelerator)  # type: ignore[arg-type]
    target = torch.zeros(100).as_subclass(OnDevice)
    copier.begin([(target, torch.ones(100))])
    copier.begin([(target, torch.full((100,), 2.0))])
    host = torch.zeros(3)
    copier.copy([(host, torch.ones(3))])
    assert target.as_subclass(torch.Tensor).tolist() == [2.0] * 100
    assert host.tolist() == [1.0] * 3
    copier.begin([(target, torch.ones(99))])
    with pytest.raises(RuntimeError, match="size"):
        copier.copy([])


def test_each_device_has_its_own_stream(buffers: BounceBuffers) -> None:
    sources = [*tensors(torch.Tensor), *tensors(torch.Tensor)]
    num = len(sources) // 2
    targets = [*blank(sources[:num], OnDevice), *blank(sources[num:], OnAnother)]
    mixed = [pair for pairs in zip(range(num), range(num, 2 * num), strict=True) for pair in pairs]
    pairs = [(targets[index], sources[index]) for index in mixed]
    buffers.to_device(pairs, marks(OnDevice, OnAnother))
    assert are_equal(pairs)
    assert set(OnDevice.accelerator.training) == {OnDevice.device, OnAnother.device}
    back = [(torch.zeros(target.shape), target) for target, _ in pairs]
    buffers.to_host(back, marks(OnDevice, OnAnother))
    assert are_equal(back)


def test_the_stand_in_shows_a_buffer_that_is_filled_too_early(
    buffers: BounceBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInEvent, "synchronize", lambda self: None)
    streams: list[StandInStream] = []
    new_stream = OnDevice.accelerator.new_stream
    monkeypatch.setattr(
        OnDevice.accelerator, "new_stream", lambda device: (streams.append(found := new_stream(device)), found)[1]
    )
    sources = tensors(torch.Tensor)
    pairs = list(zip(blank(sources, OnDevice), sources, strict=True))
    buffers.to_device(pairs, marks())
    for queued in streams[0].queue:
        queued()
    assert not are_equal(pairs)


@pytest.mark.parametrize("is_to_device", [True, False])
def test_after_an_error_nothing_is_under_way(buffers: BounceBuffers, is_to_device: bool) -> None:
    class Refusing(OnDevice):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_:
                raise RuntimeError("the device is gone")
            return super().__torch_function__(func, types, args, kwargs)

    on_device = [*tensors(OnDevice)[:5], torch.ones(7).as_subclass(Refusing)]
    on_host = blank(on_device, torch.Tensor)
    pairs = zip(on_device, on_host, strict=True) if is_to_device else zip(on_host, on_device, strict=True)
    with pytest.raises(RuntimeError, match="the device is gone"):
        (buffers.to_device if is_to_device else buffers.to_host)(list(pairs), marks())
    assert OnDevice.accelerator.is_idle()


def test_where_nothing_can_be_page_locked_all_is_copied_nevertheless(
    buffers: BounceBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*sizes: int, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        made: torch.Tensor = EMPTY(*sizes, **keywords)
        return made

    monkeypatch.setattr(module.torch, "empty", refuse)
    sources = tensors(torch.Tensor)
    pairs = list(zip(blank(sources, OnDevice), sources, strict=True))
    buffers.to_device(pairs, marks())
    assert are_equal(pairs)
