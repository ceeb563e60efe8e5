"""TLS between two peers, apart from any socket: what comes goes in as records, and what leaves comes out as records.

So the owner of the socket waits for it in the way that it always does, with its own deadlines, and a body may be
encrypted by another thread than the one that has answered the request.
"""

from __future__ import annotations

import contextlib
import re
import ssl
from typing import Final, cast

from ft_transport.tls import AUTHORITY_VARIABLE, CERTIFICATE_VARIABLE
from ft_transport.wire.key import Bytes

MAX_RECORD_BYTES: Final = 16 << 10
"""Of one record's content (RFC 8446, section 5.1)."""
PLAIN_ALERT: Final = bytes((0x15, 3, 3, 0, 2, 2, 40))
"""A fatal ``handshake_failure``, before anything is encrypted (RFC 8446, section 6): the answer to plain HTTP."""

_HTTP: Final = re.compile(rb"[A-Z]{3}")
"""How an answer of HTTP begins, and a request; no record does, nor does one with a bit changed."""
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
    """One side does not take the other for a peer; no further attempt can succeed. The text says which and why."""


class TLSBrokenError(ConnectionError):
    """What came is not what the other end has sent, as far as can be told; another attempt may succeed."""


class TLSChannel:
    """One end of a TLS connection. Used by one thread at a time.

    Args:
        context: Of this end; ``ft_transport.tls``.
        server_hostname: On the client's end, the host or address that the peer's certificate has to be valid for.
            ``None`` on the server's end.

    Attributes:
        is_ended: Whether the other end has said that nothing more comes.
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
        """Takes what has come."""
        if len(self._first) < 3:
            self._first += bytes(data[: 3 - len(self._first)])
        self._incoming.write(data)

    def take(self) -> bytes:
        """What has to be sent now."""
        return self._outgoing.read()

    @property
    def must_send(self) -> bool:
        """Whether `take` has something."""
        return bool(self._outgoing.pending)

    def shake_hands(self) -> bool:
        """Goes on with the handshake as far as what has come allows; returns whether it is complete.

        Raises:
            TLSRefusedError: One side refuses the other. `take` may have an alert that says so.
            TLSBrokenError: What came is no TLS.
        """
        # Before TLS sees it: it would complain of a version.
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
        """Decrypts into the view, one record at most; 0 where no whole record has come, or none will.

        Raises:
            TLSRefusedError: The other end refuses this one after all: in TLS 1.3 it does so after the handshake.
            TLSBrokenError: It is no record, or was changed.
        """
        try:
            # With a buffer it returns a number.
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
        """Encrypts all of ``data``; `take` has it then."""
        self.object.write(data)

    def end(self) -> None:
        """Says that nothing more is sent (RFC 8446, section 6.1); `take` has it then."""
        with contextlib.suppress(ssl.SSLError, ValueError):  # It would wait for the other end's word.
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
            # No peer that has another version is of the job; one whose first words were changed on their way is.
            return TLSBrokenError(f"expected TLS 1.2 or later with a cipher of both sides: {_words(reason)}")
        if "_ALERT_" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
            words = _words(reason.partition("_ALERT_")[2])
            return TLSRefusedError(
                f"the {other} does not take this side's certificate ({CERTIFICATE_VARIABLE}): {words}"
            )
        return TLSBrokenError(f"TLS with the {other} broke: {_words(reason)}")


def _words(reason: str) -> str:
    return reason.replace("_", " ").lower()
