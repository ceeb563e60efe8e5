"""Chunks: consecutive ranges of the data, the units of fetch and digest.

A plain digest is xxh3-64, which one core computes faster than it reads memory. It detects bytes changed by a disk, a
memory module, a network card or a wrong offset. It is not a signature: an attacker can make other bytes with the same
digest.

With the job's key, a digest is keyed BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs, section 2.3), cut to 64 bits:
a signature of the chunk, which only holders of the key can make. A forgery succeeds with probability 2**-64, and each
failed attempt is detected. One core digests 4 to 9 GB/s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import xxhash
from blake3 import blake3

from ft_transport.wire.signing import Key

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


_PLAIN_NAME: Final = "xxh3-64"
_KEYED_NAME: Final = "blake3-64"
_PURPOSE: Final = "chunks"
_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Digester:
    """Digests chunks, with or without a key. Thread-safe.

    Attributes:
        name: The algorithm, and with a key the key's id, as in the manifest.
    """

    name: str = _PLAIN_NAME
    _key: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, key: Key) -> Digester:
        """Return the keyed digester of a job."""
        return cls(f"{_KEYED_NAME} {key.key_id}", key.mac(_PURPOSE, _KEYED_NAME.encode()))

    @classmethod
    def named(cls, name: str, keys: Sequence[Key]) -> Digester | None:
        """Return the digester that a manifest names; ``None`` if these keys cannot verify it.

        Args:
            name: The name in the manifest.
            keys: The job's keys. With keys, plain digests are refused: they can be forged without one.
        """
        if not keys:
            return PLAIN if name == _PLAIN_NAME else None
        kind, _, key_id = name.partition(" ")
        key = next((key for key in keys if key.key_id == key_id), None)
        return cls.of(key) if key is not None and kind == _KEYED_NAME else None

    @property
    def is_keyed(self) -> bool:
        """Whether only holders of the key can make digests."""
        return self.name != _PLAIN_NAME

    def hasher(self, context: bytes = b"") -> Hasher | _Blake3:
        """Return a hasher for one digest.

        Args:
            context: Identifies the bytes, if nothing else ties the digest to them; used with a key only.
        """
        hasher = _Blake3(self._key) if self._key else Hasher()
        if context and self.is_keyed:
            hasher.update(memoryview(len(context).to_bytes(_DIGEST_BYTES, "big") + context))
        return hasher

    def digest(self, data: memoryview) -> int:
        """Return the digest of ``data``."""
        if not self._key:
            return xxhash.xxh3_64_intdigest(data)
        return self.digest_of([data])

    def digest_of(self, pieces: Iterable[memoryview]) -> int:
        """Return the digest of the concatenated pieces."""
        hasher = self.hasher()
        for piece in pieces:
            hasher.update(piece)
        return hasher.intdigest()


class _Blake3:
    def __init__(self, key: bytes) -> None:
        self._hasher = blake3(key=key)

    def update(self, data: memoryview) -> None:
        self._hasher.update(data)

    def intdigest(self) -> int:
        return int.from_bytes(self._hasher.digest(_DIGEST_BYTES), "big")


PLAIN: Final = Digester()
"""Detects damage, not forgery."""
