"""The receiver's end of a TLS connection, over a blocking socket whose timeouts the caller sets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Final

from ft_transport.errors import PeerAuthenticationError
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.tls_channel import TLSChannel, TLSRefusedError
from ft_transport.tls import Certificates

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
