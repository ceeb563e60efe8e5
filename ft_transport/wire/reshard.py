"""The `Planner`, which decides which bytes a receiver with another layout reads from which source. It does no I/O.

The receiver passes the part of each tensor that it needs. The manifests have the layouts of the sources' parts. Layouts
divide each dimension separately, so the overlap of two parts is a product of intervals, computed for each dimension.
Tensors of the same shape and layout share the computation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from ft_transport.errors import ManifestError, RestoreError
from ft_transport.wire.layouts import Cut, Intervals, Layout, Part, Placement, Region, overlapping_parts, shape_of
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.nodes import LayoutNode, TensorNode, ViewNode
from ft_transport.wire.slices import Box, Slice, block_items, in_pieces, row_major_strides, slice_of

StoredNode: TypeAlias = TensorNode | LayoutNode | ViewNode
"""A node, in a source's tree, of a tensor or of the source's part of a tensor."""
MAX_READS: Final = 1 << 21
_BYTES_PER_READ: Final = 1 << 10
"""A plan may have more than `MAX_READS` reads if their average length in bytes is at least this."""
MAX_WORK: Final = 1 << 22
"""Maximum number of parts that a plan examines, for all distinct shapes and layouts together. 64 ranks and 10,000
shapes need a tenth of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tensor, or a part of a tensor, that the receiver needs.

    Attributes:
        path: Path of the tensor in the state, for errors.
        start: Position of the part in the receiver's data. The part is row-major there.
        dtype: The safetensors dtype that the tensor must have at the sources.
        item_bytes: Size of an element in bytes.
        global_shape: Shape of the whole tensor.
        region: The part that the receiver needs.
        sources: The sources that have a part of the tensor.
        nodes: The node of the tensor at each of these sources.
        layouts: The layout of the tensor at each of these sources, as an index into the source's manifest. ``None`` if
            the source has the whole tensor.
    """

    path: str
    start: int
    dtype: str
    item_bytes: int
    global_shape: tuple[int, ...]
    region: Region
    sources: tuple[int, ...]
    nodes: tuple[StoredNode, ...]
    layouts: tuple[int | None, ...]


class Read(NamedTuple):
    """A planned read: a box of a needed tensor that fits into a frame."""

    wanted: Wanted
    box: Box

    @property
    def path(self) -> str:
        """Path of the tensor, for errors."""
        return self.wanted.path

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.box.counts) * self.wanted.item_bytes

    @property
    def num_blocks(self) -> int:
        """Number of contiguous pieces that the box has in the memory of a source."""
        return math.prod(self.box.counts) // block_items(self.box)

    @property
    def is_whole(self) -> bool:
        """Whether the sources have the whole tensor, instead of a part."""
        return self.wanted.layouts[self.box.holders[0]] is None

    @property
    def sources(self) -> tuple[int, ...]:
        """The sources that have the box."""
        return tuple(self.wanted.sources[holder] for holder in self.box.holders)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The sources that are on the same device mesh.

    Attributes:
        mesh_shape: Shape of the mesh.
        at: The sources at each coordinate of the mesh, as positions in ``Wanted.sources``.
    """

    mesh_shape: tuple[int, ...]
    at: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class Planner:
    """Plans reads from sources with given manifests. Not thread-safe.

    Args:
        manifests: The manifest of each source.
        names: The name of each source, for errors.
    """

    def __init__(self, manifests: Sequence[Manifest], names: Sequence[str] | None = None) -> None:
        self._manifests = manifests
        self._names = names if names is not None else [f"source {index}" for index in range(len(manifests))]
        self._meshes_of = [[layout.mesh for layout in manifest.layouts] for manifest in manifests]
        self._work = 0
        self._boxes: dict[tuple[object, ...], tuple[Box, ...]] = {}
        self._pieces: dict[tuple[object, ...], tuple[tuple[Box, int], ...]] = {}
        self._parts: dict[tuple[object, ...], tuple[Part, ...]] = {}
        self._groups: dict[tuple[object, ...], tuple[_Group, ...]] = {}
        self._holders: dict[tuple[object, ...], dict[tuple[int, ...], tuple[int, ...]]] = {}

    def plan(self, wanted: Iterable[Wanted]) -> list[list[Read]]:
        """Plan the reads from each source, so that every needed byte is read once.

        If several sources have the same part, the plan uses the source with the fewest bytes so far.

        Args:
            wanted: All tensors that the receiver needs.

        Returns:
            The reads of each source, in the order of ``wanted``.

        Raises:
            RestoreError: Some part of a tensor is at no source.
            ManifestError: A layout is invalid.
        """
        reads: list[list[Read]] = [[] for _ in self._manifests]
        loads = [0] * len(self._manifests)
        num_reads = 0
        for tensor in wanted:
            sources = tensor.sources
            is_whole = None in tensor.layouts
            pieces = self._pieces_of(tensor)
            num_reads += len(pieces)
            if num_reads > MAX_READS and num_reads * _BYTES_PER_READ > sum(loads):
                raise ManifestError(
                    f"expected layouts that divide the state into at most {MAX_READS} pieces", path=tensor.path
                )
            for box, num_bytes in pieces:
                holders = box.holders
                source = sources[holders[0]]
                if len(holders) > 1 and not is_whole:
                    source = min([sources[holder] for holder in holders], key=loads.__getitem__)
                reads[source].append(Read(tensor, box))
                loads[source] += num_bytes
        return reads

    def _pieces_of(self, wanted: Wanted) -> tuple[tuple[Box, int], ...]:
        """Return boxes that cover a needed part and fit into a frame, each with its size in bytes."""
        item_bytes = wanted.item_bytes
        key = (wanted.sources, wanted.layouts, wanted.global_shape, wanted.region, item_bytes)
        known = self._pieces.get(key)
        if known is None:
            pieces = []
            for piece in itertools.chain.from_iterable(in_pieces(box, item_bytes) for box in self.boxes(wanted)):
                pieces.append((piece, math.prod(piece.counts) * item_bytes))
                if len(pieces) > MAX_READS:
                    raise ManifestError(f"expected a tensor of at most {MAX_READS} pieces", path=wanted.path)
            known = self._pieces[key] = tuple(pieces)
        return known

    def boxes(self, wanted: Wanted) -> tuple[Box, ...]:
        """Return boxes that cover a needed part, without overlap, each with the sources that have it.

        Raises:
            RestoreError: Some element of the part is at no source.
        """
        key = (wanted.sources, wanted.layouts, wanted.global_shape, wanted.region)
        boxes = self._boxes.get(key)
        if boxes is None:
            try:
                boxes = self._boxes[key] = self._find_boxes(wanted)
            except ManifestError as error:
                error.path = wanted.path
                raise
        return boxes

    def held(self, read: Read, source: int) -> Slice:
        """Return the slice of a source's data that a read requests.

        Args:
            read: The read.
            source: A source that has the box.

        Raises:
            RestoreError: The source's part has another shape than its layout implies.
            ManifestError: The source's manifest is inconsistent.
        """
        wanted, box = read
        holder = wanted.sources.index(source)
        node = wanted.nodes[holder]
        tensors = self._manifests[source].tensors
        if not isinstance(node, (TensorNode, LayoutNode, ViewNode)):
            raise ManifestError(f"expected a node that refers to the tensor table, got {node!r:.100}", path=wanted.path)
        if node.index >= len(tensors):
            raise ManifestError(f"expected an index into the tensor table, got {node.index}", path=wanted.path)
        entry = tensors[node.index]
        if entry.dtype != wanted.dtype:
            raise RestoreError(
                f"expected {wanted.dtype} from every source, got {entry.dtype} from {self._names[source]}",
                path=wanted.path,
            )
        if type(node) is ViewNode:
            if len(node.shape) != len(node.stride):
                raise ManifestError("expected as many strides as dimensions", path=wanted.path)
            shape, start = node.shape, entry.start + node.offset * wanted.item_bytes
            strides = tuple(stride * wanted.item_bytes for stride in node.stride)
        else:
            shape, start = (node.shape if type(node) is LayoutNode else entry.shape), entry.start
            strides = row_major_strides(shape, wanted.item_bytes)
        if shape != box.held_shape:
            raise RestoreError(
                f"expected a part of shape {list(box.held_shape)} according to the layout of {self._names[source]}, "
                f"got {list(shape)}; a tensor that was not divided by torch's rules can only be received in the same "
                "layout",
                path=wanted.path,
            )
        piece = slice_of(start, strides, box.held_origin, box.counts, wanted.item_bytes)
        if not entry.start <= piece.start <= piece.end <= entry.end:
            raise ManifestError(f"expected a view of {entry.dtype}{list(entry.shape)}, got {node}", path=wanted.path)
        return piece

    def _check_layout(self, wanted: Wanted, first: int, holder: int) -> None:
        """Check an assumption of the plan: two sources on the same mesh have the same layout of a tensor."""
        expected, actual = self._layout(wanted, first), self._layout(wanted, holder)
        if (actual.global_shape, actual.placements) != (wanted.global_shape, expected.placements):
            raise RestoreError(
                f"expected placements {expected.placements} and shape {list(wanted.global_shape)} on all ranks of a "
                f"mesh, got {actual.placements} and {list(actual.global_shape)} from "
                f"{self._names[wanted.sources[holder]]}",
                path=wanted.path,
            )

    @staticmethod
    def destination(read: Read) -> Slice:
        """Return the slice of the receiver's data into which a read is written."""
        wanted, box = read
        strides = row_major_strides(shape_of(wanted.region), wanted.item_bytes)
        return slice_of(wanted.start, strides, box.origin, box.counts, wanted.item_bytes)

    def _find_boxes(self, wanted: Wanted) -> tuple[Box, ...]:
        num_wanted = math.prod(shape_of(wanted.region))
        if not num_wanted:
            return ()
        whole = [holder for holder, layout in enumerate(wanted.layouts) if layout is None]
        if whole:
            # Values of whole tensors may differ between sources, such as running statistics. So all of them are read
            # from the first source or, if that fails, from one other source.
            return tuple(self._boxes_of(_Group((), {(): whole}), (), wanted))
        num_best = -1
        for group in self._groups_of(wanted):
            first = next(iter(group.at.values()))[0]
            boxes = tuple(self._boxes_of(group, self._layout(wanted, first).placements, wanted))
            num_found = sum(math.prod(box.counts) for box in boxes)
            if num_found == num_wanted:
                for holder in {holder for box in boxes for holder in box.holders}:
                    self._check_layout(wanted, first, holder)
                return boxes
            num_best = max(num_best, num_found)
        raise RestoreError(
            f"expected sources that together have the {num_wanted} elements that this rank needs from a tensor of "
            f"shape {list(wanted.global_shape)}, got sources with {max(num_best, 0)} of them; pass all ranks of the "
            "replica as sources",
            path=wanted.path,
        )

    def _layout(self, wanted: Wanted, holder: int) -> Layout:
        layouts, index = self._manifests[wanted.sources[holder]].layouts, wanted.layouts[holder]
        if index is None or index >= len(layouts):
            raise ManifestError(f"expected an index into the layout table, got {index}", path=wanted.path)
        return layouts[index]

    def _groups_of(self, wanted: Wanted) -> tuple[_Group, ...]:
        try:
            meshes = tuple(
                [
                    self._meshes_of[source][index]
                    for source, index in zip(wanted.sources, wanted.layouts, strict=True)
                    if index is not None
                ]
            )
        except IndexError:
            raise ManifestError("expected an index into the layout table, got a larger one", path=wanted.path) from None
        key = (wanted.sources, meshes)
        known = self._groups.get(key)
        if known is None:
            groups: dict[tuple[object, ...], _Group] = {}
            for holder, (source, index) in enumerate(zip(wanted.sources, meshes, strict=True)):
                mesh = self._manifests[source].meshes[index]
                if mesh.coordinate is not None:
                    group = groups.setdefault((mesh.shape, mesh.ranks), _Group(mesh.shape))
                    there = group.at.setdefault(mesh.coordinate, [])
                    if there and self._snapshot_of(wanted, there[0]) != self._snapshot_of(wanted, holder):
                        first = self._names[wanted.sources[there[0]]]
                        raise RestoreError(
                            f"expected the ranks of one replica as sources, got {first} and {self._names[source]}, "
                            f"both at coordinate {mesh.coordinate} of a mesh of shape {list(mesh.shape)}",
                            path=wanted.path,
                        )
                    there.append(holder)
            known = self._groups[key] = tuple(groups.values())
        return known

    def _snapshot_of(self, wanted: Wanted, holder: int) -> str:
        return self._manifests[wanted.sources[holder]].snapshot_id

    def _boxes_of(self, group: _Group, placements: tuple[Placement, ...], wanted: Wanted) -> Iterator[Box]:
        cutting: list[list[int]] = [[] for _ in wanted.global_shape]
        for mesh_dim, placement in enumerate(placements):
            if placement.kind != "replicate":
                if placement.dim >= len(cutting):
                    return
                cutting[placement.dim].append(mesh_dim)
        by_dim = [
            self._parts_of(size, tuple(_cut(placements, group, mesh_dim) for mesh_dim in mesh_dims), intervals)
            for size, intervals, mesh_dims in zip(wanted.global_shape, wanted.region, cutting, strict=True)
        ]
        holders = self._holders_of(group, tuple(itertools.chain.from_iterable(cutting)))
        for parts in itertools.product(*by_dim):
            held = holders.get(tuple(itertools.chain.from_iterable(part.coordinate for part in parts)))
            if held is None:
                continue
            shape = tuple(part.length for part in parts)
            self._spend(math.prod(len(part.overlaps) for part in parts))
            for overlap in itertools.product(*(part.overlaps for part in parts)):
                yield Box(
                    holders=held,
                    held_shape=shape,
                    held_origin=tuple(position for _, position, _ in overlap),
                    origin=tuple(position for position, _, _ in overlap),
                    counts=tuple(count for _, _, count in overlap),
                )

    def _holders_of(self, group: _Group, sharded: tuple[int, ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Return the sources of each part, by the part's coordinate on the mesh dimensions that shard the tensor."""
        key = (group, sharded)
        known = self._holders.get(key)
        if known is None:
            holders: dict[tuple[int, ...], list[int]] = {}
            for coordinate, held_by in group.at.items():
                holders.setdefault(tuple(coordinate[mesh_dim] for mesh_dim in sharded), []).extend(held_by)
            known = self._holders[key] = {at: tuple(held_by) for at, held_by in holders.items()}
        return known

    def _parts_of(self, size: int, cuts: tuple[Cut, ...], wanted: Intervals) -> tuple[Part, ...]:
        key = (size, cuts, wanted)
        known = self._parts.get(key)
        if known is None:
            parts = []
            for part in overlapping_parts(size, cuts, wanted):
                self._spend(1 + len(part.overlaps))
                if part.overlaps:
                    parts.append(part)
            known = self._parts[key] = tuple(parts)
        return known

    def _spend(self, work: int) -> None:
        """Count examined parts, and refuse manifests that would keep the receiver busy for too long."""
        self._work += work
        if self._work > MAX_WORK:
            raise ManifestError(f"expected layouts that divide tensors into at most {MAX_WORK} parts in all")


def _cut(placements: tuple[Placement, ...], group: _Group, mesh_dim: int) -> Cut:
    placement = placements[mesh_dim]
    return placement.split_factor if placement.kind == "strided_shard" else 1, group.mesh_shape[mesh_dim]
