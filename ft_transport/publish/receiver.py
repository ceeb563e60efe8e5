"""The `WeightReceiver`: an HTTP server inside an inference engine, which fetches weights when a publisher orders it.

The server accepts few connections, closes each connection after one request, and sends no error texts.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Final

import msgspec
import torch
from aiohttp import web

from ft_transport.credentials import Keys, TLSFiles
from ft_transport.http.bind_address import advertised_url, bound_host, listen
from ft_transport.http.peer_address import PeerAddress, socket_address
from ft_transport.http.server.app_server import AppServer, slot_of
from ft_transport.http.server.connection_slots import ConnectionSlots
from ft_transport.http.server.logs import PeerLog
from ft_transport.http.server.request_guard import REFUSAL, HostCheck
from ft_transport.publish.allowed_sources import AllowedSources, addresses_or_none
from ft_transport.publish.engines.pulling import (
    MAX_VERSION_DIGITS,
    REASONS,
    ROUTE,
    Challenges,
    Order,
    Question,
    Reason,
    reached_by,
)
from ft_transport.publish.order_queue import OrderQueue
from ft_transport.publish.received_weights import ReceivedWeights, log_failure
from ft_transport.runtime.decoding import DECODE_ERRORS
from ft_transport.runtime.signal_safe import SafeEnd
from ft_transport.settings import check_duration

logger = logging.getLogger(__name__)

_MAX_ORDERS: Final = 32
_PATIENCE_S: Final = 10.0
"""Seconds after which the receiver cancels a slow fetch while another order waits."""
_body_decoder: Final = msgspec.json.Decoder()


class WeightReceiver:
    """Receives published versions into the tensors of an inference engine, and reports the current version.

    If the publisher has a delta from the current version, the receiver first applies the delta to the tensors. Then the
    receiver compares each chunk of the tensors with the digests of the new version, and fetches the chunks that differ.
    So a delta that is lost, or was made for other weights, does no harm.

    If a transfer fails before any byte has changed the tensors, the receiver keeps the previous version. If the
    transfer fails later, the receiver overwrites the weights with NaN patterns, and ``version`` is ``None`` until a
    complete version has arrived. Until then, the publisher's policy does not count the engine.

    With a job token, the publisher and its transport must prove that they know the token. Without a token, the receiver
    listens on the loopback only, and fetches from the loopback only. The receiver writes errors to its own log, and
    sends the publisher only one of a few fixed reasons.

    Args:
        weights: The engine's tensors, on the CPU or on a device, by the names under which the trainer publishes them;
            or a function that returns the tensors.
        paused: Returns a context manager. While the receiver is inside the context, no forward pass may read the
            weights. The receiver enters the context on a thread of its own.
        host: Address to bind. Default: all addresses with a token, the loopback without a token.
        port: Port to bind; 0 for any free port.
        token: The job token. Default: the token of the environment, as for ``TransportSettings``.
        reached_at: Additional addresses (``host:port``) that publishers use in their URLs to reach the receiver, such
            as a forwarded port. The receiver already accepts its own addresses, and names that resolve to them on this
            host.
        sources: Networks (``10.0.0.0/8``), addresses and host names from which the receiver may fetch versions.
            Default: all with a token. Without a token, only the loopback is allowed, even if this list has other
            entries.
        tls: Certificates for fetching versions, as in ``TransportSettings``. The publisher sends its messages to the
            receiver without TLS.
        timeout: Longest duration of fetching a version. While another order waits, the receiver also cancels a fetch
            that is slower than 1 MiB/s over 10 seconds.

    Raises:
        ConfigurationError: A setting is invalid, or the address cannot be bound.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]],
        *,
        paused: Callable[[], AbstractContextManager[object]] = nullcontext,
        host: str | None = None,
        port: int = 0,
        token: str | None = None,
        reached_at: Sequence[str] = (),
        sources: Sequence[str] | None = None,
        tls: TLSFiles | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        check_duration("timeout", timeout, at_least=timedelta.resolution)
        keys = Keys.of(token) if token is not None else Keys.from_environment()
        allowed = AllowedSources(sources, loopback_only=keys is None)
        self._received = ReceivedWeights(weights, allowed, paused=paused, keys=keys, tls=tls, timeout=timeout)
        self._end = SafeEnd()
        host = bound_host(host, is_guarded=keys is not None, allow_anyone=None)
        listening = listen(host, port)
        try:
            self.url = advertised_url(
                None,
                bound=host,
                port=listening.getsockname()[1],
                # The receiver's name may resolve to another address on a publisher's host.
                is_guarded=False,
                reached_at=reached_at,
            )
            names = frozenset({reached_by(self.url), *(each.lower() for each in reached_at)})
            # Without a token the receiver listens only on the loopback.
            own_names = HostCheck([host or "", *names]) if keys is None else None
            self._server = _OrderServer(listening, self._received, keys, reached_at=names, names=own_names)
        except BaseException:
            listening.close()
            raise

    @property
    def version(self) -> int | None:
        """The version of the engine's weights; ``None`` if the weights are not a complete version."""
        return self._received.version

    @property
    def num_bytes_fetched(self) -> int:
        """Number of bytes that the receiver fetched for the last complete version."""
        return self._received.num_bytes_fetched

    def close(self) -> None:
        """Stop the HTTP server and cancel a running fetch. Idempotent."""
        self._end(self._server.close)

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


class _OrderServer:
    """The HTTP server of a receiver, which runs on its own thread and event loop.

    Args:
        listening: The listening socket. The server closes the socket when it stops.
        received: Receives versions into the engine's tensors.
        keys: Keys of the job; ``None`` without a job token.
        reached_at: Addresses (``host:port``) that publishers use, besides the receiver's own addresses.
        names: Host names that a request's ``Host`` header may contain; ``None`` for any.
    """

    def __init__(
        self,
        listening: socket.socket,
        received: ReceivedWeights,
        keys: Keys | None,
        *,
        reached_at: frozenset[str],
        names: HostCheck | None,
    ) -> None:
        self._received = received
        self._keys = keys
        self._reached_at = reached_at
        self._names = names
        self._challenges = Challenges(time.monotonic)
        self._queue = OrderQueue(
            lambda order, handle: received.fetch(order.address, order.version, handle), patience_s=_PATIENCE_S
        )
        self._num_orders = 0
        self._slots = ConnectionSlots(64, time.monotonic)
        self._peer_log = PeerLog(logger, time.monotonic)
        self._server = AppServer(
            listening=listening,
            name="ft-transport-weights",
            keep_alive_s=10.0,
            slots=self._slots,
            peer_log=self._peer_log,
            # No client can prove membership by its connection: only the signed content of an order counts.
            claims=lambda _address, _sent: False,
            make_app=self._make_app,
            end=self._queue.close,
        )
        self._server.start()

    def close(self) -> None:
        """Stop the server. Idempotent."""
        self._server.stop()
        self._server.join()

    def _make_app(self) -> web.Application:
        app = web.Application(middlewares=[_close_after, self._guard], client_max_size=8 << 10)
        order_route = rf"{ROUTE}/{{version:\d{{1,{MAX_VERSION_DIGITS}}}}}"
        app.add_routes([web.get(ROUTE, self._answer_question), web.post(order_route, self._answer_order)])
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self._names is not None and not self._names.has(request.headers.get("Host")):
            self._peer_log.note(logging.WARNING, slot_of(request).address, f"an order was refused: {REFUSAL}")
            raise web.HTTPMisdirectedRequest(text=REFUSAL)
        return await handler(request)

    async def _answer_question(self, request: web.Request) -> web.Response:
        if self._keys is None:
            return web.json_response({"version": self._received.version})
        question = Question.proved(self._keys, request.query)
        if question is None:
            return self._refusal("unproved", request)
        if not await self._is_own(question.reached, request):
            return self._refusal("reached_elsewhere", request)
        return web.json_response(question.answer(self._keys, self._received.version, self._challenges.issue()))

    async def _answer_order(self, request: web.Request) -> web.Response:
        # JSON only: a web page may send some other content types cross-origin without a preflight (Fetch, 4.10).
        if request.content_type != "application/json":
            return self._refusal("malformed", request)
        try:
            # The connection slots disconnect a client that sends its request too slowly.
            body: object = _body_decoder.decode(await request.read())
        except (*DECODE_ERRORS, web.HTTPRequestEntityTooLarge):
            return self._refusal("malformed", request)
        read = Order.read(int(request.match_info["version"]), body)
        if read is None:
            return self._refusal("malformed", request)
        if self._num_orders >= _MAX_ORDERS:
            return self._refusal("busy", request)
        self._num_orders += 1
        slot = slot_of(request)
        try:
            # The response waits until the order's turn has come and the weights have arrived.
            self._slots.authenticated(slot)
            with self._slots.serving(slot):
                return await self._carry_out(*read, request)
        finally:
            self._num_orders -= 1

    async def _carry_out(self, order: Order, signature: str, request: web.Request) -> web.Response:
        if self._keys is not None:
            if not order.is_proved(self._keys, signature):
                return self._refusal("unproved", request)
            if not await self._is_own(order.reached, request):
                return self._refusal("reached_elsewhere", request)
            if not self._challenges.use(order.challenge):
                return self._refusal("unproved", request)
        reason: Reason | None = None
        try:
            await self._queue.carry_out(order)
        except Exception as error:
            reason = log_failure(order.version, error)
            if reason in ("malformed", "source_refused"):
                self._log(reason, request)
        outcome = order.outcome(self._keys, version=self._received.version, reason=reason)
        return web.json_response(outcome, status=REASONS[reason][0] if reason is not None else 200)

    def _refusal(self, reason: Reason, request: web.Request) -> web.Response:
        self._log(reason, request)
        return web.json_response({"version": None, "reason": reason}, status=REASONS[reason][0])

    def _log(self, reason: Reason, request: web.Request) -> None:
        remote = request.remote or "a client that disconnected"
        self._peer_log.note(logging.WARNING, remote, f"an order was refused: {REASONS[reason][1]}")

    async def _is_own(self, reached: str, request: web.Request) -> bool:
        """Return whether an address that a publisher used for a message is this receiver's own."""
        if reached in self._reached_at:
            return True
        transport = request.transport
        sockname = transport.get_extra_info("sockname") if transport is not None else None
        if not sockname:
            return False
        own = socket_address(sockname)
        if reached == own:
            return True
        host, _, port = reached.rpartition(":")
        if not host or port != own.rpartition(":")[2] or host.startswith("["):
            return False
        addresses = await asyncio.to_thread(addresses_or_none, PeerAddress(host=host, port=int(port)))
        return any(socket_address((str(each), port)) == own for each in addresses)


@web.middleware
async def _close_after(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Close the connection after each response, so that the limits on connections also limit requests."""
    try:
        response = await handler(request)
    except web.HTTPException as error:
        error.force_close()
        raise
    response.force_close()
    return response
