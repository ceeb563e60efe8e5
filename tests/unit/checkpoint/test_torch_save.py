"""Files of ``torch.save`` that are written without torch: torch loads them, bit for bit."""

from __future__ import annotations

import io
import math
import os
import pickletools
import zipfile
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from state_equality import exact, tensor_bytes

from ft_transport.checkpoint.torch_save import Name, envelope_of, pickled, saved
from ft_transport.errors import CheckpointError
from ft_transport.state.tensors import SAFETENSORS_NAMES, name_of

_SHAPES = [(), (1,), (5,), (0,), (3, 0, 2), (2, 3), (1, 1, 1, 1), (7, 1, 3)]
_OTHERS = ("complex32", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2")
_DTYPES = {name_of(dtype): dtype for dtype in SAFETENSORS_NAMES} | {name: getattr(torch, name) for name in _OTHERS}
_HUGE_BYTES = (1 << 32) + (1 << 20)


def saved_by_torch(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def names_in(file: bytes) -> list[object]:
    pickle = zipfile.ZipFile(io.BytesIO(file)).read("archive/data.pkl")
    return sorted(argument for opcode, argument, _ in pickletools.genops(pickle) if opcode.name == "GLOBAL")


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
def test_torch_loads_a_tensor(name: str, tmp_path: Path) -> None:
    for shape in _SHAPES:
        tensor = random_tensor(_DTYPES[name], shape)
        before, after = envelope_of(name, shape, tensor.nbytes)
        assert len(before) % 64 == 0
        file = before + tensor_bytes(tensor) + after
        path = tmp_path / "tensor"
        path.write_bytes(file)
        for loaded in (
            torch.load(io.BytesIO(file), weights_only=True),
            torch.load(io.BytesIO(file), weights_only=False),
            torch.load(path, mmap=True, weights_only=True),
        ):
            assert exact(loaded) == exact(tensor)
            assert loaded.stride() == tensor.stride()
        assert names_in(file) == names_in(saved_by_torch(tensor))


def test_torch_loads_a_tensor_of_more_than_4_gib(tmp_path: Path) -> None:
    before, after = envelope_of("uint8", (_HUGE_BYTES,), _HUGE_BYTES)
    path = tmp_path / "tensor"
    with path.open("wb") as file:
        file.write(before)
        file.seek(_HUGE_BYTES - 3, os.SEEK_CUR)  # leaves a hole
        file.write(b"end" + after)
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert len(loaded) == _HUGE_BYTES
    assert bytes(loaded[-4:].tolist()) == b"\0end"


@pytest.mark.parametrize(
    "value",
    [None, True, 1.5, -(1 << 70), "text", b"bytes", 1j, [1, (2, {3})], OrderedDict(a=1), deque([1], 2), np.float32(2)],
    ids=str,
)
def test_torch_loads_a_value(value: object) -> None:
    file = saved(value)
    loaded = torch.load(io.BytesIO(file), weights_only=False)
    assert type(loaded) is type(value)
    assert loaded == value
    assert names_in(file) == names_in(saved_by_torch(value))


def test_an_envelope_is_made_once() -> None:
    assert envelope_of("float32", (3, 4), 48) is envelope_of("float32", (3, 4), 48)
    assert envelope_of("float32", (4, 3), 48) != envelope_of("float32", (3, 4), 48)


def test_a_name_with_further_instructions_is_refused() -> None:
    """A forged manifest may call a dtype what it likes; DCP unpickles the metadata."""
    with pytest.raises(CheckpointError, match="expected the name of a class or function"):
        pickled((Name("torch", "float32\ncos\ngetcwd"),))
    with pytest.raises(CheckpointError, match="expected the name of a class or function"):
        envelope_of("float4\ncos\ngetcwd", (1,), 4)
