"""Compares two stored states element by element, however each divides and orders its tensors."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from ft_transport.cli.contents import Box, UnreadableError, intersections, row_major
from ft_transport.cli.stored_state import StoredPiece, StoredTensor
from ft_transport.runtime.handler_safety import SafeExecutor

_BLOCK_BYTES: Final = 1 << 20
"""Number of bytes of each side that are read and compared at once."""

_SPAN_BYTES: Final = 8 << 20
"""The bytes that a thread compares at once."""
_NUM_THREADS: Final = 2
Counts: TypeAlias = tuple[int, int, float | None]
"""Elements that differ, bytes that differ, and the largest absolute difference: see ``compare.Tally``."""
_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_FLOATS: Final = {"float16": "f2", "float32": "f4", "float64": "f8"}
_UNITS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "u8"}


@dataclass(slots=True)
class Tally:
    """How two tensors of one dtype and shape differ.

    Attributes:
        num_items: That differ in any bit.
        num_bytes: That differ.
        largest: The largest absolute difference of two finite numbers; ``None`` where there are none, or it is not
            computed for the dtype.
    """

    num_items: int = 0
    num_bytes: int = 0
    largest: float | None = None

    def add(self, other: Tally) -> None:
        """Sums them up."""
        self.num_items += other.num_items
        self.num_bytes += other.num_bytes
        if other.largest is not None:
            self.largest = max(other.largest, self.largest or 0.0)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors of one dtype and shape to compare; ``ranges``: only these of their bytes, if both have one piece."""

    name: str
    one: StoredTensor
    other: StoredTensor
    ranges: Sequence[tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes that lie in one piece on both sides."""

    pair: Pair
    one: StoredPiece
    one_start: int
    other: StoredPiece
    other_start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Boxes:
    """The same box of the tensor on both sides, in pieces in which it is no run."""

    pair: Pair
    one: StoredPiece
    other: StoredPiece
    box: Box


def compare(pairs: Sequence[Pair]) -> dict[str, Tally]:
    """The differences between two states, by name.

    Raises:
        UnreadableError: A file became shorter meanwhile, or cannot be read.
    """
    spans, lock, found = _spans(pairs), threading.Lock(), dict[str, Tally]()

    def work() -> None:
        comparer = _Comparer()
        while True:
            with lock:
                span = next(spans, None)
            if span is None:
                return
            tally = comparer.compare(span)
            if tally.num_bytes:
                with lock:
                    found.setdefault(span.pair.name, Tally()).add(tally)

    with SafeExecutor(_NUM_THREADS, "ft-transport-compare") as pool:
        for done in [pool.submit(work) for _ in range(_NUM_THREADS)]:
            done.result()
    return found


class _Comparer:
    """Compares in one thread, with buffers of its own."""

    def __init__(self) -> None:
        buffers = [bytearray(_BLOCK_BYTES) for _ in range(2)]
        self._one, self._other = (memoryview(buffer) for buffer in buffers)
        # They keep the buffers where they are.
        self._in_place = [(ctypes.c_char * _BLOCK_BYTES).from_buffer(buffer) for buffer in buffers]
        self._compare = ctypes.CDLL(None).memcmp

    def compare(self, span: _Run | _Boxes) -> Tally:
        if isinstance(span, _Run):
            return self._runs(span)

        tally = Tally()
        for counts in compare_boxes(span.one, span.other, span.box, span.pair.one, block_bytes=_BLOCK_BYTES):
            tally.add(Tally(*counts))
        return tally

    def _runs(self, run: _Run) -> Tally:
        tally = Tally()
        one_file, other_file = run.one.file.descriptor, run.other.file.descriptor
        for at in range(0, run.num_bytes, _BLOCK_BYTES):
            num_bytes = min(_BLOCK_BYTES, run.num_bytes - at)
            one, other = self._one[:num_bytes], self._other[:num_bytes]
            _read(one_file, run.one_start + at, one)
            _read(other_file, run.other_start + at, other)
            # It holds no lock of the interpreter's meanwhile, and writes nothing.
            if self._compare(*self._in_place, ctypes.c_size_t(num_bytes)):
                tally.add(Tally(*compare_bytes(one, other, run.pair.one)))
        return tally


def _spans(pairs: Sequence[Pair]) -> Iterator[_Run | _Boxes]:
    for pair in pairs:
        ones, others = ([piece.box for piece in tensor.pieces] for tensor in (pair.one, pair.other))
        for number, other_number, box in intersections(ones, others):
            one, other = pair.one.pieces[number], pair.other.pieces[other_number]
            starts = [_start_of_run(piece, box, pair.one.item_bytes) for piece in (one, other)]
            if None in starts:
                yield _Boxes(pair, one, other, box)
                continue
            total = math.prod(box[1]) * pair.one.item_bytes
            for first, end in pair.ranges if pair.ranges is not None else [(0, total)]:
                for at in range(first, end, _SPAN_BYTES):
                    num_bytes = min(_SPAN_BYTES, end - at)
                    yield _Run(pair, one, (starts[0] or 0) + at, other, (starts[1] or 0) + at, num_bytes)


def _start_of_run(piece: StoredPiece, box: Box, item_bytes: int) -> int | None:
    """Where in the file a box of a piece begins, if all of it lies there in one run."""
    sizes = piece.box[1]
    if box[1][1:] != sizes[1:] or (piece.strides is not None and piece.strides != row_major(sizes)):
        return None
    before = (box[0][0] - piece.box[0][0]) * math.prod(sizes[1:]) if sizes else 0
    return piece.start + before * item_bytes


def _read(descriptor: int, start: int, into: memoryview) -> None:
    try:
        num_bytes = os.preadv(descriptor, [into], start)
    except OSError as error:
        raise UnreadableError(f"expected to read what is compared: {error}") from error
    if num_bytes != len(into):
        raise UnreadableError("expected files that do not change while they are compared, one became shorter")


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
