"""Runs an aiohttp application on its own thread and event loop, behind a `Listener` that limits its connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from ft_transport.credentials import Certificates
from ft_transport.http.server.connection_slots import ConnectionSlots, Slot
from ft_transport.http.server.listener import Listener
from ft_transport.http.server.logs import PeerLog, UploadLog, describe_failure
from ft_transport.http.server.tls_protocol import TLSAcceptor, TLSProtocol
from ft_transport.runtime.signal_safe import SafeFuture, SafeThread

_MAX_LINE_BYTES: Final = 8190
_MAX_HEADERS: Final = 32
"""Maximum number of header fields of a request. This package's client sends fewer than ten short lines."""
_LINGERING_S: Final = 1.0
"""How long the server reads the rest of an unwanted body, so that its sender can receive the response."""

_START_TIMEOUT_S: Final = 30.0
_ENDING_S: Final = 1.0
_SETTLING_ROUNDS: Final = 5


class PeerProtocol(web.RequestHandler):
    """aiohttp's protocol of one connection, with logs and error responses that contain no byte of the request.

    aiohttp itself logs a malformed request verbatim with a traceback, and quotes the request in the response.

    Args:
        server: aiohttp's server, which passes requests to the application.
        owner: The server that accepted the connection.
        slot: The connection's slot.
    """

    __slots__ = ("_owner", "slot")

    def __init__(self, server: web.Server, owner: AppServer, slot: Slot) -> None:
        super().__init__(
            server,
            loop=owner.loop,
            keepalive_timeout=owner.keep_alive_s,
            access_log=None,  # type: ignore[arg-type]
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            max_headers=_MAX_HEADERS,
            lingering_time=_LINGERING_S,
            # No client of this package sends compressed bodies; a few bytes could inflate to gigabytes.
            auto_decompress=False,
        )
        self._owner = owner
        self.slot = slot

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        assert isinstance(transport, asyncio.Transport)
        self.slot.end = transport.abort
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """See ``asyncio.Protocol``."""
        self._owner.slots.leave(self.slot)
        self._owner.uploads.connection_closed(self.slot)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - quotes the request
    ) -> web.StreamResponse:
        """Send an error response to a request that could not be read or handled, and close the connection."""
        if status == HTTPStatus.BAD_REQUEST:
            self._owner.peer_log.note(logging.INFO, self.slot.address, f"a malformed request ({type(exc).__name__})")
        else:
            self._owner.peer_log.note(logging.ERROR, self.slot.address, f"a request failed: {describe_failure(exc)}")
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun, so no error response can be sent")
        response = web.Response(status=status, text=f"{status} {HTTPStatus(status).phrase}\n")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:  # noqa: ARG002 - may quote the request
        """Log an exception in one line, where aiohttp would log its whole traceback."""
        error = kw.get("exc_info")
        failure = describe_failure(error if isinstance(error, BaseException) else None)
        self._owner.peer_log.note(logging.ERROR, self.slot.address, f"a connection failed: {failure}")

    def log_debug(self, *args: Any, **kw: Any) -> None:
        """Do nothing: aiohttp calls this when a client has disconnected, which is not worth a line in the log."""


def slot_of(request: web.Request) -> Slot:
    """Return the slot of the request's connection."""
    protocol = request.protocol
    assert isinstance(protocol, PeerProtocol)
    return protocol.slot


@dataclass(slots=True, kw_only=True, eq=False)
class AppServer:
    """Serves an application from `start` until `stop`.

    Attributes:
        listening: The listening socket. The server's thread closes the socket at the end.
        name: Name of the server's thread.
        keep_alive_s: Time without a request after which the server closes a connection, in seconds.
        slots: Assigns slots to the connections.
        peer_log: Logs failures of connections and requests.
        claims: Takes the address and the first bytes of a connection; returns whether its client may be a member of the
            job.
        make_app: Creates the application. Called on the event loop.
        end: Called on the event loop after the listener has stopped.
        certificates: TLS certificates of the server; ``None`` for plain HTTP.
        uploads: Logs a fetch when its last connection ends.
        loop: The event loop. It does not follow the process's event loop policy, which may create loops without
            sendfile, such as uvloop's.
    """

    listening: socket.socket
    name: str
    keep_alive_s: float
    slots: ConnectionSlots
    peer_log: PeerLog
    claims: Callable[[str, bytes], bool]
    make_app: Callable[[], web.Application]
    end: Callable[[], Awaitable[None]]
    certificates: Certificates | None = None
    uploads: UploadLog = field(default_factory=lambda: UploadLog(time.monotonic))
    loop: asyncio.SelectorEventLoop = field(default_factory=asyncio.SelectorEventLoop, init=False)
    _thread: SafeThread = field(init=False)
    _tls: TLSAcceptor | None = field(default=None, init=False)
    _is_stopping: bool = field(default=False, init=False)

    def start(self) -> None:
        """Start the thread, and return when the server accepts connections."""
        started: Future[None] = SafeFuture()
        self._thread = SafeThread(target=self._run, args=(started,), name=self.name, daemon=True)
        self._thread.start()
        started.result(_START_TIMEOUT_S)

    def stop(self) -> None:
        """Make the thread close all connections and end. Returns at once; may be called twice."""
        # A second call would stop the loop while `_stop` closes the connections on it.
        if not self._is_stopping:
            self._is_stopping = True
            with contextlib.suppress(RuntimeError):  # The thread has ended already.
                self.loop.call_soon_threadsafe(self.loop.stop)

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self, started: Future[None]) -> None:
        loop = self.loop
        asyncio.set_event_loop(loop)
        # asyncio's error messages, and in debug mode all of its messages, quote bytes that the peer sent.
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
            self.listening.close()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _start(self) -> tuple[web.AppRunner, Listener]:
        runner = web.AppRunner(self.make_app(), handle_signals=False, shutdown_timeout=_ENDING_S)
        await runner.setup()

        assert runner.server is not None
        server = runner.server
        if self.certificates is not None:
            self._tls = TLSAcceptor(self.certificates, self.peer_log)

        def make_protocol(slot: Slot) -> asyncio.BaseProtocol:
            protocol = functools.partial(PeerProtocol, server, self, slot)
            if self._tls is None:
                return protocol()
            encrypted = TLSProtocol(self._tls, protocol, refused=functools.partial(self.slots.leave, slot))
            slot.end = encrypted.abort
            return encrypted

        return runner, Listener(self.listening, self.slots, make_protocol, self.peer_log, claims=self.claims)

    async def _stop(self, runner: web.AppRunner, listener: Listener) -> None:
        await listener.stop()
        if self._tls is not None:
            self._tls.close()
        await self.end()
        await runner.cleanup()
        self.uploads.close()
        # aiohttp does not track a connection whose peer has disconnected while the rest of a body was read.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_ENDING_S)
        # asyncio closes the socket of a closed transport only after a few iterations of the loop.
        for _ in range(_SETTLING_ROUNDS):
            await asyncio.sleep(0)

    def _on_loop_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        failure = describe_failure(context.get("exception"))
        self.peer_log.note(logging.ERROR, "the server", f"{context.get('message', 'an error')}: {failure}")
