"""Facts about tensors: names of dtypes, layouts, bytes at an address, extents, and views of other tensors."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias, TypeGuard, cast

import numpy as np
import numpy.typing as npt
import torch

from ft_transport.wire import manifest

DTYPES_BY_NAME: Final[dict[str, torch.dtype]] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""Every dtype of the installed torch by its canonical name (``float32``, never ``float``)."""

SAFETENSORS_NAMES: Final = {
    DTYPES_BY_NAME[dtype]: name for dtype, name in manifest.SAFETENSORS_NAMES.items() if dtype in DTYPES_BY_NAME
}
"""As the table of ``wire.manifest``, by dtype."""

DTYPES_BY_SAFETENSORS_NAME: Final = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}

QUANTIZED: Final = {
    torch.qint8: torch.int8,
    torch.quint8: torch.uint8,
    torch.qint32: torch.int32,
}
"""The integer dtype that ``int_repr`` returns for each quantized dtype."""

WHOLE_BYTE_DTYPES_BY_NAME: Final = {
    name: dtype for name, dtype in DTYPES_BY_NAME.items() if not name.startswith(("qint", "quint"))
}
"""All dtypes except quantized ones, whose elements need a scale in addition to their bytes."""

_CARRIERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def name_of(dtype: torch.dtype) -> str:
    """Return the canonical name of a dtype, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def torch_name_of(safetensors_name: str) -> str:
    """Return torch's name of a safetensors dtype; the safetensors name of a dtype that no torch has."""
    return manifest.TORCH_NAMES.get(safetensors_name, safetensors_name)


def carrier_of(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype of the same item size that torch can copy bit for bit. Many small dtypes have no copy kernel."""
    return _CARRIERS[dtype.itemsize]


def overlaps_itself(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether two elements of a tensor may share memory, as in an expanded dimension."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return 0 not in shape
        reach += (size - 1) * step
    return False


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether the elements fill one block of memory without holes, in any order of the dimensions.

    Expanded dimensions (stride 0) count as one element. A receiver accepts only dense layouts: so a tensor never needs
    more memory than the bytes that were sent for it.
    """
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1 and step != 0):
        if step != expected:
            return False
        expected *= size
    return True


Column: TypeAlias = npt.NDArray[np.int64]

_WRITABLE: Final = 0x200  # PyBUF_WRITE in Include/cpython/object.h
_NOT_WRITABLE: Final = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) .-", re.MULTILINE)
_FIRST_ADDRESS: Final = 1  # not NULL
_from_memory: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_all_memory: Final[memoryview] = _from_memory(_FIRST_ADDRESS, sys.maxsize - _FIRST_ADDRESS, _WRITABLE)
"""Covers all addresses, whether mapped or not. Only slices of mapped memory may be read."""


def bytes_at(address: int, num_bytes: int) -> memoryview:
    """Return a writable view of the bytes at an address. The caller keeps the owner of the memory alive.

    A slice of one large view is six times as fast as a new view from the C function. A ctypes array would need a type
    for each length, which is slow to make and never freed.

    Raises:
        ValueError: ``address`` is NULL or negative, or the end is beyond the last address.
    """
    if not num_bytes:
        return memoryview(bytearray())
    at = address - _FIRST_ADDRESS
    view = _all_memory[at : at + num_bytes]
    if at < 0 or len(view) != num_bytes:
        raise ValueError(f"expected the address of a memory block of {num_bytes} bytes, got {address:#x}")
    return view


def read_only_positions(starts: Column, ends: Column) -> list[int]:
    """Return which memory ranges are read-only, as positions in the arguments. A write there would kill the process.

    Reads the list of mappings from ``/proc``, in half a millisecond. Returns no positions on systems without ``/proc``.

    Args:
        starts: The first address of each range.
        ends: The address after the last byte of each range.
    """
    try:
        mappings = Path("/proc/self/maps").read_bytes()
    except OSError:
        return []
    read_only = np.array(
        [[int(each, 16) for each in pair] for pair in _NOT_WRITABLE.findall(mappings)], dtype=np.uint64
    )
    if not len(read_only):
        return []
    # If any read-only mapping overlaps a range, so does the last one that begins before the end of the range.
    last = np.searchsorted(read_only[:, 0], ends.astype(np.uint64), side="left").astype(np.int64) - 1
    reaches_into = read_only[np.maximum(last, 0), 1] > starts.astype(np.uint64)
    return [int(each) for each in np.flatnonzero((last >= 0) & reaches_into)]


ViewKey: TypeAlias = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Address, dtype, shape and strides of a tensor."""
Base: TypeAlias = tuple[torch.Tensor, str]
"""A tensor of which other tensors are views, and its name in the tensor table."""


def view_key(tensor: torch.Tensor) -> ViewKey:
    """Return a key that is equal for two tensors exactly if they have the same elements in the same memory."""
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def has_own_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether the value is a strided tensor or parameter with memory; ``False`` for other tensor subclasses."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and not value.is_meta  # type: ignore[attr-defined]
        and not value.is_nested  # type: ignore[attr-defined]
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor still has its storage."""
    # Not by the address: `data_ptr` of a view of freed storage is the offset of the view, not 0.
    storage = tensor.untyped_storage()
    return storage.nbytes() >= tensor.storage_offset() * tensor.dtype.itemsize + tensor.nbytes


def is_lazy(value: object) -> bool:
    """Return whether the value is a tensor of a lazy module, which has no shape or memory before its first use."""
    return torch.nn.parameter.is_lazy(cast("torch.Tensor", value))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a row-major tensor as a one-dimensional uint8 tensor, which shares its memory."""
    # `view` refuses the strides that a tensor with a single element may have.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first element of a tensor to the end of its last element."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.dtype.itemsize


def find_views(
    names: Sequence[str], tensors: Sequence[torch.Tensor], addresses: Sequence[int], num_bytes: Sequence[int]
) -> dict[ViewKey, Base]:
    """Find the tensors that are views of another tensor in the list.

    Args:
        names: Name of each tensor.
        tensors: The tensors; no two have the same `view_key`.
        addresses: Address of each contiguous tensor; 0 if unknown.
        num_bytes: Number of bytes of each tensor's elements.

    Returns:
        The base of each view, by the `view_key` of the view. The base is a contiguous tensor of the same dtype and
        storage, in which the view lies.
    """
    starts = np.array(addresses, dtype=np.int64)
    ends = starts + np.asarray(num_bytes, dtype=np.int64)
    for index in np.flatnonzero(starts == 0).tolist():
        starts[index] = tensors[index].data_ptr()
        ends[index] = starts[index] + extent_bytes(tensors[index])
    order = np.lexsort((-ends, starts))
    # In the usual state no memory overlaps, which this detects without comparing pairs.
    if not (starts[order][1:] < np.maximum.accumulate(ends[order])[:-1]).any():
        return {}
    # Sort the row-major tensor first among those with the same range, so that it becomes their base.
    is_strided = np.fromiter((not tensor.is_contiguous() for tensor in tensors), dtype=np.bool_, count=len(tensors))
    order = np.lexsort((is_strided, -ends, starts))
    views: dict[ViewKey, Base] = {}
    base: torch.Tensor | None = None
    base_name = ""
    base_end = 0
    for index in order.tolist():
        source = tensors[index]
        end = int(ends[index])
        if base is not None and end <= base_end and end > int(starts[index]):
            offset_bytes = source.data_ptr() - base.data_ptr()
            if (
                source.dtype == base.dtype
                and source.device == base.device
                and source.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
                and offset_bytes % source.dtype.itemsize == 0
            ):
                views[view_key(source)] = (base, base_name)
        elif end > base_end and source.is_contiguous() and source.dtype in SAFETENSORS_NAMES:
            base, base_name, base_end = source, names[index], end
    return views
