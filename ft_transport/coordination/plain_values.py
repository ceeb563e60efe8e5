"""Plain values that ranks and replicas tell each other; what is none of the expected kind is an error with a type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ft_transport.errors import PeerProtocolError
from ft_transport.runtime.decode_errors import DECODE_ERRORS

T = TypeVar("T")

_MAX_SHOWN = 100


def from_json(encoded: bytes, kind: type[T]) -> T:
    """A value of this kind.

    Raises:
        PeerProtocolError: It is none.
    """
    return _decoded(encoded, lambda: msgspec.json.decode(encoded, type=kind), kind)


def from_msgpack(encoded: bytes, kind: type[T]) -> T:
    """As `from_json`, of msgpack."""
    return _decoded(encoded, lambda: msgspec.msgpack.decode(encoded, type=kind), kind)


def _decoded(encoded: bytes, decode: Callable[[], T], kind: Any) -> T:
    try:
        return decode()
    except DECODE_ERRORS as error:
        raise PeerProtocolError(
            f"expected a {getattr(kind, '__name__', kind)} of another rank, got {encoded[:_MAX_SHOWN]!r}: {error}"
        ) from error
