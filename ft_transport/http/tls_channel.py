"""TLS between two peers without a socket: takes received records, and returns records to send.

So the owner of the socket waits for it with its own methods and deadlines, and another thread than the one that
answered the request may encrypt the body.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from typing import Final, cast

from ft_transport.tls import AUTHORITY_VARIABLE, CERTIFICATE_VARIABLE
from ft_transport.wire.signing import Bytes

MAX_RECORD_BYTES: Final = 16 << 10
"""Maximum length of one record's content (RFC 8446, section 5.1)."""
PLAIN_ALERT: Final = bytes((0x15, 3, 3, 0, 2, 2, 40))
"""A fatal ``handshake_failure``, unencrypted (RFC 8446, section 6): the answer to plain HTTP."""

_HTTP: Final = re.compile(rb"[A-Z]{3}")
"""The beginning of an HTTP request or response; no record begins so, not even with one bit changed."""
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
    """One side rejects the other; no retry can succeed. The text says which side and why."""


class TLSBrokenError(ConnectionError):
    """The received bytes are apparently not those that the other end sent; a retry may succeed."""


class TLSChannel:
    """One end of a TLS connection. Used by one thread at a time.

    Args:
        context: This end's context; see ``ft_transport.tls``.
        server_hostname: On the client's end, the host or address that the peer's certificate has to be valid for.
            ``None`` on the server's end.

    Attributes:
        is_ended: Whether the other end has announced the end of its data.
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
        """Take received bytes."""
        if len(self._first) < 3:
            self._first += bytes(data[: 3 - len(self._first)])
        self._incoming.write(data)

    def take(self) -> bytes:
        """Return the bytes to send now."""
        return self._outgoing.read()

    @property
    def must_send(self) -> bool:
        """Whether `take` returns any bytes."""
        return bool(self._outgoing.pending)

    def shake_hands(self) -> bool:
        """Continue the handshake with the received bytes; return whether it is complete.

        Raises:
            TLSRefusedError: One side refuses the other. `take` may return an alert about it.
            TLSBrokenError: The received bytes are not TLS.
        """
        # Checked before TLS, which would complain of a version.
        if _HTTP.fullmatch(self._first):
            raise TLSRefusedError("expected TLS, the peer speaks without it")
        try:
            self.object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise self._failure(error) from error
        return True

    def read_into(self, view: memoryview) -> int:
        """Decrypt one record at most into the view; return 0 without a whole record, or at the end.

        Raises:
            TLSRefusedError: The other end refuses this one: in TLS 1.3 it does so after the handshake.
            TLSBrokenError: The record is malformed or was changed.
        """
        try:
            # With a buffer, ``read`` returns a number.
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
        """Encrypt all of ``data`` for `take`."""
        self.object.write(data)

    def end(self) -> None:
        """Prepare the end of this side's data (RFC 8446, section 6.1) for `take`."""
        with contextlib.suppress(ssl.SSLError, ValueError):  # unwrap would wait for the other end.
            self.object.unwrap()

    def _failure(self, error: ssl.SSLError) -> TLSRefusedError | TLSBrokenError:
        other = "receiver" if self._is_server else "server"
        reason = error.reason or type(error).__name__
        if isinstance(error, ssl.SSLCertVerificationError):
            return TLSRefusedError(
                f"this side does not take the {other}'s certificate: {error.verify_message} ({AUTHORITY_VARIABLE})"
            )
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return TLSRefusedError(f"the {other} has shown no certificate")
        if reason in _NOTHING_IN_COMMON:
            # No member has another version; a member's first bytes may have been changed on the way.
            return TLSBrokenError(f"expected TLS 1.2 or later with a cipher of both sides: {_words(reason)}")
        if "_ALERT_" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
            words = _words(reason.partition("_ALERT_")[2])
            return TLSRefusedError(
                f"the {other} does not take this side's certificate ({CERTIFICATE_VARIABLE}): {words}"
            )
        return TLSBrokenError(f"TLS with the {other} broke: {_words(reason)}")


def _words(reason: str) -> str:
    return reason.replace("_", " ").lower()
