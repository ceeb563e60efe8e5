"""What ``torch.save`` writes is found in it, and what is no such thing is said to be none, whatever it is."""

from __future__ import annotations

import io
import random

import pytest
import torch

from ft_transport.cli.contents import UnreadableError
from ft_transport.cli.saved_tensor import SavedTensor, locate_tensor


def saved(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def located(content: bytes, item_bytes: int) -> SavedTensor:
    return locate_tensor(lambda start, length: content[start : start + length], len(content), item_bytes)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(4, 6),
        torch.rand(4, 6).t(),
        torch.arange(10)[3:5],
        torch.ones((), dtype=torch.uint16),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.ones(3, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.rand(70_000, 3)),
        torch.empty(0, 3),
        torch.rand(2, 1, 3).expand(2, 5, 3),
    ],
)
def test_a_tensor_is_found(tensor: torch.Tensor) -> None:
    content = saved(tensor)
    found = located(content, tensor.element_size())
    assert (found.shape, found.strides) == (tuple(tensor.shape), tensor.stride())
    if tensor.numel():
        flat = torch.frombuffer(bytearray(content[found.start : found.end]), dtype=tensor.dtype)
        assert torch.equal(flat.as_strided(found.shape, found.strides), tensor.detach())


@pytest.mark.parametrize("value", [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2).to_sparse(), {"a": 1}])
def test_another_thing_is_none(value: torch.Tensor) -> None:
    with pytest.raises(UnreadableError):
        located(saved(value), 8)


def test_damage_is_said_and_does_nothing_else() -> None:
    content, draw = saved(torch.rand(8, 8)), random.Random(3)
    expected = located(content, 4)
    for _ in range(4000):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        cut = bytes(damaged[: draw.choice((len(damaged), draw.randrange(len(damaged))))])
        try:
            found = located(cut, 4)
        except UnreadableError:
            continue
        assert 0 <= found.start <= found.end <= len(cut)
        assert len(found.shape) == len(found.strides) == len(expected.shape)
