"""Divides a rank's state into the items and values that a checkpoint stores, under the names that DCP gives them.

DCP names each leaf of a nested state by its path: keys and list indices joined by dots. DCP descends into dicts, and
into lists that contain tensors or containers (torch/distributed/checkpoint/_traverse.py, ``traverse_state_dict``). It
divides a DTensor into boxes (rectangular blocks), and stores the offset of each box in the whole tensor. This module
computes names and boxes from the manifest of a snapshot, so it needs neither the tensors nor their process groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import msgspec

from ft_transport.checkpoint.saved_values import decoded
from ft_transport.errors import CheckpointError
from ft_transport.wire.chunks import Hasher, digest
from ft_transport.wire.layouts import Region, region_of, shape_of
from ft_transport.wire.manifest import ITEM_BITS, TORCH_NAMES, Manifest
from ft_transport.wire.nodes import (
    DefaultDictNode,
    DTensorNode,
    LayoutNode,
    LeafNode,
    MappingNode,
    Node,
    SequenceNode,
    TensorNode,
    ViewNode,
)
from ft_transport.wire.slices import Slice, row_major_strides, slice_of

SHARED: Final = 0
"""Index of the shared part of a state. Its values are equal on all ranks, or shards of a DTensor."""
LOCAL: Final = 1
"""Index of the rank-local part of a state."""

Key: TypeAlias = tuple[str, tuple[int, ...]]
_Path: TypeAlias = tuple[str | int, ...]


class WriteItem(NamedTuple):
    """Bytes that a data file stores in one piece: a box of a tensor, or the bytes of another leaf.

    Attributes:
        key: Name and offset. If two ranks have items with the same key, the bytes must be equal.
        part: `SHARED` or `LOCAL`.
        entry: Index of the tensor in the manifest of the part.
        piece: Slice of the part's data that has the bytes; ``None`` if the item has no bytes.
        is_entry: Whether the item is a whole tensor of the manifest, not a part of one.
        names: Names of the tensor in DCP; empty if DCP does not list the item.
        dtype: Name of the torch dtype.
        global_shape: Shape of the whole tensor.
        offset: Indices of the first element of the box in the whole tensor.
        shape: Shape of the box.
    """

    key: Key
    part: int
    entry: int
    piece: Slice | None
    is_entry: bool
    names: tuple[str, ...]
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the item."""
        return self.piece.num_bytes if self.piece is not None else 0

    @property
    def item_bytes(self) -> int:
        """Number of bytes of an element; 1 if the item has no bytes."""
        return self.num_bytes // math.prod(self.shape) if self.num_bytes else 1


class Value(NamedTuple):
    """A leaf of the state that is not a tensor. DCP stores the output of ``torch.save`` for it."""

    name: str
    part: int
    node: Node


@dataclass(slots=True)
class Described:
    """All items and values of one rank.

    Attributes:
        items: Items, in the order of the state.
        values: Values, in the order of the state.
        paths: The path (keys and positions) of each leaf, by its name in DCP.
        structure: Digest of names, shapes and positions, but not of bytes and values. The plan of a save is valid for a
            later save if these digests are unchanged on all ranks.
    """

    items: list[WriteItem] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    structure: int = 0

    def shared_values(self) -> int:
        """Return a digest of the values in the shared part."""
        shared = [value for value in self.values if value.part == SHARED]
        # Encoded to bytes: a key may contain lone surrogates, which msgpack refuses in text.
        return digest(
            msgspec.msgpack.encode([(value.name.encode("utf-8", "surrogatepass"), value.node) for value in shared])
        )


def describe(manifests: Sequence[Manifest], rank: int) -> Described:
    """Return the items and values of one rank.

    Args:
        manifests: Manifest of each part of the rank's state: `SHARED`, then `LOCAL` if there is rank-local state.
        rank: The rank, which is part of the names of its rank-local items.

    Raises:
        CheckpointError: Two leaves have the same name in DCP, a name is reserved, or the shard of a DTensor has an
            unexpected shape.
    """
    return Describer().describe(manifests, rank)


class Describer:
    """Describes successive states of one rank. Reuses the items of the previous state if the structure is the same."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._items: list[WriteItem] = []
        self._structure = 0

    def describe(self, manifests: Sequence[Manifest], rank: int) -> Described:
        """Return the items and values of one rank. See the function `describe`."""
        described = Described()
        walks = []
        for part, manifest in enumerate(manifests):
            walk = _Walk(manifest, part, (f"rank_{rank}",) if part == LOCAL else (), described)
            walk.find_leaves()
            walks.append(walk)
        key = (
            rank,
            [(manifest.tensors, manifest.layouts, manifest.meshes) for manifest in manifests],
            [walk.tensors for walk in walks],
            [(value.name, value.part) for value in described.values],
        )
        if key != self._key:
            for walk in walks:
                walk.add_items()
            _refuse_equal_keys(described.items)
            self._key, self._items = key, described.items
            self._structure = _digest_of(described)
        described.items = self._items
        described.structure = self._structure
        return described


def _refuse_equal_keys(items: Sequence[WriteItem]) -> None:
    """Raise an error if two items have the same key, as a view of ``x`` and a tensor with the name ``x (view)``."""
    keys = set()
    for item in items:
        if (item.part, item.key) in keys:
            raise CheckpointError(
                "expected a name that is not that of another tensor followed by (view) or (bytes); rename the key",
                path=item.key[0],
            )
        keys.add((item.part, item.key))


def _digest_of(described: Described) -> int:
    hasher = Hasher()
    hasher.update(repr(described.items).encode("utf-8", "surrogatepass"))
    hasher.update(repr([(value.name, value.part) for value in described.values]).encode("utf-8", "surrogatepass"))
    return hasher.intdigest()


class _Walk:
    """Walks through one part of a state, and adds its items, values and paths to a `Described`.

    Attributes:
        tensors: The names of each tensor, by the tensor's node. A tied tensor has several names, and is stored once.
    """

    def __init__(self, manifest: Manifest, part: int, base: tuple[str, ...], described: Described) -> None:
        self._manifest = manifest
        self._part = part
        self._base = base
        self._prefix = "".join(f"{step}." for step in base)
        self._described = described
        self.tensors: dict[Node, list[str]] = {}
        self._entries: set[int] = set()

    def find_leaves(self) -> None:
        """Add the paths of all leaves and all values to the `Described`, and the tensors to `tensors`."""
        tree = self._manifest.tree
        if not isinstance(tree, (MappingNode, DefaultDictNode)):
            raise CheckpointError("expected a dict as state, which torch.distributed.checkpoint requires")
        paths, values = self._described.paths, self._described.values
        for path, node in self._leaves(tree, self._base):
            name = ".".join(map(str, path))
            if name in paths:
                raise CheckpointError(
                    "expected each path to be unique when its keys are joined by dots, got this path twice", path=name
                )
            paths[name] = path
            tensor = _tensor_of(node)
            if tensor is None:
                values.append(Value(name, self._part, node))
            else:
                self.tensors.setdefault(tensor, []).append(name)

    def add_items(self) -> None:
        """Add the items of the tensors and of all other leaves that have bytes to the `Described`."""
        for tensor, names in self.tensors.items():
            self._add_tensor(tensor, tuple(names))
        for index, entry in enumerate(self._manifest.tensors):
            if index not in self._entries:
                # The bytes of leaves that are no tensors, and of tensors that only other tensors view.
                piece = Slice(entry.start, entry.end - entry.start) if entry.end > entry.start else None
                key = (f"{self._prefix}{entry.name} (bytes)", ())
                item = WriteItem(key, self._part, index, piece, True, (), "uint8", (), (), ())
                self._described.items.append(item)

    def _leaves(self, node: Node, path: _Path) -> Iterator[tuple[_Path, Node]]:
        if isinstance(node, (MappingNode, DefaultDictNode)):
            for key, value in zip(node.items[::2], node.items[1::2], strict=False):
                yield from self._below(value, (*path, key if isinstance(key, str) else _label(key, self._manifest)))
        elif isinstance(node, SequenceNode):
            for position, value in enumerate(node.items):
                yield from self._below(value, (*path, position))

    def _below(self, node: Node, path: _Path) -> Iterator[tuple[_Path, Node]]:
        if isinstance(node, (MappingNode, DefaultDictNode)) or (_is_list(node) and not _is_terminal(node)):
            yield from self._leaves(node, path)
        else:
            yield path, node

    def _add_tensor(self, node: Node, names: tuple[str, ...]) -> None:
        local = node.local if isinstance(node, DTensorNode) else node
        assert isinstance(local, (TensorNode, LayoutNode, ViewNode)), "the node of a tensor"
        entry = self._manifest.tensors[local.index]
        shape, strides, start = entry.shape, None, entry.start
        dtype = TORCH_NAMES[entry.dtype]
        item_bytes = ITEM_BITS[entry.dtype] // 8
        if isinstance(local, LayoutNode):
            shape, dtype = local.shape, local.dtype
            item_bytes = (entry.end - entry.start) // math.prod(shape) if math.prod(shape) else item_bytes
        elif isinstance(local, ViewNode):
            shape, start = local.shape, entry.start + local.offset * item_bytes
            strides = tuple(stride * item_bytes for stride in local.stride)
        if strides is None:
            strides = row_major_strides(shape, item_bytes)
        global_shape: tuple[int, ...] = shape
        region: Region = tuple(((0, size),) if size else () for size in shape)
        if isinstance(node, DTensorNode):
            layout = self._manifest.layouts[node.layout]
            global_shape = layout.global_shape
            held = region_of(self._manifest.meshes[layout.mesh], layout.placements, global_shape)
            if held is None:
                return  # This rank is outside the mesh.
            region = held
            if shape_of(region) != shape:
                raise CheckpointError(
                    f"expected a shard of shape {list(shape_of(region))}, as torch divides tensors, got {list(shape)}",
                    path=names[0],
                )
        boxes = list(_boxes(region))
        is_entry = len(boxes) == 1 and not isinstance(local, ViewNode)
        base = f"{self._prefix}{entry.name}" if not isinstance(local, ViewNode) else f"{names[0]} (view)"
        if is_entry:
            self._entries.add(local.index)
        for held_origin, offset, counts in boxes:
            piece = slice_of(start, strides, held_origin, counts, item_bytes) if math.prod(counts) else None
            if piece is None and 0 not in global_shape:
                continue  # DCP lists an empty box only if the whole tensor is empty.
            self._described.items.append(
                WriteItem(
                    (base, offset), self._part, local.index, piece, is_entry, names, dtype, global_shape, offset, counts
                )
            )


def _label(key: Node, manifest: Manifest) -> str:
    """Return the text by which DCP names a dict key that is not a str."""
    return str(decoded(key, manifest, memoryview(b"")))


def _tensor_of(node: Node) -> Node | None:
    """Return the node of the stored tensor; ``None`` if DCP does not treat the node as a tensor."""
    value = node.value if isinstance(node, LeafNode) else node
    return value if isinstance(value, (TensorNode, LayoutNode, ViewNode, DTensorNode)) else None


def _is_list(node: Node) -> bool:
    return isinstance(node, SequenceNode) and node.kind == "list"


def _is_terminal(node: Node) -> bool:
    """Return whether DCP stores the container as one value, by the rule of DCP's function ``_is_terminal``."""
    if isinstance(node, (MappingNode, DefaultDictNode)):
        return False
    if not isinstance(node, SequenceNode) or not _is_list(node):
        return True
    return all(_is_terminal(item) and _tensor_of(item) is None for item in node.items)


def _boxes(region: Region) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Yield for each box its offset in the shard, its offset in the whole tensor, and its shape."""
    by_dim = []
    for intervals in region:
        ends = list(itertools.accumulate(end - start for start, end in intervals))
        by_dim.append(
            [(after - (end - start), start, end - start) for (start, end), after in zip(intervals, ends, strict=True)]
            or [(0, 0, 0)]
        )
    for combination in itertools.product(*by_dim):
        yield (
            tuple(position for position, _, _ in combination),
            tuple(start for _, start, _ in combination),
            tuple(count for _, _, count in combination),
        )
