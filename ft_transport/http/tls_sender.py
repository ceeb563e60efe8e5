"""Sends an encrypted body from a thread that makes the records and writes them to the socket itself."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

from ft_transport.http.send_cap import Pace
from ft_transport.http.tls_channel import TLSChannel

PIECE_BYTES: Final = 256 << 10
"""Bytes encrypted at once; they stay in the processor's cache until the kernel has taken them."""


class EncryptedSocket:
    """A blocking socket and its TLS state, both lent to one thread.

    Args:
        raw: The socket.
        channel: The server's end of the connection.
        pace: Throughput limit of the records.
    """

    def __init__(self, raw: socket.socket, channel: TLSChannel, pace: Pace) -> None:
        self.raw = raw
        self._channel = channel
        self.pace = pace

    def sendall(self, data: memoryview) -> None:
        """Send all of ``data``; blocks."""
        for start in range(0, len(data), PIECE_BYTES):
            self._channel.write(data[start : start + PIECE_BYTES])
            self.flush()

    def encrypt(self, views: Sequence[memoryview]) -> None:
        """Encrypt the views for a later `flush`; does not wait."""
        for view in views:
            self._channel.write(view)

    def flush(self) -> None:
        """Send the encrypted bytes; blocks."""
        records = memoryview(self._channel.take())
        piece_bytes = self.pace.piece_bytes
        for start in range(0, len(records), piece_bytes):
            piece = records[start : start + piece_bytes]
            self.pace.admit(len(piece))
            self.raw.sendall(piece)
