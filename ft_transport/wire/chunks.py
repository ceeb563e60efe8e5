"""Chunks: the units of fetch and of digest, consecutive ranges of the data.

A digest is xxh3-64, which one core computes faster than memory can be read. It finds bytes that a disk, a memory
module, a network card or a wrong offset changed. It is no signature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import xxhash

CHUNK_BYTES: Final = 4 << 20
"""The unit of the wire: a chunk, unless the settings say otherwise, and the most data in a frame of slices.

Small enough that a bad one costs little to fetch again, large enough that digests stay few.
"""

_LEAST_CHUNK_BYTES: Final = 1 << 20
_NUM_CHUNKS_WANTED: Final = 256
"""Of K receivers that pass on to each other what they have, the last one is late by K chunks."""

DIGEST_HEX_DIGITS: Final = 16

Hasher: TypeAlias = xxhash.xxh3_64
"""Takes bytes piece by piece: ``update(buffer)``, then ``intdigest()``. Releases the GIL for large buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTable:
    """``data_bytes`` divided into chunks of ``chunk_bytes``; the last one may be shorter."""

    data_bytes: int
    chunk_bytes: int

    @property
    def num_chunks(self) -> int:
        """How many chunks there are; none for empty data."""
        return -(-self.data_bytes // self.chunk_bytes)

    def range_of(self, first: int, end: int) -> tuple[int, int]:
        """The byte range, half-open, of chunks ``first`` to ``end`` (exclusive)."""
        return first * self.chunk_bytes, min(end * self.chunk_bytes, self.data_bytes)

    def length_of(self, chunk: int) -> int:
        """The bytes of one chunk; the last one may be shorter than the others."""
        start, end = self.range_of(chunk, chunk + 1)
        return end - start


def runs_of(chunks: Sequence[int]) -> Iterator[range]:
    """The runs of consecutive numbers of which a sequence of chunks consists, in its order."""
    if isinstance(chunks, range):
        yield chunks
        return
    first = 0
    for at, chunk in enumerate(chunks):
        if at + 1 == len(chunks) or chunks[at + 1] != chunk + 1:
            yield range(chunks[first], chunk + 1)
            first = at + 1


def chunk_bytes_for(data_bytes: int, *, most: int) -> int:
    """How large the chunks are of data of this size: the same power of two wherever the data is the same.

    Args:
        data_bytes: Of all chunks together.
        most: Longer ones are not wanted.
    """
    wanted = max(1, data_bytes // _NUM_CHUNKS_WANTED)
    return min(most, max(_LEAST_CHUNK_BYTES, 1 << (wanted.bit_length() - 1)))


def digest(data: bytes | memoryview) -> int:
    """The xxh3-64 digest of ``data`` as an unsigned 64-bit number."""
    return xxhash.xxh3_64_intdigest(data)
