"""Views slices of memory as arrays, so that numpy copies them without the interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from ft_transport.wire.slices import Slice

_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
_CARRIERS: Final[tuple[tuple[int, np.dtype[Any]], ...]] = tuple(
    (size, np.dtype(name)) for size, name in ((16, "c16"), (8, "u8"), (4, "u4"), (2, "u2"), (1, "u1"))
)


def copy_out(memory: memoryview, piece: Slice, into: memoryview) -> None:
    """Copy a slice into contiguous memory.

    Args:
        memory: The memory from the slice's start to its end.
        piece: The slice.
        into: Memory of the slice's length.
    """
    source = _strided(memory, piece)
    np.copyto(_flat(into, source), source)


def gathered(data: memoryview, piece: Slice) -> memoryview:
    """Return the bytes of a slice: a view if they are contiguous, otherwise a copy.

    Args:
        data: All data.
        piece: The slice in it.
    """
    if not piece.loops:
        return data[piece.start : piece.end]
    copied = memoryview(bytearray(piece.num_bytes))
    copy_out(data[piece.start : piece.end], piece, copied)
    return copied


def copy_in(data: memoryview, memory: memoryview, piece: Slice) -> None:
    """Write contiguous ``data`` to a slice."""
    target = _strided(memory, piece)
    np.copyto(target, _flat(data, target))


class Memory(Protocol):
    """The memory for one snapshot's data."""

    def buffers(self, start: int, end: int) -> Sequence[memoryview]:
        """Returns writable uint8 views that cover bytes ``[start, end)`` of the data, in order. For any thread."""


def put(data: memoryview, destination: Memory, piece: Slice) -> None:
    """Copy contiguous bytes to their slice of the destination.

    Args:
        data: The bytes.
        destination: The memory for the whole data.
        piece: The slice; with loops it is inside one tensor.
    """
    memories = destination.buffers(piece.start, piece.end)
    if piece.loops:
        (memory,) = memories
        copy_in(data, memory, piece)
        return
    position = 0
    for memory in memories:
        memory[:] = data[position : position + len(memory)]
        position += len(memory)


def _strided(memory: memoryview, piece: Slice) -> _Array:
    # The widest items that divide all strides: numpy copies item by item.
    step = math.gcd(piece.block_bytes, *(stride for _, stride in piece.loops))
    item_bytes, dtype = next(carrier for carrier in _CARRIERS if step % carrier[0] == 0)
    shape = (*(count for count, _ in piece.loops), piece.block_bytes // item_bytes)
    strides = (*(stride for _, stride in piece.loops), item_bytes)
    array: _Array = np.ndarray(shape, dtype, buffer=memory, strides=strides)
    return array


def _flat(data: memoryview, like: _Array) -> _Array:
    array: _Array = np.frombuffer(data, like.dtype).reshape(like.shape)
    return array
