"""One notion of equality for states: exact types, exact order, exact bits."""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor


def exact(value: Any) -> object:
    """A value that equals that of another state only if both have the same types, order and bits throughout.

    Of a tensor, the strides count too where a dimension has more than one element; of a DTensor, mesh and placements.
    """
    kind = type(value)
    match value:
        case DTensor():
            place = (value.device_mesh.mesh.tolist(), value.device_mesh.mesh_dim_names, value.placements)
            whole = (tuple(value.shape), value.stride(), value.requires_grad, isinstance(value, torch.nn.Parameter))
            return (kind, place, whole, exact(value.to_local().detach()))
        case torch.Tensor():
            dense = value if value.is_quantized else value.detach().resolve_conj().resolve_neg()
            strides = _strides(tuple(value.shape), dense.stride())
            numbers = (value.q_scale(), value.q_zero_point()) if value.is_quantized else ()
            return (
                kind, value.dtype, tuple(value.shape), strides, value.requires_grad, numbers, tensor_bytes(value)
            )  # fmt: skip
        case np.ndarray() | np.generic():
            return (kind, value.dtype.str, value.shape, value.tobytes())
        case bool() | int() | str() | bytes() | bytearray() | None:
            return (kind, value)
        case float():
            return (kind, struct.pack(">d", value))
        case complex():
            return (kind, struct.pack(">dd", value.real, value.imag))
        case set() | frozenset():
            return (kind, len(value), frozenset(exact(item) for item in value))
        case Mapping():
            factory = value.default_factory if isinstance(value, defaultdict) else None
            return (kind, factory, tuple((exact(key), exact(item)) for key, item in value.items()))
        case deque():
            return (kind, value.maxlen, tuple(exact(item) for item in value))
        case tuple() | list():
            return (kind, tuple(exact(item) for item in value))
        case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
            return (kind, value)
    raise AssertionError(f"no notion of equality for {kind}")


def _strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The strides that count: those between elements, if they leave no holes, or else the row-major ones."""
    if 0 in shape:
        return []
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step:
            if step != expected:
                return _strides(shape, torch.empty(shape, device="meta").stride())
            expected *= size
    return [step for step, size in zip(stride, shape, strict=True) if size > 1]


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, bit for bit."""
    tensor = tensor.detach().cpu()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.numel():
        return b""
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return tensor.view(carriers[tensor.dtype.itemsize]).numpy().tobytes()
