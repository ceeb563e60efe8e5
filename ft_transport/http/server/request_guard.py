"""Middleware before the server's routes: authenticates requests, delays unauthenticated ones, and sends refusals."""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import logging
import math
import re
import secrets
import socket
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec
from aiohttp import web

from ft_transport.credentials import Keys
from ft_transport.errors import (
    PeerAuthenticationError,
    PeerNotReadyError,
    StepNotServedError,
    TransportError,
)
from ft_transport.http.peer_address import socket_address
from ft_transport.http.server.app_server import slot_of
from ft_transport.http.server.connection_slots import ConnectionSlots, Slot
from ft_transport.http.server.logs import PeerLog
from ft_transport.http.server.snapshot_cache import SnapshotCache
from ft_transport.http.server.snapshot_routes import BODY
from ft_transport.wire.routes import (
    AFTER_HEADER,
    CHALLENGE_ROUTE,
    EXCHANGE_DIGEST_HEADER,
    SERVED_STEPS_HEADER,
    WATCH_ROUTES,
    RequestRead,
    exchange_digest,
)
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

_WATCH_SCHEME: Final = 'Basic realm="ft-transport: any user, and the watch token", charset="UTF-8"'
REFUSAL: Final = "expected an address, localhost or a name of this host in the Host header"
_MAX_CREDENTIALS: Final = 1024
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(:[0-9]*)?", re.ASCII)
_NUMBER: Final = web.RequestKey("number", int)
_CANCEL_AGAIN_S: Final = 0.1
_CANCEL_TIMEOUT_S: Final = 5.0
_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, kw_only=True, eq=False)
class RequestGuard:
    """The middleware of one server. Used only on the server's event loop.

    Attributes:
        cache: The cache of served snapshots; refusals list their steps.
        keys: The job's keys; ``None`` if the server does not require a proof of the job token.
        reached_at: Each ``host:port`` at which peers reach this server through address translation.
        is_encrypted: Whether the server uses TLS, so that peers need a certificate to connect.
        names: Checks the ``Host`` header of requests; ``None`` to allow any host.
        slots: The connection slots.
        peer_log: Logs refused requests.
    """

    cache: SnapshotCache
    keys: Keys | None
    reached_at: Sequence[str]
    is_encrypted: bool
    names: HostCheck | None
    slots: ConnectionSlots
    peer_log: PeerLog
    _sessions: ServerSessions | None = field(init=False)
    _handlers: set[asyncio.Task[object]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._sessions = ServerSessions(self.keys, reached_at=self.reached_at) if self.keys is not None else None

    def add_to(self, app: web.Application) -> None:
        """Guard all routes, add the route for challenges, and let each response carry a proof of the job token."""
        app.middlewares.append(self._guard)
        app.router.add_get(CHALLENGE_ROUTE, self._challenge)
        app.on_response_prepare.append(self._prove)

    def claims(self, address: str, sent: bytes) -> bool:
        """Return whether a new connection may be from a member of the job.

        Without TLS, its first bytes must contain the id of one of the job's keys. With TLS, a client at the same
        address must have authenticated itself recently.
        """
        if self.is_encrypted:
            return self.slots.limits.is_known(address)
        if self.keys is None:
            return False
        line = sent.partition(b"\r\n")[0]
        return any(key.key_id.encode() in line for key in self.keys.current())

    async def cancel_handlers(self) -> None:
        """Cancel the requests in progress, and wait until they have ended."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + _CANCEL_TIMEOUT_S
        while self._handlers and loop.time() < give_up_s:
            for handler in self._handlers:
                handler.cancel()
            # Repeats the cancellation: wait_for swallows it at the moment in which its awaitable completes.
            await asyncio.wait(tuple(self._handlers), timeout=_CANCEL_AGAIN_S)

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Require a proof of the job token, and turn errors into responses with the error's message."""
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        slot = slot_of(request)
        try:
            with self.slots.serving(slot):
                if self._admit(request, slot):
                    return await handler(request)
                return await self._in_turn(slot, request, handler)
        except TransportError as error:
            return self._refusal(error, request, slot)
        finally:
            self._handlers.discard(task)

    def _admit(self, request: web.Request, slot: Slot) -> bool:
        """Check the host name and the authentication of a request; return whether its client is a member of the job.

        Raises:
            PeerAuthenticationError: The client has to authenticate itself, and has not done so.
        """
        if self.names is not None and not self.names.has(request.headers.get("Host")):
            self.peer_log.note(logging.WARNING, slot.address, f"a request was refused: {REFUSAL}")
            misdirected = web.HTTPMisdirectedRequest(text=REFUSAL)
            misdirected.force_close()
            raise misdirected
        is_member = self.keys is not None or self.is_encrypted
        if request.path == CHALLENGE_ROUTE:
            return is_member
        if request.path in WATCH_ROUTES:
            if _is_cross_site(request.headers):
                raise web.HTTPForbidden(text="expected a request by a page of this server, got one by another")
            # A certificate proves membership of the job, as a session does; a watch token does not.
            is_member = self._admit_watcher(request) or (self.keys is None and self.is_encrypted)
        elif self._sessions is not None:
            self._sessions.admit(request)
        self.slots.authenticated(slot)
        if is_member:
            self.slots.limits.refund_member(slot)
        return is_member

    def _refusal(self, error: TransportError, request: web.Request, slot: Slot) -> web.StreamResponse:
        # The log names only the type: the message, which the response contains, may quote the request.
        self.peer_log.note(logging.INFO, slot.address, f"a request was refused: {type(error).__name__}")
        headers = {SERVED_STEPS_HEADER: ",".join(map(str, self.cache.steps()))}
        if isinstance(error, PeerNotReadyError):
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
            if error.after is not None:
                headers[AFTER_HEADER] = str(error.after)
        if isinstance(error, PeerAuthenticationError):
            headers = {"WWW-Authenticate": _WATCH_SCHEME if request.path in WATCH_ROUTES else SCHEME}
        is_past = isinstance(error, StepNotServedError) and error.is_past
        response = web.json_response(
            {"error": type(error).__name__, "message": str(error)},
            status=410 if is_past else error.http_status,
            headers=headers,
        )
        if not slot.is_authenticated:
            response.force_close()
        return response

    async def _in_turn(self, slot: Slot, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Process a request by an unauthenticated client or a watcher, as soon as the rate limit allows it."""
        limits = self.slots.limits
        after_s = limits.turn_after_s(slot)
        if after_s > 0:
            with self.slots.waiting(slot):
                await asyncio.sleep(after_s)
        response = await handler(request)
        # No refund for a watcher: a request for the process's state is costly whatever the length of its response.
        if request.path not in WATCH_ROUTES and request.method != "HEAD":
            limits.refund_transfer(slot, response.content_length or 0)
        return response

    def _admit_watcher(self, request: web.Request) -> bool:
        """Accept a request for the page, ``/state`` or ``/metrics``.

        Browsers and Prometheus cannot prove the job token. They send the watch token (`Keys.watch_tokens`) in plain
        text, as a password with any user name (RFC 7617) or as a bearer token (RFC 6750). The watch token gives access
        to these routes alone. An eavesdropper can read it, so networks with eavesdroppers need TLS.

        Returns:
            Whether the client has proved the job token itself.

        Raises:
            PeerAuthenticationError: The request has neither the watch token nor a session.
        """
        if self.keys is None:
            return False
        scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
        if scheme == SCHEME and self._sessions is not None:
            self._sessions.admit(request)
            return True
        shown = _sent_token(scheme, credentials)
        if not any(is_equal(shown, token) for token in self.keys.watch_tokens()):
            raise PeerAuthenticationError(
                "expected the watch token, as a password with any user name or as a bearer token; "
                "`ft-transport watch-token` prints it where the job token is set"
            )
        return False

    async def _prove(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._sessions is None or not self._sessions.prove(request, response):
            read = RequestRead(request.method, request.raw_path, request.headers, request.get(BODY))
            response.headers[EXCHANGE_DIGEST_HEADER] = exchange_digest(read, response.status, response.headers)

    async def _challenge(self, request: web.Request) -> web.StreamResponse:
        if self._sessions is None:
            raise PeerAuthenticationError("expected no challenge, because this server has no job token")
        slot = slot_of(request)
        slot.num_requests += 1
        if slot.num_requests > 1:
            raise PeerAuthenticationError("expected one challenge on a connection, got a second one")
        return self._sessions.challenge(request)


class ServerSessions:
    """The sessions of authenticated connections. Used only on the event loop.

    A client begins a session with a challenge, which contains the address at which the client has reached the server.
    The server refuses a challenge with another address than its own. So an impostor cannot forward a client's challenge
    to a genuine server, because the challenge contains the impostor's address.

    Args:
        keys: The job's keys.
        reached_at: Each ``host:port`` at which peers reach this server through address translation, such as a forwarded
            port.
    """

    def __init__(self, keys: Keys, *, reached_at: Sequence[str]) -> None:
        self._keys = keys
        self._reached_at = frozenset(reached_at)
        self._sessions: weakref.WeakKeyDictionary[Any, _ServerSession] = weakref.WeakKeyDictionary()

    def challenge(self, request: web.Request) -> web.Response:
        """Return the response to a challenge, and begin the session of its connection.

        Raises:
            PeerAuthenticationError: The challenge is malformed, names no key of this job, or names the address of
                another server.
        """
        challenge = Challenge.parse(request.query)
        transport = request.transport
        if challenge is None or transport is None:
            raise PeerAuthenticationError(f"expected a challenge with key ids, a nonce and an address ({SCHEME})")
        own = socket_address(transport.get_extra_info("sockname"))
        if challenge.address != own and challenge.address not in self._reached_at:
            raise PeerAuthenticationError(
                f"expected to be reached at {own}; if the network translates this address, name the address that "
                "peers use in TransportSettings.reached_at"
            )
        answered = answer_challenge(self._keys.current(), challenge, secrets.token_hex(NONCE_BYTES))
        if answered is None:
            raise PeerAuthenticationError("expected the id of a key of this job, but the peer has another job token")
        answer, session = answered
        self._sessions[transport] = _ServerSession(session)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    def admit(self, request: web.Request) -> None:
        """Check that a request belongs to the session of its connection.

        Raises:
            PeerAuthenticationError: The connection has no session, or the request was repeated or changed on the way.
        """
        found = self._session_of(request)
        if found is None:
            raise PeerAuthenticationError(
                f"expected a session by {SCHEME}: every request to this server has to prove the job token"
            )
        credentials = request.headers.get("Authorization")
        request[_NUMBER] = _claimed_number(credentials)
        number = found.session.number_of(
            credentials, request.method, request.raw_path, request.headers, after=found.last_number
        )
        if number is None:
            raise PeerAuthenticationError("expected a new, unchanged request, got one that was repeated or changed")
        found.last_number = number

    def prove(self, request: web.Request, response: web.StreamResponse) -> bool:
        """Add the proof of the job token to a response if its request belongs to a session.

        All other headers must be set already, because the proof covers them.

        Returns:
            Whether the proof was added.
        """
        found = self._session_of(request)
        number = request.get(_NUMBER)
        if found is None or number is None:
            return False
        if isinstance(response, web.Response):
            body = response.body if isinstance(response.body, (bytes, bytearray)) else b""
            response.headers[CONTENT_DIGEST_HEADER] = content_digest(body)
        headers: dict[str, str] = dict(response.headers)
        headers["Content-Length"] = str(response.content_length or 0)
        response.headers[PROOF_HEADER] = found.session.proof(number, response.status, headers)
        return True

    def _session_of(self, request: web.Request) -> _ServerSession | None:
        return self._sessions.get(request.transport) if request.transport is not None else None


@dataclass(slots=True)
class _ServerSession:
    session: Session
    last_number: int = 0


def _claimed_number(credentials: str | None) -> int:
    """Return the number that the client has given to its request; 0 if the number is missing or malformed."""
    _, _, rest = (credentials or "").partition(f"{SCHEME} number=")
    digits = rest.partition(",")[0][:18]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _is_cross_site(headers: Mapping[str, str]) -> bool:
    """Whether the browser says that a page of another site makes the request. A click on a link does not count.

    Such a page cannot read the response. But for each ``<img>`` on the page, the browser would send the watch token
    that it has stored, and this process would collect its own state. Browsers send these headers over TLS, and to
    servers on the loopback (https://www.w3.org/TR/fetch-metadata/).
    """
    if headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin"):
        return False
    return (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")) != ("navigate", "document")


def _sent_token(scheme: str, credentials: str) -> str:
    match scheme.lower():
        case "bearer":
            return credentials.strip()
        case "basic" if len(credentials) <= _MAX_CREDENTIALS:
            try:
                decoded = base64.b64decode(credentials, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError, ValueError):
                return ""
            return decoded.partition(":")[2]
        case _:
            return ""


class HostCheck:
    """Checks the ``Host`` header of requests to a server on the loopback, to prevent DNS rebinding.

    A browser lets a page read responses from the page's own host name. An attacker can make that name resolve to
    127.0.0.1 after the browser has loaded the page. But the browser still sends the attacker's name in ``Host``.

    Args:
        names: Hosts that a request may name besides ``localhost``, this host's name and any IP address; each with or
            without a port.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {_host_of(each) for each in ("localhost", socket.gethostname(), *names)}

    def has(self, header: str | None) -> bool:
        """Return whether the header names a host of this server.

        Also true without a header: only requests by browsers are a danger, and browsers always send the header.
        """
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
    """Return the normalized host of the header without its port; empty if the header is malformed."""
    found = _HOST.fullmatch(header.strip())
    return found[1].strip("[]").removesuffix(".").lower() if found is not None else ""
