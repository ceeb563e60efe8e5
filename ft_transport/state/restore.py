"""Receives a snapshot: bytes land in the receiver's own tensors if they fit, otherwise in fresh memory.

``Restore`` provides the memory for any range of the data, so that the network layer needs no tensors, and builds the
nested state after all bytes are verified. Until then a receiver's tensors may contain a mixture of two states. If the
fetch fails, ``poison`` overwrites the touched tensors, so that no partial state passes for a whole one.
"""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_transport.errors import ManifestError, RestoreError
from ft_transport.runtime.decoding import collector_paused
from ft_transport.state import placements
from ft_transport.state.device_copies import copy_bits
from ft_transport.state.dtypes import DTYPES_BY_SAFETENSORS_NAME
from ft_transport.state.matching import Incoming, Matcher
from ft_transport.state.memory_bytes import bytes_at, extent_bytes, has_own_memory, view_key
from ft_transport.state.placements import is_dtensor
from ft_transport.state.prefaulted import FreshMemory, PrefaultedMemory
from ft_transport.state.unflatten import Unflattener, as_plain
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.nodes import CheckTime, DTensorNode, LayoutNode, LeafNode, Node, TensorNode, ViewNode, unbounded

MEMORY_BYTES: Final = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""The size of this machine's memory; a larger snapshot is refused."""
_KEEP_SHARED_BYTES: Final = 16 << 10
"""A smaller fresh tensor gets its own memory at the end, so that it does not keep the whole buffer alive."""
_POISON_BYTE: Final = 0xFF
"""All bits set is a NaN in every IEEE floating-point type and -1 in every signed one."""


Range: TypeAlias = tuple[int, int]
"""Bytes of the data, half-open."""
Piece: TypeAlias = tuple[int, int, int]
"""A part of a destination: slot, offset in the slot, length in bytes."""


class DestinationPlan:
    """Divides byte ranges of the data among consecutive destinations.

    Args:
        starts: Position of each destination in the data, strictly ascending from 0; without empty destinations.
        data_bytes: End of the last destination.
    """

    def __init__(self, starts: Sequence[int], data_bytes: int) -> None:
        self._starts = list(starts)
        self._ends = [*self._starts[1:], data_bytes]

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """Yield the pieces that cover ``[start, end)``, in order."""
        slot = bisect_right(self._starts, start) - 1
        while start < end:
            stop = min(end, self._ends[slot])
            yield slot, start - self._starts[slot], stop - start
            start = stop
            slot += 1


class Restore:
    """The receiver's memory for one snapshot, and the state built from it.

    Several threads may call the methods; ``finish`` and ``poison`` only after all other calls have returned.

    Args:
        manifest: Describes the snapshot.
        into: The receiver's own state, of any structure. Bytes land directly in a CPU tensor at the same path with the
            same dtype, shape and row-major layout. A tensor that fits but is on a device, or has another layout, gets a
            copy at the end, unless it already has the content. Other values are ignored.
        meshes: Meshes for DTensors without a counterpart in ``into``.
        prefaulted: May have resident memory.
        check_time: Called repeatedly, here and in `finish`.

    Attributes:
        incoming: Describes the snapshot before its bytes arrive.
        destination_touched: Whether bytes may have landed in the receiver's own tensors.

    Raises:
        RestoreError: The snapshot is larger than this machine's memory, or memory of a tensor in ``into`` cannot be
            written to.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        into: object = None,
        meshes: Sequence[DeviceMesh] = (),
        prefaulted: PrefaultedMemory | None = None,
        check_time: CheckTime = unbounded,
    ) -> None:
        if manifest.data_bytes > MEMORY_BYTES:
            raise RestoreError(
                f"expected a snapshot of at most {MEMORY_BYTES} bytes, the memory of this machine, got "
                f"{manifest.data_bytes}",
                step=manifest.step,
            )
        self._manifest = manifest
        self._into = into
        self._meshes = meshes
        self.destination_touched = False
        self._check_time = check_time
        matcher = Matcher(manifest, check_time)
        try:
            with collector_paused():
                matcher.match(manifest.tree, into)
        except RecursionError as error:
            raise ManifestError("expected a tree that Python's recursion limit lets through") from error
        self._direct = matcher.direct
        self._indirect = matcher.indirect
        self._destinations = matcher.destinations
        self.incoming = Incoming(step=manifest.step, mismatches=tuple(matcher.mismatches), _tree=manifest.tree)
        self._indirect_of: dict[int, list[tuple[TensorNode | LayoutNode, torch.Tensor]]] = {}
        tensors = manifest.tensors
        for node, target in self._indirect:
            if tensors[node.index].end > tensors[node.index].start:
                self._indirect_of.setdefault(node.index, []).append((node, target))
        self._fresh = FreshMemory(manifest, self._direct, prefaulted)
        # Entries in fresh memory with received bytes.
        self._arrived: set[int] = set()
        # Entries copied to fresh memory from a tensor of the receiver, and that tensor.
        self._read_from: dict[int, torch.Tensor] = {}
        # Targets of final copies: undefined content after a failure.
        self._written: list[torch.Tensor] = []
        self._slots = [index for index, entry in enumerate(tensors) if entry.end > entry.start]
        self._slots.sort(key=lambda index: tensors[index].start)
        self._plan = DestinationPlan([tensors[index].start for index in self._slots], manifest.data_bytes)

    def tensors_for(self, index: int) -> list[torch.Tensor]:
        """Return the receiver's tensors that get entry ``index``, which has bytes."""
        direct = self._direct.get(index)
        others = [target for _, target in self._indirect_of.get(index, ())]
        return others if direct is None else [direct, *others]

    @property
    def is_all_here(self) -> bool:
        """Whether `present` also reads tensors of the receiver that are not received in place."""
        return all(index in self._direct or self._is_here(index) for index in self._indirect_of)

    def read_own(self, ranges: Iterable[Range]) -> None:
        """Copy the content of tensors that are not received in place, so that it can be read or partly received.

        Called before their first bytes arrive.

        Args:
            ranges: Ranges of the data. Each tensor in them is copied whole, once.
        """
        found: dict[int, torch.Tensor] = {}
        copies = []
        for start, end in ranges:
            for slot, _, _ in self._plan.pieces(start, end):
                index = self._slots[slot]
                is_known = index in self._direct or index in found or self._is_here(index)
                if index in self._indirect_of and not is_known:
                    node, own = self._indirect_of[index][0]
                    found[index] = own
                    copies.append((self._shaped(self._stored(index), node), own))
        if copies:
            self._check_time()
            copy_bits(copies)
            self._read_from |= found

    def adopt(self, earlier: Restore, *, is_landed: bool) -> bool:
        """Take over the memory of an earlier restore of the same tensors, with the bytes received there.

        Called before the first bytes arrive here, and after all work of the earlier restore; that one must not be used
        any more.

        Args:
            earlier: The earlier restore.
            is_landed: Whether its received bytes count.

        Returns:
            Whether all tensors received in place match those of the earlier restore. If not, nothing was taken over.
        """
        is_same = (
            self._manifest.tensors == earlier._manifest.tensors
            and self._direct.keys() == earlier._direct.keys()
            # The earlier restore keeps its tensors alive, so the same address is the same memory.
            and all(tensor.data_ptr() == earlier._direct[index].data_ptr() for index, tensor in self._direct.items())
        )
        if not is_same:
            return False
        self._fresh = earlier._fresh
        if is_landed:
            # Content read there may come from other tensors than this restore's.
            self._arrived = earlier._arrived | earlier._read_from.keys()
        self._written = earlier._written
        if earlier.destination_touched:
            self.destination_touched = True
        return True

    def buffers(self, start: int, end: int) -> list[memoryview]:
        """Return writable uint8 views that cover ``[start, end)`` of the data, in order.

        Raises:
            RestoreError: The memory of a tensor of the receiver was freed.
        """
        if self._direct:
            self.destination_touched = True
        return self._views(start, end, is_receiving=True)

    def present(self, start: int, end: int) -> list[memoryview]:
        """Return views to read only: the present content, received or not (see `read_own`).

        Raises:
            RestoreError: See `buffers`.
        """
        return self._views(start, end, is_receiving=False)

    def _views(self, start: int, end: int, *, is_receiving: bool) -> list[memoryview]:
        views: list[memoryview] = []
        for slot, offset, num_bytes in self._plan.pieces(start, end):
            index = self._slots[slot]
            tensor = self._direct.get(index)
            if tensor is not None:
                if not _has_memory(tensor):
                    raise RestoreError(
                        "expected the receiver's tensor to keep its memory, it was freed",
                        path=self._manifest.tensors[index].name,
                        step=self._manifest.step,
                    )
                views.append(bytes_at(tensor.data_ptr() + offset, num_bytes))
            else:
                if is_receiving:
                    self._arrived.add(index)
                views.append(self._fresh.view(index, offset, num_bytes))
        return views

    def finish(self) -> object:
        """Build the state. Called once, after all bytes have arrived.

        Tensors received in place are the receiver's own objects; others are new, on the CPU.

        Raises:
            ManifestError: The tree contradicts the tensor table, or names an object that this process lacks.
            RestoreError: A DTensor needs a mesh that the receiver lacks.
            DeadlineExceededError: ``check_time`` raised it.
        """
        unflattener = Unflattener(
            manifest=self._manifest,
            tensor_of=self._tensor,
            direct=self._direct,
            is_destination=self._is_destination,
            meshes=placements.MeshResolver(self._into, self._meshes),
            check_time=self._check_time,
        )
        try:
            with collector_paused():
                state = unflattener.build(self._manifest.tree, self._into)
        except RecursionError as error:
            raise ManifestError("expected a tree that Python's recursion limit lets through") from error
        # All faults of the snapshot are found before the first write.
        copies = [
            (target, self._shaped(self._tensor(node.index), node))
            for node, target in self._indirect
            if self._is_due(node.index, target)
        ]
        if copies:
            self.destination_touched = True
            self._written = [target for target, _ in copies]
        copy_bits(copies)
        return state

    def poison(self) -> None:
        """Overwrite the receiver's own tensors with a pattern that reads as NaN (-1 in integers).

        Called after a fetch failed midway: nobody must train on the mixture unnoticed. Freed tensors are skipped.
        """
        for tensor in filter(_has_memory, self._direct.values()):
            # All bits set is not a valid bool.
            value = 1 if tensor.dtype is torch.bool else _POISON_BYTE
            ctypes.memset(tensor.data_ptr(), value, tensor.nbytes)
        for target in self._written:
            bits = torch.full((target.nbytes,), _POISON_BYTE, dtype=torch.uint8)
            if target.dtype is torch.bool:
                bits.fill_(1)
            copy_bits([(target, bits.view(target.dtype).view(target.shape))])

    def fills(self, node: Node, into: torch.Tensor) -> bool:
        """Return whether the receiver's tensor ``into``, at the path of ``node``, gets all its bytes in place.

        A tensor without its own memory (on ``meta``, or of another class) counts as filled.
        """
        match node:
            case LeafNode():
                return self.fills(node.value, into.detach())
            case DTensorNode():
                return not is_dtensor(into) or self.fills(node.local, into.to_local().detach())
            case TensorNode() | LayoutNode():
                return (
                    not has_own_memory(into)
                    or not extent_bytes(into)
                    or self._direct.get(node.index) is into
                    or (node.index, view_key(as_plain(into))) in self._destinations
                )
            case ViewNode():
                return not has_own_memory(into) or any(
                    into.data_ptr() == base.data_ptr() + node.offset * base.dtype.itemsize
                    and into.stride() == node.stride
                    for base in self.tensors_for(node.index)
                )
            case _:
                return True

    def _is_here(self, index: int) -> bool:
        return index in self._arrived or index in self._read_from

    def _is_due(self, index: int, target: torch.Tensor) -> bool:
        """Return whether ``target``, not received in place, needs a copy; not if it still has the content."""
        if index in self._direct or index in self._arrived:
            return True
        read_from = self._read_from.get(index)
        return read_from is not None and read_from is not target

    def _is_destination(self, index: int, tensor: torch.Tensor) -> bool:
        return self._direct.get(index) is tensor or (index, view_key(tensor)) in self._destinations

    @staticmethod
    def _shaped(stored: torch.Tensor, node: TensorNode | LayoutNode) -> torch.Tensor:
        return Unflattener.reinterpret(stored, node) if isinstance(node, LayoutNode) else stored

    def _tensor(self, index: int) -> torch.Tensor:
        """Return entry ``index`` as a tensor of its wire dtype: the receiver's own, or one in fresh memory."""
        direct = self._direct.get(index)
        if direct is not None:
            return direct
        entry = self._manifest.tensors[index]
        if index in self._indirect_of:
            self.read_own([(entry.start, entry.end)])
        tensor = self._stored(index)
        return tensor.clone() if 0 < entry.end - entry.start < _KEEP_SHARED_BYTES else tensor

    def _stored(self, index: int) -> torch.Tensor:
        """Return entry ``index`` in fresh memory as a tensor; shares the memory."""
        entry = self._manifest.tensors[index]
        dtype = DTYPES_BY_SAFETENSORS_NAME.get(entry.dtype)
        if dtype is None:
            raise ManifestError(f"expected a dtype that this torch has, got {entry.dtype}", path=entry.name)
        if entry.end == entry.start:
            return torch.empty(entry.shape, dtype=dtype)
        return self._fresh.tensor(index, dtype).view(entry.shape)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether its storage still reaches to its end: where that was freed, a view's address is its offset, not 0."""
    storage = tensor.untyped_storage()
    return storage.nbytes() >= tensor.storage_offset() * tensor.dtype.itemsize + tensor.nbytes
