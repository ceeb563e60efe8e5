"""A socket with a deadline for reads, in the form that ``http.client`` takes."""

from __future__ import annotations

import contextlib
import io
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from ft_transport.errors import PeerAuthenticationError
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.tls_channel import TLSChannel, TLSRefusedError
from ft_transport.tls import CERTIFICATE_VARIABLE, Certificates

_TIMEVAL: Final = struct.Struct("@ll")
_ALERT: Final = b"\x15\x03"
"""Beginning of a TLS server's answer to anything but TLS; no HTTP response begins with it."""


class DeadlineSocket:
    """The part of a socket that http.client uses; reads end at ``read_until_s``, however the bytes trickle.

    Attributes:
        raw: The socket.
        tls: Encrypts sent and decrypts received bytes; ``None`` without TLS.
    """

    def __init__(self, raw: socket.socket) -> None:
        self.raw = raw
        self.tls: TLSStream | None = None
        self.read_until_s = 0.0
        self.in_head = False
        self.head_complete = False
        self._wakes_at_bytes = 1

    def arm(self) -> None:
        """Limit the next call on the socket to ``read_until_s``."""
        remaining_s = self.read_until_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self.raw.settimeout(remaining_s)

    def block(self, at_most_s: float) -> None:
        """Let reads wait in the kernel for about ``at_most_s``, or until they are complete.

        With a timeout, Python polls for each part of a read, and is woken for each.
        """
        self.raw.settimeout(None)
        microseconds = max(1, round(at_most_s * 1e6))
        self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(*divmod(microseconds, 1_000_000)))

    def wake_at(self, num_bytes: int) -> None:
        """Wake a waiting read after ``num_bytes``, and not after each segment (man 7 socket).

        The caller ensures that at least as many bytes are still to come.
        """
        # With TLS, some of those bytes may have been taken from the socket already.
        if num_bytes != self._wakes_at_bytes and sys.platform == "linux" and self.tls is None:
            self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at_bytes = num_bytes

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """Fill the views, in order, with the next bytes; return their number, 0 at the end.

        After `block`, waits until all views are full or its time is over.

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
        """Return the file from which http.client reads the head of a response."""
        return io.BufferedReader(_Borrowed(self))

    def sendall(self, data: bytes) -> None:
        """Send a request before the deadline."""
        self.arm()
        if self.tls is not None:
            self.tls.sendall(data)
        else:
            self.raw.sendall(data)

    def close(self) -> None:
        """Do nothing: http.client closes after the head of a connection's last response, before its body."""


class _Borrowed(io.RawIOBase):
    """Reads the head of a response from the timed socket, and nothing after it.

    Closing it leaves the socket open for the next request.
    """

    def __init__(self, timed: DeadlineSocket) -> None:
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
            # http.client would take a part of the head for all of it.
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


_BUFFER_BYTES: Final = 256 << 10
"""Bytes read from the socket at once; they stay in the processor's cache until they are decrypted."""
_ALERT_WAIT_S: Final = 1.0
"""Longest wait for an alert after a request could not be sent."""
_MAX_READS_FOR_ALERT: Final = 3


class TLSStream:
    """Encrypts sent and decrypts received bytes. Used only by the socket's thread.

    Args:
        raw: The connected socket.
        peer: The server; its certificate has to be valid for the peer's host, unless the files say otherwise.
        certificates: This side's certificates.

    Raises:
        PeerAuthenticationError: No certificate can contain the host's name.
    """

    def __init__(self, raw: socket.socket, peer: PeerAddress, certificates: Certificates) -> None:
        self._raw = raw
        self._peer = peer
        try:
            self._channel = TLSChannel(certificates.for_client(), server_hostname=peer.host.partition("%")[0])
        except TLSRefusedError as error:
            raise self._refused(error) from error
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def shake_hands(self, arm: Callable[[], None]) -> None:
        """Perform the handshake; in TLS 1.3 the server may still refuse this side afterwards.

        Args:
            arm: Called before each wait, to set its timeout.

        Raises:
            PeerAuthenticationError: One side refuses the other.
            OSError: The connection broke, or a wait was too long.
        """
        is_over = False
        while not is_over:
            try:
                is_over = self._channel.shake_hands()
            except TLSRefusedError as error:
                with contextlib.suppress(OSError):
                    self._flush()
                raise self._refused(error) from error
            arm()
            self._flush()
            if not is_over:
                arm()
                self._feed()
                if self._channel.is_ended:
                    raise ConnectionResetError("the server closed the connection in the handshake of TLS")

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """Fill the views, in order, with the bytes that have come; return their number, 0 at the end.

        Waits for the network at most once, so that the caller can check deadlines, however the bytes trickle.

        Raises:
            BlockingIOError: Nothing has come yet, or only a part of a record.
            PeerAuthenticationError: The server has refused this side.
            OSError: The connection broke, or the wait was too long.
        """
        got = self._decrypt_into(views)
        if got or self._channel.is_ended:
            return got
        # Takes only the present bytes, to decrypt them while more come; a wait for all would prevent that.
        self._feed()
        got = self._decrypt_into(views)
        if not got and not self._channel.is_ended:
            raise BlockingIOError("expected a whole record, a part of one has come")
        return got

    def sendall(self, data: bytes) -> None:
        """Send a request.

        Raises:
            PeerAuthenticationError: The server has refused this side.
            OSError: The connection broke, or the wait was too long.
        """
        self._channel.write(data)
        try:
            self._flush()
        except ConnectionError:
            self._raise_if_refused()
            raise

    def _decrypt_into(self, views: Sequence[memoryview]) -> int:
        total = 0
        read_into = self._channel.read_into
        try:
            for view in views:
                filled = 0
                while filled < len(view):
                    got = read_into(view[filled:] if filled else view)
                    if not got:
                        return total + filled
                    filled += got
                total += filled
        except TLSRefusedError as error:
            raise self._refused(error) from error
        finally:
            # For example, the response to a new key.
            if self._channel.must_send:
                with contextlib.suppress(OSError):
                    self._flush()
        return total

    def _feed(self) -> None:
        got = self._raw.recv_into(self._buffer)
        if not got:
            self._channel.is_ended = True
        self._channel.feed(self._buffer[:got])

    def _flush(self) -> None:
        data = self._channel.take()
        if data:
            self._raw.sendall(data)

    def _raise_if_refused(self) -> None:
        """Raise the alert, if any, of a server that closed the connection before it got a request."""
        self._raw.settimeout(_ALERT_WAIT_S)
        one = memoryview(bytearray(1))
        with contextlib.suppress(OSError):
            for _ in range(_MAX_READS_FOR_ALERT):
                self._feed()
                self._decrypt_into([one])

    def _refused(self, error: TLSRefusedError) -> PeerAuthenticationError:
        return PeerAuthenticationError(str(error), peer=str(self._peer))
