"""Layouts: how a mesh of processes divides a global tensor, and which part of it one process holds.

The meanings are those of ``torch.distributed.tensor`` (``placement_types.py``, ``_utils.py`` of torch 2.13): placements
apply from the first mesh dimension to the last, each to what the ones before it have left. A plain shard is cut as by
``torch.chunk``; a strided shard is cut into ``split_factor`` pieces first, and each of these among the processes.
Sharding one dimension of a tensor leaves the others alone, so that a part is a product of intervals, dimension by
dimension.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct

from ft_transport.errors import ManifestError
from ft_transport.wire.nodes import MAX_TENSOR_RANK, Count, Dimensions

MAX_INTERVALS: Final = 1 << 12
"""Most pieces that a strided shard may leave of one dimension; a peer's ``split_factor`` must not fill the memory."""

MAX_GLOBAL_ITEMS: Final = 2**56
"""Bound on the product of a tensor's sizes, which torch multiplies with the size of an element in 64 bits."""

Interval: TypeAlias = tuple[int, int]
"""Global indices ``[start, end)`` along one dimension."""
Intervals: TypeAlias = tuple[Interval, ...]
"""Ascending and disjoint, in the order in which they lie in the local tensor."""
Region: TypeAlias = tuple[Intervals, ...]
"""A part of a global tensor: all combinations of the indices given for each dimension."""


class Placement(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How one mesh dimension holds a tensor. ``dim`` and ``split_factor`` only where the kind has them."""

    kind: Literal["shard", "replicate", "strided_shard"]
    dim: Annotated[int, Meta(ge=0, lt=MAX_TENSOR_RANK)] = 0
    split_factor: Count = 0


class Mesh(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sender's mesh, and where in it the sender stands.

    ``ranks`` lists the sender's ranks in row-major order of ``shape``: plain numbers, which tell one mesh from another
    and let a receiver build one of the same form; no process group is described or created from them. A process
    outside the mesh has no ``coordinate``.
    """

    device_type: str
    shape: Dimensions
    ranks: tuple[Count, ...]
    dim_names: tuple[str, ...] | None
    coordinate: Dimensions | None


class Layout(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a DTensor lies on a mesh, ``mesh`` being its index among those of the manifest.

    ``local_offset`` is where the local shard begins in the global tensor, for readers that want no more than that.
    """

    mesh: Count
    placements: tuple[Placement, ...]
    global_shape: Dimensions
    global_stride: Dimensions
    local_offset: Dimensions


@dataclass(slots=True)
class LayoutTable:
    """Collects the layouts of a state, each once.

    Attributes:
        meshes: The meshes.
        layouts: The layouts, which refer to them.
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
        """The index of a layout, which is added if it is new.

        Args:
            mesh: Where it lies.
            placements: One for each mesh dimension.
            global_shape: Of the whole tensor.
            global_stride: Of the whole tensor, in elements.
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
    """Refuses layouts whose numbers do not fit together.

    Args:
        meshes: What came.
        layouts: What came.
        peer: Who sent it, for the error.

    Raises:
        ManifestError: A mesh or a layout contradicts itself.
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
            raise ManifestError(f"expected a mesh of distinct ranks, and a place in it, got {_shown(mesh)}", peer=peer)
    for layout in layouts:
        if layout.mesh >= len(meshes):
            raise ManifestError(f"expected one of {len(meshes)} meshes, got number {layout.mesh}", peer=peer)
        num_dims = len(layout.global_shape)
        if not (
            len(layout.placements) == len(meshes[layout.mesh].shape)
            and num_dims == len(layout.global_stride) == len(layout.local_offset)
        ):
            raise ManifestError(
                f"expected as many placements as mesh dimensions, and one rank throughout, got {_shown(layout)}",
                peer=peer,
            )
        if math.prod(size for size in layout.global_shape if size) > MAX_GLOBAL_ITEMS:
            raise ManifestError(f"expected a shape that torch can count, got {list(layout.global_shape)}", peer=peer)
        for placement in layout.placements:
            if placement.kind != "replicate" and placement.dim >= num_dims:
                raise ManifestError(f"expected a shard of {num_dims} dimensions, got {placement}", peer=peer)
            if placement.kind == "strided_shard" and placement.split_factor < 1:
                raise ManifestError(f"expected a strided shard of at least one piece, got {placement}", peer=peer)


def region_of(mesh: Mesh, placements: Sequence[Placement], global_shape: Sequence[int]) -> Region | None:
    """The part that the process holds which ``mesh`` is described for.

    Args:
        mesh: The mesh.
        placements: One for each mesh dimension.
        global_shape: Of the whole tensor.

    Returns:
        Its region; ``None`` if it stands outside the mesh.

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
    """The shape of the local tensor that holds ``region``."""
    return tuple(sum(end - start for start, end in intervals) for intervals in region)


def intervals_of(size: int, cuts: tuple[tuple[int, int, int], ...]) -> Intervals:
    """What successive cuts leave of one dimension.

    Args:
        size: Its length.
        cuts: ``split_factor``, number of parts and own part, of each mesh dimension that shards it, in order.

    Raises:
        ManifestError: More than `MAX_INTERVALS` pieces would be left.
    """
    intervals: Intervals = ((0, size),) if size else ()
    for split_factor, num_parts, part in cuts:
        length = sum(end - start for start, end in intervals)
        piece = max(1, -(-length // split_factor))
        if -(-length // piece) > MAX_INTERVALS:
            raise ManifestError(f"expected a strided shard of at most {MAX_INTERVALS} pieces, got {split_factor}")
        taken = []
        for first in range(0, length, piece):
            num_items = min(piece, length - first)
            share = -(-num_items // num_parts)
            taken.append((first + min(num_items, share * part), first + min(num_items, share * (part + 1))))
        intervals = _taken_of(intervals, taken)
    return intervals


def _taken_of(intervals: Intervals, positions: Sequence[Interval]) -> Intervals:
    """Of ``intervals``, laid one behind the other, the ascending ranges of positions; what is adjacent is joined."""
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
    """By sorting: in a set, numbers chosen for it would take time with the square of how many they are."""
    return all(map(operator.lt, ordered := sorted(ranks), ordered[1:]))


def _shown(value: object) -> str:
    return repr(value)[:300]
