"""What stands around a tensor's bytes in a data file: with it, ``torch.load`` finds the tensor, bit for bit."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from state_equality import exact, tensor_bytes

from ft_transport.checkpoint.dcp_format import envelope_of, saved
from ft_transport.state.tensors import SAFETENSORS_NAMES, name_of

_SHAPES = [(), (1,), (5,), (0,), (3, 0, 2), (2, 3), (1, 1, 1, 1), (7, 1, 3)]
_MIB = 1 << 20
_OTHERS = ("complex32", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_DTYPES = {name_of(dtype): dtype for dtype in SAFETENSORS_NAMES} | {name: getattr(torch, name) for name in _OTHERS}


@pytest.fixture(autouse=True)
def _checksums_as_they_were() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    content = (
        bytearray(os.urandom(num_bytes)) if dtype is not torch.bool else bytearray(b"\1\0" * num_bytes)[:num_bytes]
    )
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", sorted(_DTYPES))
def test_torch_loads_what_is_framed(name: str) -> None:
    for shape in _SHAPES:
        tensor = random_tensor(_DTYPES[name], shape)
        before, after = envelope_of(tensor.dtype, shape)
        assert len(before) % 64 == 0
        framed = before + tensor_bytes(tensor) + after
        assert len(framed) == len(before + after) + tensor.nbytes
        assert exact(torch.load(io.BytesIO(framed), weights_only=True)) == exact(tensor)
        # And so do programs that read torch's files in their own way.
        assert framed == saved(tensor)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        *(("float32", num_bytes) for num_bytes in (_MIB - 4, _MIB, _MIB + 4, 3 * _MIB)),
        *((name, _MIB) for name in ("bool", "bfloat16", "float8_e4m3fn", "complex64")),
    ],
)
def test_a_large_tensor_is_framed_as_a_small_one(name: str, num_bytes: int) -> None:
    """From a certain size on, another way leads there."""
    dtype = _DTYPES[name]
    tensor = random_tensor(dtype, (num_bytes // dtype.itemsize,))
    before, after = envelope_of(dtype, tuple(tensor.shape))
    framed = before + tensor_bytes(tensor) + after
    assert exact(torch.load(io.BytesIO(framed), weights_only=True)) == exact(tensor)
    assert framed == saved(tensor)


def _peak_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak cannot be read here")
def test_a_huge_tensor_is_framed_without_its_memory() -> None:
    envelope_of(torch.float32, (_MIB,))
    Path("/proc/self/clear_refs").write_text("5")  # The peak is what is used now.
    peak_bytes = _peak_bytes()
    before, after = envelope_of(torch.bfloat16, (1 << 16, 1 << 15))  # 4 GiB
    assert _peak_bytes() - peak_bytes < 64 * _MIB
    assert len(before + after) < 4096


def test_a_frame_is_made_once() -> None:
    assert envelope_of(torch.float32, (3, 4)) is envelope_of(torch.float32, (3, 4))
    assert envelope_of(torch.float32, (4, 3)) != envelope_of(torch.float32, (3, 4))
