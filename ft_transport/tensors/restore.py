"""Receiving a snapshot: its bytes land in the receiver's own tensors where they fit, and in fresh memory elsewhere.

``Restore`` hands out the memory for any range of the data, so the network layer needs to know nothing of tensors, and
builds the nested state once every byte was verified. Until then a receiver's tensors may hold a mixture; if the fetch
fails, ``poison`` overwrites what was touched, so that a part of a state cannot be taken for a whole one.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ft_transport.errors import ManifestError, RestoreError
from ft_transport.tensors import placements
from ft_transport.tensors.dtypes import DTYPES_BY_SAFETENSORS_NAME
from ft_transport.tensors.unflatten import Unflattener
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.nodes import (
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
)
from ft_transport.wire.plan import DestinationPlan

_ALIGN_BYTES: Final = 64
_KEEP_SHARED_BYTES: Final = 16 << 10
"""A smaller fresh tensor gets memory of its own at the end, so that it alone does not keep the whole buffer alive."""
_POISON_BYTE: Final = 0xFF
"""All bits set is a NaN in every IEEE floating-point type and -1 in every signed one."""


class Restore:
    """Memory for one snapshot on the receiver, and the state that comes out of it.

    The methods may be called from several threads, ``finish`` and ``poison`` after all others have returned.

    Args:
        manifest: What will be received.
        into: The receiver's own state, of any shape. A CPU tensor in it that stands at the same place as one in the
            snapshot, with the same dtype, shape and row-major layout, is received into directly. A tensor that fits
            but is on a device or has another memory layout is copied to at the end. Everything else is ignored.
        meshes: Meshes for DTensors that have no counterpart in ``into``.
        max_bytes: Refuse a snapshot larger than this.

    Raises:
        RestoreError: The snapshot is larger than ``max_bytes``.
    """

    def __init__(
        self, manifest: Manifest, *, into: object = None, meshes: Sequence[DeviceMesh] = (), max_bytes: int
    ) -> None:
        if manifest.data_bytes > max_bytes:
            raise RestoreError(
                f"expected a snapshot of at most {max_bytes} bytes (max_receive_bytes), got {manifest.data_bytes}",
                step=manifest.step,
            )
        self._manifest = manifest
        self._into = into
        self._meshes = meshes
        self._touched = threading.Event()
        matcher = _Matcher(manifest)
        matcher.match(manifest.tree, into)
        self._direct = matcher.direct
        self._indirect = matcher.indirect
        self._destinations = matcher.destinations
        self._fresh, self._fresh_offsets = _allocate_fresh(manifest, self._direct)
        self._fresh_view = memoryview(self._fresh) if self._fresh is not None else None
        filled = sorted((entry.start, index) for index, entry in enumerate(manifest.tensors) if entry.end > entry.start)
        self._slots = [index for _, index in filled]
        self._plan = DestinationPlan([start for start, _ in filled], manifest.data_bytes)

    @property
    def in_place_bytes(self) -> int:
        """How many bytes land directly in the receiver's own tensors."""
        return sum(self._manifest.tensors[index].end - self._manifest.tensors[index].start for index in self._direct)

    @property
    def destination_touched(self) -> bool:
        """Whether bytes may have landed in the receiver's own tensors."""
        return self._touched.is_set()

    def buffers(self, start: int, end: int) -> list[memoryview]:
        """Writable uint8 views that cover ``[start, end)`` of the data once, in order."""
        if self._direct:
            self._touched.set()
        return [
            self._memory(self._slots[piece.slot], piece.offset, piece.num_bytes)
            for piece in self._plan.pieces(start, end)
        ]

    def finish(self) -> object:
        """Builds the state. Called once, after every byte was received and verified.

        Tensors received in place are the receiver's own objects; others are new, on the CPU.

        Raises:
            ManifestError: The tree does not agree with the tensor table or names what this process does not have.
            RestoreError: A DTensor needs a mesh that the receiver does not have.
        """
        state = Unflattener(
            tensor_of=self._tensor,
            is_destination=self._is_destination,
            meshes=placements.MeshResolver(self._into, self._meshes),
        ).build(self._manifest.tree, self._into, "")
        with torch.no_grad():
            for target, source in self._copies_to_targets():
                target.copy_(source)
        return state

    def poison(self) -> None:
        """Overwrites the receiver's own tensors with a pattern that reads as NaN (as -1 in integers).

        Called after a fetch failed midway: the mixture that they hold must not be trained on unnoticed.
        """
        for tensor in self._direct.values():
            # A bool of all bits set is no valid bool.
            value = 1 if tensor.dtype is torch.bool else _POISON_BYTE
            ctypes.memset(tensor.data_ptr(), value, tensor.nbytes)

    def _memory(self, index: int, offset: int, num_bytes: int) -> memoryview:
        """A part of the memory that takes entry ``index``."""
        tensor = self._direct.get(index)
        if tensor is not None:
            return memoryview((ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr() + offset)).cast("B")
        assert self._fresh_view is not None, "an entry with bytes has memory"
        start = self._fresh_offsets[index] + offset
        return self._fresh_view[start : start + num_bytes]

    def _is_destination(self, index: int, tensor: torch.Tensor) -> bool:
        return self._direct.get(index) is tensor or (index, tensor.data_ptr()) in self._destinations

    def _copies_to_targets(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        for node, target in self._indirect:
            source = self._tensor(node.index)
            if isinstance(node, LayoutNode):
                source = Unflattener.reinterpret(source, node)
            yield target, source

    def _tensor(self, index: int) -> torch.Tensor:
        """The entry ``index`` as a tensor of its wire dtype: the receiver's own, or one in fresh memory."""
        direct = self._direct.get(index)
        if direct is not None:
            return direct
        entry = self._manifest.tensors[index]
        dtype = DTYPES_BY_SAFETENSORS_NAME.get(entry.dtype)
        if dtype is None:
            raise ManifestError(f"expected a dtype that this torch has, got {entry.dtype}", path=entry.name)
        if entry.end == entry.start:
            return torch.empty(entry.shape, dtype=dtype)
        assert self._fresh is not None
        num_items = (entry.end - entry.start) // dtype.itemsize
        tensor = torch.frombuffer(self._fresh, dtype=dtype, count=num_items, offset=self._fresh_offsets[index]).view(
            entry.shape
        )
        return tensor.clone() if entry.end - entry.start < _KEEP_SHARED_BYTES else tensor


class _Matcher:
    """Finds, for each entry of the table, a tensor of the receiver that can take its bytes.

    Attributes:
        direct: By entry, the tensor whose memory takes the bytes as they come.
        indirect: Tensors that are copied to at the end.
        destinations: Entry and address of every tensor in ``direct`` and ``indirect``.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self.direct: dict[int, torch.Tensor] = {}
        self.indirect: list[tuple[TensorNode | LayoutNode, torch.Tensor]] = []
        self.destinations: set[tuple[int, int]] = set()
        self._addresses: dict[int, int] = {}

    def match(self, node: Node, into: object) -> None:
        """Walks the tree and the receiver's state side by side."""
        self._collect(node, into)
        self._drop_overlapping()
        self.destinations.update(self._addresses.items())
        self.destinations.update((target.index, tensor.data_ptr()) for target, tensor in self.indirect)

    def _collect(self, node: Node, into: object) -> None:
        match node:
            case None | bool() | int() | float() | str():
                return
            case TensorNode():
                if isinstance(into, torch.Tensor) and not isinstance(into, DTensor):
                    self._consider(node, into)
            case MappingNode() | DefaultDictNode():
                if isinstance(into, Mapping):
                    self._collect_values(node.items, into)
            case SequenceNode(kind="list" | "tuple") | NamedTupleNode() | DequeNode():
                if isinstance(into, Sequence) and len(into) == len(node.items):
                    for item, counterpart in zip(node.items, into, strict=True):
                        self._collect(item, counterpart)
            case LeafNode():
                if isinstance(into, torch.Tensor):
                    self._collect(node.value, into.detach())
            case DTensorNode():
                if isinstance(into, DTensor) and placements.matches(into, node):
                    self._collect(node.local, into.to_local().detach())
            case LayoutNode():
                if isinstance(into, torch.Tensor) and not isinstance(into, DTensor):
                    self._consider_layout(node, into)
            case _:
                return

    def _collect_values(self, items: Sequence[Node], into: Mapping[object, object]) -> None:
        for key, value in zip(items[::2], items[1::2], strict=False):
            if isinstance(key, (str, int)):
                counterpart = into.get(key)
                # A fast lane for what nearly every item of a large state is.
                if type(value) is TensorNode and type(counterpart) is torch.Tensor:
                    self._consider(value, counterpart)
                elif counterpart is not None:
                    self._collect(value, counterpart)

    def _consider(self, node: TensorNode, into: torch.Tensor) -> None:
        index = node.index
        if index >= len(self._manifest.tensors):
            return  # Reported with its path when the state is built.
        entry = self._manifest.tensors[index]
        if DTYPES_BY_SAFETENSORS_NAME.get(entry.dtype) is not into.dtype or into.shape != entry.shape:
            return
        if not (into.is_cpu and into.is_contiguous()) or into.is_neg() or into.is_conj():
            self.indirect.append((node, into))
            return
        address = into.data_ptr()
        if self._addresses.setdefault(index, address) == address:
            self.direct[index] = into
        else:
            self.indirect.append((node, into))

    def _consider_layout(self, node: LayoutNode, into: torch.Tensor) -> None:
        if str(into.dtype) == f"torch.{node.dtype}" and tuple(into.shape) == node.shape and 0 not in into.stride():
            self.indirect.append((node, into))

    def _drop_overlapping(self) -> None:
        """Of the receiver's tensors that share memory, only the first may be written by two entries."""
        end = -1
        for address, index in sorted((address, index) for index, address in self._addresses.items()):
            entry = self._manifest.tensors[index]
            if address < end and entry.end > entry.start:
                del self.direct[index], self._addresses[index]
            else:
                end = max(end, address + entry.end - entry.start)


def _allocate_fresh(manifest: Manifest, direct: Mapping[int, torch.Tensor]) -> tuple[mmap.mmap | None, dict[int, int]]:
    """One buffer for all entries that have no tensor of the receiver's."""
    offsets = {}
    end = 0
    for index, entry in enumerate(manifest.tensors):
        if index not in direct and entry.end > entry.start:
            offsets[index] = end
            end += -(-(entry.end - entry.start) // _ALIGN_BYTES) * _ALIGN_BYTES
    if not end:
        return None, offsets
    # Private, because shared anonymous memory gets no huge pages on most systems.
    buffer = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        # Fewer, larger page faults: a fresh buffer of small pages is filled at a fraction of the speed.
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer, offsets
