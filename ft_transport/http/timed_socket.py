"""A socket whose reads end in time, as ``http.client`` takes one."""

from __future__ import annotations

import contextlib
import io
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Final

from ft_transport.errors import PeerAuthenticationError
from ft_transport.http.tls_stream import TLSStream
from ft_transport.tls import CERTIFICATE_VARIABLE

_TIMEVAL: Final = struct.Struct("@ll")
_ALERT: Final = b"\x15\x03"
"""How a server that expects TLS answers anything else; no head of an answer begins so."""


class TimedSocket:
    """What http.client asks of a socket; its reads end at ``read_until_s``, however the bytes trickle.

    Attributes:
        raw: The socket.
        tls: Encrypts all that is sent, and decrypts all that comes; ``None`` without TLS.
    """

    def __init__(self, raw: socket.socket) -> None:
        self.raw = raw
        self.tls: TLSStream | None = None
        self.read_until_s = 0.0
        self.in_head = False
        self.head_complete = False
        self._wakes_at_bytes = 1

    def arm(self) -> None:
        """Lets the next call on the socket take no longer than until ``read_until_s``."""
        remaining_s = self.read_until_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self.raw.settimeout(remaining_s)

    def block(self, at_most_s: float) -> None:
        """Lets reads wait in the kernel, for about ``at_most_s`` or until all that they ask for is there.

        With a timeout of its own, Python asks for each part of a read whether it is there, and is woken for each.
        """
        self.raw.settimeout(None)
        microseconds = max(1, round(at_most_s * 1e6))
        self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(*divmod(microseconds, 1_000_000)))

    def wake_at(self, num_bytes: int) -> None:
        """Lets the system wake a waiting read once so many bytes are there, and not for each segment (man 7 socket).

        The caller makes sure that as many are still to come.
        """
        # With TLS, some of what is still to come may have been taken from the socket already.
        if num_bytes != self._wakes_at_bytes and sys.platform == "linux" and self.tls is None:
            self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at_bytes = num_bytes

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """Fills the views, in order, with what comes next; returns how many bytes those are, 0 at the end.

        Waits for all of it where nothing bounds a read but what `block` allows.

        Raises:
            OSError: The connection broke, or the wait was too long (``BlockingIOError`` after `block`).
            PeerAuthenticationError: The peer has refused this side's certificate.
        """
        if self.tls is not None:
            return self.tls.receive_into(views)
        if len(views) == 1:
            return self.raw.recv_into(views[0], 0, socket.MSG_WAITALL)
        return self.raw.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]

    def makefile(self, _mode: str, *_args: object, **_kwargs: object) -> io.BufferedReader:
        """Where http.client reads the head of an answer from."""
        return io.BufferedReader(_Borrowed(self))

    def sendall(self, data: bytes) -> None:
        """Sends a request, in time."""
        self.arm()
        if self.tls is not None:
            self.tls.sendall(data)
        else:
            self.raw.sendall(data)

    def close(self) -> None:
        """Nothing: http.client closes after the head of an answer that ends its connection, before the body."""


class _Borrowed(io.RawIOBase):
    """Reads the head of an answer from the timed socket, and no further once that is complete.

    Closing it leaves the socket open for the next request.
    """

    def __init__(self, timed: TimedSocket) -> None:
        super().__init__()
        self._timed = timed
        self._is_at_start = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if self._timed.head_complete:
            return 0
        view = memoryview(buffer)
        got = self._receive_into(view)
        if self._timed.tls is None and self._is_at_start and view[:got].tobytes().startswith(_ALERT):
            raise PeerAuthenticationError(
                f"expected an HTTP answer, the peer expects TLS, and this side has no certificate "
                f"({CERTIFICATE_VARIABLE})"
            )
        self._is_at_start = False
        if not got and self._timed.in_head:
            # http.client would take what has come of the head for a whole one.
            raise ConnectionResetError("the peer closed the connection before the end of the answer's head")
        return got

    def _receive_into(self, view: memoryview) -> int:
        timed = self._timed
        while True:
            timed.arm()
            if timed.tls is None:
                return timed.raw.recv_into(view)
            with contextlib.suppress(BlockingIOError):
                return timed.tls.receive_into([view])
