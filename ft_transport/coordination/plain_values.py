"""Plain values that ranks and replicas tell each other; what is none of the expected kind is an error with a type."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ft_transport.errors import PeerProtocolError
from ft_transport.runtime.decode_errors import DECODE_ERRORS

T = TypeVar("T")

_MAX_SHOWN = 100


def from_json(encoded: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """A value of the decoder's kind.

    Raises:
        PeerProtocolError: It is none.
    """
    return _decoded(encoded, decoder)


def from_msgpack(encoded: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """As `from_json`, of msgpack."""
    return _decoded(encoded, decoder)


def _decoded(encoded: bytes, decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(encoded)
    except DECODE_ERRORS as error:
        kind = decoder.type
        raise PeerProtocolError(
            f"expected a {getattr(kind, '__name__', kind)} of another rank, got {encoded[:_MAX_SHOWN]!r}: {error}"
        ) from error
