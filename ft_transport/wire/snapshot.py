"""A snapshot and the location of its bytes, at its source and at a receiver; ``state`` makes it, ``http`` sends it.

Slices of memory are viewed as arrays, so that numpy copies them without the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from ft_transport.wire.chunks import PLAIN, Digester
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.slices import Slice


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """A safetensors file inside a memory file, from position ``start`` on, which never changes.

    Attributes:
        descriptor: Descriptor of the memory file.
        start: Where the safetensors file begins.
        data_start: Where its data begins.
        data: The data, mapped.
    """

    descriptor: int
    start: int
    data_start: int
    data: memoryview

    @contextmanager
    def pin_data(self, start: int, end: int) -> Iterator[list[memoryview]]:
        """Yield bytes ``[start, end)`` of the data; they never change, so no thread waits for the pin."""
        yield [self.data[start:end]]


class SharedFile(Protocol):
    """A safetensors file whose data is live memory, which its owner materializes before changing it."""

    def pin(self, start: int, end: int) -> AbstractContextManager[list[memoryview]]:
        """Returns bytes ``[start, end)`` of the file, in order, as they are at the snapshot's step.

        They do not change while they are pinned, because the owner waits: do not wait for a receiver inside.

        Raises:
            SnapshotError: They are lost.
        """

    def pin_data(self, start: int, end: int) -> AbstractContextManager[list[memoryview]]:
        """Returns bytes ``[start, end)`` of the data, in order, pinned as by `pin`. A tensor lies within one view.

        Raises:
            SnapshotError: They are lost.
        """

    def encoded_digests(self) -> str:
        """Returns the digests of all chunks (``wire.manifest.encode_digests``); computes missing ones.

        Raises:
            SnapshotError: The data is lost.
        """


ServedMemory: TypeAlias = MemoryFile | SharedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A state at a step, as one safetensors file; a copy, or live memory that is copied before it changes.

    Attributes:
        step: The committed step of the state.
        snapshot_id: Unique id.
        header: The file's first bytes: length prefix, JSON header, padding.
        memory: The memory until `close`: a memory file, or partly live memory that is shared.
        total_bytes: Length of the safetensors file.
        close: Gives the memory back. Called exactly once, when no reader is left.
        digester: Makes its digests.
    """

    step: int
    snapshot_id: SnapshotId
    header: bytes
    memory: ServedMemory
    total_bytes: int
    close: Callable[[], None]
    digester: Digester = PLAIN


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
