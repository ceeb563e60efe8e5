"""Authenticates requests before the server's routes, queues unauthenticated ones, and answers refusals."""

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
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

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
from ft_transport.keys import Keys
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
REFUSAL: Final = "expected to be asked by an address, localhost or a name of this host"
_LONGEST_CREDENTIALS: Final = 1024
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]*)(:[0-9]*)?", re.ASCII)
_NUMBER: Final = web.RequestKey("number", int)
_CANCEL_AGAIN_S: Final = 0.1
_CANCEL_TIMEOUT_S: Final = 5.0
_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestGuard:
    """Middleware before the routes of one server. Used only on its event loop.

    Args:
        cache: The served snapshots; a refusal names their steps.
        keys: The job's keys, if it has any.
        reached_at: ``host:port`` at which peers reach this server besides its own addresses.
        is_encrypted: Whether peers need a certificate to connect.
        names: Allowed values of the ``Host`` header; ``None`` for any.
        slots: The connection slots.
        peer_log: Logs refusals.
    """

    def __init__(
        self,
        cache: SnapshotCache,
        *,
        keys: Keys | None,
        reached_at: Sequence[str],
        is_encrypted: bool,
        names: HostCheck | None,
        slots: ConnectionSlots,
        peer_log: PeerLog,
    ) -> None:
        self._cache = cache
        self._keys = keys
        self._sessions = ServerSessions(keys, reached_at=reached_at) if keys is not None else None
        self._is_encrypted = is_encrypted
        self._is_guarded = keys is not None or is_encrypted
        self._names = names
        self._slots = slots
        self._peer_log = peer_log
        self._handlers: set[asyncio.Task[object]] = set()

    def middlewares(self) -> list[Middleware]:
        """Return the middlewares of every route, outermost first."""
        return [self._keep_place, self._guard]

    def add_to(self, app: web.Application) -> None:
        """Add the route at which the server authenticates itself, and the proof of each response."""
        app.router.add_get(CHALLENGE_ROUTE, self._challenge)
        app.on_response_prepare.append(self._prove)

    def claims(self, address: str, sent: bytes) -> bool:
        """Whether a connection has sent a key id of the job, or comes from a member's address."""
        if self._is_encrypted:
            return self._slots.limits.is_known(address)
        if self._keys is None:
            return False
        line = sent.partition(b"\r\n")[0]
        return any(key.key_id.encode() in line for key in self._keys.current())

    async def cancel_handlers(self) -> None:
        """Cancel the requests in progress."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + _CANCEL_TIMEOUT_S
        while self._handlers and loop.time() < give_up_s:
            for handler in self._handlers:
                handler.cancel()
            # Repeats the cancellation: wait_for swallows it at the moment in which its awaitable completes.
            await asyncio.wait(tuple(self._handlers), timeout=_CANCEL_AGAIN_S)

    @web.middleware
    async def _keep_place(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        with self._slots.serving(slot_of(request)):
            return await handler(request)

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Require a proof of the job token, and turn errors into responses that say what was expected."""
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        slot = slot_of(request)
        try:
            if self._names is not None and not self._names.has(request.headers.get("Host")):
                self._peer_log.note(logging.WARNING, slot.address, f"a request was refused: {REFUSAL}")
                misdirected = web.HTTPMisdirectedRequest(text=REFUSAL)
                misdirected.force_close()
                raise misdirected
            is_watching, belongs = request.path in WATCH_ROUTES, self._is_guarded
            if request.path != CHALLENGE_ROUTE:
                if is_watching:
                    if _is_asked_by_another_site(request.headers):
                        raise web.HTTPForbidden(text="expected to be asked by a page of this server")
                    # A certificate proves as much as a session; a watch token proves less.
                    belongs = self._admit_watcher(request) or (self._is_guarded and self._keys is None)
                elif self._sessions is not None:
                    self._sessions.admit(request)
                self._slots.authenticated(slot)
                if belongs:
                    self._slots.limits.refund_member(slot)
            if belongs:
                return await handler(request)
            return await self._in_turn(slot, request, handler, is_watching=is_watching)
        except TransportError as error:
            # The response says more: the content of the request stays out of this log.
            refusal = f"a request was refused: {type(error).__name__}"
            self._peer_log.note(logging.INFO, slot.address, refusal)
            headers = {SERVED_STEPS_HEADER: ",".join(map(str, self._cache.steps()))}
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
        finally:
            self._handlers.discard(task)

    async def _in_turn(
        self, slot: Slot, request: web.Request, handler: _Handler, *, is_watching: bool
    ) -> web.StreamResponse:
        """Rate-limit a request to a server that authenticates nobody, or for its state."""
        limits = self._slots.limits
        after_s = limits.turn_after_s(slot)
        if after_s > 0:
            with self._slots.waiting(slot):
                await asyncio.sleep(after_s)
        response = await handler(request)
        # The cost of a monitoring request does not depend on the length of its response.
        if not is_watching and request.method != "HEAD":
            limits.refund_transfer(slot, response.content_length or 0)
        return response

    def _admit_watcher(self, request: web.Request) -> bool:
        """Accept a request for the page, ``/state`` or ``/metrics``; return whether its peer proved the job token.

        Browsers and Prometheus cannot answer a challenge. They send the watch token (`Keys.watch_tokens`) as it is, as
        the password of any user (RFC 7617) or as a bearer token (RFC 6750); it opens nothing else. An eavesdropper gets
        the token, so a network with eavesdroppers needs TLS.

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

    async def _prove(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._sessions is None or not self._sessions.prove(request, response):
            _say_what_was_understood(request, response)

    async def _challenge(self, request: web.Request) -> web.StreamResponse:
        if self._sessions is None:
            raise PeerAuthenticationError("this server has no job token, and can prove nothing")
        slot = slot_of(request)
        slot.num_requests += 1
        if slot.num_requests > 1:
            raise PeerAuthenticationError("expected one challenge on a connection, and then a proof")
        return self._sessions.challenge(request)


def _say_what_was_understood(request: web.Request, response: web.StreamResponse) -> None:
    read = RequestRead(request.method, request.raw_path, request.headers, request.get(BODY))
    response.headers[EXCHANGE_DIGEST_HEADER] = exchange_digest(read, response.status, response.headers)


class ServerSessions:
    """The session of each authenticated connection. Used only on the event loop.

    A session includes the address at which the client has reached the server. A server that forwards the challenge to
    another server gains nothing from the response, because that server was reached at another address.

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
        found = self._session_of(request)
        if found is None:
            raise PeerAuthenticationError(
                f"expected a session by {SCHEME}: every request to this server proves that it knows the job token"
            )
        credentials = request.headers.get("Authorization")
        request[_NUMBER] = _claimed_number(credentials)
        number = found.session.number_of(
            credentials, request.method, request.raw_path, request.headers, after=found.last_number
        )
        if number is None:
            raise PeerAuthenticationError("expected a request as it was made, once; it was changed or repeated")
        found.last_number = number

    def prove(self, request: web.Request, response: web.StreamResponse) -> bool:
        """Add the proof to a response whose headers are complete, if its request has a session.

        Returns:
            Whether the proof was added.
        """
        found = self._session_of(request)
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

    def _session_of(self, request: web.Request) -> _ServerSession | None:
        return self._sessions.get(request.transport) if request.transport is not None else None


@dataclass(slots=True)
class _ServerSession:
    session: Session
    last_number: int = 0


def _claimed_number(credentials: str | None) -> int:
    """Return the number of the client's request; 0 if it cannot be parsed."""
    _, _, rest = (credentials or "").partition(f"{SCHEME} number=")
    digits = rest.partition(",")[0][:18]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _is_asked_by_another_site(headers: Mapping[str, str]) -> bool:
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


class HostCheck:
    """The hosts that the ``Host`` header of a request may name, on a server on the loopback.

    A browser lets a page read responses from the page's own host name. The owner of that name can make it resolve to
    127.0.0.1 from one moment to the next (DNS rebinding), but the browser still sends the name in ``Host``.

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
