"""The contents of a snapshot, a file or a checkpoint in one form, and the boxes of tensors that its parts are."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from ft_transport.errors import TransportError

ITEM_BITS: Final = {
    "bool": 8, "uint8": 8, "int8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64,
    "float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "complex32": 32, "complex64": 64, "complex128": 128,
    "float8_e4m3fn": 8, "float8_e4m3fnuz": 8, "float8_e5m2": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "float4_e2m1fn_x2": 8, "qint8": 8, "quint8": 8, "qint32": 32, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element by dtype: torch's names, and safetensors' names of dtypes that torch lacks."""
MAX_DIMENSIONS: Final = 64
"""The limit of torch's own tensors."""


Form: TypeAlias = Literal["file", "files", "dcp"]
"""One safetensors file, a directory of them, or a directory of DCP's."""
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and shape."""

_MOST_LOOKS: Final = 5_000_000
"""Limit of examinations of boxes; parts of ten thousand ranks need a few each."""
_MOST_PAIRS: Final = 1_000_000


class UnreadableError(TransportError, ValueError):
    """The named file is unreadable, or contradicts itself."""


class NotFoundError(UnreadableError):
    """No such file or directory, or one of an unknown kind."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A stored part: a file beside the metadata (empty: the file itself), position, and length.

    ``is_raw`` means that the bytes are the data themselves, not ``torch.save``'s form. ``is_zstd`` means that DCP's
    extension has compressed them.
    """

    file: str
    start: int
    num_bytes: int
    is_raw: bool = True
    is_zstd: bool = False


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A box of a tensor: first index, shape, and its stored part, if any."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: StoredPart | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor.

    Attributes:
        path: Its name.
        dtype: torch's name without ``torch.``.
        shape: Shape of the whole tensor.
        num_bytes: Length of the whole tensor.
        num_parts: Number of stored parts.
        pieces: The parts, if requested.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    num_parts: int = 1
    pieces: tuple[TensorPiece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All contents.

    Attributes:
        kind: The kind in words.
        form: The storage format.
        tensors: The tensors in storage order.
        values: Names of other stored values, with their parts if requested.
        step: The committed step; ``None`` if unknown.
        data_start: Position of the data in a single file.
        metadata: The file's own metadata by name.
        num_bytes_missing: Number of bytes missing at the ends of its safetensors files.
        troubles: Reasons why the library cannot open its safetensors files, or contradictions with their index.
        notes: Parts that were not examined.
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
    """Describe gaps and overlaps of boxes that should cover a tensor; empty if there are none.

    Time and memory are proportional to the number of boxes, not to their sizes.

    Args:
        shape: Shape of the tensor.
        boxes: The boxes in any order; empty ones do not count.
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
    return _find_overlap(filled) or ("" if num_there == num_items else "its parts have more elements than it")


def _find_overlap(boxes: list[Box]) -> str:
    """Divide the boxes by planes, repeatedly, until every box is alone."""
    groups, num_looks = [boxes] if len(boxes) > 1 else [], 0
    while groups:
        group = groups.pop()
        num_looks += len(group) * max(1, len(group[0][0]))
        if num_looks > _MOST_LOOKS:
            return f"its {len(boxes)} parts lie too irregularly to be looked at"
        divided = next(filter(None, (_divide(group, dim) for dim in range(len(group[0][0])))), None)
        if divided is not None:
            groups += [each for each in divided if len(each) > 1]
            continue
        # No plane divides these boxes: a pinwheel, for example, or two that overlap.
        if len(group) ** 2 > _MOST_PAIRS:
            return f"its {len(boxes)} parts lie too irregularly to be looked at"
        for one, other in itertools.combinations(group, 2):
            if intersection(one, other) is not None:
                return f"its parts at {_shown(one[0])} and {_shown(other[0])} lie over each other"
    return ""


def _divide(group: list[Box], dim: int) -> list[list[Box]] | None:
    """Return the groups between planes that cut no box; ``None`` without such a plane."""
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
    """Yield intersections of the boxes of two divisions of a tensor, with the boxes' numbers.

    Both divisions have no gaps.
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
    # Sorted along the dimension of the division, few boxes overlap; along others all do.
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
