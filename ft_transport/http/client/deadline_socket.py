"""A socket whose reads have a deadline, with or without TLS, and with the methods that ``http.client`` calls."""

from __future__ import annotations

import contextlib
import io
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from ft_transport.credentials import CERTIFICATE_VARIABLE, Certificates
from ft_transport.errors import PeerAuthenticationError
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.tls_channel import TLSChannel, TLSRefusedError

_TIMEVAL: Final = struct.Struct("@ll")
_ALERT: Final = b"\x15\x03"
"""First bytes of the alert with which a TLS server responds to plain HTTP; no HTTP response begins with them."""


class DeadlineSocket:
    """A socket for ``http.client`` whose reads end at ``read_until_s``, even if bytes arrive one by one.

    Attributes:
        raw: The kernel's socket.
        tls: Encrypts sent bytes and decrypts received bytes; ``None`` without TLS.
        read_until_s: Deadline of reads and writes, on the monotonic clock.
        in_head: Whether the head of a response is still incomplete, so that the end of the stream would be an error.
        head_complete: Whether the head was read, so that the file of `makefile` returns no more bytes.
    """

    def __init__(self, raw: socket.socket) -> None:
        self.raw = raw
        self.tls: TLSStream | None = None
        self.read_until_s = 0.0
        self.in_head = False
        self.head_complete = False
        self._wakes_at_bytes = 1

    def arm(self) -> None:
        """Set the timeout of the next call on the socket, so that the call ends at ``read_until_s``."""
        remaining_s = self.read_until_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self.raw.settimeout(remaining_s)

    def block(self, at_most_s: float) -> None:
        """Make each read wait in the kernel until all its bytes have arrived, at most for about ``at_most_s`` seconds.

        With a Python timeout, each read would poll and wake up once for each part that arrives.
        """
        self.raw.settimeout(None)
        microseconds = max(1, round(at_most_s * 1e6))
        self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(*divmod(microseconds, 1_000_000)))

    def wake_at(self, num_bytes: int) -> None:
        """Make the kernel wake a waiting read only after ``num_bytes`` bytes, not after each segment (man 7 socket).

        The caller ensures that the peer will send at least ``num_bytes`` more bytes.
        """
        # Not with TLS, which may have read some of these bytes from the socket already.
        if num_bytes != self._wakes_at_bytes and sys.platform == "linux" and self.tls is None:
            self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at_bytes = num_bytes

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """Read the next bytes into the views, in order; return their number, 0 at the end of the stream.

        After a call of `block`, waits until all views are full or the time of `block` has passed.

        Raises:
            OSError: The connection broke, or the wait was too long (``BlockingIOError`` after `block`).
            PeerAuthenticationError: The peer refused this process's certificate.
        """
        if self.tls is not None:
            return self.tls.receive_into(views)
        if len(views) == 1:
            return self.raw.recv_into(views[0], 0, socket.MSG_WAITALL)
        return self.raw.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]

    def makefile(self, _mode: str, *_args: object, **_kwargs: object) -> io.BufferedReader:
        """Return the file from which ``http.client`` reads the head of a response."""
        return io.BufferedReader(_HeadFile(self))

    def sendall(self, data: bytes) -> None:
        """Send a whole request; raise ``TimeoutError`` if it is not sent by ``read_until_s``."""
        self.arm()
        if self.tls is not None:
            self.tls.sendall(data)
        else:
            self.raw.sendall(data)

    def close(self) -> None:
        """Do nothing: ``http.client`` calls this after the head of the last response, before its body was read."""


class _HeadFile(io.RawIOBase):
    """The file from which ``http.client`` reads the head of a response. Closing the file leaves the socket open."""

    def __init__(self, sock: DeadlineSocket) -> None:
        super().__init__()
        self._socket = sock
        self._is_at_start = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if self._socket.head_complete:
            return 0
        view = memoryview(buffer)
        got = self._receive_into(view)
        if self._socket.tls is None and self._is_at_start and view[:got].tobytes().startswith(_ALERT):
            raise PeerAuthenticationError(
                f"expected an HTTP response, but the peer expects TLS, and this process has no certificate "
                f"({CERTIFICATE_VARIABLE})"
            )
        self._is_at_start = False
        if not got and self._socket.in_head:
            # Otherwise http.client would treat a part of the head as the whole head.
            raise ConnectionResetError("the peer closed the connection before the end of the response's head")
        return got

    def _receive_into(self, view: memoryview) -> int:
        sock = self._socket
        while True:
            sock.arm()
            if sock.tls is None:
                return sock.raw.recv_into(view)
            with contextlib.suppress(BlockingIOError):
                return sock.tls.receive_into([view])


_BUFFER_BYTES: Final = 256 << 10
"""Bytes to read from the socket at once: few enough to stay in the processor's cache until they are decrypted."""
_ALERT_WAIT_S: Final = 1.0
"""Longest wait for a TLS alert after a request could not be sent."""
_MAX_READS_FOR_ALERT: Final = 3


class TLSStream:
    """Encrypts sent bytes and decrypts received bytes. For one thread at a time.

    Args:
        raw: The connected socket.
        peer: Address of the server. The server's certificate must be valid for the host in this address, unless
            `TLSFiles.verify` is ``chain``.
        certificates: This process's certificates.

    Raises:
        PeerAuthenticationError: The host name cannot occur in a certificate.
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
        """Perform the TLS handshake. In TLS 1.3, the server may refuse the client's certificate even afterwards.

        Args:
            arm: Function that sets the timeout of the next wait; called before each wait.

        Raises:
            PeerAuthenticationError: The server or the client refuses the certificate of the other.
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
                    raise ConnectionResetError("the server closed the connection during the TLS handshake")

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """Decrypt received bytes into the views, in order; return their number, 0 at the end of the stream.

        Reads from the network at most once, so that the caller can check deadlines even if bytes arrive one by one.

        Raises:
            BlockingIOError: No whole TLS record has arrived yet.
            PeerAuthenticationError: The server refused this process's certificate.
            OSError: The connection broke, or the wait was too long.
        """
        got = self._decrypt_into(views)
        if got or self._channel.is_ended:
            return got
        # Reads only the bytes that have arrived, and decrypts them while the kernel receives more.
        self._feed()
        got = self._decrypt_into(views)
        if not got and not self._channel.is_ended:
            raise BlockingIOError("expected a whole TLS record, got a part of one")
        return got

    def sendall(self, data: bytes) -> None:
        """Encrypt and send a request.

        Raises:
            PeerAuthenticationError: The server refused this process's certificate.
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
            # The decrypted records may require a response, for example to a key update.
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
        """Raise an error if the server sent a TLS alert before it closed the connection."""
        self._raw.settimeout(_ALERT_WAIT_S)
        one = memoryview(bytearray(1))
        with contextlib.suppress(OSError):
            for _ in range(_MAX_READS_FOR_ALERT):
                self._feed()
                self._decrypt_into([one])

    def _refused(self, error: TLSRefusedError) -> PeerAuthenticationError:
        return PeerAuthenticationError(str(error), peer=str(self._peer))
