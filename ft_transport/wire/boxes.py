"""Boxes of tensors: overlaps of a sharded dimension with wanted indices, and pieces that fit into frames; pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.layouts import Intervals, intervals_of
from ft_transport.wire.slices import MAX_BLOCKS_PER_FRAME

Cut: TypeAlias = tuple[int, int]
"""``split_factor`` and number of parts of a mesh dimension that shards a tensor's dimension."""


class Box(NamedTuple):
    """A box that the receiver wants and some sources have. Tuples are by dimension.

    Attributes:
        holders: Positions in ``Wanted.sources``.
        held_shape: Shape of each holder's part.
        held_origin: First index of the box in a holder's part.
        origin: First index of the box in the receiver's part.
        counts: Shape of the box.
    """

    holders: tuple[int, ...]
    held_shape: tuple[int, ...]
    held_origin: tuple[int, ...]
    origin: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The overlap of one part of a sharded dimension with the wanted indices.

    Attributes:
        coordinate: The part's coordinate on the sharding mesh dimensions.
        length: Number of indices of the part.
        overlaps: Wanted position, held position, number of indices.
    """

    coordinate: tuple[int, ...]
    length: int
    overlaps: tuple[tuple[int, int, int], ...]


def overlapping_parts(size: int, cuts: tuple[Cut, ...], wanted: Intervals) -> Iterator[Part]:
    """Yield the parts of a dimension that may have a wanted index."""
    for coordinate in _candidates(size, cuts, wanted):
        held = intervals_of(size, tuple((*cut, part) for cut, part in zip(cuts, coordinate, strict=True)))
        yield Part(coordinate, sum(end - start for start, end in held), tuple(_overlaps(wanted, held)))


def _candidates(size: int, cuts: tuple[Cut, ...], wanted: Intervals) -> Iterable[tuple[int, ...]]:
    """Return parts that may have a wanted index; exact for plain shards."""
    if len(cuts) == 1 and cuts[0][0] == 1 and wanted:
        share = max(1, -(-size // cuts[0][1]))
        return ((part,) for part in range(wanted[0][0] // share, (wanted[-1][1] - 1) // share + 1))
    return itertools.product(*(range(num_parts) for _, num_parts in cuts))


def _overlaps(wanted: Intervals, held: Intervals) -> Iterator[tuple[int, int, int]]:
    """Yield overlaps of ascending intervals: position in ``wanted``, position in ``held``, number of indices."""
    first = second = 0
    wanted_before = held_before = 0
    while first < len(wanted) and second < len(held):
        wanted_start, wanted_end = wanted[first]
        held_start, held_end = held[second]
        start, end = max(wanted_start, held_start), min(wanted_end, held_end)
        if start < end:
            yield wanted_before + start - wanted_start, held_before + start - held_start, end - start
        if wanted_end <= held_end:
            wanted_before += wanted_end - wanted_start
            first += 1
        else:
            held_before += held_end - held_start
            second += 1


def in_pieces(box: Box, item_bytes: int) -> Iterable[Box]:
    """Cut the box into pieces that fit into a frame, and that several holders can share."""
    piece_bytes = CHUNK_BYTES if len(box.holders) == 1 else CHUNK_BYTES // 2
    # Short rows cost more than their bytes imply.
    piece_bytes = min(piece_bytes, block_items(box) * item_bytes * MAX_BLOCKS_PER_FRAME)
    if math.prod(box.counts) * item_bytes <= piece_bytes:
        return (box,)
    return _cut_to(box, item_bytes, piece_bytes)


def block_items(box: Box) -> int:
    """Return the number of contiguous elements of the box at a source with row-major memory."""
    num_items = 1
    for count, size in zip(reversed(box.counts), reversed(box.held_shape), strict=True):
        num_items *= count
        if count != size:
            break
    return num_items


def _cut_to(box: Box, item_bytes: int, piece_bytes: int) -> Iterator[Box]:
    """Cut along the first dimensions."""
    if math.prod(box.counts) * item_bytes <= piece_bytes:
        yield box
        return
    dim = next(dim for dim, count in enumerate(box.counts) if count > 1)
    inner_bytes = math.prod(box.counts[dim + 1 :]) * item_bytes
    step = max(1, piece_bytes // inner_bytes)
    for first in range(0, box.counts[dim], step):
        piece = box._replace(
            held_origin=_moved(box.held_origin, dim, first),
            origin=_moved(box.origin, dim, first),
            counts=(*box.counts[:dim], min(step, box.counts[dim] - first), *box.counts[dim + 1 :]),
        )
        yield from _cut_to(piece, item_bytes, piece_bytes)


def _moved(origin: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*origin[:dim], origin[dim] + by, *origin[dim + 1 :])
