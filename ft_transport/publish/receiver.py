"""The receiving end of a publisher, inside an inference engine: the facade of the classes that pull weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Final

import torch

from ft_transport.errors import (
    ConfigurationError,
    DeadlineExceededError,
    FetchFailedError,
    PeerUnreachableError,
    TransportError,
)
from ft_transport.http.bind_address import advertised_url, bound_host, listen
from ft_transport.http.client.fetch_settings import FetchHandle
from ft_transport.http.peer_address import socket_address
from ft_transport.http.server.access import HostCheck
from ft_transport.keys import Keys
from ft_transport.publish.allowed_sources import AllowedSources, SourceRefusedError, addresses_of_name
from ft_transport.publish.engines.pull_order import Challenges, Order, Question, Reason, reached_by
from ft_transport.publish.order_queue import OrderQueue, OrderRefusedError
from ft_transport.publish.order_server import Caller, OrderServer
from ft_transport.publish.received_weights import ReceivedWeights, WeightsDifferError, WeightsUnusableError
from ft_transport.runtime.handler_safety import SafeEnd
from ft_transport.settings import check_duration
from ft_transport.tls import TLSFiles

logger = logging.getLogger(__name__)

_MAX_TOLD_CHARACTERS: Final = 2000


class WeightReceiver:
    """Receives versions into an engine's own tensors, and reports the version that they hold.

    If the publisher has a delta from the current version, the receiver first changes the elements that differ. Then it
    compares the tensors' content with the digests of the version, chunk by chunk, and fetches only the chunks that
    differ: a delta that was lost, or made for other weights, does no harm. A version that breaks off before any of its
    bytes have landed leaves the previous version. One that breaks off later leaves no usable weights: the receiver
    overwrites them with NaN patterns, and ``version`` is ``None`` until a version has arrived whole. The publisher does
    not count such an engine.

    With a job token, the publisher that orders a version proves that it knows the token, and so does its transport.
    Without a token the receiver listens only on the loopback, and fetches only from there. The receiver logs errors
    here; the publisher gets one of a few reasons.

    Args:
        weights: Tensors on the CPU or on a device, by the names under which they are published; or a function that
            returns them.
        paused: Returns a context in which no forward pass reads the weights, entered on the receiver's own thread.
        host: Address to bind; ``None`` for all, or without a token for the loopback.
        port: Port to bind; 0 for any free one.
        advertise: See ``TransportSettings``.
        token: The job token. Default: the environment's, as for ``TransportSettings``.
        reached_at: ``host:port`` of URLs by which publishers reach the receiver, besides its own addresses and the
            names that resolve to them here; such as that of a forwarded port.
        sources: Allowed sources of versions: networks (``10.0.0.0/8``), addresses and host names. Default: all with a
            token, the loopback without one; this list narrows it.
        tls: Certificates for fetching versions, see ``TransportSettings``; the publisher's messages to this receiver do
            not use them.
        timeout: Timeout for fetching a version.
        patience: While another order waits, a fetch that receives less than 1 MiB/s over this time is ended.

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
        reached_at: Sequence[str] = (),
        sources: Sequence[str] | None = None,
        tls: TLSFiles | None = None,
        timeout: timedelta = timedelta(minutes=10),
        patience: timedelta = timedelta(seconds=10),
    ) -> None:
        for name, duration in (("timeout", timeout), ("patience", patience)):
            check_duration(name, duration, at_least=timedelta.resolution)
        keys = Keys.of(token) if token is not None else Keys.from_environment()
        self._received = ReceivedWeights(weights, paused=paused, keys=keys, tls=tls, timeout=timeout)
        allowed = AllowedSources(sources, loopback_only=keys is None)
        self._end = SafeEnd()
        host = bound_host(host, is_guarded=keys is not None, may_open=False)
        listening = listen(host, port)
        try:
            self.url = advertised_url(
                advertise,
                bound=host,
                port=listening.getsockname()[1],
                # Publishers may use a name of the receiver that resolves to another address there.
                is_guarded=False,
                reached_at=reached_at,
            )
            names = frozenset({reached_by(self.url), *(each.lower() for each in reached_at)})
            orders = _Orders(self._received, allowed, keys, names=names, patience_s=patience.total_seconds())
            # Without a token the receiver listens only on the loopback.
            own_names = HostCheck([host or "", *names]) if keys is None else None
            self._server = OrderServer(listening, orders, names=own_names)
        except BaseException:
            listening.close()
            raise

    @property
    def version(self) -> int | None:
        """The version that the weights hold; ``None`` before the first, and after one that failed on its way."""
        return self._received.version

    @property
    def num_bytes_fetched(self) -> int:
        """Number of bytes that the last version took."""
        return self._received.num_bytes_fetched

    def close(self) -> None:
        """Stop answering, and cancel a running fetch. May be called twice."""
        self._end(self._server.close)

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


class _Orders:
    """Checks the messages to a receiver, and answers them."""

    def __init__(
        self,
        received: ReceivedWeights,
        allowed: AllowedSources,
        keys: Keys | None,
        *,
        names: frozenset[str],
        patience_s: float,
    ) -> None:
        self._received = received
        self._allowed = allowed
        self._keys = keys
        self._names = names
        self._challenges = Challenges(time.monotonic)
        self._queue = OrderQueue(self._fetch, patience_s=patience_s)

    async def end(self) -> None:
        """See `Answering`."""
        await self._queue.close()

    async def answer_question(self, query: Mapping[str, str], caller: Caller) -> Mapping[str, object] | Reason:
        """See `Answering`."""
        if self._keys is None:
            return {"version": self._received.version}
        question = Question.proved(self._keys, query)
        if question is None:
            return "unproved"
        if not await self._is_own(question.reached, caller):
            return "reached_elsewhere"
        return question.answer(self._keys, self._received.version, self._challenges.issue())

    async def answer_order(
        self, version: int, body: object, caller: Caller
    ) -> tuple[Mapping[str, object], Reason | None]:
        """See `Answering`."""
        read = Order.read(version, body)
        if read is None:
            return {"version": None, "reason": "malformed"}, "malformed"
        order, signature = read
        reason = await self._disbelief(order, signature, caller)
        if reason is not None:
            return {"version": None, "reason": reason}, reason
        try:
            await self._queue.carry_out(order)
        except Exception as error:
            reason = _reason_of(error)
            is_own = reason in ("engine_failed", "weights_unusable") and not isinstance(error, TransportError)
            logger.warning("version %d could not be received: %s", version, _told(error), exc_info=is_own)
        return order.outcome(self._keys, version=self._received.version, reason=reason), reason

    async def _disbelief(self, order: Order, signature: str, caller: Caller) -> Reason | None:
        if self._keys is None:
            return None
        if not order.is_proved(self._keys, signature):
            return "unproved"
        if not await self._is_own(order.reached, caller):
            return "reached_elsewhere"
        return None if self._challenges.use(order.challenge) else "unproved"

    async def _is_own(self, reached: str, caller: Caller) -> bool:
        """Return whether this receiver has the address that a sender with the token used."""
        if reached in self._names:
            return True
        if not caller.reached:
            return False
        own = socket_address(caller.reached)
        if reached == own:
            return True
        host, _, port = reached.rpartition(":")
        if not host or port != own.rpartition(":")[2] or host.startswith("["):
            return False
        addresses = await asyncio.to_thread(addresses_of_name, host, int(port))
        return any(socket_address((str(each), port)) == own for each in addresses)

    def _fetch(self, order: Order, handle: FetchHandle) -> None:
        try:
            source = self._allowed.choose(order.address, is_given_up=lambda: bool(handle.reason))
            self._received.fetch(source, order.version, handle)
        except TransportError as error:
            if not handle.reason:
                raise
            # The fetch was cancelled here, which caused the error.
            ended = DeadlineExceededError(handle.reason)
            ended.destination_touched = error.destination_touched
            raise ended from error


def _reason_of(error: Exception) -> Reason:
    match error:
        case OrderRefusedError():
            return error.reason
        case ConfigurationError():
            return "malformed"
        case SourceRefusedError():
            return "source_refused"
        case WeightsDifferError():
            return "weights_differ"
        case WeightsUnusableError():
            return "weights_unusable"
        case DeadlineExceededError():
            return "too_slow"
        case FetchFailedError() if error.failures and isinstance(error.failures[-1], PeerUnreachableError):
            return "source_unreachable"
        case PeerUnreachableError():
            return "source_unreachable"
        case TransportError():
            return "source_failed"
        case _:
            return "engine_failed"


def _told(error: Exception) -> str:
    """Return an error as one printable line: it may contain text from a peer."""
    text = f"{type(error).__name__}: {error}"[:_MAX_TOLD_CHARACTERS]
    return "".join(each if each.isprintable() else " " for each in text)
