"""Finds which parts of a state this rank needs if the sources have the state in another layout.

Merges the manifests of all sources into one manifest for the receiver's layout. No peer serves this manifest, but
``state.restore`` uses it like any other. ``wire.reshard`` then plans from which source each wanted part is fetched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_transport.errors import ManifestError, RestoreError
from ft_transport.runtime.decoding import collector_paused
from ft_transport.state.placements import describe_mesh, encode_placements, is_dtensor
from ft_transport.state.tensors import (
    WHOLE_BYTE_DTYPES_BY_NAME,
    is_dense,
    is_lazy,
    torch_name_of,
)
from ft_transport.wire.chunks import CHUNK_BYTES, ChunkTable
from ft_transport.wire.layouts import Layout, LayoutTable, Mesh, Placement, Region, region_of, shape_of
from ft_transport.wire.manifest import ITEM_BITS, Manifest, TensorEntry
from ft_transport.wire.merging import Path, StoredLeaf, TensorLike, merge_trees, path_name
from ft_transport.wire.nodes import CheckTime, DTensorNode, LayoutNode, Node, TensorNode, ViewNode, unbounded
from ft_transport.wire.reshard import StoredNode, Wanted
from ft_transport.wire.slices import row_major_strides

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MAX_DATA_BYTES: Final = 2**62

LikeFunction: TypeAlias = Callable[[tuple[str | int, ...]], torch.Tensor | None]
"""For the path of a tensor that the receiver lacks, returns one of its own tensors that is sharded in the same way."""

_Where: TypeAlias = tuple[int, tuple[Placement, ...]]
"""How the receiver shards a tensor: the id of its mesh, and the placements on that mesh."""
_Kind: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int | None, ...]]
"""Shape, sources, and the layout at each source. The receiver usually shards tensors of one kind in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """The merged manifests of several sources.

    Attributes:
        manifest: The manifest of the state in the receiver's layout, without digests.
        wanted: The tensors or shards that the receiver needs, in the order of the first source's data.
    """

    manifest: Manifest
    wanted: tuple[Wanted, ...]


class _Described(NamedTuple):
    """A tensor, as its first source describes it.

    ``name``, ``start`` and ``dtype`` are from the tensor table of that source. ``torch_dtype`` is from the node of the
    tensor; ``None`` if the node has no dtype.
    """

    name: str
    start: int
    dtype: str
    torch_dtype: str | None
    item_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None


class _HeldPart(NamedTuple):
    """A tensor, with its node and layout at each source that has a part of it."""

    first: _Described
    global_shape: tuple[int, ...]
    sources: tuple[int, ...]
    nodes: tuple[StoredNode, ...]
    layouts: tuple[int | None, ...]


def reshard(
    manifests: Sequence[Manifest],
    into: object,
    *,
    like: LikeFunction | None = None,
    names: Sequence[str] | None = None,
    check_time: CheckTime = unbounded,
) -> Resharding:
    """Find the parts that a receiver needs of a state that is divided among several sources.

    Args:
        manifests: The manifest of each source, all of the same step. A tensor that is not sharded comes from the first
            source that has it.
        into: The receiver's own state, whose DTensors determine the layout. A plain tensor in ``into`` is received
            whole. With ``None``, everything is received whole.
        like: Decides how to shard tensors that ``into`` lacks, such as those of an optimizer before its first step. By
            default, they are sharded like tensors in ``into`` with the same shape and the same layout at the sources.
        names: Names of the sources, for errors.
        check_time: Called repeatedly; an error that it raises ends the call.

    Raises:
        RestoreError: The sources contradict each other, or neither ``into`` nor ``like`` determines how to shard a
            DTensor of the sources.
        ManifestError: A manifest contradicts itself.
    """
    with collector_paused():
        builder = _Builder(manifests, into, like, None, names, check_time=check_time)
        tree = builder.build()
        if builder.num_missing:
            # The first pass has learned how the receiver shards its own tensors. Apply that to those that it lacks.
            builder = _Builder(manifests, into, like, builder.learned, names, check_time=check_time)
            tree = builder.build()
    order = sorted(range(len(builder.wanted)), key=builder.held_starts.__getitem__)
    home = manifests[0]
    return Resharding(
        manifest=Manifest(
            step=home.step,
            snapshot_id=home.snapshot_id,
            tensors=tuple(builder.entries),
            tree=tree,
            meshes=tuple(builder.layouts.meshes),
            layouts=tuple(builder.layouts.layouts),
            chunks=ChunkTable(data_bytes=builder.data_bytes, chunk_bytes=CHUNK_BYTES),
            digests=None,
            header_bytes=0,
        ),
        wanted=tuple(builder.wanted[index] for index in order),
    )


class _Builder:
    """Merges the trees of all sources, and plans the receiver's part of each tensor.

    The arguments are those of `reshard`, and ``learned``: how the receiver shards tensors of each kind. It is ``None``
    in the first pass, which collects this in the attribute `learned`.
    """

    def __init__(
        self,
        manifests: Sequence[Manifest],
        into: object,
        like: LikeFunction | None,
        learned: dict[_Kind, set[_Where | None]] | None,
        names: Sequence[str] | None,
        *,
        check_time: CheckTime,
    ) -> None:
        self._names = names
        self._check_time = check_time
        self._manifests = manifests
        self._into = into
        self._like = like
        self._is_final = learned is not None
        self.learned: dict[_Kind, set[_Where | None]] = learned if learned is not None else {}
        self.num_missing = 0
        self._containers: dict[Path, object] = {}
        self._meshes: dict[int, tuple[DeviceMesh, Mesh]] = {}
        self._places: dict[tuple[object, ...], tuple[int, Region]] = {}
        self._nodes: dict[tuple[object, ...], Node] = {}
        self.entries: list[TensorEntry] = []
        self.layouts = LayoutTable()
        self.wanted: list[Wanted] = []
        self.held_starts: list[int] = []
        self.data_bytes = 0

    def build(self) -> Node:
        trees = [manifest.tree for manifest in self._manifests]
        return merge_trees(
            trees,
            merge_tensor=self.tensor,
            merge_stored=self.stored,
            names=self._names,
            check_time=self._check_time,
        )

    def tensor(self, path: Path, sources: tuple[int, ...], nodes: tuple[TensorLike, ...]) -> Node:
        """Add the part of a tensor that the receiver needs, and return the node of this part."""
        first = nodes[0]
        if type(first) is ViewNode and not any(type(node) is DTensorNode for node in nodes):
            own = self._counterpart(path)
            if not is_dtensor(own):
                return self._view(path, sources, nodes, first)
        layouts = tuple([node.layout if type(node) is DTensorNode else None for node in nodes])
        stored: Any = tuple([node.local if type(node) is DTensorNode else node for node in nodes])
        described = self._describe(sources[0], stored[0], path)
        shape, global_stride = described.shape, None
        if type(first) is DTensorNode:
            layout = self._layout(sources[0], first.layout, path)
            shape, global_stride = layout.global_shape, layout.global_stride
        where = self._where(path, (shape, sources, layouts))
        index, region = None, _whole(shape)
        if where is not None:
            index, region = self._place(where, shape, global_stride)
        # Take ties from a source that has bytes of the tensor: empty shards never share memory.
        shows = next((at for at, source in enumerate(sources) if self._has_bytes(source, stored[at])), 0)
        key = (shows, stored[shows], index, sources, shape, layouts)
        node = self._nodes.get(key)
        if node is None or not all(region):
            held = _HeldPart(described, shape, sources, stored, layouts)
            local = self._want(path, held, region, is_part=index is not None)
            node = self._nodes[key] = local if index is None else DTensorNode(local, index)
        return node

    def stored(self, path: Path, source: int, node: StoredLeaf) -> Node:
        """Add the bytes of a leaf that is not a tensor, and return its node."""
        where = TensorNode(node.index)
        described = self._describe(source, where, path)
        held = _HeldPart(described, described.shape, (source,), (where,), (None,))
        local = self._want(path, held, _whole(described.shape), is_part=False)
        return msgspec.structs.replace(node, index=local.index)

    def _view(self, path: Path, sources: tuple[int, ...], nodes: tuple[TensorLike, ...], view: ViewNode) -> Node:
        """Add the whole base of a view, and return a view of it, so that the receiver's tensors also share memory."""
        bases: Any = tuple([TensorNode(node.index) if type(node) is ViewNode else node for node in nodes])
        if any(type(base) is not TensorNode for base in bases):
            raise ManifestError("expected this tensor to be a view at every source or at none", path=path_name(path))
        described = self._describe(sources[0], bases[0], path)
        key = (0, bases[0], None, sources, described.shape, (None,) * len(sources))
        base = self._nodes.get(key)
        if base is None:
            held = _HeldPart(described, described.shape, sources, bases, (None,) * len(sources))
            base = self._nodes[key] = self._want(path, held, _whole(described.shape), is_part=False)
        assert isinstance(base, TensorNode), "the base of a view is row-major"
        return msgspec.structs.replace(view, index=base.index)

    def _describe(self, source: int, node: object, path: Path) -> _Described:
        tensors = self._manifests[source].tensors
        if not isinstance(node, (TensorNode, LayoutNode, ViewNode)) or node.index >= len(tensors):
            raise ManifestError(f"expected the index of a tensor in the tensor table, got {node}", path=path_name(path))
        entry = tensors[node.index]
        item_bytes = ITEM_BITS[entry.dtype] // 8
        if not isinstance(node, LayoutNode):
            shape = node.shape if isinstance(node, ViewNode) else entry.shape
            return _Described(entry.name, entry.start, entry.dtype, None, item_bytes, shape, None)
        dtype = WHOLE_BYTE_DTYPES_BY_NAME.get(node.dtype)
        if dtype is None:
            raise ManifestError(
                f"expected a dtype that this version of torch has, got {node.dtype[:64]!r}", path=path_name(path)
            )
        is_carried = dtype.itemsize != item_bytes
        if math.prod(node.shape) * dtype.itemsize != entry.end - entry.start or (is_carried and item_bytes != 1):
            raise ManifestError(
                f"expected data of the size of {node.dtype}{list(node.shape)}, got {entry.dtype}{list(entry.shape)}",
                path=path_name(path),
            )
        return _Described(entry.name, entry.start, entry.dtype, node.dtype, dtype.itemsize, node.shape, node.stride)

    def _has_bytes(self, source: int, node: Any) -> bool:
        tensors = self._manifests[source].tensors
        return (
            isinstance(node, (TensorNode, LayoutNode, ViewNode))
            and node.index < len(tensors)
            and tensors[node.index].end > tensors[node.index].start
        )

    def _layout(self, source: int, index: int, path: Path) -> Layout:
        layouts = self._manifests[source].layouts
        if index >= len(layouts):
            raise ManifestError(
                f"expected the index of a layout in the layout table, got {index}", path=path_name(path)
            )
        return layouts[index]

    def _where(self, path: Path, kind: _Kind) -> _Where | None:
        """Return how the receiver shards a tensor; ``None`` if it needs the whole tensor."""
        shape, _, layouts = kind
        is_sharded = any(layout is not None for layout in layouts)
        own = self._counterpart(path)
        if self._into is None and self._like is None:
            return None
        if own is None and self._like is not None:
            own = self._like(tuple(step for step in path if isinstance(step, (str, int))))
            if isinstance(own, torch.Tensor) and (is_lazy(own) or own.shape != shape):
                own = None
        if is_dtensor(own):
            where = self._where_is(own, shape, path)
        elif isinstance(own, torch.Tensor):
            where = None
        else:
            return self._learned_where(path, kind, is_sharded=is_sharded)
        if not self._is_final:
            self.learned.setdefault(kind, set()).add(where)
        return where

    def _learned_where(self, path: Path, kind: _Kind, *, is_sharded: bool) -> _Where | None:
        if not self._is_final:
            self.num_missing += 1
            return None
        ways = self.learned.get(kind, set())
        if len(ways) != 1 and not is_sharded:
            return None
        if len(ways) != 1:
            found = f"{len(ways)} different ways" if ways else "none"
            raise RestoreError(
                f"expected this tensor in the receiver's state, or one with the same shape {list(kind[0])} and layout "
                f"at the sources, to decide how it is sharded; found {found}: create an optimizer's states first "
                "(get_optimizer_state_dict of torch.distributed.checkpoint.state_dict does), or pass like= to the "
                "call that fetches or loads",
                path=path_name(path),
            )
        return next(iter(ways))

    def _counterpart(self, path: Path) -> object:
        """Return the receiver's value at a path; ``None`` if there is none."""
        if not path:
            return self._into
        try:
            parent = self._containers.get(path[:-1])
            if parent is None:
                parent = self._containers[path[:-1]] = self._counterpart(path[:-1]) or ()
        except TypeError:
            return None  # a key in the path is neither a str nor an int
        step = path[-1]
        if isinstance(parent, Mapping):
            return parent.get(step) if isinstance(step, (str, int)) else None
        if isinstance(parent, Sequence) and isinstance(step, int) and 0 <= step < len(parent):
            return parent[step]
        return None

    def _where_is(self, own: DTensor, shape: tuple[int, ...], path: Path) -> _Where:
        mesh = own.device_mesh
        if id(mesh) not in self._meshes:
            self._meshes[id(mesh)] = (mesh, describe_mesh(mesh))
        where = (id(mesh), tuple(encode_placements(own, path_name(path))))
        if tuple(own.shape) == shape and self._meshes[id(mesh)][1].coordinate is not None:
            _, region = self._place(where, shape, own.stride())
            local_shape = tuple(own._local_tensor.shape)
            if local_shape != shape_of(region):
                raise RestoreError(
                    f"expected a local shard of {list(shape_of(region))} by the placements {own.placements}, got "
                    f"{list(local_shape)} in the receiver's state; a tensor that torch would divide differently can "
                    "only be received in the same layout",
                    path=path_name(path),
                )
        return where

    def _place(
        self, where: _Where, shape: tuple[int, ...], global_stride: tuple[int, ...] | None
    ) -> tuple[int, Region]:
        key = (where, shape, global_stride)
        place = self._places.get(key)
        if place is None:
            mesh = self._meshes[where[0]][1]
            stride = global_stride if global_stride is not None else row_major_strides(shape, 1)
            region = region_of(mesh, where[1], shape) or ((),) * len(shape)
            index = self.layouts.add(mesh, where[1], global_shape=shape, global_stride=stride)
            place = self._places[key] = (index, region)
        return place

    def _want(self, path: Path, held: _HeldPart, region: Region, *, is_part: bool) -> TensorNode | LayoutNode:
        """Add a whole tensor or a shard of it to `wanted`, and return its node."""
        described = held.first
        shape = shape_of(region)
        index, start = len(self.entries), self.data_bytes
        is_carried = ITEM_BITS[described.dtype] // 8 != described.item_bytes
        self.data_bytes += math.prod(shape) * described.item_bytes
        if self.data_bytes > _MAX_DATA_BYTES:
            raise ManifestError(f"expected at most {_MAX_DATA_BYTES} bytes of state", path=path_name(path))
        entry_shape = (*shape, described.item_bytes) if is_carried else shape
        self.entries.append(TensorEntry(described.name, described.dtype, entry_shape, start, self.data_bytes))
        self.held_starts.append(described.start)
        self.wanted.append(
            Wanted(
                path=described.name,
                start=start,
                dtype=described.dtype,
                item_bytes=described.item_bytes,
                global_shape=held.global_shape,
                region=region,
                sources=held.sources,
                nodes=held.nodes,
                layouts=held.layouts,
            )
        )
        row_major = row_major_strides(shape, 1)
        stride = row_major
        if described.stride is not None and held.layouts[0] is None and not is_part:
            stride = described.stride
        dtype = described.torch_dtype
        own = self._counterpart(path) if is_part else None
        if is_dtensor(own):
            local = own._local_tensor
            if tuple(local.shape) == shape and not local.is_contiguous() and is_dense(shape, local.stride()):
                stride = tuple(local.stride())
                dtype = dtype if dtype is not None else torch_name_of(described.dtype)
        # Compare the dtypes as well: a dtype without a safetensors name may have the same item size as its carrier.
        is_plain = not is_carried and stride == row_major and dtype in (None, torch_name_of(described.dtype))
        return TensorNode(index) if dtype is None or is_plain else LayoutNode(index, dtype, shape, stride)


def _whole(shape: tuple[int, ...]) -> Region:
    return tuple(((0, size),) if size else () for size in shape)
