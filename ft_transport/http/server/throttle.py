"""Limits the server's share of the network: bodies are sent in pieces, each when the limit allows.

A trainer shares the machine with the threads that send its state: the kernel copies each byte on the trainer's cores,
and sends it over the network that its gradients need. One limit covers all bodies, for any receiver and any way of
sending. Pieces of 25 milliseconds enforce it: the limit holds over any short interval too, and the sending threads take
the interpreter from the trainer only a few times in each.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ft_transport.http.tls_channel import TLSChannel
from ft_transport.wire.chunks import CHUNK_BYTES

ENCRYPTED_PIECE_BYTES: Final = 256 << 10
"""Bytes encrypted at once; they stay in the processor's cache until the kernel has taken them."""
_PIECE_S: Final = 0.025
_LEAST_PIECE_BYTES: Final = 4 << 10
_CREDIT_S: Final = 0.04
"""Sleeping threads wake up late: after a pause, a thread may catch up by this much."""
_UNLIMITED_PIECE_BYTES: Final = 1 << 62
_CLOSED_BY_PEER: Final = getattr(select, "POLLRDHUP", 0)


class RateLimiter:
    """Grants bytes at a rate. Thread-safe.

    Args:
        bytes_per_s: The rate.
        clock: Monotonic seconds.

    Attributes:
        piece_bytes: Maximum size of one grant.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._free_s = float("-inf")
        self.piece_bytes: int = max(_LEAST_PIECE_BYTES, min(CHUNK_BYTES, int(bytes_per_s * _PIECE_S)))

    def grant(self, num_bytes: int) -> float:
        """Return the seconds until ``num_bytes`` may be sent; callers are served in order."""
        now_s = self._clock()
        with self._mutex:
            start_s = max(self._free_s, now_s - _CREDIT_S)
            self._free_s = start_s + num_bytes / self._bytes_per_s
        return start_s - now_s

    def take_back(self, num_bytes: int) -> None:
        """Return unused bytes to the budget."""
        with self._mutex:
            self._free_s -= num_bytes / self._bytes_per_s


class BodySocket:
    """A blocking socket to which one body is sent under a rate limit. Used only by one thread, except `waited_s`.

    Args:
        raw: The socket to the receiver.
        limiter: Limit for all bodies of the server; ``None`` for none.
        channel: The server's end of a TLS connection, lent to this thread; ``None`` without TLS.

    Attributes:
        raw: The socket.
        is_encrypted: Whether the body is sent over TLS.
        piece_bytes: Maximum number of bytes to `admit` at once.
    """

    def __init__(self, raw: socket.socket, limiter: RateLimiter | None, channel: TLSChannel | None = None) -> None:
        self.raw = raw
        self.is_encrypted = channel is not None
        self.piece_bytes: int = limiter.piece_bytes if limiter is not None else _UNLIMITED_PIECE_BYTES
        self._limiter = limiter
        self._channel = channel
        self._waits: tuple[float, float | None] = (0.0, None)
        """Total wait so far, and start of the current wait; one value, because other threads read it."""
        self._poll = select.poll()

    def sendall(self, data: memoryview) -> None:
        """Send all of ``data``; blocks."""
        if self._channel is None:
            self._send(data)
            return
        for start in range(0, len(data), ENCRYPTED_PIECE_BYTES):
            self.encrypt([data[start : start + ENCRYPTED_PIECE_BYTES]])
            self.flush()

    def encrypt(self, views: Sequence[memoryview]) -> None:
        """Encrypt the views for a later `flush`; does not wait."""
        assert self._channel is not None, "without TLS, sendall suffices"
        for view in views:
            self._channel.write(view)

    def flush(self) -> None:
        """Send the encrypted bytes; blocks."""
        assert self._channel is not None, "without TLS, sendall suffices"
        self._send(memoryview(self._channel.take()))

    def _send(self, data: memoryview) -> None:
        for start in range(0, len(data), self.piece_bytes):
            piece = data[start : start + self.piece_bytes]
            self.admit(len(piece))
            self.raw.sendall(piece)

    def send_file(self, descriptor: int, position: int, num_bytes: int) -> int:
        """Send the beginning of a part of a file, without TLS; return the bytes sent, 0 at the end of the file."""
        num_bytes = min(num_bytes, self.piece_bytes)
        self.admit(num_bytes)
        sent = os.sendfile(self.raw.fileno(), descriptor, position, num_bytes)
        self.unsent(num_bytes - sent)
        return sent

    def admit(self, num_bytes: int) -> None:
        """Wait until ``num_bytes``, at most ``piece_bytes``, may be sent; no memory may be pinned meanwhile.

        Raises:
            ConnectionResetError: The connection ended meanwhile.
        """
        if self._limiter is None:
            return
        left_s = self._limiter.grant(num_bytes)
        if left_s <= 0:
            return
        until_s = time.monotonic() + left_s
        with self.waiting():
            while left_s > 0:
                # Not time.sleep: the thread that ends the connection waits for this one.
                if self.has_ended(left_s):
                    self._limiter.take_back(num_bytes)
                    raise ConnectionResetError("the connection has ended")
                left_s = until_s - time.monotonic()

    def unsent(self, num_bytes: int) -> None:
        """Return admitted but unsent bytes to the budget."""
        if self._limiter is not None and num_bytes:
            self._limiter.take_back(num_bytes)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time of the block to `waited_s`: the receiver has nothing to take meanwhile."""
        self._waits = self._waits[0], time.monotonic()
        try:
            yield
        finally:
            self._waits = self.waited_s(), None

    def waited_s(self) -> float:
        """Return the seconds of waiting so far. Called by any thread."""
        waited_s, began_s = self._waits
        return waited_s + (time.monotonic() - began_s if began_s is not None else 0.0)

    def has_ended(self, within_s: float) -> bool:
        """Wait at most ``within_s`` for either side to end the connection; return whether it ended."""
        self._poll.register(self.raw, _CLOSED_BY_PEER)
        return bool(self._poll.poll(within_s * 1e3))
