"""Compares the tensors of two stored states element by element, even if the states divide a tensor differently."""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ft_transport.cli.contents import Box, UnreadableError, intersections, row_major
from ft_transport.cli.stored_state import StoredFile, StoredPiece, StoredTensor
from ft_transport.runtime.threads import SafeExecutor

if TYPE_CHECKING:
    import numpy as np

_BLOCK_BYTES: Final = 1 << 20
"""Number of bytes of each state that one system call reads."""
_SPAN_BYTES: Final = 8 << 20
"""Number of bytes that a thread compares before it asks for more work."""
_NUM_THREADS: Final = 2
_memcmp: Final = ctypes.CDLL(None).memcmp
_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_FLOATS: Final = {"float16": "f2", "float32": "f4", "float64": "f8"}
_UNITS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "u8"}


@dataclass(slots=True)
class Tally:
    """Counts the differences between two tensors of the same dtype and shape.

    Attributes:
        num_items: Number of elements that differ in any bit.
        num_bytes: Number of bytes that differ.
        largest: The largest absolute difference between two finite elements; ``None`` if no finite elements differ, or
            the dtype is not a float.
    """

    num_items: int = 0
    num_bytes: int = 0
    largest: float | None = None

    def add(self, other: Tally) -> None:
        """Add the counts for another part of the same tensors."""
        self.num_items += other.num_items
        self.num_bytes += other.num_bytes
        if other.largest is not None:
            self.largest = max(other.largest, self.largest or 0.0)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors of the same dtype and shape to compare.

    If ``ranges`` is given, only these byte ranges are compared; then each tensor must be stored in one piece.
    """

    name: str
    one: StoredTensor
    other: StoredTensor
    ranges: Sequence[tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    """A unit of work of a thread: a box that is inside one stored piece of each of the two tensors.

    Attributes:
        pair: The two tensors.
        one: The piece of the first tensor that contains the box.
        other: The piece of the second tensor that contains the box.
        box: The box. If ``starts`` is given, only a part of the box is compared.
        starts: Position of this part in each of the two files; ``None`` if the box is not contiguous in one of them.
        num_bytes: Length of this part.
    """

    pair: Pair
    one: StoredPiece
    other: StoredPiece
    box: Box
    starts: tuple[int, int] | None = None
    num_bytes: int = 0


def compare(pairs: Sequence[Pair]) -> dict[str, Tally]:
    """Compare pairs of tensors; return the counted differences of each pair that differs, by the name of the pair.

    Raises:
        UnreadableError: A file cannot be read, or became shorter during the comparison.
    """
    spans, lock, found = _spans(pairs), threading.Lock(), dict[str, Tally]()

    def work() -> None:
        buffers = bytearray(_BLOCK_BYTES), bytearray(_BLOCK_BYTES)
        while True:
            with lock:
                span = next(spans, None)
            if span is None:
                return
            tally = _compare_span(span, *buffers)
            if tally.num_bytes:
                with lock:
                    found.setdefault(span.pair.name, Tally()).add(tally)

    with SafeExecutor(_NUM_THREADS, "ft-transport-compare") as pool:
        for done in [pool.submit(work) for _ in range(_NUM_THREADS)]:
            done.result()
    return found


def _compare_span(span: _Span, buffer: bytearray, other_buffer: bytearray) -> Tally:
    """Compare a span. The buffers have the length of a block, and belong to the calling thread."""
    tally, tensor = Tally(), span.pair.one
    if span.starts is None:
        import numpy as np

        ones, others = (_array(piece, span.box, tensor.item_bytes) for piece in (span.one, span.other))
        for first, second in _blocks(ones, others):
            if not np.array_equal(first, second):
                flat, flat_other = (np.ascontiguousarray(each).reshape(-1) for each in (first, second))
                tally.add(_compare_bytes(flat, flat_other, tensor))
        return tally
    in_place = [(ctypes.c_char * _BLOCK_BYTES).from_buffer(each) for each in (buffer, other_buffer)]
    for at in range(0, span.num_bytes, _BLOCK_BYTES):
        num_bytes = min(_BLOCK_BYTES, span.num_bytes - at)
        one, other = memoryview(buffer)[:num_bytes], memoryview(other_buffer)[:num_bytes]
        _read(span.one.file, span.starts[0] + at, one)
        _read(span.other.file, span.starts[1] + at, other)
        # memcmp runs without the interpreter's lock.
        if _memcmp(*in_place, ctypes.c_size_t(num_bytes)):
            tally.add(_compare_bytes(one, other, tensor))
    return tally


def _spans(pairs: Sequence[Pair]) -> Iterator[_Span]:
    for pair in pairs:
        ones, others = ([piece.box for piece in tensor.pieces] for tensor in (pair.one, pair.other))
        for number, other_number, box in intersections(ones, others):
            span = _Span(pair, pair.one.pieces[number], pair.other.pieces[other_number], box)
            start = _start_of_run(span.one, box, pair.one.item_bytes)
            other_start = _start_of_run(span.other, box, pair.one.item_bytes)
            if start is None or other_start is None:
                yield span
                continue
            total = math.prod(box[1]) * pair.one.item_bytes
            for first, end in pair.ranges if pair.ranges is not None else [(0, total)]:
                for at in range(first, end, _SPAN_BYTES):
                    num_bytes = min(_SPAN_BYTES, end - at)
                    yield replace(span, starts=(start + at, other_start + at), num_bytes=num_bytes)


def _start_of_run(piece: StoredPiece, box: Box, item_bytes: int) -> int | None:
    """Return the position in the file at which a box of a piece begins; ``None`` if the box is not contiguous there."""
    sizes = piece.box[1]
    if box[1][1:] != sizes[1:] or (piece.strides is not None and piece.strides != row_major(sizes)):
        return None
    before = (box[0][0] - piece.box[0][0]) * math.prod(sizes[1:]) if sizes else 0
    return piece.start + before * item_bytes


def _read(file: StoredFile, start: int, into: memoryview) -> None:
    try:
        num_bytes = os.preadv(file.descriptor, [into], start)
    except OSError as error:
        raise UnreadableError(f"cannot read a file that is compared: {error}") from error
    if num_bytes != len(into):
        raise UnreadableError(
            "a file became shorter during the comparison; compare again when no process writes to the files"
        )


def _compare_bytes(one: memoryview | _Array, other: memoryview | _Array, tensor: StoredTensor) -> Tally:
    """Count the differences between two byte strings that consist of whole elements of a tensor."""
    import numpy as np

    ones, others = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
    num_bytes = int(np.count_nonzero(ones != others))
    unit = min(8, tensor.item_bytes)
    differs = (ones.view(f"u{unit}") != others.view(f"u{unit}")).reshape(-1, tensor.item_bytes // unit).any(axis=1)
    return Tally(int(np.count_nonzero(differs)), num_bytes, _largest(ones, others, tensor.dtype, differs))


def _array(piece: StoredPiece, box: Box, item_bytes: int) -> _Array:
    import numpy as np

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


def _blocks(one: _Array, other: _Array) -> Iterator[tuple[_Array, _Array]]:
    """Divide both arrays into corresponding blocks of at most 1 MiB, by halving the first dimension longer than 1."""
    if one.nbytes <= _BLOCK_BYTES:
        yield one, other
        return
    dim = next(dim for dim, size in enumerate(one.shape) if size > 1)
    middle = one.shape[dim] // 2
    for half in (slice(None, middle), slice(middle, None)):
        where = (*(slice(None) for _ in range(dim)), half)
        yield from _blocks(one[where], other[where])


def _largest(one: _Array, other: _Array, dtype: str, differs: _Array) -> float | None:
    import numpy as np

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
