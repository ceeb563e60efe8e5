"""Digests of chunks: xxh3-64, which one core computes faster than memory can be read.

A digest finds bytes that a disk, a memory module, a network card or a wrong offset changed. It is no signature:
who may send is decided by the job token (``http.server``).
"""

from __future__ import annotations

from typing import Final, TypeAlias

import xxhash

DIGEST_HEX_DIGITS: Final = 16

Hasher: TypeAlias = xxhash.xxh3_64
"""Takes bytes piece by piece: ``update(buffer)``, then ``intdigest()``. Releases the GIL for large buffers."""


def digest(data: bytes | memoryview) -> int:
    """The xxh3-64 digest of ``data`` as an unsigned 64-bit number."""
    return xxhash.xxh3_64_intdigest(data)
