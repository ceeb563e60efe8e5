"""A flattened state: a tree of nodes, and the columns of a table that describes its tensors and their memory.

`FastLane` fills the columns for the usual tensors of a large state: tensors that are row-major and on the CPU, and that
share neither memory nor name with another tensor. The walk through the state only lists these tensors; one tight loop
then describes them. If a listed tensor turns out to be unusual, the walk starts again without listing it.
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

from ft_transport.state.tensors import SAFETENSORS_NAMES, name_of
from ft_transport.wire.layouts import LayoutTable
from ft_transport.wire.nodes import LayoutNode, Node


def _column() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Blocks:
    """The columns of the tensor table. Each list or array has one element for each tensor; arrays are of 64-bit ints.

    Attributes:
        names: Unique names, made from the paths.
        sources: Live tensors on any device, with any strides.
        dtypes: The safetensors dtype of each tensor in the file.
        shapes: The shape of each tensor in the file; may be ``torch.Size``.
        num_bytes: The number of bytes of each tensor in the file.
        item_bytes: The number of bytes of one element, which is also the alignment of the tensor.
        addresses: The address of a source that is row-major and on the CPU, so that its bytes can be copied directly; 0
            for any other source.
        casts: By index, the dtype to which the copy casts a source. The other columns describe the cast tensor.
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
    """A flattened state, ready to be copied. Nodes of ``tree`` refer to tensors and layouts by their index."""

    tree: Node
    blocks: Blocks
    layouts: LayoutTable


_PLAIN_NAMES: Final = {dtype: name for dtype, name in SAFETENSORS_NAMES.items() if not dtype.is_complex}
_ITEM_BYTES: Final = {dtype: dtype.itemsize for dtype in _PLAIN_NAMES}
_TAKEN_NAMES: Final = ("__metadata__", "")
"""Names that no tensor may have: that of the metadata in the header, and the empty path of the root."""

_facts_of: Final = attrgetter("dtype", "shape", "nbytes", "requires_grad", "is_cpu")


class OffLaneError(Exception):
    """Raised if tensors in the fast lane turn out to be unusual; ``ids`` has the ``id()`` of each such tensor."""

    def __init__(self, ids: frozenset[int]) -> None:
        super().__init__(len(ids))
        self.ids = ids


class FastLane:
    """Fills the remaining columns for tensors that the walk added only to ``blocks.names`` and ``blocks.sources``.

    Args:
        blocks: The columns of the state.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._names: set[str] = set(_TAKEN_NAMES)
        self._blocks = blocks
        self._in_lane: list[range] = []
        self._num_indexed = 0
        self._index_at: dict[int, int] = {}

    def settle(self) -> None:
        """Describe the tensors that were listed since the last call.

        Reads few attributes and makes few objects for each tensor, because the caller holds the lock.

        Raises:
            OffLaneError: A tensor is not row-major, not on the CPU, or has the name of another tensor.
        """
        start, end = len(self._blocks.shapes), len(self._blocks.names)
        if start == end:
            return
        try:
            is_plain = self._describe_from(start)
        except RuntimeError:  # A sparse tensor has no address, and a nested tensor has no shape.
            is_plain = False
        if not is_plain:
            raise OffLaneError(self._off_lane_ids())
        self._in_lane.append(range(start, end))

    def _describe_from(self, start: int) -> bool:
        """Fill the columns. If a tensor or a name is unusual, return ``False``; the columns are filled in part then."""
        blocks = self._blocks
        sources, names = blocks.sources[start:], blocks.names[start:]
        num_names = len(self._names)
        self._names.update(names)
        if len(self._names) - num_names < len(names):
            return False
        dtypes: list[torch.dtype] = []
        add_dtype, add_shape = dtypes.append, blocks.shapes.append
        add_num_bytes, add_address = blocks.num_bytes.append, blocks.addresses.append
        # All attributes of one tensor before the next tensor, while it is in the processor's cache.
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
        """Append an unusual tensor to every column of the table, under an unused name, and return its index.

        Args:
            source: The tensor.
            path: Its path, which becomes its name unless another tensor has that name.
            dtype: Its safetensors dtype.
            shape: Its shape in the file.
            address: Its address if it is row-major and on the CPU, else 0; ``None`` lets this method find out.

        Raises:
            OffLaneError: A tensor that was listed earlier is unusual (see `settle`).
        """
        self.settle()
        blocks = self._blocks
        name = path or "(root)"
        if not name.isascii():
            # A str key may contain lone surrogates, which JSON cannot encode.
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
        """Check that each tensor in the lane has memory, at an address that no other tensor has.

        Raises:
            OffLaneError: A tensor has no memory, or the address of another tensor.
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
        """Return the index of the first row-major tensor at an address; ``None`` if there is none."""
        for lane in self._in_lane[self._num_indexed :]:
            for index in lane:
                self._index_at.setdefault(self._blocks.addresses[index], index)
        self._num_indexed = len(self._in_lane)
        return self._index_at.get(address)

    def note(self, address: int, index: int) -> None:
        """Record the address of a row-major tensor that is not in the lane, for `first_at`."""
        self._index_at.setdefault(address, index)


CASTABLE: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that `cast_floating` casts from and to. Other dtypes are no floating-point types or need scales."""


def cast_floating(flat: FlatState, dtype: torch.dtype) -> FlatState:
    """Return a state whose floating-point tensors are cast to ``dtype`` when they are copied. Changes ``flat.blocks``.

    Args:
        flat: The flattened state.
        dtype: One of `CASTABLE`.
    """
    blocks = flat.blocks
    for index, source in enumerate(blocks.sources):
        if source.dtype is dtype or source.dtype not in CASTABLE:
            continue
        blocks.dtypes[index] = SAFETENSORS_NAMES[dtype]
        blocks.num_bytes[index] = math.prod(blocks.shapes[index]) * dtype.itemsize
        blocks.item_bytes[index] = dtype.itemsize
        # 0, because the copy of a cast tensor is no copy of bytes.
        blocks.addresses[index] = 0
        blocks.casts[index] = dtype
    return replace(flat, tree=_cast_layouts(flat.tree, blocks.casts)) if blocks.casts else flat


def _cast_layouts(node: Any, casts: dict[int, torch.dtype]) -> Node:
    """Return the tree with the dtypes after the casts. Only a `LayoutNode` names the dtype of its tensor."""
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
