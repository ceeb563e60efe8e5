"""The HTTP side of a receiver: few connections, none for longer than one request, and no text of anybody's errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web

from ft_transport.http.admission import Admission, Place
from ft_transport.http.listener import Listener
from ft_transport.http.own_names import REFUSAL, OwnNames
from ft_transport.http.peer_protocol import PeerProtocol, place_of
from ft_transport.http.strangers import Strangers
from ft_transport.http.trouble_log import TroubleLog, describe_failure
from ft_transport.publish.engines.pull_order import MAX_VERSION_DIGITS, MEANING, ROUTE, STATUS, Reason
from ft_transport.runtime.decode_errors import DECODE_ERRORS
from ft_transport.runtime.handler_safety import SafeFuture, SafeThread

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES: Final = 8 << 10
_MAX_CONNECTIONS: Final = 64
_MAX_ORDERS: Final = 32
_KEEP_ALIVE_S: Final = 10.0
_START_TIMEOUT_S: Final = 30.0
_SETTLING_ROUNDS: Final = 5
_ENDING_S: Final = 1.0

_body_decoder: Final = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and where.

    Attributes:
        remote: The caller's address.
        reached: The address of this end of the connection, as the socket has it.
    """

    remote: str
    reached: tuple[Any, ...]


class Answering(Protocol):
    """What the server asks of the receiver. Called on the server's loop; none of it raises."""

    async def answer_question(self, query: Mapping[str, str], caller: Caller) -> Mapping[str, object] | Reason:
        """The answer to ``GET /weights``."""

    async def answer_order(
        self, version: int, body: object, caller: Caller
    ) -> tuple[Mapping[str, object], Reason | None]:
        """The answer to ``POST /weights/{version}``, and why it is a refusal, if it is one."""

    async def end(self) -> None:
        """Called last."""


class OrderServer:
    """Answers on a thread and an event loop of its own.

    Args:
        listening: Where; it is closed in the end.
        answering: Says what.
        names: By which it may be asked; ``None`` for any.
    """

    def __init__(self, listening: socket.socket, answering: Answering, *, names: OwnNames | None) -> None:
        self._socket = listening
        self._names = names
        self._answering = answering
        self._num_orders = 0
        self._admission = Admission(_MAX_CONNECTIONS, time.monotonic)
        self._strangers = Strangers(time.monotonic)
        self._trouble = TroubleLog(logger, time.monotonic)
        self._loop = asyncio.new_event_loop()
        started: Future[None] = SafeFuture()
        self._thread = SafeThread(target=self._run, args=(started,), name="ft-transport-weights", daemon=True)
        self._thread.start()
        started.result(_START_TIMEOUT_S)

    def close(self) -> None:
        """Stops answering. May be called twice."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # The thread has ended already.
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self, started: Future[None]) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        # asyncio's own words, and all of them in its debug mode, quote what the peer sent.
        loop.set_debug(False)
        loop.set_exception_handler(self._on_loop_error)
        try:
            try:
                runner, listener = loop.run_until_complete(self._start())
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(None)
            loop.run_forever()
            loop.run_until_complete(self._stop(runner, listener))
        finally:
            self._socket.close()
            loop.close()

    async def _start(self) -> tuple[web.AppRunner, Listener]:
        app = web.Application(middlewares=[_close_after, self._guard], client_max_size=_MAX_REQUEST_BYTES)
        order_route = rf"{ROUTE}/{{version:\d{{1,{MAX_VERSION_DIGITS}}}}}"
        app.add_routes([web.get(ROUTE, self._say), web.post(order_route, self._receive)])
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=_ENDING_S)
        await runner.setup()
        server = runner.server
        assert server is not None

        def make_protocol(place: Place) -> PeerProtocol:
            return PeerProtocol(
                server,
                loop=self._loop,
                keep_alive_s=_KEEP_ALIVE_S,
                admission=self._admission,
                place=place,
                trouble=self._trouble,
            )

        listener = Listener(
            self._socket, self._admission, make_protocol, self._trouble, strangers=self._strangers, claims=_nobody
        )
        return runner, listener

    async def _stop(self, runner: web.AppRunner, listener: Listener) -> None:
        await listener.stop()
        await self._answering.end()
        await runner.cleanup()
        # aiohttp forgets a connection that its peer has left while it still reads the rest of a body.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_ENDING_S)
        # asyncio takes a few rounds of the loop from a closed transport to a closed socket.
        for _ in range(_SETTLING_ROUNDS):
            await asyncio.sleep(0)

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        failure = describe_failure(context.get("exception"))
        self._trouble.note(logging.ERROR, "the receiver", f"{context.get('message', 'an error')}: {failure}")

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._names is not None and not self._names.has(request.headers.get("Host")):
            self._trouble.note(logging.WARNING, place_of(request).address, f"an order was refused: {REFUSAL}")
            raise web.HTTPMisdirectedRequest(text=REFUSAL)
        return await handler(request)

    async def _say(self, request: web.Request) -> web.Response:
        caller = _caller_of(request)
        answer = await self._answering.answer_question(request.query, caller)
        return self._refusal(answer, caller) if isinstance(answer, str) else _answer(answer)

    async def _receive(self, request: web.Request) -> web.Response:
        caller = _caller_of(request)
        # A page in a browser may send any other type to another origin without being asked (Fetch standard, 4.10).
        if request.content_type != "application/json":
            return self._refusal("malformed", caller)
        try:
            # Who is slow loses its place.
            body: object = _body_decoder.decode(await request.read())
        except (*DECODE_ERRORS, web.HTTPRequestEntityTooLarge):
            return self._refusal("malformed", caller)
        if self._num_orders >= _MAX_ORDERS:
            return self._refusal("busy", caller)
        self._num_orders += 1
        place = place_of(request)
        try:
            # It waits for its turn, and for the weights.
            self._admission.authenticated(place)
            with self._admission.serving(place):
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
    """Whether one claims to be a member: what an order proves shows when it has come."""
    return False


def _caller_of(request: web.Request) -> Caller:
    transport = request.transport
    reached = transport.get_extra_info("sockname") if transport is not None else None
    return Caller(request.remote or "a peer that has gone", tuple(reached or ()))


@web.middleware
async def _close_after(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Who asks next connects again, and is counted again, also who asked for a route that there is not."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.force_close()
        raise
    response.force_close()
    return response


def _answer(answer: Mapping[str, object], reason: Reason | None = None) -> web.Response:
    return web.json_response(answer, status=STATUS.get(reason, 500) if reason is not None else 200)
