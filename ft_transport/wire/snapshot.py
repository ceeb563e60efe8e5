"""A `Snapshot`, the memory that contains its bytes, and functions that copy slices of memory.

``state`` makes snapshots, and ``http`` sends them. Slices are copied by numpy, as arrays, without a Python loop.
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
    """A safetensors file that is part of an anonymous memory file. Its bytes never change.

    Attributes:
        descriptor: File descriptor of the memory file.
        start: Position of the safetensors file in the memory file.
        data_start: Position of the tensor data in the memory file.
        data: The tensor data, as mapped memory.
    """

    descriptor: int
    start: int
    data_start: int
    data: memoryview

    @contextmanager
    def pin_data(self, start: int, end: int) -> Iterator[list[memoryview]]:
        """Yield bytes ``[start, end)`` of the data. Pinning has no effect here, because the bytes never change."""
        yield [self.data[start:end]]


class SharedFile(Protocol):
    """A safetensors file whose data is live memory of the trainer. The trainer copies the data before changing it."""

    def pin(self, start: int, end: int) -> AbstractContextManager[list[memoryview]]:
        """Returns a context that yields bytes ``[start, end)`` of the file, in order, with the values of the snapshot.

        The bytes do not change during the context, because the trainer waits for its end. So the caller must not wait
        for a receiver during the context.

        Raises:
            SnapshotError: The bytes are lost.
        """

    def pin_data(self, start: int, end: int) -> AbstractContextManager[list[memoryview]]:
        """Returns a context as `pin` does, for bytes ``[start, end)`` of the tensor data. Each tensor lies in one view.

        Raises:
            SnapshotError: The bytes are lost.
        """

    def encoded_digests(self) -> str:
        """Returns the digests of all chunks, encoded by ``wire.manifest.encode_digests``; computes missing digests.

        Raises:
            SnapshotError: Bytes of the data are lost.
        """


ServedMemory: TypeAlias = MemoryFile | SharedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A state at a committed step, as one safetensors file: a copy, or live memory that is copied before it changes.

    Attributes:
        step: The committed step.
        snapshot_id: Unique id of the snapshot.
        header: First bytes of the file: length prefix, JSON header, padding.
        memory: The memory with the file, valid until ``close`` is called.
        total_bytes: Length of the safetensors file.
        close: Frees the memory. Must be called exactly once, when no reader is left.
        digester: Computes the digests of the snapshot.
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
        memory: The memory from the first byte of the slice to the last.
        piece: The slice.
        into: The destination, which has the length of the slice.
    """
    source = _strided(memory, piece)
    np.copyto(_flat(into, source), source)


def gathered(data: memoryview, piece: Slice) -> memoryview:
    """Return the bytes of a slice: a view if they are contiguous, otherwise a copy.

    Args:
        data: The whole data.
        piece: The slice of the data.
    """
    if not piece.loops:
        return data[piece.start : piece.end]
    copied = memoryview(bytearray(piece.num_bytes))
    copy_out(data[piece.start : piece.end], piece, copied)
    return copied


def copy_in(data: memoryview, memory: memoryview, piece: Slice) -> None:
    """Copy contiguous ``data`` into a slice of ``memory``, which begins and ends with the slice."""
    target = _strided(memory, piece)
    np.copyto(target, _flat(data, target))


class Memory(Protocol):
    """Memory of a receiver for the data of one snapshot."""

    def buffers(self, start: int, end: int) -> Sequence[memoryview]:
        """Returns writable uint8 views that cover bytes ``[start, end)`` of the data, in order. Thread-safe."""


def put(data: memoryview, destination: Memory, piece: Slice) -> None:
    """Copy contiguous bytes into a slice of a receiver's memory.

    Args:
        data: The bytes of the slice.
        destination: The memory for the whole data.
        piece: The slice. A slice with loops must lie within one tensor.
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
    # numpy copies item by item, so use the widest items that divide all strides.
    step = math.gcd(piece.block_bytes, *(stride for _, stride in piece.loops))
    item_bytes, dtype = next(carrier for carrier in _CARRIERS if step % carrier[0] == 0)
    shape = (*(count for count, _ in piece.loops), piece.block_bytes // item_bytes)
    strides = (*(stride for _, stride in piece.loops), item_bytes)
    array: _Array = np.ndarray(shape, dtype, buffer=memory, strides=strides)
    return array


def _flat(data: memoryview, like: _Array) -> _Array:
    array: _Array = np.frombuffer(data, like.dtype).reshape(like.shape)
    return array
