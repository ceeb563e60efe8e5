"""The receiving end of a publisher, inside an inference engine: the facade of what pulls weights."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Set
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Final, TypeAlias

import msgspec
import torch
from aiohttp import web

from ft_transport.errors import RestoreError, TransportError
from ft_transport.http.own_address import advertised_host, listen
from ft_transport.http.token import JobToken
from ft_transport.publish.deltas import AppliedChanges, OwnChange, changes_of
from ft_transport.publish.engines.pulling import ROUTE
from ft_transport.runtime.handler_safety import SafeEnd
from ft_transport.settings import TransportSettings, check_duration
from ft_transport.state.dtensors import is_dtensor
from ft_transport.state.dtypes import overlaps_itself
from ft_transport.state.matching import Incoming
from ft_transport.state.views import extent_bytes, has_own_memory
from ft_transport.transport import HTTPTransport

logger = logging.getLogger(__name__)

_MAX_REQUEST_BYTES: Final = 64 << 10
_START_TIMEOUT_S: Final = 30.0


class _Served(msgspec.Struct):
    address: str


class WeightReceiver:
    """Receives versions into an engine's own tensors, and says which version they are.

    Where the publisher keeps a delta from the version that is here, the elements that differ are changed first. Then
    what the tensors hold is compared with the digests of the version, chunk by chunk, and only what differs crosses the
    network: a delta that was lost, or made for other weights, does no harm. A version that breaks off before bytes of
    it have landed leaves the one before. One that breaks off later leaves no weights to use: they are overwritten with
    NaN patterns, and ``version`` is ``None`` until one has arrived whole. The publisher counts such an engine out.

    Args:
        weights: By the names under which they are published, tensors on the CPU or on a device; or a function that
            returns them.
        paused: Returns a context in which no forward pass reads the weights, entered on a thread of the receiver's own.
        host: Address to bind; ``None`` for all.
        port: Port to bind; 0 for any free one.
        advertise: See ``TransportSettings``.
        token: The job token that every request must carry. Default: the environment variable ``FT_TRANSPORT_TOKEN``;
            without it no token is asked for.
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
        self._newest = -1
        self.num_bytes_fetched = 0
        self._mutex = threading.Lock()
        self._end = SafeEnd()
        self._socket = listen(host, port)
        self.url = f"http://{advertised_host(advertise, bound=host)}:{self._socket.getsockname()[1]}"
        settings = TransportSettings(token=token) if token is not None else None
        self._transport: HTTPTransport[Any] = HTTPTransport(timeout, settings=settings)
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
        self._end(self._close)

    def _close(self) -> None:
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
        except web.HTTPException:
            raise
        except Exception as error:
            # Also what the engine's own functions raise: the publisher's report says why.
            logger.warning("a version could not be received: %s", error, exc_info=not isinstance(error, TransportError))
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)

    async def _say(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self._version})

    async def _receive(self, request: web.Request) -> web.Response:
        version = int(request.match_info["version"])
        try:
            served = msgspec.json.decode(await request.read(), type=_Served)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return web.json_response({"error": 'expected {"address": URL}'}, status=400)
        await asyncio.to_thread(self._fetch, served.address, version)
        return web.json_response({"version": self._version})

    def _fetch(self, address: str, version: int) -> None:
        with self._mutex:
            # One of the same number is compared: another run counts from the beginning again.
            if self._version is not None and version < self._version:
                return
            if version < self._newest:
                raise RestoreError(f"expected version {self._newest}, which was begun before, or a later one")
            own = _own_weights(self._weights() if callable(self._weights) else self._weights)
            into = {"weights": {names[0]: tensor for names, tensor in own}}

            def check(incoming: Incoming) -> None:
                _refuse_others(incoming, {name for names, _ in own for name in names})

            changes, num_delta_bytes = self._deltas(address, version, own)
            applied = AppliedChanges()
            with self._paused():
                # Until all is there, or is what it was: undoing may fail as well.
                base, self._version = self._version, None
                try:
                    applied.apply(changes)
                    received = self._transport.fetch(
                        address, version, into=into, check=check, timeout=self._timeout, only_changed=True
                    )
                except BaseException as error:
                    if getattr(error, "destination_touched", False):
                        self._newest = version
                    else:
                        applied.undo()
                        self._version = base
                    raise
                self._newest = version
                _refuse_unfilled(received.state["weights"], own)
                self._version = received.step
                self.num_bytes_fetched = num_delta_bytes + (received.num_bytes_fetched or 0)

    def _deltas(self, address: str, version: int, own: _Own) -> tuple[list[OwnChange], int]:
        """What changes the version that is here into another, and how many bytes came; nothing if chunks have to do."""
        base = self._version
        if base is None:
            return [], 0
        try:
            deltas = self._transport.fetch_deltas(
                address,
                base,
                version,
                max_bytes=sum(each.nbytes for _, each in own),
                timeout=self._timeout,
            )
            changes = changes_of(deltas, {name: tensor for names, tensor in own for name in names})
        except TransportError as error:
            logger.info("version %d: the deltas from version %d are of no use: %s", version, base, error)
            return [], 0
        return changes, sum(delta.num_bytes for delta in deltas)


_Own: TypeAlias = list[tuple[list[str], torch.Tensor]]


def _own_weights(weights: Mapping[str, object]) -> _Own:
    """The engine's tensors, each once with all its names, as plain tensors that share its memory.

    Raises:
        RestoreError: Something is no tensor that bytes can be received into, or two overlap.
    """
    own: dict[tuple[object, ...], tuple[list[str], torch.Tensor]] = {}
    for name, value in weights.items():
        plain: object = value
        if isinstance(value, torch.Tensor) and not is_dtensor(value):
            plain = value.detach().as_subclass(torch.Tensor)
        if not has_own_memory(plain) or (not plain.is_contiguous() and overlaps_itself(plain.shape, plain.stride())):
            kind = (
                f"{type(value).__name__} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__
            )
            raise RestoreError(f"expected a tensor with memory of its own to receive into, got {kind}", path=name)
        key = (plain.device, plain.data_ptr(), plain.dtype, plain.shape, plain.stride()) if plain.numel() else (name,)
        own.setdefault(key, ([], plain))[0].append(name)
    found = list(own.values())
    by_start = sorted((str(each.device), each.data_ptr(), extent_bytes(each), names[0]) for names, each in found)
    for (device, start, length, name), (other_device, other_start, other_length, other) in itertools.pairwise(by_start):
        if device == other_device and other_length and other_start < start + length:
            raise RestoreError(f"expected weights that do not overlap, {other} begins inside {name}", path=other)
    return found


def _refuse_unfilled(state: Mapping[str, torch.Tensor], own: _Own) -> None:
    """Makes sure that what has come is in the engine's own tensors; for a tie, that all its names are the same."""
    for names, tensor in own:
        if state[names[0]] is not tensor and tensor.numel():
            raise RestoreError("expected it to be received in place, it was not", path=names[0])
        for name in names[1:]:
            if not torch.equal(_bits_of(state[name]), _bits_of(tensor)):
                raise RestoreError(f"expected the same as {names[0]}, with which it shares memory here", path=name)


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _refuse_others(incoming: Incoming, own: Set[str]) -> None:
    """What comes has to be just what is here."""
    names = set(incoming.keys("weights") or ())
    if incoming.mismatches or names != own:
        missing, unexpected = sorted(own - names)[:5], sorted(names - own)[:5]
        differing = "; ".join(
            f"{each.path}: {each.own} here, {each.received} there" for each in incoming.mismatches[:5]
        )
        raise RestoreError(
            f"expected the weights that are here; missing: {missing or 'none'}, unexpected: {unexpected or 'none'}, "
            f"differing: {differing or 'none'}; nothing was received"
        )
