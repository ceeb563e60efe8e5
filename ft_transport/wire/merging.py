"""Merges the trees of several sources, which are the ranks of one replica, into one tree.

The trees are equal except for parts of sharded tensors, and for entries that only some ranks have, such as those of
pipeline stages. Values at the same path in two trees are the same value of the state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from ft_transport.errors import ManifestError, RestoreError
from ft_transport.wire import nodes

Path: TypeAlias = tuple[nodes.Node, ...]
"""Path of a value in a tree: encoded keys of mappings, and positions in sequences."""
TensorLike: TypeAlias = nodes.TensorNode | nodes.LayoutNode | nodes.ViewNode | nodes.DTensorNode
StoredLeaf: TypeAlias = nodes.NumpyArrayNode | nodes.StoredBytesNode
_KEYS: Final = (
    str, bool, int, float, nodes.BigIntNode, nodes.FloatNode, nodes.ComplexNode, nodes.StringNode, nodes.BytesNode,
    nodes.ConstantNode, nodes.NumpyScalarNode,
)  # fmt: skip
_TENSORS: Final[frozenset[type]] = frozenset({nodes.TensorNode, nodes.LayoutNode, nodes.ViewNode, nodes.DTensorNode})


MergeTensor: TypeAlias = Callable[[Path, tuple[int, ...], tuple[TensorLike, ...]], nodes.Node]
"""Returns the merged node of a tensor, from its path, the sources that have it, and its node at each of them."""
MergeStored: TypeAlias = Callable[[Path, int, StoredLeaf], nodes.Node]
"""Returns the merged node of an array or bytes, from its path, one source that has it, and its node there."""


def merge_trees(
    trees: Sequence[nodes.Node],
    *,
    merge_tensor: MergeTensor,
    merge_stored: MergeStored,
    names: Sequence[str] | None = None,
    check_time: nodes.CheckTime = nodes.unbounded,
) -> nodes.Node:
    """Return one tree with all entries of several trees.

    Args:
        trees: The tree of each source.
        merge_tensor: Merges the nodes of a tensor.
        merge_stored: Merges the nodes of an array or bytes whose content is in the tensor table.
        names: Names of the sources, for errors.
        check_time: Called repeatedly; raises an error after a deadline.

    Raises:
        RestoreError: Two sources have different values at one path.
        ManifestError: A tree is malformed.
    """
    try:
        return _Merge(merge_tensor, merge_stored, names, check_time).merge((), tuple(range(len(trees))), tuple(trees))
    except RecursionError as error:
        raise ManifestError("expected a tree whose nesting does not exceed Python's recursion limit") from error


def path_name(path: Path) -> str:
    """Format a path as text, for errors."""
    return ".".join(step if isinstance(step, str) else repr(step) for step in path)[:400] or "(root)"


@dataclass(slots=True)
class _Merge:
    merge_tensor: MergeTensor
    merge_stored: MergeStored
    names: Sequence[str] | None
    check_time: nodes.CheckTime
    num_merged: int = 0

    def merge(self, path: Path, sources: tuple[int, ...], found: tuple[Any, ...]) -> nodes.Node:
        self.num_merged += 1
        if self.num_merged % nodes.STRIDE == 0:
            self.check_time()
        first = found[0]
        kind = type(first)
        if kind is nodes.LeafNode:
            # parameter and requires_grad may differ: the receiver's own tensors decide about them.
            values = tuple([node.value if type(node) is nodes.LeafNode else node for node in found])
            return nodes.LeafNode(self.merge(path, sources, values), first.parameter, first.requires_grad)
        kinds = set(map(type, found))
        if kind in _TENSORS:
            if not kinds <= _TENSORS:
                raise self._conflict(path, sources, found)
            return self.merge_tensor(path, sources, found)
        if len(kinds) > 1:
            raise self._conflict(path, sources, found)
        match first:
            case nodes.MappingNode() | nodes.DefaultDictNode():
                return self._mapping(path, sources, found)
            case nodes.SequenceNode() | nodes.NamedTupleNode() | nodes.DequeNode():
                return self._sequence(path, sources, found)
            case nodes.QuantizedNode():
                values = tuple(node.values for node in found)
                self._check_equal(path, sources, found, "values")
                return nodes.QuantizedNode(
                    self.merge(path, sources, values), first.dtype, first.scale_bits, first.zero_point
                )
            case nodes.CustomNode():
                self._check_equal(path, sources, found, "value")
                merged = self.merge(path, sources, tuple(node.value for node in found))
                return nodes.CustomNode(first.name, merged)
            case nodes.NumpyArrayNode() | nodes.StoredBytesNode():
                self._check_equal(path, sources, found, "index")
                return self.merge_stored(path, sources[0], first)
            case _:
                if any(node != first for node in found):
                    raise self._conflict(path, sources, found)
                return first  # type: ignore[no-any-return]

    def _mapping(self, path: Path, sources: tuple[int, ...], found: tuple[Any, ...]) -> nodes.Node:
        self._check_equal(path, sources, found, "items")
        first = found[0]
        keys = first.items[::2]
        if any(len(node.items) % 2 for node in found):
            raise ManifestError("expected as many values as keys", path=path_name(path))
        items: list[nodes.Node] = []
        if all(node.items[::2] == keys for node in found):
            for key, values in zip(keys, zip(*(node.items[1::2] for node in found), strict=True), strict=True):
                items += (key, self.merge((*path, key), sources, values))
            return _with_items(first, items)
        for key in itertools.chain.from_iterable(node.items[::2] for node in found):
            # Other keys are not hashable, or have hashes that a sender could choose to collide.
            if not (key is None or isinstance(key, _KEYS)):
                raise RestoreError(
                    f"expected keys of type str or int, or equal keys from every source, got {repr(key)[:100]}",
                    path=path_name(path),
                )
        by_key = [dict(zip(node.items[::2], node.items[1::2], strict=True)) for node in found]
        for key in dict.fromkeys(key for entries in by_key for key in entries):
            have = [position for position, entries in enumerate(by_key) if key in entries]
            values = tuple(by_key[position][key] for position in have)
            items += (key, self.merge((*path, key), tuple(sources[position] for position in have), values))
        return _with_items(first, items)

    def _sequence(self, path: Path, sources: tuple[int, ...], found: tuple[Any, ...]) -> nodes.Node:
        first = found[0]
        self._check_equal(path, sources, found, "items")
        if any(len(node.items) != len(first.items) for node in found):
            raise self._conflict(path, sources, tuple(f"{len(node.items)} items" for node in found))
        columns = zip(*(node.items for node in found), strict=True)
        items = [self.merge((*path, position), sources, values) for position, values in enumerate(columns)]
        return _with_items(first, items)

    def _check_equal(self, path: Path, sources: tuple[int, ...], found: tuple[Any, ...], but_for: str) -> None:
        """Refuse nodes that differ in any field except ``but_for``."""
        fields = [name for name in found[0].__struct_fields__ if name != but_for]
        for node in found[1:]:
            if any(getattr(node, name) != getattr(found[0], name) for name in fields):
                raise self._conflict(path, sources, found)

    def _conflict(self, path: Path, sources: tuple[int, ...], found: tuple[Any, ...]) -> RestoreError:
        other = next((position for position, node in enumerate(found) if node != found[0]), len(found) - 1)
        return RestoreError(
            f"expected the same value from every source, got {repr(found[0])[:100]} from {self._name(sources[0])} and "
            f"{repr(found[other])[:100]} from {self._name(sources[other])}; a value that differs between ranks cannot "
            "be received in another layout: leave it out, or register it with scope='local'",
            path=path_name(path),
        )

    def _name(self, source: int) -> str:
        return self.names[source] if self.names is not None else f"source {source}"


def _with_items(node: Any, items: list[nodes.Node]) -> nodes.Node:
    replaced: nodes.Node = msgspec.structs.replace(node, items=items)
    return replaced
