"""Layouts, which divide a global tensor among a mesh of processes, and the part of the tensor that each process has.

The rules are those of ``torch.distributed.tensor`` (``placement_types.py``, ``_utils.py`` of torch 2.13). Placements
apply from the first mesh dimension to the last, each to the result of the previous placements. A plain shard is divided
as by ``torch.chunk``. A strided shard is first divided into ``split_factor`` pieces, and each piece is then divided
among the processes. Sharding of one tensor dimension does not affect the other dimensions, so the part of a process is
a product of intervals.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct

from ft_transport.errors import ManifestError
from ft_transport.wire.nodes import MAX_TENSOR_RANK, Count, Dimensions

MAX_INTERVALS: Final = 1 << 12
"""Maximum number of pieces of a strided shard in one dimension: a peer's ``split_factor`` must not fill memory."""

MAX_GLOBAL_ITEMS: Final = 2**56
"""Maximum number of elements of a tensor, so that torch can compute its bytes in 64 bits."""

Interval: TypeAlias = tuple[int, int]
"""Global indices ``[start, end)`` along one dimension."""
Intervals: TypeAlias = tuple[Interval, ...]
"""Ascending, disjoint intervals along one dimension, in the order of the local tensor."""
Region: TypeAlias = tuple[Intervals, ...]
"""A part of a global tensor: intervals for each dimension. The part is the product of these intervals."""
Cut: TypeAlias = tuple[int, int]
"""How one mesh dimension shards a tensor dimension: ``split_factor`` and number of parts."""


class Placement(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor's placement on one mesh dimension.

    ``dim`` is the sharded tensor dimension, for both kinds of shards. Only a strided shard has a ``split_factor``.
    """

    kind: Literal["shard", "replicate", "strided_shard"]
    dim: Annotated[int, Meta(ge=0, lt=MAX_TENSOR_RANK)] = 0
    split_factor: Count = 0


class Mesh(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A device mesh of the sender, and the sender's coordinate in the mesh.

    ``ranks`` has the sender's global ranks in row-major order of ``shape``. Receivers use these numbers only to
    distinguish meshes, and create no process group from them. ``coordinate`` is ``None`` if the sender is outside the
    mesh.
    """

    device_type: str
    shape: Dimensions
    ranks: tuple[Count, ...]
    dim_names: tuple[str, ...] | None
    coordinate: Dimensions | None


class Layout(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The layout of a DTensor. ``mesh`` is an index into the manifest's meshes.

    ``local_offset`` is the first global index of the local shard. It follows from the other fields, and serves
    readers that do not compute it.
    """

    mesh: Count
    placements: tuple[Placement, ...]
    global_shape: Dimensions
    global_stride: Dimensions
    local_offset: Dimensions


@dataclass(slots=True)
class LayoutTable:
    """Collects the distinct meshes and layouts of a state for its manifest.

    Attributes:
        meshes: The distinct meshes.
        layouts: The distinct layouts, which refer to meshes by index.
    """

    meshes: list[Mesh] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    _mesh_indices: dict[Mesh, int] = field(default_factory=dict)
    _indices: dict[Layout, int] = field(default_factory=dict)

    def add(
        self,
        mesh: Mesh,
        placements: Sequence[Placement],
        *,
        global_shape: Sequence[int],
        global_stride: Sequence[int],
    ) -> int:
        """Add a layout if it is new, and return its index.

        Args:
            mesh: The mesh.
            placements: One placement for each mesh dimension.
            global_shape: Shape of the whole tensor.
            global_stride: Strides of the whole tensor, in elements.
        """
        index = self._mesh_indices.setdefault(mesh, len(self.meshes))
        if index == len(self.meshes):
            self.meshes.append(mesh)
        at = tuple(placements)
        shape = tuple(global_shape)
        region = region_of(mesh, at, shape) or ((),) * len(shape)
        local_offset = tuple(intervals[0][0] if intervals else 0 for intervals in region)
        layout = Layout(index, at, shape, tuple(global_stride), local_offset)
        position = self._indices.setdefault(layout, len(self.layouts))
        if position == len(self.layouts):
            self.layouts.append(layout)
        return position


def check(meshes: Sequence[Mesh], layouts: Iterable[Layout], *, peer: str | None) -> None:
    """Check that meshes and layouts received from a peer are consistent.

    Args:
        meshes: The received meshes.
        layouts: The received layouts.
        peer: Name of the sender, for errors.

    Raises:
        ManifestError: A mesh or a layout is inconsistent.
    """
    for mesh in meshes:
        num_dims = len(mesh.shape)
        at = mesh.coordinate
        if not (
            0 < math.prod(mesh.shape) == len(mesh.ranks)
            and max(mesh.ranks) < 2**31
            and _are_distinct(mesh.ranks)
            and (mesh.dim_names is None or len(set(mesh.dim_names)) == len(mesh.dim_names) == num_dims)
            and (at is None or (len(at) == num_dims and all(map(int.__lt__, at, mesh.shape))))
        ):
            raise ManifestError(
                f"expected a mesh of distinct ranks, and a coordinate inside it, got {_shown(mesh)}", peer=peer
            )
    for layout in layouts:
        if layout.mesh >= len(meshes):
            raise ManifestError(f"expected an index into {len(meshes)} meshes, got {layout.mesh}", peer=peer)
        num_dims = len(layout.global_shape)
        if not (
            len(layout.placements) == len(meshes[layout.mesh].shape)
            and num_dims == len(layout.global_stride) == len(layout.local_offset)
        ):
            raise ManifestError(
                "expected one placement for each mesh dimension, and shape, strides and offset of equal length, got "
                f"{_shown(layout)}",
                peer=peer,
            )
        if math.prod(size for size in layout.global_shape if size) > MAX_GLOBAL_ITEMS:
            raise ManifestError(
                f"expected a shape of at most {MAX_GLOBAL_ITEMS} elements, got {list(layout.global_shape)}", peer=peer
            )
        for placement in layout.placements:
            if placement.kind != "replicate" and placement.dim >= num_dims:
                raise ManifestError(
                    f"expected a placement that shards one of {num_dims} tensor dimensions, got {placement}", peer=peer
                )
            if placement.kind == "strided_shard" and placement.split_factor < 1:
                raise ManifestError(f"expected a split_factor of at least 1, got {placement}", peer=peer)


def region_of(mesh: Mesh, placements: Sequence[Placement], global_shape: Sequence[int]) -> Region | None:
    """Return the part of a tensor that the process at ``mesh.coordinate`` has.

    Args:
        mesh: The mesh.
        placements: One placement for each mesh dimension.
        global_shape: Shape of the whole tensor.

    Returns:
        The part; ``None`` for a process outside the mesh.

    Raises:
        ManifestError: A strided shard has more than `MAX_INTERVALS` pieces.
    """
    at = mesh.coordinate
    if at is None:
        return None
    return tuple(
        intervals_of(
            size,
            tuple(
                (placement.split_factor if placement.kind == "strided_shard" else 1, num_parts, part)
                for placement, num_parts, part in zip(placements, mesh.shape, at, strict=True)
                if placement.kind != "replicate" and placement.dim == dim
            ),
        )
        for dim, size in enumerate(global_shape)
    )


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of the local tensor that consists of the elements of a region."""
    return tuple(sum(end - start for start, end in intervals) for intervals in region)


def intervals_of(size: int, cuts: tuple[tuple[int, int, int], ...]) -> Intervals:
    """Return the intervals of one tensor dimension that a process has after successive cuts.

    Args:
        size: Length of the tensor dimension.
        cuts: For each mesh dimension that shards the tensor dimension, in order: ``split_factor``, number of parts, and
            index of the process's part.

    Raises:
        ManifestError: More than `MAX_INTERVALS` pieces would result.
    """
    intervals: Intervals = ((0, size),) if size else ()
    for split_factor, num_parts, part in cuts:
        length = sum(end - start for start, end in intervals)
        piece = max(1, -(-length // split_factor))
        if -(-length // piece) > MAX_INTERVALS:
            raise ManifestError(
                f"expected a strided shard of at most {MAX_INTERVALS} pieces, got a split_factor of {split_factor}"
            )
        taken = []
        for first in range(0, length, piece):
            num_items = min(piece, length - first)
            share = -(-num_items // num_parts)
            taken.append((first + min(num_items, share * part), first + min(num_items, share * (part + 1))))
        intervals = _taken_of(intervals, taken)
    return intervals


def _taken_of(intervals: Intervals, positions: Sequence[Interval]) -> Intervals:
    """Join the indices of all intervals to one sequence; return the indices at ``positions``, as intervals."""
    taken: list[Interval] = []
    which = before = 0
    for position, end in positions:
        first = position
        while first < end:
            start, stop = intervals[which]
            if first >= before + stop - start:
                before += stop - start
                which += 1
                continue
            begin = start + first - before
            until = min(stop, start + end - before)
            if taken and taken[-1][1] == begin:
                taken[-1] = (taken[-1][0], until)
            else:
                taken.append((begin, until))
            first += until - begin
    return tuple(taken)


def _are_distinct(ranks: Sequence[int]) -> bool:
    """Return whether all ranks are distinct. A set would be slow if a peer chose numbers with colliding hashes."""
    return all(map(operator.lt, ordered := sorted(ranks), ordered[1:]))


def _shown(value: object) -> str:
    return repr(value)[:300]


@dataclass(frozen=True, slots=True)
class Part:
    """The overlap of one part of a sharded tensor dimension with the indices that the receiver needs.

    Attributes:
        coordinate: Coordinate of the part on the mesh dimensions that shard the tensor dimension.
        length: Number of indices of the part.
        overlaps: For each overlap: position among the needed indices, position in the part, number of indices.
    """

    coordinate: tuple[int, ...]
    length: int
    overlaps: tuple[tuple[int, int, int], ...]


def overlapping_parts(size: int, cuts: tuple[Cut, ...], wanted: Intervals) -> Iterator[Part]:
    """Yield the parts of a sharded dimension that may contain a needed index, with their overlaps."""
    for coordinate in _candidates(size, cuts, wanted):
        held = intervals_of(size, tuple((*cut, part) for cut, part in zip(cuts, coordinate, strict=True)))
        yield Part(coordinate, sum(end - start for start, end in held), tuple(_overlaps(wanted, held)))


def _candidates(size: int, cuts: tuple[Cut, ...], wanted: Intervals) -> Iterable[tuple[int, ...]]:
    """Return the coordinates of parts that may contain a needed index. For a plain shard, all of them contain one."""
    if len(cuts) == 1 and cuts[0][0] == 1 and wanted:
        share = max(1, -(-size // cuts[0][1]))
        return ((part,) for part in range(wanted[0][0] // share, (wanted[-1][1] - 1) // share + 1))
    return itertools.product(*(range(num_parts) for _, num_parts in cuts))


def _overlaps(wanted: Intervals, held: Intervals) -> Iterator[tuple[int, int, int]]:
    """Yield each overlap of two lists of intervals: position in ``wanted``, position in ``held``, number of indices."""
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
