"""The HTTP server of a receiver: few connections, each closed after one request, and no error texts in responses."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web

from ft_transport.http.server.access import REFUSAL, HostCheck
from ft_transport.http.server.app_server import AppServer, slot_of
from ft_transport.http.server.connection_slots import ConnectionSlots
from ft_transport.http.server.logs import PeerLog
from ft_transport.publish.engines.pull_order import MAX_VERSION_DIGITS, MEANING, ROUTE, STATUS, Reason
from ft_transport.runtime.decode_errors import DECODE_ERRORS

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES: Final = 8 << 10
_MAX_CONNECTIONS: Final = 64
_MAX_ORDERS: Final = 32
_KEEP_ALIVE_S: Final = 10.0

_body_decoder: Final = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request, and the address that it reached.

    Attributes:
        remote: The client's address.
        reached: The address of this end of the connection, as the socket reports it.
    """

    remote: str
    reached: tuple[Any, ...]


class Answering(Protocol):
    """The receiver, as the server calls it, on the server's loop. No method raises."""

    async def answer_question(self, query: Mapping[str, str], caller: Caller) -> Mapping[str, object] | Reason:
        """Returns the answer to ``GET /weights``."""

    async def answer_order(
        self, version: int, body: object, caller: Caller
    ) -> tuple[Mapping[str, object], Reason | None]:
        """Returns the answer to ``POST /weights/{version}``, and the reason if the answer is a refusal."""

    async def end(self) -> None:
        """Ends the receiver's work. The last call."""


class OrderServer:
    """Answers requests on its own thread and event loop.

    Args:
        listening: The listening socket; the server closes it at the end.
        answering: Answers the requests.
        names: Host names that requests may name; ``None`` for any.
    """

    def __init__(self, listening: socket.socket, answering: Answering, *, names: HostCheck | None) -> None:
        self._names = names
        self._answering = answering
        self._num_orders = 0
        self._slots = ConnectionSlots(_MAX_CONNECTIONS, time.monotonic)
        self._trouble = PeerLog(logger, time.monotonic)
        self._server = AppServer(
            listening=listening,
            name="ft-transport-weights",
            keep_alive_s=_KEEP_ALIVE_S,
            slots=self._slots,
            trouble=self._trouble,
            claims=_nobody,
            make_app=self._make_app,
            end=answering.end,
        )
        self._server.start()

    def close(self) -> None:
        """Stop answering. May be called twice."""
        self._server.stop()
        self._server.join()

    def _make_app(self) -> web.Application:
        app = web.Application(middlewares=[_close_after, self._guard], client_max_size=_MAX_REQUEST_BYTES)
        order_route = rf"{ROUTE}/{{version:\d{{1,{MAX_VERSION_DIGITS}}}}}"
        app.add_routes([web.get(ROUTE, self._say), web.post(order_route, self._receive)])
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._names is not None and not self._names.has(request.headers.get("Host")):
            self._trouble.note(logging.WARNING, slot_of(request).address, f"an order was refused: {REFUSAL}")
            raise web.HTTPMisdirectedRequest(text=REFUSAL)
        return await handler(request)

    async def _say(self, request: web.Request) -> web.Response:
        caller = _caller_of(request)
        answer = await self._answering.answer_question(request.query, caller)
        return self._refusal(answer, caller) if isinstance(answer, str) else _answer(answer)

    async def _receive(self, request: web.Request) -> web.Response:
        caller = _caller_of(request)
        # A page in a browser may send any other type to another origin without a preflight (Fetch standard, 4.10).
        if request.content_type != "application/json":
            return self._refusal("malformed", caller)
        try:
            # A slow client loses its place.
            body: object = _body_decoder.decode(await request.read())
        except (*DECODE_ERRORS, web.HTTPRequestEntityTooLarge):
            return self._refusal("malformed", caller)
        if self._num_orders >= _MAX_ORDERS:
            return self._refusal("busy", caller)
        self._num_orders += 1
        slot = slot_of(request)
        try:
            # The request waits for its turn, and for the weights.
            self._slots.authenticated(slot)
            with self._slots.serving(slot):
                version = int(request.match_info["version"])
                answer, reason = await self._answering.answer_order(version, body, caller)
        finally:
            self._num_orders -= 1
        if reason in ("malformed", "unproved", "reached_elsewhere", "source_refused"):
            self._tell(reason, caller)
        return _answer(answer, reason)

    def _refusal(self, reason: Reason, caller: Caller) -> web.Response:
        self._tell(reason, caller)
        return _answer({"version": None, "reason": reason}, reason)

    def _tell(self, reason: Reason, caller: Caller) -> None:
        self._trouble.note(logging.WARNING, caller.remote, f"an order was refused: {MEANING[reason]}")


def _nobody(_address: str, _sent: bytes) -> bool:
    """Treat no client as a member: only the content of an order proves membership."""
    return False


def _caller_of(request: web.Request) -> Caller:
    transport = request.transport
    reached = transport.get_extra_info("sockname") if transport is not None else None
    return Caller(request.remote or "a peer that has gone", tuple(reached or ()))


@web.middleware
async def _close_after(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Close the connection after each response, errors included, so that the limits count every request of a client."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.force_close()
        raise
    response.force_close()
    return response


def _answer(answer: Mapping[str, object], reason: Reason | None = None) -> web.Response:
    return web.json_response(answer, status=STATUS.get(reason, 500) if reason is not None else 200)
