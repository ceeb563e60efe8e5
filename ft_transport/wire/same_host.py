"""The protocol between a source and a receiver on one host: memory is copied once and crosses no network.

The answer with the manifest names a socket of the source (``FT-Same-Host``). A receiver that reaches it is on the same
host, whatever the names of both. It asks the source for a ticket, by HTTP, so that this request is authenticated like
any other, and sends the ticket through the socket; with `LENT` comes a descriptor of the snapshot's memory. The source
leaves that memory unchanged while the socket is open, or until a newer snapshot has waited for it for long enough.
After `DONE` it sends `HELD` if the memory is unchanged up to now.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from ft_transport.errors import PeerProtocolError
from ft_transport.runtime.decode_errors import DECODE_ERRORS

TICKET_CHARACTERS: Final = 32
LENT: Final = b"L"
GONE: Final = b"G"
DONE: Final = b"D"
HELD: Final = b"H"

_NAME: Final = re.compile("[0-9a-f]{16}", re.ASCII)


class MemoryTicket(Struct, frozen=True):
    """A ticket, valid once and for a moment.

    Attributes:
        ticket: Hexadecimal digits, drawn at random.
        data_start: Where in the memory the data of the snapshot begins.
        data_bytes: Its length.
    """

    ticket: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{TICKET_CHARACTERS}}}$")]
    data_start: Annotated[int, Meta(ge=0, lt=2**62)]
    data_bytes: Annotated[int, Meta(ge=0, lt=2**62)]


_decoder: Final = msgspec.json.Decoder(MemoryTicket)


def encode_ticket(ticket: MemoryTicket) -> bytes:
    """Encode a ticket as the body of an answer."""
    return msgspec.json.encode(ticket)


def decode_ticket(body: bytes | bytearray, *, peer: str) -> MemoryTicket:
    """Decode a body of `encode_ticket`.

    Raises:
        PeerProtocolError: The body is no ticket.
    """
    try:
        return _decoder.decode(body)
    except DECODE_ERRORS as error:
        raise PeerProtocolError(f"expected a ticket for memory: {error}", peer=peer) from error


def socket_name(name: str) -> bytes | None:
    """Return the abstract address of the socket that a server calls ``name``; ``None`` for an invalid name.

    Each network namespace has its own abstract addresses (``man 7 unix``), so other hosts cannot reach it.
    """
    return b"\0ft-transport/" + name.encode() if _NAME.fullmatch(name) else None
