"""The part of a comparison that needs numpy: tensors stored in two layouts, and the size of a difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeAlias

import numpy as np

from ft_transport.cli.coverage import Box, row_major
from ft_transport.cli.stored_state import StoredPiece, StoredTensor

Counts: TypeAlias = tuple[int, int, float | None]
"""Elements that differ, bytes that differ, and the largest absolute difference: see ``compare.Tally``."""
_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_FLOATS: Final = {"float16": "f2", "float32": "f4", "float64": "f8"}
_UNITS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "u8"}


def compare_boxes(
    one: StoredPiece, other: StoredPiece, box: Box, tensor: StoredTensor, *, block_bytes: int
) -> Iterator[Counts]:
    """Compares a box of a tensor that two pieces have, wherever in them it lies, block by block."""
    ones, others = (_array(piece, box, tensor.item_bytes) for piece in (one, other))
    for first, second in _blocks(ones, others, block_bytes):
        if not np.array_equal(first, second):
            yield compare_bytes(_flat(first), _flat(second), tensor)


def compare_bytes(one: memoryview | _Array, other: memoryview | _Array, tensor: StoredTensor) -> Counts:
    """Compares two runs of bytes of a tensor, which begin and end with an element."""
    ones, others = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
    num_bytes = int(np.count_nonzero(ones != others))
    unit = min(8, tensor.item_bytes)
    differs = (ones.view(f"u{unit}") != others.view(f"u{unit}")).reshape(-1, tensor.item_bytes // unit).any(axis=1)
    return int(np.count_nonzero(differs)), num_bytes, _largest(ones, others, tensor.dtype, differs)


def _array(piece: StoredPiece, box: Box, item_bytes: int) -> _Array:
    unit = np.dtype(_UNITS[item_bytes])
    strides = piece.strides if piece.strides is not None else row_major(piece.box[1])
    inner = (item_bytes // unit.itemsize,)
    whole: _Array = np.ndarray(
        (*piece.box[1], *inner),
        unit,
        buffer=piece.file.mapped,
        offset=piece.start,
        strides=(*(stride * item_bytes for stride in strides), unit.itemsize),
    )
    return whole[
        tuple(
            slice(start - first, start - first + size)
            for start, first, size in zip(box[0], piece.box[0], box[1], strict=True)
        )
    ]


def _blocks(one: _Array, other: _Array, block_bytes: int) -> Iterator[tuple[_Array, _Array]]:
    """Halves of halves along the first dimension that can be halved, until they are small."""
    if one.nbytes <= block_bytes:
        yield one, other
        return
    dim = next(dim for dim, size in enumerate(one.shape) if size > 1)
    middle = one.shape[dim] // 2
    for half in (slice(None, middle), slice(middle, None)):
        where = (*(slice(None) for _ in range(dim)), half)
        yield from _blocks(one[where], other[where], block_bytes)


def _flat(array: _Array) -> _Array:
    flat: _Array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat


def _largest(one: _Array, other: _Array, dtype: str, differs: _Array) -> float | None:
    if dtype == "bfloat16":
        ones, others = ((each.view("u2")[differs].astype("u4") << 16).view("f4") for each in (one, other))
    elif dtype in _FLOATS:
        ones, others = (each.view(_FLOATS[dtype])[differs] for each in (one, other))
    else:
        return None
    with np.errstate(all="ignore"):
        away = np.abs(ones.astype("f8") - others.astype("f8"))
    finite = away[np.isfinite(away)]
    return float(finite.max()) if finite.size else None
