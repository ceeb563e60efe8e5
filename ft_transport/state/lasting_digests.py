"""Caches digests of memory that seldom changes, so that frozen weights are not digested for each snapshot.

The cache covers chunks of lasting memory only. A cached digest is valid while the memory has the same address, torch
has counted no change of it, and its owner has announced none (`LastingDigests.forget`). torch does not count changes
through ``Tensor.data``; owners of shared memory must announce them anyway. To detect a missing announcement, each
snapshot digests a few cached chunks again, and discards the cache if one differs.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

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
