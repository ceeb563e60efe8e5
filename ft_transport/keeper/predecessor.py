"""The duties of a dead trainer's keeper, which the process that takes the trainer's place (the successor) inherits."""

from __future__ import annotations

import io
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ft_transport.keeper.messages import ANSWER_S, Inherit, Inheritance, end_duty, receive_with_files, send
from ft_transport.runtime.children import close_files_in_children, close_in_children, making_socket
from ft_transport.runtime.unix_sockets import is_own_user

logger = logging.getLogger(__name__)

_START_S: Final = 5.0
"""How long a successor waits for the answer of its predecessor's keeper, which may still be starting."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A file that a keeper held for a dead trainer.

    Attributes:
        number: Identifies the file within the duty.
        about: The dead trainer's description of the file, in msgpack.
        file: The open file, which this process owns.
    """

    number: int
    about: bytes
    file: io.FileIO


class Predecessor:
    """A duty of a dead trainer's keeper, which this process may end to take the trainer's place.

    Until `end`, or if this process dies before it, the keeper carries on.

    Args:
        connection: The connection to the keeper.
        inheritance: The keeper's answer.
        descriptors: The descriptors that came with the answer: at least that of the listening socket.

    Attributes:
        connection: The connection to the keeper.
        listening: The socket to which this process has connected.
        name: Name of the duty.
        argument: Argument of the duty, in msgpack.
        files: The files that the keeper holds. Their user closes them; forked children close them by themselves.
    """

    def __init__(self, connection: socket.socket, inheritance: Inheritance, descriptors: Sequence[int]) -> None:
        self.connection = connection
        self.listening = socket.socket(fileno=descriptors[0])
        self.name = inheritance.name
        self.argument = inheritance.argument
        self.files = [
            HeldFile(number, about, io.FileIO(descriptor))
            for (number, about), descriptor in zip(inheritance.held, descriptors[1:], strict=False)
        ]
        self._identities = {_identity(os.fstat(each.file.fileno())) for each in self.files}
        close_in_children(self)
        close_files_in_children(self)

    def is_mine(self, candidate: socket.socket) -> bool:
        """Return whether the socket is this object's own. Forked children close it (``runtime.children``)."""
        return candidate.fileno() in {self.connection.fileno(), self.listening.fileno()}

    def is_my_file(self, status: os.stat_result) -> bool:
        """Return whether this is one of ``files``. Forked children close these (``runtime.children``)."""
        return _identity(status) in self._identities

    def end(self) -> None:
        """End the duty, and wait until the keeper has ended it. Idempotent."""
        if self.connection.fileno() < 0:
            return
        if not end_duty(self.connection, self.name):
            logger.warning("the keeper of the replica's earlier process did not answer within %g s", ANSWER_S)
        # Only now: if a signal handler has raised above, the next call ends the duty.
        self.close()

    def close(self) -> None:
        """Leave the duty to the keeper. Idempotent."""
        self.listening.close()
        self.connection.close()


def find_predecessor(address: str, secret: bytes = b"") -> Predecessor | None:
    """Return the duty at a Unix address if its trainer has died.

    Args:
        address: The address of the duty (`Attend`).
        secret: The secret of the duty.

    Returns:
        The duty; ``None`` if there is none, or if it has another secret.
    """
    try:
        with making_socket:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:  # This process has no free descriptor.
        return None
    try:
        connection.settimeout(_START_S)
        connection.connect(address)
        if is_own_user(connection):
            send(connection, Inherit(secret))
            # No fork until each descriptor has its owner: a child would inherit it and never close it.
            with making_socket:
                answer, descriptors = receive_with_files(connection)
                if isinstance(answer, Inheritance) and descriptors:
                    connection.settimeout(ANSWER_S)
                    return Predecessor(connection, answer, descriptors)
    except OSError:  # There is no keeper, or it does not answer.
        pass
    connection.close()
    return None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
