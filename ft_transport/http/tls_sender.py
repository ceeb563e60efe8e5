"""Sending a body encrypted, from a thread that makes the records and writes them to the socket itself."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

from ft_transport.http.send_cap import Pace
from ft_transport.http.tls_channel import TLSChannel

PIECE_BYTES: Final = 256 << 10
"""Encrypted at once; stays in the processor's cache until the kernel has taken it."""


class EncryptedSocket:
    """A blocking socket and the state of TLS on it, both lent to one thread.

    Args:
        raw: The socket.
        channel: The server's end of the connection.
        pace: How fast records are written.
    """

    def __init__(self, raw: socket.socket, channel: TLSChannel, pace: Pace) -> None:
        self.raw = raw
        self._channel = channel
        self.pace = pace

    def sendall(self, data: memoryview) -> None:
        """Sends all of ``data``; blocks."""
        for start in range(0, len(data), PIECE_BYTES):
            self._channel.write(data[start : start + PIECE_BYTES])
            self.flush()

    def encrypt(self, views: Sequence[memoryview]) -> None:
        """Encrypts the views, for a `flush` later; does not wait."""
        for view in views:
            self._channel.write(view)

    def flush(self) -> None:
        """Sends what was encrypted; blocks."""
        records = memoryview(self._channel.take())
        piece_bytes = self.pace.piece_bytes
        for start in range(0, len(records), piece_bytes):
            piece = records[start : start + piece_bytes]
            self.pace.admit(len(piece))
            self.raw.sendall(piece)
