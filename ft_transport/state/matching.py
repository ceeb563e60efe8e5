"""Finds which of the receiver's own tensors can receive the tensors of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ft_transport.errors import RestoreError
from ft_transport.state import placements
from ft_transport.state.placements import is_dtensor
from ft_transport.state.tensors import (
    DTYPES_BY_SAFETENSORS_NAME,
    Column,
    ViewKey,
    extent_bytes,
    has_own_memory,
    is_lazy,
    name_of,
    overlaps_itself,
    read_only_positions,
    torch_name_of,
    view_key,
)
from ft_transport.state.unflatten import as_plain
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.nodes import (
    STRIDE,
    CheckTime,
    DefaultDictNode,
    DequeNode,
    DTensorNode,
    LayoutNode,
    LeafNode,
    MappingNode,
    NamedTupleNode,
    Node,
    SequenceNode,
    TensorNode,
    unbounded,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Mismatch(NamedTuple):
    """A tensor of the receiver that differs from the tensor at the same path in the snapshot.

    Attributes:
        path: Path of the tensor.
        own: Dtype and shape of the receiver's tensor, such as ``float32[2, 3]``, or its division among ranks.
        received: Dtype and shape, or division, of the tensor in the snapshot.
        is_division: Whether only the division among ranks differs.
    """

    path: str
    own: str
    received: str
    is_division: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """Describes a state that a receiver is about to load, before its first byte arrives.

    Attributes:
        step: The committed step of the state.
        mismatches: Tensors that differ from the receiver's own in dtype, shape or division among ranks.
    """

    step: int
    mismatches: tuple[Mismatch, ...]
    _tree: Node

    def keys(self, *path: str | int) -> tuple[str, ...] | None:
        """Return the str keys of the mapping at ``path``; ``None`` if no mapping is there."""
        node = self._node(path)
        if not isinstance(node, MappingNode):
            return None
        return tuple(key for key in node.items[::2] if isinstance(key, str))

    def num_items(self, *path: str | int) -> int | None:
        """Return the length of the list or tuple at ``path``; ``None`` if no list or tuple is there."""
        node = self._node(path)
        return len(node.items) if isinstance(node, SequenceNode) else None

    def texts(self, *path: str | int) -> tuple[str, ...]:
        """Return the str items of the list or tuple at ``path``. Any other item becomes an empty text."""
        node = self._node(path)
        items = node.items if isinstance(node, SequenceNode) else []
        return tuple(item if isinstance(item, str) else "" for item in items)

    def _node(self, path: tuple[str | int, ...]) -> Node:
        node: Node = self._tree
        for step in path:
            match node:
                case MappingNode():
                    pairs = zip(node.items[::2], node.items[1::2], strict=False)
                    node = next((value for key, value in pairs if type(key) is type(step) and key == step), None)
                case SequenceNode() if isinstance(step, int) and 0 <= step < len(node.items):
                    node = node.items[step]
                case _:
                    return None
        return node


class Offer(NamedTuple):
    """A tensor of the receiver with the dtype and shape of a node, and the addresses where its memory starts and ends.

    ``is_direct`` tells whether the bytes can be received in place.
    """

    node: TensorNode | LayoutNode
    tensor: torch.Tensor
    is_direct: bool
    start: int
    end: int


class Matcher:
    """Finds, for each tensor of a snapshot, the tensors of the receiver that can receive it.

    Args:
        manifest: The manifest of the snapshot.
        check_time: Called repeatedly; an error that it raises ends the search.

    Attributes:
        direct: The receiver's tensors into which bytes are received directly, by index in the snapshot's tensor table.
        indirect: The receiver's tensors into which data is copied after it was received, each with its node.
        destinations: All matched tensors except those that `_take_plain` matched, by index in the tensor table and
            `view_key`.
        mismatches: Tensors of the receiver that differ from the snapshot in dtype, shape or division.
    """

    def __init__(self, manifest: Manifest, check_time: CheckTime = unbounded) -> None:
        self._manifest = manifest
        self._check_time = check_time
        self._num_seen = 0
        # Tensors found on the fast way. In columns, since an object for each would trigger the garbage collector.
        self._plain: dict[int, torch.Tensor] = {}
        self._plain_starts: list[int] = []
        self._has_fast_lane = True
        self.direct: dict[int, torch.Tensor] = {}
        self.indirect: list[tuple[TensorNode | LayoutNode, torch.Tensor]] = []
        self.destinations: dict[tuple[int, ViewKey], Offer] = {}
        self.mismatches: list[Mismatch] = []

    def match(self, node: Node, into: object) -> None:
        """Walk through the tree and the receiver's state in parallel, and fill the attributes. Called once.

        Raises:
            RestoreError: The memory of a matching tensor is read-only.
        """
        self._collect(node, into)
        memory = self._memory()
        self._refuse_read_only(*memory)
        if _overlap(*memory):
            # Some tensors share memory: search again without the fast way, which does not handle that.
            self._has_fast_lane = False
            self._plain.clear()
            self._plain_starts.clear()
            self.destinations.clear()
            self.mismatches.clear()
            self._collect(node, into)
            self._refuse_overlapping()
        self.direct.update(self._plain)
        for offer in self.destinations.values():
            if offer.is_direct and offer.node.index not in self.direct:
                self.direct[offer.node.index] = offer.tensor
            else:
                self.indirect.append((offer.node, offer.tensor))

    def _collect(self, node: Node, into: object) -> None:
        self._num_seen += 1
        if self._num_seen % STRIDE == 0:
            self._check_time()
        if isinstance(into, torch.Tensor):
            if is_lazy(into):  # The lazy module allocates this tensor when it loads the state.
                return
            if into.is_nested:
                self._note_nested(node)
                return
        match node:
            case None | bool() | int() | float() | str():
                return
            case TensorNode():
                if is_dtensor(into):
                    self._note_other_division(node, into, "a plain tensor")
                elif isinstance(into, torch.Tensor):
                    self._consider(node, into)
            case MappingNode() | DefaultDictNode():
                if isinstance(into, Mapping):
                    self._collect_values(node.items, into)
            case SequenceNode(kind="list" | "tuple") | NamedTupleNode() | DequeNode():
                if isinstance(into, Sequence):
                    # Lengths may differ, for example of histories; the first items are received in place.
                    for item, counterpart in zip(node.items, into, strict=False):
                        self._collect(item, counterpart)
            case LeafNode():
                if isinstance(into, torch.Tensor):
                    self._collect(node.value, into.detach())
            case DTensorNode():
                if is_dtensor(into):
                    self._collect_part(node, into)
                elif isinstance(into, torch.Tensor):
                    self._note_other_division(node.local, into, "a shard of a DTensor")
            case LayoutNode():
                if isinstance(into, torch.Tensor) and not is_dtensor(into):
                    self._consider_layout(node, into)
            case _:
                return

    def _collect_part(self, node: DTensorNode, into: DTensor) -> None:
        manifest = self._manifest
        if node.layout >= len(manifest.layouts):
            return  # `Unflattener` reports this error with its path.
        layout = manifest.layouts[node.layout]
        if placements.matches(into, layout, manifest.meshes[layout.mesh]):
            self._collect(node.local, into.to_local().detach())
            return
        local = node.local
        if (
            into.shape != layout.global_shape
            and isinstance(local, (TensorNode, LayoutNode))
            and local.index < len(manifest.tensors)
        ):
            entry = manifest.tensors[local.index]
            self._note_mismatch(entry.name, into, torch_name_of(entry.dtype), layout.global_shape)
        elif into.shape == layout.global_shape:
            mesh = manifest.meshes[layout.mesh]
            at = placements.decode_placements(layout.placements)
            self._note_other_division(local, into, f"the shard of coordinate {mesh.coordinate} of {mesh.shape} by {at}")

    def _note_other_division(self, node: Node, into: torch.Tensor, received: str) -> None:
        if isinstance(node, (TensorNode, LayoutNode)) and node.index < len(self._manifest.tensors):
            own = f"a plain tensor of {list(into.shape)}"
            if is_dtensor(into):
                mesh = into.device_mesh
                at = mesh.get_coordinate()
                own = f"the shard of coordinate {tuple(at or ())} of {tuple(mesh.mesh.shape)} by {into.placements}"
            self._add_mismatch(Mismatch(self._manifest.tensors[node.index].name, own, received, True))

    def _collect_values(self, items: Sequence[Node], into: Mapping[object, object]) -> None:
        for num_before, (key, value) in enumerate(zip(items[::2], items[1::2], strict=False)):
            if num_before % STRIDE == 0:
                self._check_time()
            if isinstance(key, (str, int)):
                counterpart = into.get(key)
                if counterpart is None or (
                    type(value) is TensorNode
                    and type(counterpart) is torch.Tensor
                    and self._take_plain(value.index, counterpart)
                ):
                    continue
                self._collect(value, counterpart)

    def _take_plain(self, index: int, into: torch.Tensor) -> bool:
        """Match a tensor without an `Offer`, which is faster. Return ``False`` if it is not a usual tensor.

        A usual tensor is row-major and on the CPU, has its own memory, and is the first match of the snapshot's tensor.
        """
        if not self._has_fast_lane or index >= len(self._manifest.tensors) or index in self._plain:
            return False
        entry = self._manifest.tensors[index]
        dtype = into.dtype
        if not (
            DTYPES_BY_SAFETENSORS_NAME.get(entry.dtype) is dtype
            and into.layout is torch.strided
            and not into.is_nested
            and into.is_cpu
            and into.shape == entry.shape
            and into.is_contiguous()
            and not (into.requires_grad or into.is_neg() or (dtype.is_complex and into.is_conj()))
        ):
            return False
        start = into.data_ptr()
        if not start or entry.start == entry.end:
            return False
        self._plain[index] = into
        self._plain_starts.append(start)
        return True

    def _consider(self, node: TensorNode, into: torch.Tensor) -> None:
        index = node.index
        if index >= len(self._manifest.tensors):
            return  # `Unflattener` reports this error with its path.
        entry = self._manifest.tensors[index]
        if into.shape == entry.shape and DTYPES_BY_SAFETENSORS_NAME.get(entry.dtype) is into.dtype:
            self._offer(node, into, is_row_major=True)
        else:
            self._note_mismatch(entry.name, into, torch_name_of(entry.dtype), entry.shape)

    def _consider_layout(self, node: LayoutNode, into: torch.Tensor) -> None:
        if node.index >= len(self._manifest.tensors):
            return
        if into.shape == node.shape and name_of(into.dtype) == node.dtype:
            self._offer(node, into, is_row_major=False)
        else:
            self._note_mismatch(self._manifest.tensors[node.index].name, into, node.dtype, node.shape)

    def _note_nested(self, node: Node) -> None:
        """Record a mismatch for a nested tensor of the receiver, whose shape may not be readable."""
        while isinstance(node, (LeafNode, DTensorNode)):
            node = node.value if isinstance(node, LeafNode) else node.local
        if isinstance(node, (TensorNode, LayoutNode)) and node.index < len(self._manifest.tensors):
            entry = self._manifest.tensors[node.index]
            dtype, shape = torch_name_of(entry.dtype), entry.shape
            if isinstance(node, LayoutNode):
                dtype, shape = node.dtype, node.shape
            self._add_mismatch(Mismatch(entry.name, "a nested tensor", f"{dtype[:64]}{list(shape)}"))

    def _note_mismatch(self, path: str, into: torch.Tensor, dtype: str, shape: Sequence[int]) -> None:
        own = f"{name_of(into.dtype)}{list(into.shape)}"
        self._add_mismatch(Mismatch(path, own, f"{dtype[:64]}{list(shape)}"))

    def _add_mismatch(self, mismatch: Mismatch) -> None:
        """Add a mismatch. Limits their number, because a forged tree could name the same tensor many times."""
        if len(self.mismatches) <= len(self._manifest.tensors):
            self.mismatches.append(mismatch)

    def _offer(self, node: TensorNode | LayoutNode, into: torch.Tensor, *, is_row_major: bool) -> None:
        if not has_own_memory(into):
            return
        tensor = as_plain(into)
        is_contiguous = tensor.is_contiguous()
        if not is_contiguous and overlaps_itself(tensor.shape, tensor.stride()):
            return
        key = view_key(tensor)
        num_bytes = tensor.nbytes if is_contiguous else extent_bytes(tensor)
        if key[0] or not num_bytes:  # a freed storage has address 0
            is_direct = is_row_major and is_contiguous and tensor.is_cpu and not (tensor.is_neg() or tensor.is_conj())
            self.destinations.setdefault((node.index, key), Offer(node, tensor, is_direct, key[0], key[0] + num_bytes))

    def _memory(self) -> tuple[Column, Column]:
        """Return addresses and sizes of matched tensors: first those that `_take_plain` matched, then the others."""
        table = self._manifest.tensors
        starts = [*self._plain_starts, *(offer.start for offer in self.destinations.values())]
        num_bytes = [
            *(table[index].end - table[index].start for index in self._plain),
            *(offer.end - offer.start for offer in self.destinations.values()),
        ]
        return np.array(starts, dtype=np.int64), np.array(num_bytes, dtype=np.int64)

    def _refuse_read_only(self, starts: Column, num_bytes: Column) -> None:
        found = read_only_positions(starts, starts + num_bytes) if len(starts) else []
        plain, offers = list(self._plain), list(self.destinations.values())
        for position in found:
            offer = offers[position - len(plain)] if position >= len(plain) else None
            # The address of a device tensor may be in a mapping of the driver that is read-only for the process.
            if offer is None or offer.tensor.is_cpu:
                raise RestoreError(
                    "expected a tensor in writable memory, got one in a read-only mapping: map the file privately "
                    "(MAP_PRIVATE with PROT_WRITE, mmap.ACCESS_COPY), or leave the tensor out of the state to load "
                    "into",
                    path=self._manifest.tensors[offer.node.index if offer is not None else plain[position]].name,
                    step=self._manifest.step,
                )

    def _refuse_overlapping(self) -> None:
        """Remove tensors that share memory with an earlier one, so that no byte is written twice."""
        by_start = sorted(self.destinations.items(), key=lambda item: item[1].start)
        written: dict[torch.device, int] = {}
        for key, offer in by_start:
            if offer.start == offer.end:
                continue
            if offer.start < written.get(offer.tensor.device, 0):
                del self.destinations[key]
            else:
                written[offer.tensor.device] = offer.end


def _overlap(starts: Column, num_bytes: Column) -> bool:
    """Return whether any two memory ranges overlap, without comparing all pairs."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], starts[order] + num_bytes[order]
    return bool((starts[1:] < np.maximum.accumulate(ends)[:-1]).any())
