"""The HTTP side of a receiver: few connections, none for longer than one request, and no text of anybody's errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiohttp import web

from ft_transport.publish.engines.pull_order import MAX_VERSION_DIGITS, MEANING, ROUTE, STATUS, Reason

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES: Final = 8 << 10
_MAX_NEWCOMERS: Final = 16
"""Connections whose request is not complete. One more, and the oldest of them is closed."""
_BACKLOG: Final = 128
_MAX_ORDERS: Final = 32
_REQUEST_S: Final = 10.0
"""In which a request has to be complete, body included."""
_START_TIMEOUT_S: Final = 30.0
_SETTLING_ROUNDS: Final = 5
_ENDING_S: Final = 1.0
_TOLD_EVERY_S: Final = 60.0
_MAX_TOLD: Final = 256


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
    """

    def __init__(self, listening: socket.socket, answering: Answering) -> None:
        self._socket = listening
        self._answering = answering
        self._newcomers: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        self._num_orders = 0
        self._told: dict[str, float] = {}
        self._loop = asyncio.new_event_loop()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="ft-transport-weights", daemon=True)
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

    async def _start(self) -> tuple[web.AppRunner, asyncio.AbstractServer]:
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        order_route = rf"{ROUTE}/{{version:\d{{1,{MAX_VERSION_DIGITS}}}}}"
        app.add_routes([web.get(ROUTE, self._say), web.post(order_route, self._receive)])
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_quiet_logger(),
            shutdown_timeout=1.0,
            keepalive_timeout=_REQUEST_S,
            lingering_time=1.0,
        )
        await runner.setup()
        server = runner.server
        assert server is not None

        def accept() -> asyncio.BaseProtocol:
            while len(self._newcomers) >= _MAX_NEWCOMERS:
                self._evict(next(iter(self._newcomers)))
            protocol = server()
            self._newcomers[protocol] = self._loop.call_later(_REQUEST_S, self._evict, protocol)
            return protocol

        return runner, await self._loop.create_server(accept, sock=self._socket, backlog=_BACKLOG)

    async def _stop(self, runner: web.AppRunner, listener: asyncio.AbstractServer) -> None:
        listener.close()
        await self._answering.end()
        # asyncio takes three rounds of the loop from an accepted connection to one that can be closed.
        for _ in range(_SETTLING_ROUNDS):
            await asyncio.sleep(0)
        for protocol in list(self._newcomers):
            self._evict(protocol)
        await runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_ENDING_S)
        for _ in range(_SETTLING_ROUNDS):
            await asyncio.sleep(0)

    def _evict(self, protocol: asyncio.BaseProtocol, num_rounds: int = _SETTLING_ROUNDS) -> None:
        """Closes a connection whose request did not come."""
        timer = self._newcomers.pop(protocol, None)
        if timer is not None:
            timer.cancel()
        transport = getattr(protocol, "transport", None)
        if transport is not None:
            transport.abort()
        elif num_rounds:
            # It was accepted this moment, or has ended.
            self._loop.call_soon(self._evict, protocol, num_rounds - 1)

    def _is_complete(self, request: web.Request) -> None:
        timer = self._newcomers.pop(request.protocol, None)
        if timer is not None:
            timer.cancel()

    async def _say(self, request: web.Request) -> web.Response:
        self._is_complete(request)
        caller = _caller_of(request)
        answer = await self._answering.answer_question(request.query, caller)
        if isinstance(answer, str):
            return self._refusal(answer, caller)
        return _closing(answer)

    async def _receive(self, request: web.Request) -> web.Response:
        caller = _caller_of(request)
        # A page in a browser may send any other type to another origin without being asked (Fetch standard, 4.10).
        if request.content_type != "application/json":
            return self._refusal("malformed", caller)
        try:
            # The connection is closed in time.
            body: object = await request.json()
        except (ValueError, RecursionError, LookupError, web.HTTPRequestEntityTooLarge):
            return self._refusal("malformed", caller)
        if self._num_orders >= _MAX_ORDERS:
            return self._refusal("busy", caller)
        self._is_complete(request)
        self._num_orders += 1
        try:
            version = int(request.match_info["version"])
            answer, reason = await self._answering.answer_order(version, body, caller)
        finally:
            self._num_orders -= 1
        if reason in ("malformed", "unproved", "reached_elsewhere", "source_refused"):
            self._tell(reason, caller)
        return _closing(answer, reason)

    def _refusal(self, reason: Reason, caller: Caller) -> web.Response:
        self._tell(reason, caller)
        return _closing({"version": None, "reason": reason}, reason)

    def _tell(self, reason: Reason, caller: Caller) -> None:
        """Logs a refused peer, once a minute."""
        now_s = time.monotonic()
        if now_s - self._told.get(caller.remote, -_TOLD_EVERY_S) < _TOLD_EVERY_S:
            return
        self._told = {each: told_s for each, told_s in self._told.items() if now_s - told_s < _TOLD_EVERY_S}
        if len(self._told) < _MAX_TOLD:
            self._told[caller.remote] = now_s
            logger.warning("refused %s: %s", caller.remote, MEANING[reason])


def _quiet_logger() -> logging.Logger:
    """Takes what aiohttp says of each request that is none."""
    quiet = logging.Logger(f"{logger.name}.requests")
    quiet.addHandler(_TellingOnce())
    return quiet


class _TellingOnce(logging.Handler):
    """Says once a minute that there was something, and nothing of what a stranger has sent."""

    def __init__(self) -> None:
        super().__init__()
        self._told_s = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _TOLD_EVERY_S:
            self._told_s = now_s
            error = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] is not None else "no error"
            logger.warning("a request could not be answered: %s", error)


def _caller_of(request: web.Request) -> Caller:
    transport = request.transport
    reached = transport.get_extra_info("sockname") if transport is not None else None
    return Caller(request.remote or "a peer that has gone", tuple(reached or ()))


def _closing(answer: Mapping[str, object], reason: Reason | None = None) -> web.Response:
    """An answer after which the connection is closed: who asks next connects again."""
    response = web.json_response(answer, status=STATUS.get(reason, 500) if reason is not None else 200)
    response.force_close()
    return response
