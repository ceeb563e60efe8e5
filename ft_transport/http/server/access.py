"""Which requests a server answers: by the session of their connection, by the watch token, and by the host they name.

A session includes the address at which the client has reached the server. A server that forwards the challenge to
another server gains nothing from the response, because that server was reached at another address.

Browsers and Prometheus cannot answer a challenge. They send the watch token (`Keys.watch_tokens`) as it is, as the
password of any user (RFC 7617) or as a bearer token (RFC 6750); it opens nothing else. An eavesdropper gets the token,
so a network with eavesdroppers needs TLS.

A browser lets a page read responses from the page's own host name. The owner of that name can make it resolve to
127.0.0.1 from one moment to the next (DNS rebinding), but the browser still sends the name in ``Host``.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
import secrets
import socket
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from ft_transport.errors import PeerAuthenticationError
from ft_transport.http.peer_address import socket_address
from ft_transport.keys import Keys
from ft_transport.wire.signing import (
    CONTENT_DIGEST_HEADER,
    NONCE_BYTES,
    PROOF_HEADER,
    SCHEME,
    Challenge,
    Session,
    answer_challenge,
    content_digest,
    is_equal,
)

WATCH_SCHEME: Final = 'Basic realm="ft-transport: any user, and the watch token", charset="UTF-8"'
_LONGEST_CREDENTIALS: Final = 1024


_NUMBER: Final = web.RequestKey("number", int)


class ServerSessions:
    """The server's side: the session of each authenticated connection. Used only on the event loop.

    Args:
        keys: The job's keys.
        reached_at: ``host:port`` at which peers reach this server besides the addresses of its own sockets, such as a
            forwarded port.
    """

    def __init__(self, keys: Keys, *, reached_at: Sequence[str]) -> None:
        self._keys = keys
        self._reached_at = frozenset(reached_at)
        self._sessions: weakref.WeakKeyDictionary[Any, _ServerSession] = weakref.WeakKeyDictionary()

    def challenge(self, request: web.Request) -> web.Response:
        """Answer a challenge, and begin the session of the request's connection.

        Raises:
            PeerAuthenticationError: The challenge names no key of this job, or another address.
        """
        challenge = Challenge.parse(request.query)
        transport = request.transport
        if challenge is None or transport is None:
            raise PeerAuthenticationError(f"expected the ids of keys and a nonce, as {SCHEME} has them")
        own = socket_address(transport.get_extra_info("sockname"))
        if challenge.address != own and challenge.address not in self._reached_at:
            raise PeerAuthenticationError(
                f"expected to be reached at {own}; where an address is translated on the way, name it in "
                "TransportSettings.reached_at"
            )
        answered = answer_challenge(self._keys.current(), challenge, secrets.token_hex(NONCE_BYTES))
        if answered is None:
            raise PeerAuthenticationError("expected the key of this job's token, the peer has another one")
        answer, session = answered
        self._sessions[transport] = _ServerSession(session)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    def admit(self, request: web.Request) -> None:
        """Accept a request that belongs to a session.

        Raises:
            PeerAuthenticationError: The request has no session, was repeated, or was changed on the way.
        """
        transport = request.transport
        found = self._sessions.get(transport) if transport is not None else None
        if found is None:
            raise PeerAuthenticationError(
                f"expected a session by {SCHEME}: every request to this server proves that it knows the job token"
            )
        request[_NUMBER] = found.claimed_number(request.headers.get("Authorization"))
        number = found.session.number_of(
            request.headers.get("Authorization"),
            request.method,
            request.raw_path,
            request.headers,
            after=found.last_number,
        )
        if number is None:
            raise PeerAuthenticationError("expected a request as it was made, once; it was changed or repeated")
        found.last_number = number

    def prove(self, request: web.Request, response: web.StreamResponse) -> bool:
        """Add the proof to a response whose headers are complete, if its request has a session.

        Returns:
            Whether the proof was added.
        """
        transport = request.transport
        found = self._sessions.get(transport) if transport is not None else None
        number = request.get(_NUMBER)
        if found is None or number is None:
            return False
        if isinstance(response, web.Response):
            body = response.body
            response.headers[CONTENT_DIGEST_HEADER] = content_digest(
                body if isinstance(body, (bytes, bytearray)) else b""
            )
        headers: dict[str, str] = dict(response.headers)
        headers["Content-Length"] = str(response.content_length or 0)
        response.headers[PROOF_HEADER] = found.session.proof(number, response.status, headers)
        return True


class _ServerSession:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.last_number = 0

    def claimed_number(self, credentials: str | None) -> int:
        """Return the number of the client's request; 0 if it cannot be parsed."""
        _, _, rest = (credentials or "").partition(f"{SCHEME} number=")
        digits = rest.partition(",")[0][:18]
        return int(digits) if digits.isascii() and digits.isdigit() else 0


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


_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(:[0-9]*)?", re.ASCII)
REFUSAL: Final = "expected to be asked by an address, localhost or a name of this host"


class HostCheck:
    """The hosts that the ``Host`` header of a request may name.

    Args:
        names: Hosts besides ``localhost``, this host's name and every address, each with or without a port.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {_host_of(each) for each in ("localhost", socket.gethostname(), *names)}

    def has(self, header: str | None) -> bool:
        """Whether a request with this ``Host`` header, if any, is for this server. Browsers always send one."""
        if header is None:
            return True
        host = _host_of(header)
        if host in self._names:
            return bool(host)
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True


def _host_of(header: str) -> str:
    """Return the normalized host without its port; empty if ``header`` is malformed."""
    found = _HOST.fullmatch(header.strip())
    return found[1].strip("[]").removesuffix(".").lower() if found is not None else ""
