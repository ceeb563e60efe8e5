"""Who may watch: peers of the job, and whoever shows its watch token, which opens nothing else.

Browsers and Prometheus cannot answer a challenge. They send the watch token (`Keys.watch_tokens`) as it is, as the
password of any user (RFC 7617) or as a bearer token (RFC 6750). Whoever hears it may watch, too, so networks that
others listen on need TLS.
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
from ft_transport.wire.authentication import SCHEME
from ft_transport.wire.key import is_equal

WATCH_SCHEME: Final = 'Basic realm="ft-transport: any user, and the watch token", charset="UTF-8"'
_LONGEST_CREDENTIALS: Final = 1024


class WatchAccess:
    """Lets watchers in. Belongs to the server's event loop.

    Args:
        keys: Of the job, if it has any; without them whoever reaches the server may watch.
        sessions: Of peers that have proved that they know the token.
    """

    def __init__(self, keys: Keys | None, sessions: ServerSessions | None) -> None:
        self._keys = keys
        self._sessions = sessions

    def admit(self, request: web.Request) -> bool:
        """Lets a request through; whether it comes from a peer, which has proved that it belongs to the job.

        Raises:
            PeerAuthenticationError: It shows no watch token, and is none of a session.
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
    """Whether a browser says that a page of another site asks, not to be left for what it asks for.

    Such a page learns nothing by it. But with the password that the browser has, or where none is needed, each
    ``<img>`` on it would have a job looked at, and take the place of somebody who watches. Browsers say who asks to
    servers on the loopback and by TLS (https://www.w3.org/TR/fetch-metadata/).
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
