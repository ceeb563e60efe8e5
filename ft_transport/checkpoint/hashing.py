"""The hash functions of a checkpoint's files: a checksum, or with a key a secure hash, so that nobody can forge a file.

A checksum detects bits that a disk or a memory module has changed, at the speed of memory. Another file with the same
checksum is easy to make, so a signed list of files uses SHA-256 (FIPS 180-4), of which one core computes 1 to 2 GB/s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final, Literal, Protocol, TypeAlias

import xxhash

HashName: TypeAlias = Literal["xxh3-64", "sha256"]

CHECKSUM: Final[HashName] = "xxh3-64"
SECURE_HASH: Final[HashName] = "sha256"


class RunningHash(Protocol):
    """Takes bytes piece by piece. Releases the GIL for large buffers."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Adds bytes."""

    def hexdigest(self) -> str:
        """Returns the digest of all added bytes, in hexadecimal digits."""


_MAKERS: Final[dict[HashName, Callable[[], RunningHash]]] = {CHECKSUM: xxhash.xxh3_64, SECURE_HASH: hashlib.sha256}
_NUM_DIGITS: Final[dict[HashName, int]] = {CHECKSUM: 16, SECURE_HASH: 64}


def new_hash(name: HashName) -> RunningHash:
    """Return a hash of no bytes yet."""
    return _MAKERS[name]()


def hash_of(name: HashName, data: bytes | memoryview) -> str:
    """Return the digest of some bytes, in hexadecimal digits."""
    running = new_hash(name)
    running.update(data)
    return running.hexdigest()


def num_digits_of(name: HashName) -> int:
    """Return the number of hexadecimal digits of a digest."""
    return _NUM_DIGITS[name]
