"""Snapshots that are read from the live state, and copied only when the state is about to change.

The owner of the state calls ``CopyOnWriteMemory.materialize`` before a change. This copies the shared memory once, and
later reads use the copy. If the state does not change while it is read, no memory and no copy are needed.

A reader pins the memory while it reads. ``materialize`` waits until no live memory is pinned, so a reader must not wait
for the network while it has such a pin. Pins of the copy delay nobody.

`LastingDigests` caches the digest of a chunk from one snapshot to the next. A cached digest is valid while the chunk
has the same address, torch has counted no change of it, and its owner has announced no change
(`LastingDigests.forget`). torch does not count changes through ``Tensor.data``; owners must announce these. To detect a
missing announcement, each snapshot digests a few cached chunks again, and discards the cache if a digest differs.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import torch

from ft_transport.errors import SnapshotError
from ft_transport.runtime.signal_safe import SafeCondition
from ft_transport.state.arena import Arena, ArenaPool
from ft_transport.state.copying import DeviceCopier
from ft_transport.state.host_copying import HostCopier, HostCopies
from ft_transport.state.tensors import Column, bytes_at
from ft_transport.telemetry.metrics import MetricValues
from ft_transport.wire.chunks import ChunkTable, Digester
from ft_transport.wire.manifest import SnapshotId, encode_digests

logger = logging.getLogger(__name__)

_MAX_GATHERING: Final = 4
_gathering: Final = threading.BoundedSemaphore(_MAX_GATHERING)  # noqa: TID251 # taken by threads of the server alone
"""Maximum number of readers that gather slices at one time. Each has a pin, so more would delay `materialize`."""
_LONGEST_PIN_S: Final = 10.0
"""How long `materialize` waits for pins. A pin lasts only for a read of memory, unless the machine stalls."""


ChunkKey: TypeAlias = tuple[object, ...]
"""The addresses and versions of the tensors in a chunk, and the name of the digest function."""
_NUM_CHECKED: Final = 2
_own_random = random.Random()
"""Separate from the generator of ``random``, which the trainer uses and saves."""


class LastingDigests:
    """Caches digests of chunks in lasting memory, which its owner seldom changes. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._generation = 0
        self._digests: dict[ChunkKey, int] = {}

    def forget(self) -> None:
        """Discard all digests. Called before any of the memory may change."""
        with self._mutex:
            self._generation += 1
            self._digests = {}

    def known(self, keys: Sequence[ChunkKey | None], digest: Callable[[int], int]) -> tuple[int, list[int | None]]:
        """Return the cached digests of the chunks of a snapshot. Discards the digests of all other chunks.

        Args:
            keys: The cache key of each chunk; ``None`` for a chunk with any memory that is not lasting.
            digest: Returns the digest of a chunk, by its index.

        Returns:
            The number of `forget` calls so far (the generation), and the digest of each chunk, ``None`` if not cached.
        """
        with self._mutex:
            generation = self._generation
            found = [self._digests.get(key) if key is not None else None for key in keys]
            self._digests = {
                key: each for key, each in zip(keys, found, strict=True) if key is not None and each is not None
            }
        kept = [chunk for chunk, each in enumerate(found) if each is not None]
        for chunk in _own_random.sample(kept, min(_NUM_CHECKED, len(kept))):
            if digest(chunk) != found[chunk]:
                logger.warning(
                    "memory that is registered as stable has changed outside a write section, in a way that torch does "
                    "not count (Tensor.data?): all its digests are computed again"
                )
                self.forget()
                return generation, [None] * len(keys)
        return generation, found

    def keep(self, generation: int, key: ChunkKey | None, digest: int) -> None:
        """Cache the digest of a chunk, unless `forget` was called since `known` returned ``generation``."""
        if key is None:
            return
        with self._mutex:
            if generation == self._generation:
                self._digests[key] = digest


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotResources:
    """The resources that all snapshots of a `Stager` use.

    Attributes:
        pool: Lends the arenas.
        copier: Copies and digests host memory.
        device_copier: Copies from accelerators.
        chunk_bytes: Maximum number of bytes in a chunk, the unit of digest and fetch. Small states have smaller chunks.
        is_digested: Whether snapshots have digests.
        lasting: Caches the digests of lasting tensors.
        costs: Counts the bytes and seconds of all copies, as metrics.
    """

    pool: ArenaPool
    copier: HostCopier
    device_copier: DeviceCopier
    chunk_bytes: int
    is_digested: bool
    lasting: LastingDigests = field(default_factory=LastingDigests)
    costs: MetricValues = field(default_factory=lambda: MetricValues("copies", threading.RLock()))


class CopyOnWriteMemory:
    """The data of one snapshot, some or all of which is still in live memory. Thread-safe.

    Args:
        starts: Position of each block in the data; int64.
        num_bytes: Length of each block; int64.
        addresses: Present address of each block; int64.
        shared: Indices of the blocks that are in live memory.
        owners: Tensors whose references keep the live memory from being freed.
        chunks: Division of the data into chunks, each with a digest.
        arena: The arena with the blocks that are not shared, which this object owns; ``None`` if all are shared.
        resources: The pool and the copiers for `materialize`.
        digester: Computes the digests.
        keys: The cache key of each chunk's digest; ``None`` for a chunk whose digest is not cached.
        check: Raises a `SnapshotError` if live memory has changed without `materialize`. Called before the copy, and
            before the digests are sent: no receiver uses bytes without their digests.

    Attributes:
        storages: Addresses of the storages with the live memory. Only a change in one of these requires `materialize`.
        snapshot_id: Id of the snapshot; ``None`` until `complete` is called.
    """

    def __init__(
        self,
        *,
        starts: Column,
        num_bytes: Column,
        addresses: Column,
        shared: Column,
        owners: list[torch.Tensor],
        chunks: ChunkTable,
        arena: Arena | None,
        resources: SnapshotResources,
        digester: Digester,
        keys: Sequence[ChunkKey | None],
        check: Callable[[], None],
    ) -> None:
        filled = np.flatnonzero(num_bytes)
        order = filled[np.argsort(starts[filled], kind="stable")]
        self._starts = starts[order]
        self._num_bytes = num_bytes[order]
        self._addresses = addresses[order]
        self._blocks = _views_of(self._addresses, self._num_bytes)
        self._block_starts: list[int] = self._starts.tolist()
        to_copy = np.zeros(len(starts), dtype=np.bool_)
        # If there is no arena yet, `materialize` copies all data into a new one.
        to_copy[shared if arena is not None else slice(None)] = True
        self._to_copy = np.flatnonzero(to_copy[order])
        self._owners = owners
        self._arena = arena
        self._resources = resources
        self._digester = digester
        self._check = check
        self._header = b""
        self.snapshot_id: SnapshotId | None = None
        self._chunks = chunks
        self._keys = keys
        self._generation, self._digests = resources.lasting.known(keys, self._digest)
        # Held by the thread that copies. Other threads that call `materialize` wait for that copy.
        self._copying = threading.Lock()
        self._digesting = threading.Lock()
        self._changed = SafeCondition()
        self._num_pins = 0
        self._num_pins_of_shared = 0
        self._is_shared = True
        self._is_lost = False
        self._is_closed = False
        self.storages = frozenset(owner.untyped_storage().data_ptr() for owner in owners)

    def complete(self, header: bytes, snapshot_id: SnapshotId) -> None:
        """Set the header, with which the file begins, and the snapshot's id. Called before the first pin."""
        self._header, self.snapshot_id = header, snapshot_id

    @contextmanager
    def pin(self, start: int, end: int) -> Iterator[list[memoryview]]:
        """Yield views of a byte range of the file. Its bytes do not change during the ``with`` block."""
        header_bytes = len(self._header)
        head = [memoryview(self._header)[start:end]] if start < header_bytes else []
        start, end = max(0, start - header_bytes), max(0, end - header_bytes)
        with self._pinned():
            # The digest loads the bytes into the processor's cache, from which the kernel then sends them.
            self._digest_chunks_that_begin_in(start, end)
            yield head + self._views(start, end)

    @contextmanager
    def pin_data(self, start: int, end: int) -> Iterator[list[memoryview]]:
        """Yield views of a byte range of the data, as `pin` does, without computing digests."""
        with _gathering, self._pinned():
            yield self._views(start, end)

    @contextmanager
    def _pinned(self) -> Iterator[None]:
        with self._changed:
            if self._is_lost or self._is_closed:
                raise SnapshotError(
                    "expected a snapshot that can still be read, but it was closed or its memory changed"
                )
            # `materialize` waits only for pins of live memory.
            is_of_shared = self._is_shared
            self._num_pins += 1
            self._num_pins_of_shared += is_of_shared
        try:
            yield
        finally:
            with self._changed:
                self._num_pins -= 1
                self._num_pins_of_shared -= is_of_shared
                self._free_unused()
                self._changed.notify_all()

    def encoded_digests(self) -> str:
        """Return the digests of all chunks, encoded for the header. Computes those that no read has computed yet."""
        with self._digesting:
            for chunk, known in enumerate(self._digests):
                if known is None:
                    start, _ = self._chunks.range_of(chunk, chunk + 1)
                    with self.pin(len(self._header) + start, len(self._header) + start + 1):
                        pass
            self._refuse_moved()
        return encode_digests([digest for digest in self._digests if digest is not None])

    def materialize(self) -> None:
        """Copy the live memory, and wait until no reader has pinned it. The owner may change it afterwards.

        Further calls are allowed, even after an error. If no memory is free for the copy, the snapshot is lost: its
        readers get an error, and the owner continues.
        """
        began_s = time.monotonic()
        is_to_copy = False
        with self._copying:
            try:
                with self._changed:
                    # A pin of its own, so that a concurrent `close` cannot give back the arena during the copy.
                    is_shared = self.is_shared
                    self._num_pins += is_shared
                    is_to_copy = is_shared
                if is_to_copy:
                    self._copy()
            finally:
                if is_to_copy:
                    with self._changed:
                        self._num_pins -= 1
                        self._free_unused()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._num_pins_of_shared, _LONGEST_PIN_S):
                logger.error("a reader still uses live memory after %.0f s; it may read changed bytes", _LONGEST_PIN_S)
            self._free_unused()
        if is_to_copy:
            num_bytes = 0 if self._is_lost else int(self._num_bytes[self._to_copy].sum())
            self._resources.costs.add("snapshot_copy_bytes_total", "copy_on_write", by=num_bytes)
            self._resources.costs.add("snapshot_copy_seconds_total", "copy_on_write", by=time.monotonic() - began_s)

    @property
    def is_lost(self) -> bool:
        """Whether the snapshot is lost: its memory changed without `materialize`, or no memory was free for a copy."""
        return self._is_lost

    @property
    def is_shared(self) -> bool:
        """Whether the snapshot still reads live memory."""
        return self._is_shared and not self._is_closed

    def close(self) -> None:
        """Free the memory as soon as no reader has pinned it."""
        with self._changed:
            self._is_closed = True
            self._free_unused()

    def _free_unused(self) -> None:
        """Free memory that nobody can read any more. The caller holds the mutex."""
        if not self._num_pins_of_shared and not self.is_shared:
            self._owners = []
        if self._is_closed and not self._num_pins and self._arena is not None:
            arena, self._arena = self._arena, None
            self._resources.pool.give_back(arena)

    def _refuse_moved(self) -> None:
        """Raise if live memory has changed without `materialize`; the snapshot is lost then.

        Raises:
            SnapshotError: The memory has changed, or the snapshot was lost before.
        """
        with self._copying:
            # A copy was checked when it was made, and the owner may have changed the live memory since.
            if self._is_shared:
                try:
                    self._check()
                except SnapshotError:
                    with self._changed:
                        self._is_lost, self._is_shared = True, False
                    raise
            if self._is_lost:
                raise SnapshotError("expected a snapshot that can still be read, but its memory changed")

    def _copy(self) -> None:
        """Copy the live memory into the arena, from which all later pins read."""
        arena, taken = self._arena, None
        try:
            self._check()
            if arena is None:
                arena = taken = self._resources.pool.take(self._chunks.data_bytes)
            indices = self._to_copy
            addresses = self._addresses.copy()
            addresses[indices] = arena.data.data_ptr() + self._starts[indices]
            self._resources.copier.copy(
                HostCopies(addresses[indices], self._addresses[indices], self._num_bytes[indices])
            )
            with self._changed:
                if not self._is_closed:
                    self._blocks = _views_of(addresses, self._num_bytes)
                    self._arena, taken, self._is_shared = arena, None, False
        except SnapshotError as error:
            logger.warning(
                "a snapshot was dropped while receivers read it: its memory changes now and could not be copied: %s",
                error,
            )
            with self._changed:
                self._is_lost, self._is_shared = True, False
        finally:
            if taken is not None:
                self._resources.pool.give_back(taken)

    def _digest_chunks_that_begin_in(self, start: int, end: int) -> None:
        chunk_bytes = self._chunks.chunk_bytes
        for chunk in range(-(-start // chunk_bytes), -(-end // chunk_bytes)):
            if self._digests[chunk] is None:
                self._digests[chunk] = digest = self._digest(chunk)
                if self._is_shared:
                    self._resources.lasting.keep(self._generation, self._keys[chunk], digest)

    def _digest(self, chunk: int) -> int:
        return self._digester.digest_of(self._views(*self._chunks.range_of(chunk, chunk + 1)))

    def _views(self, start: int, end: int) -> list[memoryview]:
        blocks, starts = self._blocks, self._block_starts
        views = []
        block = max(0, bisect_right(starts, start) - 1)
        while start < end:
            begin = start - starts[block]
            view = blocks[block][begin : end - starts[block]]
            views.append(view)
            start += len(view)
            block += 1
        return views


def _views_of(addresses: Column, num_bytes: Column) -> list[memoryview]:
    return [bytes_at(address, length) for address, length in zip(addresses.tolist(), num_bytes.tolist(), strict=True)]
