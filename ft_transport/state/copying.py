"""Copies host memory at its own speed, and digests it; caches the digests of memory that seldom changes.

`LastingDigests` caches the digest of a chunk from one snapshot to the next, while the chunk has the same address, torch
has counted no change of it, and its owner has announced none (`LastingDigests.forget`). torch does not count changes
through ``Tensor.data``; owners of shared memory must announce them anyway. To detect a missing announcement, each
snapshot digests a few cached chunks again, and discards the cache if one differs.
"""

from __future__ import annotations

import ctypes
import logging
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ft_transport.errors import SnapshotError
from ft_transport.runtime.signal_safe import ThreadRefusedError
from ft_transport.runtime.threads import ExecutorClosedError, SafeExecutor
from ft_transport.wire.chunks import PLAIN, ChunkTable, Digester

T = TypeVar("T")
R = TypeVar("R")

Column: TypeAlias = npt.NDArray[np.int64]

_MIN_SHARE_BYTES: Final = 1 << 20
"""Below this a second thread costs more than it saves."""


@dataclass(frozen=True, slots=True, eq=False)
class HostCopies:
    """Copies of ``num_bytes[i]`` from address ``sources[i]`` to ``targets[i]``. The caller keeps both alive.

    Arrays, because a state may have tens of thousands of tensors, and their division among threads holds the lock.
    """

    targets: Column
    sources: Column
    num_bytes: Column


class HostCopier:
    """A pool of threads that copy and digest memory. Thread-safe.

    ``ctypes.memmove`` releases the GIL and starts no intra-op threads of torch, which would compete with those of the
    training thread.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = SafeExecutor(num_threads, "ft-transport-copy")

    def copy(self, copies: HostCopies) -> None:
        """Run all copies, divided evenly by bytes among the threads; return when the last is done."""
        total = int(copies.num_bytes.sum())
        if total < 2 * _MIN_SHARE_BYTES or self._num_threads == 1:
            _copy_all(copies)
            return
        shares = _divide(copies, max(total // self._num_threads + 1, _MIN_SHARE_BYTES))
        futures: list[Future[None]] = []
        try:
            futures.extend(self._submit(_copy_all, share) for share in shares)
            for future in futures:
                future.result()
        finally:
            # Even if a signal handler raises: the caller may free the memory after this call.
            for future in futures:
                future.exception()

    def digests(self, data: memoryview, chunks: ChunkTable, digester: Digester = PLAIN) -> list[int]:
        """Return the digest of each chunk of ``data``, computed by all threads."""

        def digest_of(index: int) -> int:
            start, end = chunks.range_of(index, index + 1)
            return digester.digest(data[start:end])

        return [future.result() for future in [self._submit(digest_of, index) for index in range(chunks.num_chunks)]]

    def _submit(self, function: Callable[[T], R], argument: T) -> Future[R]:
        try:
            return self._pool.submit(function, argument)
        except ExecutorClosedError as error:
            raise SnapshotError("expected an open transport, got one that was shut down") from error
        except ThreadRefusedError as error:
            raise SnapshotError(f"expected a further thread ({self._pool.name}): {error}") from error

    def close(self) -> None:
        """End the threads after their present work."""
        self._pool.shutdown(wait=True)


def _copy_all(copies: HostCopies) -> None:
    memmove = ctypes.memmove
    for target, source, num_bytes in zip(
        copies.targets.tolist(), copies.sources.tolist(), copies.num_bytes.tolist(), strict=True
    ):
        memmove(target, source, num_bytes)


def _divide(copies: HostCopies, share_bytes: int) -> list[HostCopies]:
    """Split the copies into shares of ``share_bytes``; cuts large copies."""
    ends = np.cumsum(copies.num_bytes)
    total = int(ends[-1]) if len(ends) else 0
    shares = []
    for start in range(0, total, share_bytes):
        end = min(start + share_bytes, total)
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, end, side="left"))
        part = slice(first, last + 1)
        targets, sources, num_bytes = (
            copies.targets[part].copy(),
            copies.sources[part].copy(),
            copies.num_bytes[part].copy(),
        )
        skipped = start - int(ends[first] - copies.num_bytes[first])
        targets[0] += skipped
        sources[0] += skipped
        num_bytes[0] -= skipped
        num_bytes[-1] -= int(ends[last]) - end
        shares.append(HostCopies(targets, sources, num_bytes))
    return shares


logger = logging.getLogger(__name__)

ChunkKey: TypeAlias = tuple[object, ...]
"""Addresses and versions of a chunk's bytes, and the kind of digest."""
_NUM_CHECKED: Final = 2
_own_random = random.Random()
"""Separate from the process's generator, which the trainer uses."""


class LastingDigests:
    """The digests of one replica's lasting memory. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._generation = 0
        self._digests: dict[ChunkKey, int] = {}

    def forget(self) -> None:
        """Discard all digests: any of the memory may change from now on."""
        with self._mutex:
            self._generation += 1
            self._digests = {}

    def known(self, keys: Sequence[ChunkKey | None], digest: Callable[[int], int]) -> tuple[int, list[int | None]]:
        """Return the cached digests of a snapshot's chunks, and discard all others.

        Args:
            keys: The key of each chunk; ``None`` for a chunk without lasting memory.
            digest: Digests a chunk.

        Returns:
            The present generation, and each chunk's digest or ``None``.
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
                    "memory that is registered as stable has changed outside of a write section, and torch has not "
                    "counted it (Tensor.data?): its digests are computed anew"
                )
                self.forget()
                return generation, [None] * len(keys)
        return generation, found

    def keep(self, generation: int, key: ChunkKey | None, digest: int) -> None:
        """Cache a chunk's digest, unless a change was announced since that generation."""
        if key is None:
            return
        with self._mutex:
            if generation == self._generation:
                self._digests[key] = digest
