"""Chunks (the consecutive byte ranges in which data is fetched) and their digests.

Without a job token, digests are xxh3-64, which one core computes faster than it reads memory. These digests detect
bytes that were damaged by a disk, a memory module, a network card or a wrong offset. They do not detect forgery,
because an attacker can find other bytes with the same digest.

With a job token, digests are keyed BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs, section 2.3), truncated to 64
bits. Only processes that know the key can make such a digest. A forgery succeeds with probability 2**-64, and each
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

A damaged chunk of this size costs little to fetch again, and a manifest has few digests.
"""

_LEAST_CHUNK_BYTES: Final = 1 << 20
_NUM_CHUNKS_WANTED: Final = 256
"""Wanted minimum number of chunks. With few chunks relaying is slow: in a chain of receivers, each one lags
one chunk behind the previous one."""

DIGEST_HEX_DIGITS: Final = 16

Hasher: TypeAlias = xxhash.xxh3_64
"""Computes a plain digest of several buffers with ``update`` and ``intdigest``. Releases the GIL for long buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTable:
    """The division of ``data_bytes`` bytes into chunks of ``chunk_bytes``; the last chunk may be shorter."""

    data_bytes: int
    chunk_bytes: int

    @property
    def num_chunks(self) -> int:
        """The number of chunks; 0 for empty data."""
        return -(-self.data_bytes // self.chunk_bytes)

    def range_of(self, first: int, end: int) -> tuple[int, int]:
        """Return the half-open byte range of the chunks ``first`` to ``end - 1``."""
        return first * self.chunk_bytes, min(end * self.chunk_bytes, self.data_bytes)

    def length_of(self, chunk: int) -> int:
        """Return the length of a chunk; the last one may be shorter."""
        start, end = self.range_of(chunk, chunk + 1)
        return end - start


def runs_of(chunks: Sequence[int]) -> Iterator[range]:
    """Divide a sequence of chunk indices into runs of consecutive indices, in order."""
    if isinstance(chunks, range):
        yield chunks
        return
    first = 0
    for at, chunk in enumerate(chunks):
        if at + 1 == len(chunks) or chunks[at + 1] != chunk + 1:
            yield range(chunks[first], chunk + 1)
            first = at + 1


def chunk_bytes_for(data_bytes: int, *, most: int) -> int:
    """Return the length of chunks for data of a given size. The result is the same on every host.

    Args:
        data_bytes: Length of the data.
        most: Maximum chunk length.
    """
    wanted = max(1, data_bytes // _NUM_CHUNKS_WANTED)
    return min(most, max(_LEAST_CHUNK_BYTES, 1 << (wanted.bit_length() - 1)))


def digest(data: bytes | memoryview) -> int:
    """Return the xxh3-64 digest of ``data``, an unsigned 64-bit number."""
    return xxhash.xxh3_64_intdigest(data)


_PLAIN_NAME: Final = "xxh3-64"
_KEYED_NAME: Final = "blake3-64"
_PURPOSE: Final = "chunks"
_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Digester:
    """Computes digests of chunks, with or without a key. Thread-safe.

    Attributes:
        name: Name in the manifest: the algorithm, and the key's id if there is a key.
    """

    name: str = _PLAIN_NAME
    _key: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, key: Key) -> Digester:
        """Return a digester that uses ``key``."""
        return cls(f"{_KEYED_NAME} {key.key_id}", key.mac(_PURPOSE, _KEYED_NAME.encode()))

    @classmethod
    def named(cls, name: str, keys: Sequence[Key]) -> Digester | None:
        """Return the digester with a name from a manifest; ``None`` if this process cannot verify such digests.

        Args:
            name: The name in the manifest.
            keys: Keys of the job; empty without a job token. With keys, plain digests are refused, because anyone can
                forge them.
        """
        if not keys:
            return PLAIN if name == _PLAIN_NAME else None
        kind, _, key_id = name.partition(" ")
        key = next((key for key in keys if key.key_id == key_id), None)
        return cls.of(key) if key is not None and kind == _KEYED_NAME else None

    @property
    def is_keyed(self) -> bool:
        """Whether the digests are computed with a key."""
        return self.name != _PLAIN_NAME

    def hasher(self, context: bytes = b"") -> Hasher | _Blake3:
        """Return an object that computes one digest with ``update`` and ``intdigest``.

        Args:
            context: Description of the digested bytes. It is part of the digest, which is therefore not valid for other
                bytes. Ignored without a key.
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
"""The digester without a key, which detects damage but not forgery."""
