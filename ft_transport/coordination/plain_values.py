"""Decoding of plain values that ranks and replicas exchange; a value of an unexpected kind raises a typed error."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ft_transport.errors import PeerProtocolError
from ft_transport.runtime.decode_errors import DECODE_ERRORS

T = TypeVar("T")

_MAX_SHOWN = 100


def from_json(encoded: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return a value of the decoder's kind.

    Raises:
        PeerProtocolError: The text is no such value.
    """
    return _decoded(encoded, decoder)


def from_msgpack(encoded: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Return a value of the decoder's kind, from msgpack; raises as `from_json`."""
    return _decoded(encoded, decoder)


def _decoded(encoded: bytes, decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T]) -> T:
    try:
        return decoder.decode(encoded)
    except DECODE_ERRORS as error:
        kind = decoder.type
        raise PeerProtocolError(
            f"expected a {getattr(kind, '__name__', kind)} of another rank, got {encoded[:_MAX_SHOWN]!r}: {error}"
        ) from error
