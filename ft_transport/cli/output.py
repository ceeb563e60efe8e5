"""Formats text that all commands print: escaped names, sizes, and errors with remedies."""

from __future__ import annotations

import contextlib
import sys
from typing import Final
from urllib.parse import urlsplit

from ft_transport.errors import (
    DeadlineExceededError,
    FetchFailedError,
    ManifestError,
    PeerAuthenticationError,
    PeerProtocolError,
    PeerUnreachableError,
    StepNotServedError,
    TransportError,
    UnknownHostError,
    escape_peer_text,
)

MAX_NAME: Final = 200
_REMEDIES: Final[tuple[tuple[type[TransportError], str], ...]] = (
    (UnknownHostError, "is the host name right? ft-transport doctor URL checks the connection"),
    (PeerUnreachableError, "is the replica running there? ft-transport doctor URL checks the connection"),
    (
        DeadlineExceededError,
        "is the replica's process stopped, or does its training step take longer than --timeout? ft-transport doctor "
        "URL checks the connection",
    ),
    (PeerAuthenticationError, "set FT_TRANSPORT_TOKEN and the TLS files of the job"),
)
_OF_ANOTHER_SERVER: Final = (PeerAuthenticationError, PeerProtocolError, StepNotServedError, ManifestError)


def escape(text: str, max_characters: int = MAX_NAME) -> str:
    """Escape control characters in untrusted text, such as the name of a peer or a file, and truncate the text."""
    return escape_peer_text(text, max_characters=max_characters)


def megabytes(num_bytes: float) -> str:
    """Format a number of bytes in decimal units: MB below 1 GB, otherwise GB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def print_error(error: TransportError) -> None:
    """Print an error and its remedy on standard error."""
    remedy = remedy_for(error)
    print(message_of(error) + (f"\n  → {remedy}" if remedy else ""), file=sys.stderr)


def message_of(error: TransportError) -> str:
    """Return the class and message of an error in one line, escaped because the message may quote a peer or a file."""
    return f"{type(error).__name__}: {escape(str(error), 2000)}"


def remedy_for(error: TransportError) -> str:
    """Return advice on how to fix an error; empty if there is none.

    If the error may come from a server that is no replica, this function requests the server's page to find out.
    """
    if isinstance(error, FetchFailedError) and error.failures:
        error = error.failures[-1]
    if isinstance(error, _OF_ANOTHER_SERVER) and error.peer is not None:
        advice = _advice_for_other_servers(error.peer)
        if advice:
            return advice
    return next((remedy for kind, remedy in _REMEDIES if isinstance(error, kind)), "")


def _advice_for_other_servers(peer: str) -> str:
    import http.client

    from ft_transport.wire.routes import EXCHANGE_DIGEST_HEADER

    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        address = urlsplit(f"//{peer}")
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=2.0)
        with contextlib.closing(connection):
            connection.request("GET", "/")
            response = connection.getresponse()
            # Every HTTP response of this package has the header.
            if response.headers.get(EXCHANGE_DIGEST_HEADER) is not None:
                return ""
            if b"Lighthouse" in response.read(4096):
                return f"this is a Lighthouse; expected a replica's URL; ft-transport top http://{peer} shows its job"
            return "expected the URL that a transport's metadata() returns, but another program answers there"
    return ""
