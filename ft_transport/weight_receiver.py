"""The receiving end of a publisher, inside an inference engine: the facade of what pulls weights."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Final

import torch
from aiohttp import web

from ft_transport.errors import RestoreError, TransportError
from ft_transport.net.address import advertised_host, listen
from ft_transport.net.token import JobToken
from ft_transport.publish.pulling import ROUTE
from ft_transport.settings import check_duration
from ft_transport.tensors.matching import Incoming
from ft_transport.transport import HTTPTransport

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES: Final = 64 << 10
_START_TIMEOUT_S: Final = 30.0


class WeightReceiver:
    """Receives versions into an engine's own tensors, and says which version they are.

    What the tensors hold already is compared with the digests of the version, chunk by chunk, and only what differs
    crosses the network. One that breaks off after bytes have landed leaves no weights to use: they are overwritten with
    NaN patterns, and ``version`` is ``None`` until one has arrived whole. The publisher counts such an engine out.

    Args:
        weights: By the names under which they are published, tensors on the CPU or on a device; or a function that
            returns them.
        paused: Returns a context in which no forward pass reads the weights, entered on a thread of the receiver's own.
        host: Address to bind; ``None`` for all.
        port: Port to bind; 0 for any free one.
        advertise: See ``TransportSettings``.
        token: The job token that every request must carry. Default: the environment variable ``FT_TRANSPORT_TOKEN``;
            without it nobody is asked.
        timeout: For fetching a version.

    Raises:
        ConfigurationError: A setting cannot work, or the address cannot be bound.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]],
        *,
        paused: Callable[[], AbstractContextManager[object]] = nullcontext,
        host: str | None = None,
        port: int = 0,
        advertise: str | None = None,
        token: str | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        check_duration("timeout", timeout, at_least=timedelta.resolution)
        self._weights = weights
        self._paused = paused
        self._timeout = timeout
        self._token = JobToken(token) if token is not None else JobToken.from_environment()
        self._version: int | None = None
        self.num_bytes_fetched = 0
        self._mutex = threading.Lock()
        self._socket = listen(host, port)
        self.url = f"http://{advertised_host(advertise, bound=host)}:{self._socket.getsockname()[1]}"
        self._transport: HTTPTransport[Any] = HTTPTransport(timeout)
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._run, name="ft-transport-weights", daemon=True)
        started: Future[None] = Future()
        self._started = started
        self._thread.start()
        started.result(_START_TIMEOUT_S)

    @property
    def version(self) -> int | None:
        """The version that the weights are; ``None`` before the first, and after one that failed on its way."""
        return self._version

    def close(self) -> None:
        """Stops answering. May be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._transport.shutdown()

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._start())
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        self._loop.run_forever()
        assert self._runner is not None, "it was started"
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES, middlewares=[self._answering])
        app.add_routes([web.get(ROUTE, self._say), web.post(ROUTE + r"/{version:\d{1,18}}", self._receive)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

    @web.middleware
    async def _answering(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        """Asks for the token, and turns errors into answers."""
        if self._token is not None and not self._token.accepts(request.headers.get("Authorization")):
            return web.json_response({"error": "expected the job token as 'Authorization: Bearer TOKEN'"}, status=401)
        try:
            response: web.StreamResponse = await handler(request)
            return response
        except TransportError as error:
            logger.warning("a version could not be received: %s", error)
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)

    async def _say(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self._version})

    async def _receive(self, request: web.Request) -> web.Response:
        version = int(request.match_info["version"])
        try:
            address = (await request.json())["address"]
        except (ValueError, KeyError, TypeError):
            address = None
        if not isinstance(address, str):
            return web.json_response({"error": 'expected {"address": URL}'}, status=400)
        await asyncio.to_thread(self._fetch, address, version)
        return web.json_response({"version": self._version})

    def _fetch(self, address: str, version: int) -> None:
        with self._mutex:
            if self._version is not None and version <= self._version:
                return  # What was asked for again, or overtaken.
            weights = self._weights() if callable(self._weights) else self._weights
            into = {"weights": dict(weights)}

            def check(incoming: Incoming) -> None:
                _refuse_others(incoming, into["weights"])

            with self._paused():
                try:
                    received = self._transport.fetch(
                        address, version, into=into, check=check, timeout=self._timeout, only_changed=True
                    )
                except TransportError as error:
                    if error.destination_touched:
                        self._version = None
                    raise
                self._version = received.step
                self.num_bytes_fetched = received.num_bytes_fetched or 0


def _refuse_others(incoming: Incoming, weights: Mapping[str, torch.Tensor]) -> None:
    """What comes has to be just what is here."""
    names = set(incoming.keys("weights") or ())
    if incoming.mismatches or names != weights.keys():
        missing, unexpected = sorted(weights.keys() - names)[:5], sorted(names - weights.keys())[:5]
        differing = "; ".join(
            f"{each.path}: {each.own} here, {each.received} there" for each in incoming.mismatches[:5]
        )
        raise RestoreError(
            f"expected the weights that are here; missing: {missing or 'none'}, unexpected: {unexpected or 'none'}, "
            f"differing: {differing or 'none'}; nothing was received"
        )
