"""Copies host memory as fast as memory allows, digests it, and caches the digests of memory that seldom changes.

`LastingDigests` caches the digest of a chunk from one snapshot to the next. A cached digest is valid while the chunk
has the same address, torch has counted no change of it, and its owner has announced none (`LastingDigests.forget`).
torch does not count changes through ``Tensor.data``; owners must announce these. To detect a missing announcement, each
snapshot digests a few cached chunks again, and discards the cache if a digest differs.
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
"""Smallest share of a copy for one thread. For less, starting the thread takes longer than the copy."""


@dataclass(frozen=True, slots=True, eq=False)
class HostCopies:
    """Copies of ``num_bytes[i]`` bytes from address ``sources[i]`` to ``targets[i]``. The caller keeps both alive.

    Arrays rather than objects: a state may have tens of thousands of tensors, and the caller holds the lock.
    """

    targets: Column
    sources: Column
    num_bytes: Column


class HostCopier:
    """A pool of threads that copy and digest memory. Thread-safe.

    The threads copy with ``ctypes.memmove``, which releases the GIL. torch's own copy would start intra-op threads,
    which compete with those of the training thread.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = SafeExecutor(num_threads, "ft-transport-copy")

    def copy(self, copies: HostCopies) -> None:
        """Copy everything, with the same number of bytes on each thread. Return when all copies are complete."""
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
            # Wait even if a signal handler raises: the caller may free the memory after this call.
            for future in futures:
                future.exception()

    def digests(self, data: memoryview, chunks: ChunkTable, digester: Digester = PLAIN) -> list[int]:
        """Return the digest of each chunk of ``data``, computed on all threads."""

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
            raise SnapshotError(f"expected another thread ({self._pool.name}): {error}") from error

    def close(self) -> None:
        """Finish running copies, and end the threads."""
        self._pool.shutdown(wait=True)


def _copy_all(copies: HostCopies) -> None:
    memmove = ctypes.memmove
    for target, source, num_bytes in zip(
        copies.targets.tolist(), copies.sources.tolist(), copies.num_bytes.tolist(), strict=True
    ):
        memmove(target, source, num_bytes)


def _divide(copies: HostCopies, share_bytes: int) -> list[HostCopies]:
    """Divide the copies into shares of ``share_bytes`` bytes. A large copy may be cut into several shares."""
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
            keys: The cache key of each chunk; ``None`` for a chunk that is not only lasting memory.
            digest: Returns the digest of a chunk, by its number.

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
        """Cache the digest of a chunk, unless `forget` was called since ``generation``."""
        if key is None:
            return
        with self._mutex:
            if generation == self._generation:
                self._digests[key] = digest
