"""The HTTP server: aiohttp on a thread and an event loop of its own.

Bodies go from the memory file to the socket with ``sendfile``, so neither Python nor the training thread touches them.
Nothing here waits for a lock of the trainer, copies device memory or computes a digest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import IO, Final

import msgspec
from aiohttp import web

from ft_transport.errors import (
    ConfigurationError,
    PeerAuthenticationError,
    PeerNotReadyError,
    SnapshotReplacedError,
    StepNotServedError,
    TransportError,
)
from ft_transport.net.address import advertised_host, listen
from ft_transport.net.shelf import Reading, ServedSnapshot, Shelf
from ft_transport.net.token import JobToken
from ft_transport.wire.integrity import digest
from ft_transport.wire.manifest import SnapshotId
from ft_transport.wire.routes import (
    FULL_ROUTE,
    LATEST,
    MANIFEST_DIGEST_HEADER,
    METADATA_ROUTE,
    SERVED_STEPS_HEADER,
    SNAPSHOT_PARAMETER,
    STATUS_ROUTE,
    WAIT_PARAMETER,
    StepSelector,
    parse_step,
)

logger = logging.getLogger(__name__)

_SLICE_BYTES: Final = 8 << 20
"""What one deadline covers: a receiver has to take this much within ``stall_timeout_s``."""
_START_TIMEOUT_S: Final = 30.0

FreshSnapshot = Callable[[], int]
"""Asks the owner of the state for a snapshot that is not older than now, without waiting for it. Returns the number
(``Shelf.newest_sequence``) after which a snapshot is new enough. Thread-safe, and called on the event loop."""


class SnapshotServer:
    """Serves the snapshots of a shelf until ``close``.

    Args:
        shelf: What is served.
        host: Address to bind, ``None`` for all.
        port: Port to bind, 0 for any.
        advertise: Host, address or interface that peers are told.
        replica: How this replica calls itself in ``/status``.
        token: Required on every route if given.
        max_wait_s: The longest that a request is held until its step is there, in seconds.
        stall_timeout_s: How long a receiver may take for 8 MiB before it is cut off, in seconds.
        fresh_snapshot: Asks for a new snapshot when ``latest`` is requested.
    """

    def __init__(
        self,
        shelf: Shelf,
        *,
        host: str | None,
        port: int,
        advertise: str | None,
        replica: str,
        token: JobToken | None,
        max_wait_s: float,
        stall_timeout_s: float,
        fresh_snapshot: FreshSnapshot | None,
    ) -> None:
        self._shelf = shelf
        self._replica = replica
        self._token = token
        self._max_wait_s = max_wait_s
        self._stall_timeout_s = stall_timeout_s
        self.fresh_snapshot = fresh_snapshot
        self._socket = listen(host, port)
        try:
            self.port: int = self._socket.getsockname()[1]
            self.address = f"http://{advertised_host(advertise or host)}:{self.port}"
            self._loop = asyncio.new_event_loop()
            self._changed = asyncio.Event()
            self._closing = False
            self._handlers: set[asyncio.Task[object]] = set()
            started: Future[web.AppRunner] = Future()
            self._thread = threading.Thread(target=self._run, args=(started,), name="ft-transport-server", daemon=True)
            self._thread.start()
            self._runner = started.result(_START_TIMEOUT_S)
        except BaseException:
            self._socket.close()
            raise
        shelf.listen(self._on_change)

    def close(self, *, wait: bool) -> None:
        """Stops serving; running transfers are cut off.

        Args:
            wait: Whether to return only when the thread has ended.
        """
        if self._closing:
            return
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if wait:
            self._thread.join()

    def _run(self, started: Future[web.AppRunner]) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            try:
                runner = loop.run_until_complete(self._start())
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(runner)
            loop.run_forever()
            for handler in tuple(self._handlers):
                handler.cancel()
            loop.run_until_complete(runner.cleanup())
        finally:
            self._socket.close()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(METADATA_ROUTE, self._metadata, allow_head=True)
        app.router.add_get(FULL_ROUTE, self._full, allow_head=True)
        app.router.add_get(STATUS_ROUTE, self._status, allow_head=True)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, self._socket).start()
        return runner

    def _on_change(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop was closed by a shutdown at the same moment.
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Asks for the token, and turns errors into answers that say what was expected."""
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            if self._token is not None and not self._token.accepts(request.headers.get("Authorization")):
                raise PeerAuthenticationError("expected the job token as 'Authorization: Bearer …'")
            return await handler(request)
        except TransportError as error:
            logger.info("%s %s from %s refused: %s", request.method, request.path, request.remote, error)
            headers = {SERVED_STEPS_HEADER: ",".join(map(str, self._shelf.steps()))}
            if isinstance(error, PeerNotReadyError):
                headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
            if isinstance(error, PeerAuthenticationError):
                headers = {"WWW-Authenticate": "Bearer"}
            return web.json_response(
                {"error": type(error).__name__, "message": str(error)}, status=error.http_status, headers=headers
            )
        finally:
            self._handlers.discard(task)

    async def _status(self, _request: web.Request) -> web.StreamResponse:
        newest = self._shelf.newest()
        body = {
            "state": "serving" if newest is not None else "empty",
            "replica": self._replica,
            "step": newest.step if newest is not None else None,
            "steps": self._shelf.steps(),
            "snapshot": newest.snapshot_id if newest is not None else None,
            "snapshot_bytes": newest.total_bytes if newest is not None else 0,
            "clients": self._shelf.num_readers(),
        }
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _metadata(self, request: web.Request) -> web.StreamResponse:
        with await self._read(request) as snapshot:
            body = snapshot.header[8:]
            headers = {"ETag": f'"{snapshot.snapshot_id}"', MANIFEST_DIGEST_HEADER: f"{digest(body):016x}"}
            return web.Response(body=body, content_type="application/json", headers=headers)

    async def _full(self, request: web.Request) -> web.StreamResponse:
        with await self._read(request) as snapshot:
            return await self._send_file(request, snapshot)

    async def _send_file(self, request: web.Request, snapshot: ServedSnapshot) -> web.StreamResponse:
        total = snapshot.total_bytes
        etag = f'"{snapshot.snapshot_id}"'
        start, end, partial = 0, total, False
        try:
            asked = request.http_range
        except ValueError:
            asked = slice(None)  # Several ranges, or another unit: RFC 9110 section 14.2 lets a server ignore it.
        if (asked.start is not None or asked.stop is not None) and request.headers.get("If-Range", etag) == etag:
            start, end, _ = asked.indices(total)
            partial = True
        if partial and start >= end:
            raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{total}"})
        response = web.StreamResponse(
            status=206 if partial else 200,
            headers={
                "Content-Type": "application/octet-stream",
                "Content-Disposition": f'attachment; filename="step-{snapshot.step}.safetensors"',
                "Accept-Ranges": "bytes",
                "Cache-Control": "no-store",
                "ETag": etag,
            },
        )
        if partial:
            response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{total}"
        response.content_length = end - start
        await response.prepare(request)
        if request.method != "HEAD":
            await self._send_body(request, snapshot, start, end)
        await response.write_eof()
        return response

    async def _send_body(self, request: web.Request, snapshot: ServedSnapshot, start: int, end: int) -> None:
        """Sends ``[start, end)`` of the file; a receiver that stalls is cut off."""
        with open(snapshot.descriptor, "rb", buffering=0, closefd=False) as file:
            while start < end:
                num_bytes = min(_SLICE_BYTES, end - start)
                await self._send_slice(request, file, snapshot.file_start + start, num_bytes)
                start += num_bytes

    async def _send_slice(self, request: web.Request, file: IO[bytes], position: int, num_bytes: int) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the receiver closed the connection")
        try:
            await asyncio.wait_for(
                self._loop.sendfile(transport, file, position, num_bytes), timeout=self._stall_timeout_s
            )
        except asyncio.TimeoutError:
            logger.warning(
                "receiver %s took less than %d bytes in %.0f s and was cut off",
                request.remote, num_bytes, self._stall_timeout_s,
            )  # fmt: skip
            # Only an abort frees the socket of a peer that does not read; a close would wait for it.
            transport.abort()
            raise ConnectionResetError("the receiver stalled") from None

    async def _read(self, request: web.Request) -> Reading:
        """Begins reading the snapshot that a request names, waiting for it if it may still come."""
        step = parse_step(request.match_info["step"])
        if step is None:
            raise StepNotServedError(
                f"expected a step number or 'latest' in the path, got {request.match_info['step'][:64]!r}"
            )
        transport = request.transport

        def is_connected() -> bool:
            return transport is not None and not transport.is_closing()

        bound_to = request.query.get(SNAPSHOT_PARAMETER)
        if bound_to is not None:
            reading = self._shelf.read(step, snapshot_id=SnapshotId(bound_to), is_connected=is_connected)
            if reading is None:
                raise SnapshotReplacedError(
                    f"expected snapshot {bound_to[:32]} of step {step}, which is no longer served; start again"
                )
            return reading
        after = self.fresh_snapshot() if step == LATEST and self.fresh_snapshot is not None else 0
        deadline_s = time.monotonic() + self._wait_s(request)
        while True:
            changed = self._changed
            reading = self._shelf.read(step, after_sequence=after, is_connected=is_connected)
            if reading is not None:
                return reading
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not self._may_come(step):
                return self._read_or_refuse(step, is_connected)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), remaining_s)

    def _may_come(self, step: StepSelector) -> bool:
        newest_step = self._shelf.newest_step()
        return step == LATEST or newest_step is None or step > newest_step

    def _read_or_refuse(self, step: StepSelector, is_connected: Callable[[], bool]) -> Reading:
        """After the wait: the newest snapshot for ``latest``, however old, or the reason why there is none."""
        reading = self._shelf.read(step, is_connected=is_connected)
        if reading is not None:
            return reading
        served = self._shelf.steps()
        if not served:
            raise PeerNotReadyError("expected a snapshot, and none has been taken yet", step=step)
        raise StepNotServedError(f"expected step {step}, this replica serves {list(served)}", served=served)

    def _wait_s(self, request: web.Request) -> float:
        text = request.query.get(WAIT_PARAMETER)
        if text is None:
            return self._max_wait_s
        try:
            asked_s = float(text)
        except ValueError:
            asked_s = -1.0
        if not 0 <= asked_s < float("inf"):
            raise ConfigurationError(f"expected a number of seconds in '{WAIT_PARAMETER}', got {text[:64]!r}")
        return min(asked_s, self._max_wait_s)
