"""Chunks: consecutive ranges of the data, the units of fetch and digest.

A digest is xxh3-64, which one core computes faster than it reads memory. It detects bytes changed by a disk, a memory
module, a network card or a wrong offset. It is not a signature.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import xxhash

CHUNK_BYTES: Final = 4 << 20
"""Default length of a chunk, and maximum length of a frame of slices.

Small enough to fetch a damaged chunk again at little cost, large enough to keep digests few.
"""

_LEAST_CHUNK_BYTES: Final = 1 << 20
_NUM_CHUNKS_WANTED: Final = 256
"""In a chain of K relaying receivers, the last one lags by K chunks."""

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
        """The number of chunks; 0 for empty data."""
        return -(-self.data_bytes // self.chunk_bytes)

    def range_of(self, first: int, end: int) -> tuple[int, int]:
        """Return the half-open byte range of chunks ``first`` to ``end`` (exclusive)."""
        return first * self.chunk_bytes, min(end * self.chunk_bytes, self.data_bytes)

    def length_of(self, chunk: int) -> int:
        """Return the length of a chunk; the last one may be shorter."""
        start, end = self.range_of(chunk, chunk + 1)
        return end - start


def runs_of(chunks: Sequence[int]) -> Iterator[range]:
    """Yield the runs of consecutive numbers in a sequence of chunks, in order."""
    if isinstance(chunks, range):
        yield chunks
        return
    first = 0
    for at, chunk in enumerate(chunks):
        if at + 1 == len(chunks) or chunks[at + 1] != chunk + 1:
            yield range(chunks[first], chunk + 1)
            first = at + 1


def chunk_bytes_for(data_bytes: int, *, most: int) -> int:
    """Return the chunk length for data of this size: a power of two, the same for the same data everywhere.

    Args:
        data_bytes: Length of the data.
        most: Maximum chunk length.
    """
    wanted = max(1, data_bytes // _NUM_CHUNKS_WANTED)
    return min(most, max(_LEAST_CHUNK_BYTES, 1 << (wanted.bit_length() - 1)))


def digest(data: bytes | memoryview) -> int:
    """The xxh3-64 digest of ``data`` as an unsigned 64-bit number."""
    return xxhash.xxh3_64_intdigest(data)
