"""Sessions between peers that have the job's key (``wire.signing``), each bound to one connection.

A session includes the address at which the client has reached the server. A server that forwards the challenge to
another server gains nothing from the response, because that server was reached at another address.
"""

from __future__ import annotations

import ipaddress
import secrets
import weakref
from collections.abc import Mapping, Sequence
from http.client import HTTPMessage
from typing import Any, Final

import msgspec
from aiohttp import web

from ft_transport.errors import PeerAuthenticationError
from ft_transport.http.peer_address import PeerAddress
from ft_transport.keys import Keys
from ft_transport.runtime.decode_errors import DECODE_ERRORS
from ft_transport.wire.signing import (
    CONTENT_DIGEST_HEADER,
    NONCE_BYTES,
    PROOF_HEADER,
    SCHEME,
    Challenge,
    ChallengeAnswer,
    Session,
    accept_answer,
    answer_challenge,
    content_digest,
)

_NUMBER: Final = web.RequestKey("number", int)
_answer_decoder: Final = msgspec.json.Decoder(ChallengeAnswer)


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


class ClientSession:
    """The client's side of the session of one connection. Used only by the connection's thread.

    Args:
        session: The session that both sides agreed upon.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._number = 0

    def signed(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> dict[str, str]:
        """Return the headers of the next request, including those that authenticate it."""
        signed = dict(headers)
        if body is not None:
            signed[CONTENT_DIGEST_HEADER] = content_digest(body)
        self._number += 1
        signed["Authorization"] = self._session.credentials(self._number, method, target, signed)
        return signed

    def is_proved(self, status: int, headers: HTTPMessage) -> bool:
        """Whether the response to the last request is authentic."""
        return self._session.proves(headers.get(PROOF_HEADER), self._number, status, headers)


def make_challenge(keys: Keys, address: str) -> Challenge:
    """Return a challenge with a new nonce.

    Args:
        keys: The job's keys.
        address: The address at which the server was reached; see `socket_address`.
    """
    return Challenge(tuple(key.key_id for key in keys.current()), secrets.token_hex(NONCE_BYTES), address)


def begin_session(keys: Keys, challenge: Challenge, answer: bytes) -> ClientSession | None:
    """Return the session of a connection; ``None`` if the answer proves nothing."""
    try:
        decoded = _answer_decoder.decode(answer)
    except DECODE_ERRORS:
        return None
    session = accept_answer(keys.current(), challenge, decoded)
    return ClientSession(session) if session is not None else None


def socket_address(address: Any) -> str:
    """Return a socket's address as both ends see it, in canonical form: ``host:port``."""
    host, port = address[:2]
    parsed = ipaddress.ip_address(str(host).partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(PeerAddress(host=str(mapped or parsed), port=int(port)))
