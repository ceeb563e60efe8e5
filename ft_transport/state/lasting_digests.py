"""Digests of memory that seldom changes, kept from one snapshot to the next: frozen weights are not digested again.

A digest is kept for a chunk that consists of lasting memory alone. It counts as long as the memory lies where it lay,
torch has counted no change of it, and its owner has announced none (`LastingDigests.forget`). What changes memory
behind torch's back, through ``Tensor.data``, has to be announced by the owner for shared memory in any case. So that
who forgets it is found out, a few chunks are digested again each time; if one differs, nothing kept is believed.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

logger = logging.getLogger(__name__)

ChunkKey: TypeAlias = tuple[object, ...]
"""Where the bytes of a chunk lie, their versions, and how they are digested."""
_NUM_CHECKED: Final = 2
_own_random = random.Random()
"""Not the process's generator, which the trainer draws from."""


class LastingDigests:
    """The digests of one replica's lasting memory. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._generation = 0
        self._digests: dict[ChunkKey, int] = {}

    def forget(self) -> None:
        """Any of the memory may change from here on."""
        with self._mutex:
            self._generation += 1
            self._digests = {}

    def known(self, keys: Sequence[ChunkKey | None], digest: Callable[[int], int]) -> tuple[int, list[int | None]]:
        """What is known of a snapshot's chunks. The digests of other memory are forgotten.

        Args:
            keys: Of each chunk; ``None`` for one that does not last.
            digest: Digests a chunk.

        Returns:
            The present generation, and for each chunk its digest or ``None``.
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
        """Keep a chunk's digest, unless something has been announced since that generation."""
        if key is None:
            return
        with self._mutex:
            if generation == self._generation:
                self._digests[key] = digest
