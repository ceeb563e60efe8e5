"""Access to the page, ``/state`` and ``/metrics``: for peers of the job, and for clients with its watch token.

Browsers and Prometheus cannot answer a challenge. They send the watch token (`Keys.watch_tokens`) as it is, as the
password of any user (RFC 7617) or as a bearer token (RFC 6750); it opens nothing else. An eavesdropper gets the token,
so a network with eavesdroppers needs TLS.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Final

from aiohttp import web

from ft_transport.errors import PeerAuthenticationError
from ft_transport.http.peer_sessions import ServerSessions
from ft_transport.keys import Keys
from ft_transport.wire.signing import SCHEME, is_equal

WATCH_SCHEME: Final = 'Basic realm="ft-transport: any user, and the watch token", charset="UTF-8"'
_LONGEST_CREDENTIALS: Final = 1024


class WatchAccess:
    """Checks requests for these routes. Runs on the server's event loop.

    Args:
        keys: The keys of the job, if it has any; without them every client has access.
        sessions: The sessions of peers that proved the job token.
    """

    def __init__(self, keys: Keys | None, sessions: ServerSessions | None) -> None:
        self._keys = keys
        self._sessions = sessions

    def admit(self, request: web.Request) -> bool:
        """Checks a request; returns whether it comes from a peer that proved the job token.

        Raises:
            PeerAuthenticationError: The request has neither the watch token nor a session.
        """
        if self._keys is None:
            return False
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        if scheme == SCHEME and self._sessions is not None:
            self._sessions.admit(request)
            return True
        shown = _shown_token(scheme, credentials)
        if not any(is_equal(shown, token) for token in self._keys.watch_tokens()):
            raise PeerAuthenticationError(
                "expected the watch token, as the password of any user or as a bearer token; "
                "`ft-transport watch-token` prints it where the job token is set"
            )
        return False


def is_asked_by_another_site(headers: Mapping[str, str]) -> bool:
    """Whether a browser says that a page of another site makes the request, other than by a link to this page.

    Such a page could not read the answer. But with the password that the browser has stored, or where none is needed,
    each ``<img>`` on it would cost this process an answer. Browsers send these headers to servers on the loopback and
    over TLS (https://www.w3.org/TR/fetch-metadata/).
    """
    if headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin"):
        return False
    return (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")) != ("navigate", "document")


def _shown_token(scheme: str, credentials: str) -> str:
    match scheme.lower():
        case "bearer":
            return credentials.strip()
        case "basic" if len(credentials) <= _LONGEST_CREDENTIALS:
            try:
                decoded = base64.b64decode(credentials, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError, ValueError):
                return ""
            return decoded.partition(":")[2]
        case _:
            return ""
