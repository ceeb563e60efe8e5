"""The messages between a keeper, its trainer, and the process that takes the place of a dead trainer (the successor).

Each message is one datagram of msgpack on a Unix socket of type ``SOCK_SEQPACKET`` (``man 7 unix``). A datagram arrives
whole or not at all, so a sender that is killed or interrupted never leaves half a message.
"""

from __future__ import annotations

import socket
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

_MAX_MESSAGE_BYTES: Final = 64 * 1024


class Attend(Struct, frozen=True, tag=True):
    """From the trainer: take on a duty, which begins when the trainer dies.

    Attributes:
        name: Identifies the duty. It replaces an earlier duty with this name.
        kind: Selects the keeper's class of duties.
        argument: Argument of the duty, in msgpack.
        address: The Unix address at which a successor can inherit the duty; empty if none can.
    """

    name: str
    kind: str
    argument: bytes
    address: str = ""


class Begin(Struct, frozen=True, tag=True):
    """From the trainer: begin a duty now, although the trainer lives."""

    name: str


class End(Struct, frozen=True, tag=True):
    """From the trainer or its successor: end a duty. The keeper answers `Ended`."""

    name: str


class Inherit(Struct, frozen=True, tag=True):
    """From a successor: describe the duty. The keeper answers `Inheritance` if its trainer is dead."""


class Ended(Struct, frozen=True, tag=True):
    """The answer to `End`, and a report that the work of a duty is over: the keeper does nothing more for the duty."""

    name: str


class Inheritance(Struct, frozen=True, tag=True):
    """The answer to `Inherit`: name and argument of the duty, which goes on until the successor sends `End`."""

    name: str
    argument: bytes


Message: TypeAlias = Attend | Begin | End | Inherit | Ended | Inheritance

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


def send(connection: socket.socket, message: Message) -> None:
    """Send a message.

    Raises:
        OSError: The receiver has exited, or does not read.
    """
    connection.send(_encoder.encode(message), socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> Message | None:
    """Receive a message; return ``None`` if the sender has exited, or is of another version of this package.

    Raises:
        BlockingIOError: The socket does not block, and no message has arrived.
        TimeoutError: No message arrived within the timeout of the socket.
    """
    try:
        received = connection.recv(_MAX_MESSAGE_BYTES)
    except (BlockingIOError, TimeoutError):
        raise
    except OSError:
        return None
    try:
        return _decoder.decode(received) if received else None
    except msgspec.MsgspecError:
        return None
