"""A key and its signatures: HMAC-SHA256 (RFC 2104), each bound to one purpose."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Final, TypeAlias

Bytes: TypeAlias = bytes | bytearray | memoryview

_ID_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Key:
    """One key, whose secret does not appear in its repr.

    Attributes:
        key_id: Public id, equal for equal keys.
    """

    key_id: str
    _secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> Key:
        """Return the key with these bytes."""
        return cls(_mac(secret, "id")[:_ID_BYTES].hex(), secret)

    def mac(self, purpose: str, *parts: Bytes) -> bytes:
        """Return the HMAC-SHA256 of the purpose and the parts, with their lengths: 32 bytes."""
        return _mac(self._secret, purpose, *parts)

    def derived(self, purpose: str, *parts: bytes) -> Key:
        """Return a derived key, which does not reveal this one."""
        return Key.of(self.mac(purpose, *parts))


def is_equal(one: str | bytes, other: str | bytes) -> bool:
    """Compare in constant time, so that the duration does not reveal the position of a difference."""
    return hmac.compare_digest(
        *(each.encode("utf-8", "surrogateescape") if isinstance(each, str) else each for each in (one, other))
    )


def _mac(secret: bytes, purpose: str, *parts: Bytes) -> bytes:
    made = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (purpose.encode(), *parts):
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.digest()
