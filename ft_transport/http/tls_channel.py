"""TLS without a socket: decrypts received records, and encrypts data into records to send.

The owner of the socket sends and receives the records. So the owner can wait with its own methods and deadlines. One
thread can encrypt the head of a response, and another thread its body.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from typing import Final, cast

from ft_transport.credentials import AUTHORITY_VARIABLE, CERTIFICATE_VARIABLE
from ft_transport.wire.signing import Bytes

MAX_RECORD_BYTES: Final = 16 << 10
"""Maximum length of one record's content (RFC 8446, section 5.1)."""
PLAIN_ALERT: Final = bytes((0x15, 3, 3, 0, 2, 2, 40))
"""An unencrypted alert, ``handshake_failure`` (RFC 8446, section 6). The server sends it to a client without TLS."""

_HTTP: Final = re.compile(rb"[A-Z]{3}")
"""The beginning of an HTTP request or response. No TLS record begins like this, not even with one bit changed."""
_NOTHING_IN_COMMON: Final = frozenset(
    {
        "INSUFFICIENT_SECURITY",
        "NO_PROTOCOLS_AVAILABLE",
        "NO_SHARED_CIPHER",
        "SSLV3_ALERT_HANDSHAKE_FAILURE",
        "TLSV1_ALERT_INSUFFICIENT_SECURITY",
        "TLSV1_ALERT_PROTOCOL_VERSION",
        "UNSUPPORTED_PROTOCOL",
        "WRONG_SSL_VERSION",
    }
)


class TLSRefusedError(Exception):
    """One side refuses the other side, so no retry can succeed. The message names the side and the reason."""


class TLSBrokenError(ConnectionError):
    """The received bytes apparently differ from the sent bytes; a retry may succeed."""


class TLSChannel:
    """One end of a TLS connection. Used by one thread at a time.

    Args:
        context: TLS context of this end (``ft_transport.credentials``).
        server_hostname: On the client's end, the host or address for which the server's certificate must be valid;
            ``None`` on the server's end.

    Attributes:
        is_ended: Whether the other end has announced the end of its data.
        object: The TLS state.
    """

    def __init__(self, context: ssl.SSLContext, *, server_hostname: str | None) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._is_server = server_hostname is None
        self._first = b""
        self.is_ended = False
        try:
            self.object = context.wrap_bio(
                self._incoming, self._outgoing, server_side=self._is_server, server_hostname=server_hostname
            )
        except (ssl.SSLError, ValueError) as error:
            raise TLSRefusedError(
                f"expected a host name that a certificate may have, got {server_hostname!r}"
            ) from error

    def feed(self, data: Bytes) -> None:
        """Add received bytes to decrypt."""
        if len(self._first) < 3:
            self._first += bytes(data[: 3 - len(self._first)])
        self._incoming.write(data)

    def take(self) -> bytes:
        """Return the encrypted bytes that have to be sent now."""
        return self._outgoing.read()

    @property
    def must_send(self) -> bool:
        """Whether `take` would return any bytes."""
        return bool(self._outgoing.pending)

    def shake_hands(self) -> bool:
        """Continue the handshake with the received bytes; return whether it is complete.

        Raises:
            TLSRefusedError: One side refuses the other side. `take` may then return an alert with the reason.
            TLSBrokenError: The received bytes are not TLS.
        """
        # First, because OpenSSL would report a wrong version of TLS.
        if _HTTP.fullmatch(self._first):
            raise TLSRefusedError("expected TLS, but the peer speaks plain HTTP")
        try:
            self.object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise self._failure(error) from error
        return True

    def read_into(self, view: memoryview) -> int:
        """Decrypt at most one record into the view.

        Returns:
            Number of decrypted bytes; 0 if no complete record was received, or at the end of the data.

        Raises:
            TLSRefusedError: The other end refuses this end; in TLS 1.3 it may do so after the handshake.
            TLSBrokenError: The record is malformed or was changed.
        """
        try:
            # With a buffer, ``read`` returns the number of bytes.
            got = cast(int, self.object.read(min(len(view), MAX_RECORD_BYTES), view))
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLZeroReturnError:
            got = 0
        except ssl.SSLError as error:
            raise self._failure(error) from error
        if not got:
            self.is_ended = True
        return got

    def write(self, data: Bytes) -> None:
        """Encrypt all of ``data``; `take` returns the result."""
        self.object.write(data)

    def end(self) -> None:
        """Encrypt the announcement that this end sends no more data (RFC 8446, section 6.1); `take` returns it."""
        with contextlib.suppress(ssl.SSLError, ValueError):  # Raised because the other end has not ended yet.
            self.object.unwrap()

    def _failure(self, error: ssl.SSLError) -> TLSRefusedError | TLSBrokenError:
        other = "receiver" if self._is_server else "server"
        reason = error.reason or type(error).__name__
        if isinstance(error, ssl.SSLCertVerificationError):
            return TLSRefusedError(
                f"this side does not accept the {other}'s certificate: {error.verify_message} ({AUTHORITY_VARIABLE})"
            )
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return TLSRefusedError(f"expected a certificate from the {other}, got none")
        if reason in _NOTHING_IN_COMMON:
            # All members of a job support these versions, so a member's first bytes were probably changed on the way.
            return TLSBrokenError(f"expected TLS 1.2 or later with a cipher that both sides support: {_words(reason)}")
        if "_ALERT_" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
            words = _words(reason.partition("_ALERT_")[2])
            return TLSRefusedError(
                f"the {other} does not accept this side's certificate ({CERTIFICATE_VARIABLE}): {words}"
            )
        return TLSBrokenError(f"TLS with the {other} broke: {_words(reason)}")


def _words(reason: str) -> str:
    return reason.replace("_", " ").lower()
