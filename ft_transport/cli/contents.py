"""Describes the tensors of a snapshot, file or checkpoint in a common form, and finds overlaps of tensors' parts."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from ft_transport.errors import TransportError

ITEM_BITS: Final = {
    "bool": 8, "uint8": 8, "int8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "complex32": 32, "complex64": 64, "complex128": 128,
    "float8_e4m3fn": 8, "float8_e4m3fnuz": 8, "float8_e5m2": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "float4_e2m1fn_x2": 8, "qint8": 8, "quint8": 8, "qint32": 32, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element, by dtype. Names are torch's, or safetensors' for dtypes that torch lacks."""
MAX_DIMENSIONS: Final = 64
"""Maximum number of dimensions of a tensor, as in torch."""


Form: TypeAlias = Literal["file", "files", "dcp"]
"""One safetensors file, a directory of safetensors files, or a directory of a DCP checkpoint."""
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""A rectangular part of a tensor: its first index and its shape."""
Read: TypeAlias = Callable[[int, int], bytes]
"""Reads bytes of a file, given a position and a length. Returns fewer bytes at the end of the file."""

_MAX_BOXES_EXAMINED: Final = 5_000_000
"""Maximum number of boxes that a search for overlaps examines, over all dimensions, to limit its time."""
_MAX_PAIRS: Final = 1_000_000


class UnreadableError(TransportError, ValueError):
    """A file cannot be read, or its content contradicts itself."""


class NotFoundError(UnreadableError):
    """A file or directory does not exist, or is of an unknown kind."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The position of stored bytes.

    Attributes:
        file: Name of the file in the directory of the checkpoint; empty if the state is a single file.
        start: Position of the first byte in the file.
        num_bytes: Number of stored bytes.
        is_raw: Whether the bytes are the elements of a tensor; otherwise they are the output of ``torch.save``.
        is_zstd: Whether DCP's ZStandard extension has compressed the bytes.
    """

    file: str
    start: int
    num_bytes: int
    is_raw: bool = True
    is_zstd: bool = False


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A box of a tensor: its first index, its shape, and where it is stored (``None`` if that is unknown)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: StoredPart | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """The description of one tensor in a file or checkpoint.

    Attributes:
        path: Name of the tensor.
        dtype: Name of the dtype, as in `ITEM_BITS`.
        shape: Shape of the whole tensor.
        num_bytes: Length of the whole tensor.
        num_parts: Number of boxes into which the tensor is divided.
        pieces: The boxes; empty if the caller did not request positions.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_parts: int = 1
    pieces: tuple[TensorPiece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The tensors and other values of a snapshot, file or checkpoint.

    Attributes:
        kind: Description of the source for people, such as "DCP checkpoint".
        form: The storage format.
        tensors: The tensors in storage order.
        values: Other stored values, by name, with their positions if the caller requested them.
        step: The committed step; ``None`` if unknown.
        data_start: Position of the first tensor in a single file.
        metadata: The metadata in the header of a single file.
        num_bytes_missing: Number of bytes that truncated safetensors files lack.
        troubles: Reasons why the safetensors library cannot open the files, and contradictions with their index.
        notes: Messages about files that were not examined.
    """

    kind: str
    form: Form = "dcp"
    tensors: tuple[TensorEntry, ...] = ()
    values: dict[str, StoredPart | None] = field(default_factory=dict)
    step: int | None = None
    data_start: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    num_bytes_missing: int = 0
    troubles: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Total length of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def find_gap(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Describe why boxes do not cover a tensor exactly once, such as a gap; return an empty text if they cover it.

    Time and memory depend on the number of boxes, not on their sizes.

    Args:
        shape: Shape of the tensor.
        boxes: The boxes in any order. Empty boxes are ignored.
    """
    filled = []
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"a part has {len(sizes)} dimensions, the tensor {len(shape)}"
        if any(offset + size > length for offset, size, length in zip(offsets, sizes, shape, strict=True)):
            return f"a part of {_shown(sizes)} at {_shown(offsets)} lies outside of {_shown(shape)}"
        if all(sizes):
            filled.append((offsets, sizes))
    num_there, num_items = sum(math.prod(sizes) for _, sizes in filled), math.prod(shape)
    if num_there < num_items:
        return f"its parts have {num_there} of {num_items} elements"
    return _find_overlap(filled) or ("" if num_there == num_items else "its parts have more elements than the tensor")


def _find_overlap(boxes: list[Box]) -> str:
    """Describe two boxes that overlap; return an empty text if none do. Finds them by dividing the space by planes."""
    groups, num_examined = [boxes] if len(boxes) > 1 else [], 0
    while groups:
        group = groups.pop()
        num_examined += len(group) * max(1, len(group[0][0]))
        if num_examined > _MAX_BOXES_EXAMINED:
            return f"its {len(boxes)} parts are too irregular to be checked for overlaps"
        divided = next(filter(None, (_divide(group, dim) for dim in range(len(group[0][0])))), None)
        if divided is not None:
            groups += [each for each in divided if len(each) > 1]
            continue
        # No plane divides these boxes, because they overlap or are arranged like a pinwheel.
        if len(group) ** 2 > _MAX_PAIRS:
            return f"its {len(boxes)} parts are too irregular to be checked for overlaps"
        for one, other in itertools.combinations(group, 2):
            if intersection(one, other) is not None:
                return f"its parts at {_shown(one[0])} and {_shown(other[0])} overlap"
    return ""


def _divide(group: list[Box], dim: int) -> list[list[Box]] | None:
    """Divide boxes along dimension ``dim`` by planes that cut no box; return ``None`` if no such plane exists."""
    divided: list[list[Box]] = []
    end = -1
    for box in sorted(group, key=lambda box: box[0][dim]):
        if box[0][dim] >= end:
            divided.append([])
        divided[-1].append(box)
        end = max(end, box[0][dim] + box[1][dim])
    return divided if len(divided) > 1 else None


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or ``None`` if it is empty."""
    offsets, sizes = [], []
    for first, length, second, width in zip(*one, *other, strict=True):
        start, end = max(first, second), min(first + length, second + width)
        if start >= end:
            return None
        offsets.append(start)
        sizes.append(end - start)
    return tuple(offsets), tuple(sizes)


def intersections(ones: Sequence[Box], others: Sequence[Box]) -> Iterator[tuple[int, int, Box]]:
    """Yield the intersections of the boxes of two divisions of a tensor.

    Args:
        ones: The boxes of the first division, which must cover the tensor.
        others: The boxes of the second division, which must cover the tensor.

    Yields:
        The index of a box in ``ones``, the index of a box in ``others``, and the intersection of both.
    """
    by_box = {box: number for number, box in enumerate(others)}
    left = []
    for number, box in enumerate(ones):
        if box in by_box:
            if all(box[1]):
                yield number, by_box.pop(box), box
        elif all(box[1]):
            left.append((number, box))
    rest = [(box, number) for box, number in by_box.items() if all(box[1])]
    if not left or not rest:
        return
    # Sort along the dimension with most different positions: few boxes overlap in it.
    dim = max(range(len(rest[0][0][0])), key=lambda dim: len({box[0][dim] for box, _ in rest}))
    rest.sort(key=lambda each: each[0][0][dim])
    starts = [box[0][dim] for box, _ in rest]
    longest = max(box[1][dim] for box, _ in rest)
    for number, box in left:
        start = box[0][dim]
        first, end = bisect_right(starts, start - longest), bisect_left(starts, start + box[1][dim])
        for other, other_number in rest[first:end]:
            common = intersection(box, other)
            if common is not None:
                yield number, other_number, common


def _shown(lengths: Sequence[int]) -> str:
    return "×".join(map(str, lengths)) or "·"


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major array, in elements."""
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= max(1, size)
    return tuple(reversed(strides))
