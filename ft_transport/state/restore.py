"""Receiving a snapshot: its bytes land in the receiver's own tensors where they fit, and in fresh memory elsewhere.

``Restore`` hands out the memory for any range of the data, so the network layer needs to know nothing of tensors, and
builds the nested state once every byte was verified. Until then a receiver's tensors may hold a mixture; if the fetch
fails, ``poison`` overwrites what was touched, so that a part of a state cannot be taken for a whole one.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_transport.errors import ManifestError, RestoreError
from ft_transport.runtime.garbage_collector import collector_paused
from ft_transport.state import placements
from ft_transport.state.bit_copies import copy_bits
from ft_transport.state.dtensors import is_dtensor
from ft_transport.state.dtypes import DTYPES_BY_SAFETENSORS_NAME
from ft_transport.state.fresh_memory import FreshMemory
from ft_transport.state.matching import Incoming, Matcher
from ft_transport.state.raw_memory import bytes_at
from ft_transport.state.spare_memory import SpareMemory
from ft_transport.state.unflatten import Unflattener, as_plain
from ft_transport.state.views import extent_bytes, has_own_memory, view_key
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.nodes import DTensorNode, LayoutNode, LeafNode, Node, TensorNode, ViewNode
from ft_transport.wire.tree_codec import CheckTime, unbounded

_KEEP_SHARED_BYTES: Final = 16 << 10
"""A smaller fresh tensor gets memory of its own at the end, so that it alone does not keep the whole buffer alive."""
_POISON_BYTE: Final = 0xFF
"""All bits set is a NaN in every IEEE floating-point type and -1 in every signed one."""


Range: TypeAlias = tuple[int, int]
"""Bytes of the data, half-open."""
Piece: TypeAlias = tuple[int, int, int]
"""A part of a destination: its slot, where the part begins in it, and how many bytes it has."""


class DestinationPlan:
    """Divides byte ranges of the data among destinations that lie one behind the other.

    Args:
        starts: Where each destination begins in the data, ascending; empty destinations must be left out, so that
            the starts are strictly ascending and the first is 0.
        data_bytes: Where the last one ends.
    """

    def __init__(self, starts: Sequence[int], data_bytes: int) -> None:
        self._starts = list(starts)
        self._ends = [*self._starts[1:], data_bytes]

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """The pieces that cover ``[start, end)`` once, in order."""
        slot = bisect_right(self._starts, start) - 1
        while start < end:
            stop = min(end, self._ends[slot])
            yield slot, start - self._starts[slot], stop - start
            start = stop
            slot += 1


class Restore:
    """Memory for one snapshot on the receiver, and the state that comes out of it.

    The methods may be called from several threads, ``finish`` and ``poison`` after all others have returned.

    Args:
        manifest: What will be received.
        into: The receiver's own state, of any shape. A CPU tensor in it that stands at the same place as one in the
            snapshot, with the same dtype, shape and row-major layout, is received into directly. A tensor that fits
            but is on a device or has another memory layout is copied to at the end, unless it has kept what belongs
            there. Everything else is ignored.
        meshes: Meshes for DTensors that have no counterpart in ``into``.
        max_bytes: Refuse a snapshot larger than this.
        spare: Has memory that is resident already, perhaps.
        check_time: Called now and then, here and in `finish`.

    Attributes:
        incoming: What comes, before it does.
        destination_touched: Whether bytes may have landed in the receiver's own tensors.

    Raises:
        RestoreError: The snapshot is larger than ``max_bytes``, or memory of a tensor in ``into`` cannot be written to.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        into: object = None,
        meshes: Sequence[DeviceMesh] = (),
        max_bytes: int,
        spare: SpareMemory | None = None,
        check_time: CheckTime = unbounded,
    ) -> None:
        if manifest.data_bytes > max_bytes:
            raise RestoreError(
                f"expected a snapshot of at most {max_bytes} bytes (max_receive_bytes), got {manifest.data_bytes}",
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
        self._fresh = FreshMemory(manifest, self._direct, spare)
        # The entries in fresh memory of which bytes were received.
        self._arrived: set[int] = set()
        # The entries that were copied there from a tensor of the receiver's, and that tensor.
        self._read_from: dict[int, torch.Tensor] = {}
        # The tensors that are copied to: what is in them when that fails is anybody's guess.
        self._written: list[torch.Tensor] = []
        self._slots = [index for index, entry in enumerate(tensors) if entry.end > entry.start]
        self._slots.sort(key=lambda index: tensors[index].start)
        self._plan = DestinationPlan([tensors[index].start for index in self._slots], manifest.data_bytes)

    def tensors_for(self, index: int) -> list[torch.Tensor]:
        """The receiver's tensors that get entry ``index``, which has bytes."""
        direct = self._direct.get(index)
        others = [target for _, target in self._indirect_of.get(index, ())]
        return others if direct is None else [direct, *others]

    @property
    def is_all_here(self) -> bool:
        """Whether `present` reads the content also of those tensors of the receiver that nothing is received for."""
        return all(index in self._direct or self._is_here(index) for index in self._indirect_of)

    def read_own(self, ranges: Iterable[Range]) -> None:
        """Copies what tensors hold that are not received in place: so that it can be read, or received in part.

        Called before anything is received there.

        Args:
            ranges: Of the data. Every tensor of which they have a part is copied whole, once.
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
        """Takes over the memory of another restore of the same tensors, with what has landed there.

        Called before anything is received here, and after everything that received there has ended; the other one must
        not be used any more.

        Args:
            earlier: The other one.
            is_landed: Whether anything has landed there that counts.

        Returns:
            Whether each tensor that is received in place belongs to the same place as there. If not, nothing was taken
            over.
        """
        is_same = (
            self._manifest.tensors == earlier._manifest.tensors
            and self._direct.keys() == earlier._direct.keys()
            # The other one keeps its tensors alive, so the same address is the same memory.
            and all(tensor.data_ptr() == earlier._direct[index].data_ptr() for index, tensor in self._direct.items())
        )
        if not is_same:
            return False
        self._fresh = earlier._fresh
        if is_landed:
            # What was read there may come from other tensors than this one's.
            self._arrived = earlier._arrived | earlier._read_from.keys()
        self._written = earlier._written
        if earlier.destination_touched:
            self.destination_touched = True
        return True

    def buffers(self, start: int, end: int) -> list[memoryview]:
        """Writable uint8 views that cover ``[start, end)`` of the data once, in order.

        Raises:
            RestoreError: The memory of one of the receiver's tensors was freed.
        """
        if self._direct:
            self.destination_touched = True
        return self._views(start, end, is_receiving=True)

    def present(self, start: int, end: int) -> list[memoryview]:
        """The same as `buffers`, only to be read: what lies there, received or not (see `read_own`).

        Raises:
            RestoreError: As `buffers`.
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
        """Builds the state. Called once, after every byte was received.

        Tensors received in place are the receiver's own objects; others are new, on the CPU.

        Raises:
            ManifestError: The tree does not agree with the tensor table or names what this process does not have.
            RestoreError: A DTensor needs a mesh that the receiver does not have.
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
        # All that can be wrong with the snapshot is found before the first one is written.
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
        """Overwrites the receiver's own tensors with a pattern that reads as NaN (as -1 in integers).

        Called after a fetch failed midway: the mixture that they hold must not be trained on unnoticed. A tensor whose
        memory was freed holds nothing.
        """
        for tensor in filter(_has_memory, self._direct.values()):
            # A bool of all bits set is no valid bool.
            value = 1 if tensor.dtype is torch.bool else _POISON_BYTE
            ctypes.memset(tensor.data_ptr(), value, tensor.nbytes)
        for target in self._written:
            bits = torch.full((target.nbytes,), _POISON_BYTE, dtype=torch.uint8)
            if target.dtype is torch.bool:
                bits.fill_(1)
            copy_bits([(target, bits.view(target.dtype).view(target.shape))])

    def fills(self, node: Node, into: torch.Tensor) -> bool:
        """Whether all of the receiver's tensor ``into``, which stands where ``node`` does, gets its bytes in place.

        One without memory of its own (on ``meta``, or of another class) is none that could, and counts as filled.
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
        """Whether ``target``, which nothing is received into in place, needs a copy: not if it has kept its content."""
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
        """The entry ``index`` as a tensor of its wire dtype: the receiver's own, or one in fresh memory."""
        direct = self._direct.get(index)
        if direct is not None:
            return direct
        entry = self._manifest.tensors[index]
        if index in self._indirect_of:
            self.read_own([(entry.start, entry.end)])
        tensor = self._stored(index)
        return tensor.clone() if 0 < entry.end - entry.start < _KEEP_SHARED_BYTES else tensor

    def _stored(self, index: int) -> torch.Tensor:
        """The same, of what is in fresh memory; shares it."""
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
