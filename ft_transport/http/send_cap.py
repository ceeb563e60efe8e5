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
from collections.abc import Callable, Iterator
from typing import Final

from ft_transport.wire.chunks import CHUNK_BYTES

_PIECE_S: Final = 0.025
_LEAST_PIECE_BYTES: Final = 4 << 10
_CREDIT_S: Final = 0.04
"""Sleeping threads wake up late: after a pause, a thread may catch up by this much."""
_UNCAPPED_PIECE_BYTES: Final = 1 << 62
_CLOSED_BY_PEER: Final = getattr(select, "POLLRDHUP", 0)


class SendCap:
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


class Pace:
    """The throughput limit of one body. Used only by the thread that sends it, except `waited_s`.

    Args:
        connected: Socket to the receiver; its closing ends a wait.
        cap: Limit for all bodies of the server; ``None`` for none.
    """

    def __init__(self, connected: socket.socket, cap: SendCap | None) -> None:
        self._connected = connected
        self._cap = cap
        self._held_up: tuple[float, float | None] = (0.0, None)
        """Total wait so far, and start of the current wait; one value, because other threads read it."""
        self._poll = select.poll()
        self.piece_bytes: int = cap.piece_bytes if cap is not None else _UNCAPPED_PIECE_BYTES

    def waited_s(self) -> float:
        """Return the seconds of waiting so far. Called by any thread."""
        waited_s, began_s = self._held_up
        return waited_s + (time.monotonic() - began_s if began_s is not None else 0.0)

    def admit(self, num_bytes: int) -> None:
        """Wait until ``num_bytes``, at most ``piece_bytes``, may be sent; no memory may be pinned meanwhile.

        Raises:
            ConnectionResetError: The connection ended meanwhile.
        """
        if self._cap is None:
            return
        left_s = self._cap.grant(num_bytes)
        if left_s <= 0:
            return
        until_s = time.monotonic() + left_s
        with self.held_up():
            while left_s > 0:
                # Not time.sleep: the thread that ends the connection waits for this one.
                if self.has_ended(left_s):
                    self._cap.take_back(num_bytes)
                    raise ConnectionResetError("the connection has ended")
                left_s = until_s - time.monotonic()

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """Add the time of the block to `waited_s`: the receiver has nothing to take meanwhile."""
        self._held_up = self._held_up[0], time.monotonic()
        try:
            yield
        finally:
            self._held_up = self.waited_s(), None

    def has_ended(self, within_s: float) -> bool:
        """Wait at most ``within_s`` for either side to end the connection; return whether it ended."""
        self._poll.register(self._connected, _CLOSED_BY_PEER)
        return bool(self._poll.poll(within_s * 1e3))

    def unsent(self, num_bytes: int) -> None:
        """Return admitted but unsent bytes to the budget."""
        if self._cap is not None and num_bytes:
            self._cap.take_back(num_bytes)


class PacedSocket:
    """A blocking socket to which one body is sent under a throughput limit.

    Args:
        raw: The socket.
        pace: The limit.
    """

    def __init__(self, raw: socket.socket, pace: Pace) -> None:
        self.raw = raw
        self.pace = pace

    def sendall(self, data: memoryview) -> None:
        """Send all of ``data``; blocks."""
        piece_bytes = self.pace.piece_bytes
        for start in range(0, len(data), piece_bytes):
            piece = data[start : start + piece_bytes]
            self.pace.admit(len(piece))
            self.raw.sendall(piece)

    def send_file(self, descriptor: int, position: int, num_bytes: int) -> int:
        """Send the beginning of a part of a file; return the bytes sent, 0 after the file's end. Blocks."""
        num_bytes = min(num_bytes, self.pace.piece_bytes)
        self.pace.admit(num_bytes)
        sent = os.sendfile(self.raw.fileno(), descriptor, position, num_bytes)
        self.pace.unsent(num_bytes - sent)
        return sent
