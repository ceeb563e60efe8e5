"""The messages between a keeper, its trainer, and the process that takes the place of a dead trainer (the successor).

Each message is one datagram of msgpack on a Unix socket of type ``SOCK_SEQPACKET`` (``man 7 unix``). A datagram arrives
whole or not at all, so a sender that is killed or interrupted never leaves half a message.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

_MAX_MESSAGE_BYTES: Final = 64 * 1024
_MAX_DESCRIPTORS: Final = 253  # SCM_MAX_FD of include/net/scm.h
ANSWER_S: Final = 1.0
"""How long a process waits for an answer of a keeper that runs, which answers within a millisecond."""


class Attend(Struct, frozen=True, tag=True):
    """From the trainer: take on a duty, which begins when the trainer dies.

    Attributes:
        name: Identifies the duty. It replaces an earlier duty with this name.
        kind: Names the class of the duty, as ``module:class``.
        argument: Argument of the duty, in msgpack.
        secret: A successor must know this; empty if none is needed.
    """

    name: str
    kind: str
    argument: bytes
    secret: bytes = b""


class Listen(Struct, frozen=True, tag=True):
    """From the trainer: let a successor inherit the duty. A listening socket comes with this message.

    If the trainer is itself a successor, its connection to the keeper of its predecessor comes as well. That keeper's
    duty ends when this message arrives. So exactly one of the two keepers offers the duty, whenever the trainer dies.

    Attributes:
        name: Name of the duty.
        predecessor: Name of the predecessor's duty; empty without one.
    """

    name: str
    predecessor: str = ""


class Begin(Struct, frozen=True, tag=True):
    """From the trainer: begin a duty now, although the trainer lives.

    Attributes:
        name: Name of the duty.
        is_left: Whether a successor can inherit the duty now. If not, it can after the trainer's death.
    """

    name: str
    is_left: bool = False


class End(Struct, frozen=True, tag=True):
    """From the trainer or its successor: end a duty. The keeper answers `Ended`."""

    name: str


class Hold(Struct, frozen=True, tag=True):
    """From the trainer: hold a file, whose descriptor comes with this message, until `Drop` or the end of the duty.

    Attributes:
        name: Name of the duty to which the file belongs.
        number: Identifies the file within the duty. It replaces an earlier file with this number.
        about: Describes the file to a successor, in msgpack.
    """

    name: str
    number: int
    about: bytes


class Drop(Struct, frozen=True, tag=True):
    """From the trainer: close a held file. The trainer may change the file as soon as it has sent this message."""

    name: str
    number: int


class Inherit(Struct, frozen=True, tag=True):
    """From a successor: describe the duty. The keeper answers `Inheritance` if its trainer is dead."""

    secret: bytes = b""


class Ended(Struct, frozen=True, tag=True):
    """The answer to `End`, and a report that the work of a duty is over: the keeper does nothing more for the duty."""

    name: str


class Inheritance(Struct, frozen=True, tag=True):
    """The answer to `Inherit`: the duty, which goes on until the successor sends `End`, and its held files.

    The listening socket comes with this message, and then the held files.

    Attributes:
        name: Name of the duty.
        argument: Argument of the duty.
        held: Number and description of each held file, in the order of the descriptors.
    """

    name: str
    argument: bytes
    held: tuple[tuple[int, bytes], ...] = ()


Message: TypeAlias = Attend | Listen | Begin | End | Hold | Drop | Inherit | Ended | Inheritance

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Message)


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send a message, with descriptors of files.

    Raises:
        OSError: The receiver has exited, or does not read.
    """
    encoded = _encoder.encode(message)
    if descriptors:
        socket.send_fds(connection, [encoded], list(descriptors), socket.MSG_NOSIGNAL)
    else:
        connection.send(encoded, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> Message | None:
    """Receive a message, and close the descriptors that came with it; see `receive_with_files`."""
    message, descriptors = receive_with_files(connection)
    for descriptor in descriptors:
        os.close(descriptor)
    return message


def receive_with_files(connection: socket.socket) -> tuple[Message | None, list[int]]:
    """Receive a message and the descriptors that came with it, which the caller closes.

    Returns:
        The message; ``None`` if the sender has exited, or is of another version of this package. The descriptors; fewer
        than were sent if this process may not have that many.

    Raises:
        BlockingIOError: The socket does not block, and no message has arrived.
        TimeoutError: No message arrived within the timeout of the socket.
    """
    try:
        received, descriptors, _flags, _address = socket.recv_fds(
            connection, _MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except (BlockingIOError, TimeoutError):
        raise
    except OSError:
        return None, []
    try:
        return (_decoder.decode(received) if received else None), descriptors
    except msgspec.MsgspecError:
        for descriptor in descriptors:
            os.close(descriptor)
        return None, []


def end_duty(connection: socket.socket, name: str) -> bool:
    """End a duty of the keeper at the other end. Return whether it has ended: the keeper answered, or it has exited."""
    deadline_s = time.monotonic() + ANSWER_S
    try:
        send(connection, End(name))
        while time.monotonic() < deadline_s:
            answer = receive(connection)
            # Skip the late answer to an earlier request.
            if answer is None or answer == Ended(name):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return False
