"""A flattened state before its copy: a tree of nodes, and the memory of its tensors in columns.

`FastLane` describes the usual tensors of a large state: row-major, on the CPU, and sharing neither memory nor name with
another one. The walk through the state only lists these tensors; one tight loop describes them. Tensors that turn out
to be different are walked again, off the lane.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field, replace
from itertools import count
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
import torch

from ft_transport.state.dtypes import SAFETENSORS_NAMES, name_of
from ft_transport.wire.layouts import LayoutTable
from ft_transport.wire.nodes import LayoutNode, Node


def _column() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Blocks:
    """The memory to copy, one entry of the tensor table each; the lists and arrays (of 64-bit ints) run in parallel.

    Attributes:
        names: Unique names, made from the paths.
        sources: Live tensors on any device, of any stride.
        dtypes: safetensors dtype of each entry.
        shapes: Shape of each entry as it stands in the file; may be ``torch.Size``.
        num_bytes: Size of each entry.
        item_bytes: Size of one element of the source, which is also its alignment.
        addresses: Address of a row-major source on the CPU, whose bytes can be copied directly; 0 for others.
        casts: By index, the dtype to cast a source to during the copy; the other columns describe the result.
    """

    names: list[str] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    num_bytes: array[int] = field(default_factory=_column)
    item_bytes: array[int] = field(default_factory=_column)
    addresses: array[int] = field(default_factory=_column)
    casts: dict[int, torch.dtype] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatState:
    """A state ready for its copy; the tree's nodes index ``blocks`` and ``layouts``."""

    tree: Node
    blocks: Blocks
    layouts: LayoutTable


_PLAIN_NAMES: Final = {dtype: name for dtype, name in SAFETENSORS_NAMES.items() if not dtype.is_complex}
_ITEM_BYTES: Final = {dtype: dtype.itemsize for dtype in _PLAIN_NAMES}
_TAKEN_NAMES: Final = ("__metadata__", "")
"""Reserved names: the header's metadata, and the root, which has another name."""

_facts_of: Final = attrgetter("dtype", "shape", "nbytes", "requires_grad", "is_cpu")


class OffLaneError(Exception):
    """Some tensors in the fast lane are not of the usual kind; ``ids`` names them."""

    def __init__(self, ids: frozenset[int]) -> None:
        super().__init__(len(ids))
        self.ids = ids


class FastLane:
    """Describes the tensors that the walk has added to ``blocks.names`` and ``blocks.sources`` alone.

    Args:
        blocks: The state's blocks.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._names: set[str] = set(_TAKEN_NAMES)
        self._blocks = blocks
        self._in_lane: list[range] = []
        self._num_indexed = 0
        self._index_at: dict[int, int] = {}

    def settle(self) -> None:
        """Describe the tensors listed since the last call.

        Reads few attributes of each tensor and makes few objects: the caller holds the lock.

        Raises:
            OffLaneError: A tensor is not row-major, not on the CPU, or shares its name with another one.
        """
        start, end = len(self._blocks.shapes), len(self._blocks.names)
        if start == end:
            return
        try:
            is_plain = self._describe_from(start)
        except RuntimeError:  # Tensors of another layout have no address, and nested ones no shape.
            is_plain = False
        if not is_plain:
            raise OffLaneError(self._off_lane_ids())
        self._in_lane.append(range(start, end))

    def _describe_from(self, start: int) -> bool:
        """Fill the columns; return false, with partly filled columns, if a tensor or name is not of the usual kind."""
        blocks = self._blocks
        sources, names = blocks.sources[start:], blocks.names[start:]
        num_names = len(self._names)
        self._names.update(names)
        if len(self._names) - num_names < len(names):
            return False
        dtypes: list[torch.dtype] = []
        add_dtype, add_shape = dtypes.append, blocks.shapes.append
        add_num_bytes, add_address = blocks.num_bytes.append, blocks.addresses.append
        # Row by row, while each tensor is in the processor's cache.
        facts = map(_facts_of, sources)
        for source, (dtype, shape, num_bytes, requires_grad, is_cpu) in zip(sources, facts, strict=True):
            if requires_grad or not is_cpu or not source.is_contiguous() or source.is_neg():
                return False
            add_dtype(dtype)
            add_shape(shape)
            add_num_bytes(num_bytes)
            add_address(source.data_ptr())
        kinds = set(dtypes)
        if not kinds <= _PLAIN_NAMES.keys():
            return False
        if len(kinds) == 1:
            blocks.dtypes.extend([_PLAIN_NAMES[dtypes[0]]] * len(dtypes))
            blocks.item_bytes.extend(array("q", [dtypes[0].itemsize]) * len(dtypes))
        else:
            blocks.dtypes.extend(map(_PLAIN_NAMES.__getitem__, dtypes))
            blocks.item_bytes.extend(map(_ITEM_BYTES.__getitem__, dtypes))
        return True

    def store(
        self, source: torch.Tensor, path: str, dtype: str, shape: tuple[int, ...], address: int | None = None
    ) -> int:
        """Add a block off the lane under a free name; return its index.

        ``address`` is that of a row-major source on the CPU, and 0 for others; ``None`` if the caller has not looked.

        Raises:
            OffLaneError: See `settle`.
        """
        self.settle()
        blocks = self._blocks
        name = path or "(root)"
        if not name.isascii():
            # A str key may contain lone surrogates, which JSON cannot.
            name = name.encode("utf-8", "backslashreplace").decode()
        if name in self._names:
            numbered = (f"{name}#{number}" for number in count(2))
            name = next(candidate for candidate in numbered if candidate not in self._names)
        self._names.add(name)
        blocks.names.append(name)
        blocks.sources.append(source)
        blocks.dtypes.append(dtype)
        blocks.shapes.append(shape)
        blocks.num_bytes.append(source.nbytes)
        blocks.item_bytes.append(source.dtype.itemsize)
        if address is None:
            address = source.data_ptr() if source.is_cpu and source.is_contiguous() else 0
        blocks.addresses.append(address)
        return len(blocks.names) - 1

    def check(self) -> None:
        """Make sure that the lane's tensors have memory, and share no address with other tensors.

        Raises:
            OffLaneError: A tensor has no memory, or shares its address with another one.
        """
        if not self._in_lane:
            return
        addresses = np.asarray(self._blocks.addresses)
        is_in_lane = np.zeros(len(addresses), dtype=np.bool_)
        for lane in self._in_lane:
            is_in_lane[lane.start : lane.stop] = True
        order = np.argsort(addresses, kind="stable")
        is_again = np.zeros(len(addresses), dtype=np.bool_)
        is_again[order[1:]] = addresses[order[1:]] == addresses[order[:-1]]
        if (is_in_lane & (is_again | (addresses == 0))).any():
            raise OffLaneError(self._off_lane_ids())

    def _off_lane_ids(self) -> frozenset[int]:
        names, addresses = set(_TAKEN_NAMES), {0}
        found = set()
        for name, source in zip(self._blocks.names, self._blocks.sources, strict=True):
            has_address = source.layout is torch.strided and not source.is_nested
            address = source.data_ptr() if has_address else 0
            if (
                source.dtype not in _PLAIN_NAMES
                or source.requires_grad
                or not source.is_cpu
                or address in addresses
                or not source.is_contiguous()
                or source.is_neg()
                or name in names
            ):
                found.add(id(source))
            names.add(name)
            addresses.add(address)
        return frozenset(found)

    def first_at(self, address: int) -> int | None:
        """The index of the first row-major tensor that begins at an address."""
        for lane in self._in_lane[self._num_indexed :]:
            for index in lane:
                self._index_at.setdefault(self._blocks.addresses[index], index)
        self._num_indexed = len(self._in_lane)
        return self._index_at.get(address)

    def note(self, address: int, index: int) -> None:
        """Notes a row-major tensor off the lane."""
        self._index_at.setdefault(address, index)


CASTABLE: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Other dtypes need scales (float8) or are not floating-point."""


def cast_floating(flat: FlatState, dtype: torch.dtype) -> FlatState:
    """Return the state with floating-point tensors to be cast to ``dtype``; changes the blocks of ``flat``.

    Args:
        flat: The state.
        dtype: One of `CASTABLE`.
    """
    blocks = flat.blocks
    for index, source in enumerate(blocks.sources):
        if source.dtype is dtype or source.dtype not in CASTABLE:
            continue
        blocks.dtypes[index] = SAFETENSORS_NAMES[dtype]
        blocks.num_bytes[index] = math.prod(blocks.shapes[index]) * dtype.itemsize
        blocks.item_bytes[index] = dtype.itemsize
        # A cast source cannot be copied as bytes.
        blocks.addresses[index] = 0
        blocks.casts[index] = dtype
    return replace(flat, tree=_cast_layouts(flat.tree, blocks.casts)) if blocks.casts else flat


def _cast_layouts(node: Any, casts: dict[int, torch.dtype]) -> Node:
    """Return the tree with the new dtypes, which only nodes of strided tensors have."""
    if isinstance(node, LayoutNode):
        cast: Node = msgspec.structs.replace(node, dtype=name_of(casts[node.index])) if node.index in casts else node
        return cast
    changed: dict[str, object] = {}
    for name in ("items", "value", "local", "values"):
        below = getattr(node, name, None)
        if isinstance(below, list):
            changed[name] = [_cast_layouts(item, casts) for item in below]
        elif isinstance(below, msgspec.Struct):
            changed[name] = _cast_layouts(below, casts)
    unchanged: Node = node
    return msgspec.structs.replace(node, **changed) if changed else unchanged
