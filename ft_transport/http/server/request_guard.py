"""Authenticates requests before the server's routes, queues unauthenticated ones, and answers refusals."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from ft_transport.errors import (
    PeerAuthenticationError,
    PeerNotReadyError,
    StepNotServedError,
    TransportError,
)
from ft_transport.http.server.access import (
    REFUSAL,
    WATCH_SCHEME,
    HostCheck,
    ServerSessions,
    WatchAccess,
    is_asked_by_another_site,
)
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
from ft_transport.wire.signing import SCHEME

_CANCEL_AGAIN_S: Final = 0.1
_CANCEL_TIMEOUT_S: Final = 5.0


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
        self._watch_access = WatchAccess(keys, self._sessions)
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
    async def _keep_place(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        with self._slots.serving(slot_of(request)):
            return await handler(request)

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
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
                    if is_asked_by_another_site(request.headers):
                        raise web.HTTPForbidden(text="expected to be asked by a page of this server")
                    # A certificate proves as much as a session; a watch token proves less.
                    belongs = self._watch_access.admit(request) or (self._is_guarded and self._keys is None)
                elif self._sessions is not None:
                    self._sessions.admit(request)
                self._slots.authenticated(slot)
                if belongs:
                    self._slots.limits.belongs(slot)
            if belongs:
                return await handler(request)
            if is_watching:
                return await self._watch_in_turn(slot, request, handler)
            return await self._in_turn(slot, request, handler)
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
                headers = {"WWW-Authenticate": WATCH_SCHEME if request.path in WATCH_ROUTES else SCHEME}
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
        self, slot: Slot, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Rate-limit a request to a server that authenticates nobody."""
        after_s = self._slots.limits.turn_after_s(slot)
        if after_s > 0:
            await asyncio.sleep(after_s)
        response = await handler(request)
        if request.method != "HEAD":
            self._slots.limits.moved(slot, response.content_length or 0)
        return response

    async def _watch_in_turn(
        self, slot: Slot, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Rate-limit a monitoring request: its cost does not depend on its length."""
        after_s = self._slots.limits.turn_after_s(slot)
        if after_s > 0:
            with self._slots.waiting(slot):
                await asyncio.sleep(after_s)
        return await handler(request)

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
