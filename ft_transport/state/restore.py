"""Receives a snapshot into the receiver's own tensors where dtype, shape and layout match, else into fresh memory.

``Restore`` returns the memory for any range of the data, so that the network code need not know tensors. It builds the
nested state after all bytes were verified. Until then, the receiver's tensors may contain a mixture of two states. If
the fetch fails, ``Restore.poison`` overwrites these tensors, so that nobody mistakes the mixture for a state.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import Final, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from ft_transport.errors import ManifestError, RestoreError
from ft_transport.runtime.decoding import collector_paused
from ft_transport.state import placements
from ft_transport.state.bounce_buffers import Pair
from ft_transport.state.early_copies import EarlyCopies
from ft_transport.state.matching import Incoming, Matcher
from ft_transport.state.placements import is_dtensor
from ft_transport.state.prefaulted import FreshMemory, PrefaultedMemory
from ft_transport.state.tensors import (
    DTYPES_BY_SAFETENSORS_NAME,
    bytes_at,
    extent_bytes,
    has_memory,
    has_own_memory,
    view_key,
)
from ft_transport.state.unflatten import Unflattener, as_plain
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.nodes import CheckTime, DTensorNode, LayoutNode, LeafNode, Node, TensorNode, ViewNode, unbounded

MEMORY_BYTES: Final = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""Size of this machine's memory. A larger snapshot is refused."""
_KEEP_SHARED_BYTES: Final = 16 << 10
"""A smaller new tensor is copied into memory of its own, so that it does not keep the whole buffer alive."""
_POISON_BYTE: Final = 0xFF
"""If all bits are set, a value is NaN in IEEE floating-point types and -1 in signed integers."""


Range: TypeAlias = tuple[int, int]
"""Start and end of a byte range of the data, half-open."""
Piece: TypeAlias = tuple[int, int, int]
"""A part of a destination: index of the destination, offset in it, length in bytes."""


class DestinationPlan:
    """Divides byte ranges of the data among destinations, of which each begins where the previous one ends.

    Args:
        starts: Position of each destination in the data, strictly ascending from 0. No destination is empty.
        data_bytes: Length of the data, where the last destination ends.
    """

    def __init__(self, starts: Sequence[int], data_bytes: int) -> None:
        self._starts = list(starts)
        self._ends = [*self._starts[1:], data_bytes]

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """Yield the parts of destinations that cover the bytes from ``start`` to ``end``, in order."""
        slot = bisect_right(self._starts, start) - 1
        while start < end:
            stop = min(end, self._ends[slot])
            yield slot, start - self._starts[slot], stop - start
            start = stop
            slot += 1


class Restore:
    """Provides the memory into which one snapshot is received, and builds the state from it.

    Several threads may call the methods, but `finish` and `poison` only after all other calls have returned.

    Args:
        manifest: The manifest of the snapshot.
        into: The receiver's own state, of any structure. If a CPU tensor at the same path has the same dtype and shape
            and is row-major, the bytes are received directly into it. If such a tensor is on a device, or has another
            layout, the data is copied into it, unless it already has that data: when `landed` reports its last chunk,
            else in `finish`. Other values are ignored.
        meshes: Meshes for DTensors that ``into`` lacks.
        prefaulted: Provides a prepared block of resident memory, if it has one.
        check_time: Called repeatedly, here and in `finish`; an error that it raises ends the call.

    Attributes:
        incoming: Describes the snapshot before its bytes arrive.

    Raises:
        RestoreError: The snapshot is larger than this machine's memory, or a tensor in ``into`` is read-only.
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
        self._is_touched = False
        self._check_time = check_time
        matcher = Matcher(manifest, check_time)
        try:
            with collector_paused():
                matcher.match(manifest.tree, into)
        except RecursionError as error:
            raise ManifestError("expected a tree nested less deeply than Python's recursion limit") from error
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
        # Tensors in fresh memory that have received bytes.
        self._arrived: set[int] = set()
        # Tensors that `read_own` has copied to fresh memory, and the receiver's tensor from which it has copied them.
        self._read_from: dict[int, torch.Tensor] = {}
        self._slots = [index for index, entry in enumerate(tensors) if entry.end > entry.start]
        self._slots.sort(key=lambda index: tensors[index].start)
        self._plan = DestinationPlan([tensors[index].start for index in self._slots], manifest.data_bytes)
        self._early = EarlyCopies(
            {
                index: tensors[index].end - tensors[index].start
                for index, copies in self._indirect_of.items()
                if index not in self._direct and all(_is_on_device(target) for _, target in copies)
            },
            {target.device for _, target in self._indirect},
        )

    def tensors_for(self, index: int) -> list[torch.Tensor]:
        """Return the receiver's tensors that receive tensor ``index`` of the snapshot, a non-empty tensor."""
        direct = self._direct.get(index)
        others = [target for _, target in self._indirect_of.get(index, ())]
        return others if direct is None else [direct, *others]

    @property
    def destination_touched(self) -> bool:
        """Whether the receiver's own tensors may contain received bytes."""
        return self._is_touched or bool(self._early.written)

    @property
    def is_all_here(self) -> bool:
        """Whether `present` returns the receiver's data even for the tensors that are not received in place."""
        return all(index in self._direct or self._is_here(index) for index in self._indirect_of)

    def read_own(self, ranges: Iterable[Range]) -> None:
        """Copy to fresh memory those tensors of the receiver that are not received in place, before their bytes arrive.

        Afterwards `present` can return their content, and the fetch can skip bytes that have not changed.

        Args:
            ranges: Byte ranges of the data. Each tensor in these ranges is copied whole, once.
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
            self._early.copier.copy(copies)
            self._read_from |= found

    def adopt(self, earlier: Restore, *, is_landed: bool) -> bool:
        """Reuse the memory of an earlier `Restore` of the same tensors, and the bytes in it.

        Called before this object receives bytes, and after all work of the earlier object, which must not be used
        afterwards.

        Args:
            earlier: The earlier `Restore`.
            is_landed: Whether bytes that the earlier object has received count as received here.

        Returns:
            Whether both objects receive the same tensors in place. If not, nothing is reused.
        """
        is_same = (
            self._manifest.tensors == earlier._manifest.tensors
            and self._direct.keys() == earlier._direct.keys()
            # The earlier restore keeps its tensors alive, so the same address is the same memory.
            and all(tensor.data_ptr() == earlier._direct[index].data_ptr() for index, tensor in self._direct.items())
        )
        if not is_same:
            return False
        earlier.close()
        self._fresh = earlier._fresh
        if is_landed:
            # The earlier object may have read content from other tensors than those of this object.
            self._arrived = earlier._arrived | earlier._read_from.keys()
        own = {(target.device, target.data_ptr()) for _, target in self._indirect}
        is_own = [(target.device, target.data_ptr()) in own for target in earlier._early.written]
        self._early.written += compress(earlier._early.written, is_own)
        others = [target for target, is_kept in zip(earlier._early.written, is_own, strict=True) if not is_kept]
        earlier._early.begin_fill(others, _POISON_BYTE).close()
        self._is_touched = self._is_touched or earlier._is_touched
        return True

    def buffers(self, start: int, end: int) -> list[memoryview]:
        """Return writable views of the memory for the bytes from ``start`` to ``end`` of the data, in order.

        Raises:
            RestoreError: The memory of a tensor of the receiver was freed.
        """
        if self._direct:
            self._is_touched = True
        return self._views(start, end, is_receiving=True)

    def present(self, start: int, end: int) -> list[memoryview]:
        """Return the same views as `buffers`, for reading: of received bytes, or of earlier content (see `read_own`).

        Raises:
            RestoreError: The memory of a tensor of the receiver was freed.
        """
        return self._views(start, end, is_receiving=False)

    def _views(self, start: int, end: int, *, is_receiving: bool) -> list[memoryview]:
        views: list[memoryview] = []
        for slot, offset, num_bytes in self._plan.pieces(start, end):
            index = self._slots[slot]
            tensor = self._direct.get(index)
            if tensor is not None:
                self._check_memory(index, tensor)
                views.append(bytes_at(tensor.data_ptr() + offset, num_bytes))
            else:
                if is_receiving:
                    self._arrived.add(index)
                views.append(self._fresh.view(index, offset, num_bytes))
        return views

    def landed(self, chunk: int) -> None:
        """Note that the bytes of a chunk have arrived in `buffers`. Any thread may call this.

        Begins to copy the tensors that are complete now and are not received in place. `finish` copies the others, and
        those of which a chunk has arrived again, because the first one was damaged.
        """
        if not self._early.is_needed:
            return
        pieces = self._plan.pieces(*self._manifest.chunks.range_of(chunk, chunk + 1))
        for index in self._early.landed(chunk, [(self._slots[slot], num_bytes) for slot, _, num_bytes in pieces]):
            # `finish` raises it: here it would count as a failure of the source.
            with contextlib.suppress(ManifestError):
                self._early.begin(index, self._copies_of(index))

    def finish(self) -> object:
        """Build the state and return it. Called once, after all bytes have arrived.

        For tensors of ``into`` that were received, the state has the receiver's own objects. All other tensors are new,
        on the CPU.

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
            raise ManifestError("expected a tree nested less deeply than Python's recursion limit") from error
        # Only now, after all errors in the snapshot would have been raised, write into the other tensors.
        due = [(node, target) for node, target in self._indirect if self._is_due(node.index, target)]
        for node, target in due:
            self._check_memory(node.index, target)
        self._early.copy([(target, self._shaped(self._tensor(node.index), node)) for node, target in due])
        self.close()
        return state

    def poison(self) -> None:
        """Overwrite the receiver's own tensors with NaN (-1 in integers), after a fetch has failed.

        So nobody can train on a mixture of two states without noticing. Freed tensors are skipped.
        """
        # Early copies that are on their way come first, even if a signal handler interrupts the wait for them.
        copier = self._early.begin_fill(self._early.written, _POISON_BYTE)
        for tensor in filter(has_memory, self._direct.values()):
            # All bits set is not a valid bool.
            value = 1 if tensor.dtype is torch.bool else _POISON_BYTE
            ctypes.memset(tensor.data_ptr(), value, tensor.nbytes)
        copier.close()
        self.close()

    def close(self) -> None:
        """Return when no thread writes to the receiver's tensors any more. No bytes may arrive afterwards."""
        self._early.copier.close()

    def fills(self, node: Node, into: torch.Tensor) -> bool:
        """Return whether the receiver's tensor ``into`` receives all data of ``node``, the node at the same path.

        Return ``True`` also for a tensor without its own memory: on ``meta``, or of another class.
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
        """Return whether `finish` must copy into ``target``: not if ``target`` already has the data."""
        if index in self._direct or index in self._arrived:
            return not self._early.is_begun(index)
        read_from = self._read_from.get(index)
        return read_from is not None and read_from is not target

    def _is_destination(self, index: int, tensor: torch.Tensor) -> bool:
        return self._direct.get(index) is tensor or (index, view_key(tensor)) in self._destinations

    def _check_memory(self, index: int, tensor: torch.Tensor) -> None:
        if not has_memory(tensor):
            raise RestoreError(
                "expected the receiver's tensor to keep its memory, but the memory was freed",
                path=self._manifest.tensors[index].name,
                step=self._manifest.step,
            )

    def _copies_of(self, index: int) -> list[Pair]:
        stored = self._stored(index)
        return [(target, self._shaped(stored, node)) for node, target in self._indirect_of[index]]

    @staticmethod
    def _shaped(stored: torch.Tensor, node: TensorNode | LayoutNode) -> torch.Tensor:
        return Unflattener.reinterpret(stored, node) if isinstance(node, LayoutNode) else stored

    def _tensor(self, index: int) -> torch.Tensor:
        """Return tensor ``index`` of the snapshot: the receiver's own tensor, or a new one in fresh memory."""
        direct = self._direct.get(index)
        if direct is not None:
            return direct
        entry = self._manifest.tensors[index]
        if index in self._indirect_of:
            self.read_own([(entry.start, entry.end)])
        tensor = self._stored(index)
        return tensor.clone() if 0 < entry.end - entry.start < _KEEP_SHARED_BYTES else tensor

    def _stored(self, index: int) -> torch.Tensor:
        """Return tensor ``index`` of the snapshot as a view of fresh memory."""
        entry = self._manifest.tensors[index]
        dtype = DTYPES_BY_SAFETENSORS_NAME.get(entry.dtype)
        if dtype is None:
            raise ManifestError(f"expected a dtype that this version of torch has, got {entry.dtype}", path=entry.name)
        if entry.end == entry.start:
            return torch.empty(entry.shape, dtype=dtype)
        return self._fresh.tensor(index, dtype).view(entry.shape)


def _is_on_device(tensor: torch.Tensor) -> bool:
    return not tensor.is_cpu
