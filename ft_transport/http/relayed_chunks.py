"""The body of a response with relayed chunks: each is sent as soon as it lands, in any order (``wire.routes``)."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Final

from ft_transport.errors import RestoreError
from ft_transport.http.body_sender import MAX_VIEWS_PER_SEND
from ft_transport.http.relays import Follower
from ft_transport.http.send_cap import PacedSocket
from ft_transport.http.tls_sender import PIECE_BYTES, EncryptedSocket
from ft_transport.wire.routes import CHUNK_HEADER, relayed_bytes

_LOOK_S: Final = 0.1
"""Interval at which a response that waits for its next chunk checks whether the receiver is still connected."""


class RelayedChunks:
    """See ``body_sender.Content``.

    Args:
        follower: Reports landed chunks; the caller closes it.
        pause_s: Longest wait for the next chunk, in seconds; then the response ends early.
    """

    def __init__(self, follower: Follower, *, pause_s: float) -> None:
        self.position = 0
        self.end = relayed_bytes(follower.relay.chunks, follower.chunks)
        self._follower = follower
        self._relay = follower.relay
        self._views_of = follower.relay.views()
        self._pause_s = pause_s

    def send_to(self, connected: PacedSocket) -> None:
        """See ``body_sender.Content``."""
        while self.position < self.end:
            start, end, header = self._next_chunk(connected)
            while header or start < end:
                views = self._views(start, min(end, start + connected.pace.piece_bytes - CHUNK_HEADER.size))
                if header:
                    views = [header, *views]
                views = views[:MAX_VIEWS_PER_SEND]
                num_bytes = sum(map(len, views))
                connected.pace.admit(num_bytes)
                sent = connected.raw.sendmsg(views)
                connected.pace.unsent(num_bytes - sent)
                self.position += sent
                of_header = min(sent, len(header))
                header = header[of_header:]
                start += sent - of_header

    def send_encrypted(self, encrypted: EncryptedSocket) -> None:
        """See ``body_sender.Content``."""
        while self.position < self.end:
            start, end, header = self._next_chunk(encrypted)
            encrypted.sendall(header)
            self.position += len(header)
            # Looks up the memory for each piece: a slow receiver delays the loop, and the trainer may free memory
            # meanwhile, which must not be read here. Without TLS the kernel reads it, which is safe.
            for at in range(start, end, PIECE_BYTES):
                for view in self._views(at, min(end, at + PIECE_BYTES)):
                    encrypted.sendall(view)
                    self.position += len(view)

    def _next_chunk(self, connected: PacedSocket | EncryptedSocket) -> tuple[int, int, memoryview]:
        """Return the range of the next landed chunk, and its header."""
        chunk = self._follower.next(0.0)
        if chunk is None:
            chunk = self._await_chunk(connected)
        start, end = self._relay.chunks.range_of(chunk, chunk + 1)
        return start, end, memoryview(CHUNK_HEADER.pack(start, self._relay.furthest))

    def _await_chunk(self, connected: PacedSocket | EncryptedSocket) -> int:
        until_s = time.monotonic() + self._pause_s
        # Otherwise the end of the previous chunk would wait for an acknowledgement (man 7 tcp).
        connected.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connected.pace.held_up():
            while (chunk := self._follower.next(min(_LOOK_S, until_s - time.monotonic()))) is None:
                if self._relay.has_ended:
                    raise ConnectionAbortedError("it is not passed on any more")
                if connected.pace.has_ended(0.0):
                    raise ConnectionResetError("the receiver has closed the connection")
                if time.monotonic() >= until_s:
                    raise ConnectionAbortedError("no other chunk has landed in time")
        connected.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        return chunk

    def _views(self, start: int, end: int) -> Sequence[memoryview]:
        if self._relay.has_ended:
            raise ConnectionAbortedError("it is not passed on any more")
        try:
            return self._views_of(start, end)
        except RestoreError as error:
            # The trainer has freed the received data: the next request is refused before it waits for chunks.
            self._relay.end()
            raise ConnectionAbortedError(str(error)) from error
