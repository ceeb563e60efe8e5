"""Turns a flattened state into a snapshot: an immutable safetensors file in host memory.

`PendingSnapshot.copy_now` copies the tensors that may change soon. `PendingSnapshot.copy_deferred` copies the rest, and
may run on another thread; it does not wait for devices. The caller holds the read lock during both.
`PendingSnapshot.finish` computes digests and header without the lock, because it reads only the copies.
``state.stager`` makes these objects.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ft_transport.errors import SnapshotError
from ft_transport.runtime.decoding import collector_paused
from ft_transport.state.arena import Arena
from ft_transport.state.blocks import FlatState
from ft_transport.state.copy_on_write import ChunkKey, CopyOnWriteMemory, SnapshotResources
from ft_transport.state.copying import CopiesInFlight, Marks
from ft_transport.state.host_copying import HostCopies
from ft_transport.state.tensors import Column, carrier_of
from ft_transport.wire.chunks import ChunkTable, Digester, chunk_bytes_for
from ft_transport.wire.manifest import DATA_ALIGN_BYTES, SnapshotId, TensorEntry, encode_header
from ft_transport.wire.snapshot import MemoryFile, Snapshot

_CACHE_LINE_BYTES: Final = 64
"""Size of a cache line on x86 and most other processors. Copies of whole lines are fastest."""


def nothing_moved() -> None:
    """Do nothing. This is the default check of a `Taking`: it detects no changes of the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """Describes a snapshot to take. A tensor is copied at once unless ``deferrable`` or ``lasting`` selects it.

    Attributes:
        step: The committed step of the state.
        state: Any nesting of supported kinds.
        deferrable: Returns whether a live tensor stays unchanged while the read lock is held. Such a tensor is copied
            later, in ``copy_deferred``.
        lasting: Returns whether the owner of a live tensor seldom changes it, and calls ``StateServer.materialize``
            before each change. If such a tensor is row-major in host memory, it is not copied but served from live
            memory. Later snapshots reuse its digests, until ``Stager.forget_lasting``.
        check_deferred: Called after the deferred tensors were copied, or before they may change. Raises a
            `SnapshotError` if one of them has changed; the snapshot fails then.
        check_shared: Called before a receiver may use bytes from live memory. Raises a `SnapshotError` if a tensor has
            changed without ``materialize``; the snapshot is lost then.
        max_held_bytes: Maximum number of bytes that ``Stager.hold`` copies.
        float_dtype: Dtype to which floating-point tensors are cast; ``None`` keeps their dtypes.
    """

    step: int
    state: object
    deferrable: Callable[[torch.Tensor], bool] | None = None
    lasting: Callable[[torch.Tensor], bool] | None = None
    check_deferred: Callable[[], None] = nothing_moved
    check_shared: Callable[[], None] = nothing_moved
    max_held_bytes: int = 0
    float_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """The flattened state of a step, from which a snapshot can begin as long as its deferrable tensors stay unchanged.

    It uses no arena.

    Attributes:
        taking: The request for the snapshot.
        flat: The flattened state. If `Stager.hold` made it, tensors that are not deferrable are copies.
        marks: For each device, an event after all work that was queued on the device. Copies from the device wait for
            this event.
    """

    taking: Taking
    flat: FlatState
    marks: Marks

    @property
    def is_shareable(self) -> bool:
        """Whether all tensors are row-major in host memory, so that the state can be served without a copy."""
        blocks = self.flat.blocks
        return all(
            address or not num_bytes for address, num_bytes in zip(blocks.addresses, blocks.num_bytes, strict=True)
        )


class PendingSnapshot:
    """A snapshot that is not complete yet. Only one thread at a time may use it.

    Args:
        held: The flattened state.
        resources: The resources of the `Stager`.
        digester: Digests the data and the header.
        arena: Destination of the copies; ``None`` if nothing is copied.

    Attributes:
        step: The committed step.
        shared: The data of the snapshot if at least part of it is live memory; ``None`` if everything is copied.
    """

    def __init__(
        self, held: HeldState, resources: SnapshotResources, *, digester: Digester, arena: Arena | None
    ) -> None:
        # Keep no reference to `taking.state`: it would keep live tensors in memory after the copy.
        taking = held.taking
        self.step = taking.step
        self.shared: CopyOnWriteMemory | None = None
        self._flat = flat = held.flat
        self._starts = _lay_out(flat)
        self._num_bytes = np.asarray(flat.blocks.num_bytes)
        self._addresses = np.asarray(flat.blocks.addresses)
        self._data_bytes = data_bytes_of(flat)
        self._arena = arena
        self._resources = resources
        self._digester = digester
        chunk_bytes = chunk_bytes_for(self._data_bytes, most=resources.chunk_bytes)
        self._chunks = ChunkTable(data_bytes=self._data_bytes, chunk_bytes=chunk_bytes)
        self._deferred: Column = np.empty(0, dtype=np.int64)
        self._in_flight: CopiesInFlight | None = None
        self._is_held = True
        self._marks = held.marks
        self._deferrable, self._lasting = taking.deferrable, taking.lasting
        self._check_deferred, self._check_shared = taking.check_deferred, taking.check_shared

    def copy_now(self) -> None:
        """Copy every tensor that is neither deferrable nor shared."""
        is_shared = self._which(self._lasting) & (self._addresses != 0)
        is_deferred = self._which(self._deferrable) & ~is_shared
        self._deferred = np.flatnonzero(is_deferred)
        self._copy(np.flatnonzero(~(is_deferred | is_shared)))
        if is_shared.any():
            self._share(np.flatnonzero(is_shared), is_shared)

    def defer_all(self) -> None:
        """Leave all tensors to `copy_deferred`."""
        self._deferred = np.arange(len(self._flat.blocks.sources))

    def share_all(self) -> None:
        """Serve all tensors from live memory, without a copy."""
        self._share(np.arange(len(self._flat.blocks.sources)), self._which(self._lasting))

    def copy_deferred(self) -> CopiesInFlight | None:
        """Copy the deferred tensors on the host, and queue the copies of those on devices.

        Not on the main thread if a signal handler may raise there.

        Returns:
            The queued copies; ``None`` if there are none. The caller may now release the read lock, if each later
            writer calls a method of `CopiesInFlight` first. `finish` waits for the copies.
        """
        deferred, self._deferred = self._deferred, self._deferred[:0]
        try:
            self._in_flight = self._copy(deferred, is_queued=True)
            if len(deferred) and self._in_flight is None:
                self._check_deferred()
        except BaseException:
            self.abandon()
            raise
        return self._in_flight

    def finish(self) -> Snapshot:
        """Digest the copies, encode the header, and return the snapshot. Needs no lock.

        Raises:
            SnapshotError: A deferred tensor has changed before its copy was complete.
        """
        assert self._is_held, "finish is called once, and not after a failure"
        assert not len(self._deferred), "copy_deferred is called before finish"
        try:
            if self._in_flight is not None:
                began_s = time.monotonic()
                self._in_flight.complete()
                self._resources.costs.add("snapshot_copy_seconds_total", "clone", by=time.monotonic() - began_s)
            blocks = self._flat.blocks
            tree = self._flat.tree
            with collector_paused():
                table = [
                    TensorEntry(name, dtype, tuple(shape), start, start + num_bytes)
                    for name, dtype, shape, start, num_bytes in zip(
                        blocks.names, blocks.dtypes, blocks.shapes, self._starts.tolist(), blocks.num_bytes, strict=True
                    )
                ]
            # Drop the references to live tensors: they would keep replaced parameters in memory.
            blocks.sources.clear()
            digests = self._digests()
            snapshot_id = SnapshotId(secrets.token_hex(16))
            header = encode_header(
                step=self.step,
                snapshot_id=snapshot_id,
                tensors=table,
                tree=tree,
                chunks=self._chunks,
                digests=digests,
                align_bytes=DATA_ALIGN_BYTES,
                layouts=self._flat.layouts,
                digester=self._digester,
            )
            memory = self._put_header(header, snapshot_id)
        except BaseException:
            self.abandon()
            raise
        self._is_held = False
        return Snapshot(
            step=self.step,
            snapshot_id=snapshot_id,
            header=header,
            memory=memory,
            total_bytes=len(header) + self._data_bytes,
            close=self._closing(),
            digester=self._digester,
        )

    def abandon(self) -> None:
        """Cancel the snapshot and return its arena to the pool. Does nothing after `finish` or a failure."""
        if self._is_held:
            self._is_held = False
            if self._in_flight is not None:
                # Otherwise the copies would write into the arena of another snapshot.
                with contextlib.suppress(SnapshotError):
                    self._in_flight.complete()
            self._flat.blocks.sources.clear()
            self._closing()()

    def _which(self, chosen: Callable[[torch.Tensor], bool] | None) -> npt.NDArray[np.bool_]:
        sources = self._flat.blocks.sources
        if chosen is None:
            return np.zeros(len(sources), dtype=np.bool_)
        return np.fromiter(map(chosen, sources), dtype=np.bool_, count=len(sources))

    def _chunk_keys(self, is_lasting: npt.NDArray[np.bool_]) -> list[ChunkKey | None]:
        """Return the cache key of each chunk that has only lasting tensors; ``None`` for every other chunk."""
        filled = np.flatnonzero(self._num_bytes)
        order = filled[np.argsort(self._starts[filled], kind="stable")].tolist()
        chunk_bytes, sources = self._chunks.chunk_bytes, self._flat.blocks.sources
        keys: list[list[object] | None] = [[self._digester.name] for _ in range(self._chunks.num_chunks)]
        for index in order:
            start, num_bytes = int(self._starts[index]), int(self._num_bytes[index])
            lasts = bool(is_lasting[index]) and not sources[index].is_inference()
            version = sources[index]._version if lasts else -1
            for chunk in range(start // chunk_bytes, -(-(start + num_bytes) // chunk_bytes)):
                parts = keys[chunk]
                if not lasts:
                    keys[chunk] = None
                elif parts is not None:
                    parts.append((int(self._addresses[index]), start - chunk * chunk_bytes, num_bytes, version))
        return [tuple(key) if key is not None else None for key in keys]

    def _share(self, indices: Column, is_lasting: npt.NDArray[np.bool_]) -> None:
        keys = self._chunk_keys(is_lasting)
        addresses = self._addresses
        if self._arena is not None:
            addresses = self._starts + self._arena.data.data_ptr()
            addresses[indices] = self._addresses[indices]
        sources = self._flat.blocks.sources
        self.shared = CopyOnWriteMemory(
            starts=self._starts,
            num_bytes=self._num_bytes,
            addresses=addresses,
            shared=indices,
            owners=[sources[index] for index in indices.tolist()],
            chunks=self._chunks,
            arena=self._arena,
            resources=self._resources,
            digester=self._digester,
            keys=keys,
            check=self._check_shared,
        )

    def _digests(self) -> list[int] | None:
        if self.shared is not None or not self._resources.is_digested:
            return None
        assert self._arena is not None, "a snapshot without live memory has an arena"
        return self._resources.copier.digests(self._arena.view[: self._data_bytes], self._chunks, self._digester)

    def _put_header(self, header: bytes, snapshot_id: SnapshotId) -> MemoryFile | CopyOnWriteMemory:
        if self.shared is not None:
            self.shared.complete(header, snapshot_id)
            return self.shared
        assert self._arena is not None, "a snapshot without live memory has an arena"
        start = self._arena.write_header(header)
        return MemoryFile(self._arena.descriptor, start, start + len(header), self._arena.view[: self._data_bytes])

    def _closing(self) -> Callable[[], None]:
        """Return a function that frees the memory of the snapshot, and that does not refer to this object."""
        if self.shared is not None:
            return self.shared.close
        assert self._arena is not None, "a snapshot without live memory has an arena"
        return functools.partial(self._resources.pool.give_back, self._arena)

    def _copy(self, indices: Column, *, is_queued: bool = False) -> CopiesInFlight | None:
        """Copy tensors to the arena. Return the copies from devices if these are queued and not complete."""
        blocks = self._flat.blocks
        indices = indices[self._num_bytes[indices] > 0]
        if not len(indices):
            return None
        assert self._arena is not None, "a snapshot with copies has an arena"
        began_s = time.monotonic()
        has_address = self._addresses[indices] != 0
        host = indices[has_address]
        targets = self._starts[host] + self._arena.data.data_ptr()
        self._resources.copier.copy(HostCopies(targets, self._addresses[host], self._num_bytes[host]))
        device: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index in indices[~has_address].tolist():
            source = blocks.sources[index]
            cast = blocks.casts.get(index)
            dtype = carrier_of(source.dtype) if cast is None else cast
            carried = source.view(dtype) if cast is None else source
            target = self._target(index, dtype, source.shape)
            if source.is_cpu:
                target.copy_(carried)
            else:
                device.append((target, carried))
        in_flight: CopiesInFlight | None = None
        if device and is_queued:
            in_flight = self._resources.device_copier.queue(device, self._marks, self._check_deferred)
        elif device:
            self._resources.device_copier.copy(device, self._marks)
        costs = self._resources.costs
        costs.add("snapshot_copy_bytes_total", "clone", by=int(self._num_bytes[indices].sum()))
        costs.add("snapshot_copy_seconds_total", "clone", by=time.monotonic() - began_s)
        return in_flight

    def _target(self, index: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        assert self._arena is not None, "a snapshot with copies has an arena"
        start = int(self._starts[index])
        block = self._arena.data[start : start + self._flat.blocks.num_bytes[index]]
        return block.view(dtype).view(shape)


def data_bytes_of(flat: FlatState) -> int:
    """Return the number of bytes of all tensors of a state.

    Raises:
        SnapshotError: The format cannot represent so many bytes.
    """
    data_bytes = sum(flat.blocks.num_bytes)
    if data_bytes >= 2**62:
        raise SnapshotError(f"expected a state of less than 2**62 bytes, got {data_bytes}")
    return data_bytes


def _lay_out(flat: FlatState) -> Column:
    """Return the position of each tensor in the data: aligned, and without holes between tensors.

    Tensors of whole cache lines come first. If Adam's step counters came between them, each weight would be shifted by
    4 bytes relative to the tensor that it is copied from. The other tensors follow, by descending item size, so that
    each one is aligned to its item size.
    """
    blocks = flat.blocks
    num_bytes = np.asarray(blocks.num_bytes)
    order = np.lexsort((-np.asarray(blocks.item_bytes), num_bytes % _CACHE_LINE_BYTES != 0))
    starts = np.empty_like(num_bytes)
    starts[order] = np.cumsum(num_bytes[order]) - num_bytes[order]
    return starts
