"""An aiohttp application on a thread and an event loop of its own, behind a listener that counts its connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from ft_transport.http.admission import Admission, Place
from ft_transport.http.listener import Listener
from ft_transport.http.peer_protocol import PeerProtocol
from ft_transport.http.strangers import Strangers
from ft_transport.http.tls_protocol import TLSAcceptor, TLSProtocol
from ft_transport.http.trouble_log import TroubleLog, describe_failure
from ft_transport.http.upload_log import UploadLog
from ft_transport.runtime.handler_safety import SafeFuture, SafeThread

_START_TIMEOUT_S: Final = 30.0
_ENDING_S: Final = 1.0
_SETTLING_ROUNDS: Final = 5


@dataclass(slots=True, kw_only=True, eq=False)
class AppServer:
    """Answers from `start` until `stop`.

    Attributes:
        listening: The listening socket; the thread closes it at the end.
        name: Name of the thread.
        keep_alive_s: How long a connection may be silent between two requests.
        admission: Gives the connections their places.
        trouble: Logs what goes wrong.
        claims: See `Listener`.
        make_app: Makes the application. Called on the event loop.
        end: Called on the event loop when no further connection is accepted.
        tls: Encrypts the connections; ``None``: plain HTTP.
        uploads: Logs the fetches of connections that end.
        strangers: Limits unauthenticated clients.
        loop: The event loop. Its class by name: a policy of the process may make loops without sendfile (uvloop).
    """

    listening: socket.socket
    name: str
    keep_alive_s: float
    admission: Admission
    trouble: TroubleLog
    claims: Callable[[str, bytes], bool]
    make_app: Callable[[], web.Application]
    end: Callable[[], Awaitable[None]]
    tls: TLSAcceptor | None = None
    uploads: UploadLog = field(default_factory=lambda: UploadLog(time.monotonic))
    strangers: Strangers = field(default_factory=lambda: Strangers(time.monotonic))
    loop: asyncio.SelectorEventLoop = field(default_factory=asyncio.SelectorEventLoop, init=False)
    _thread: SafeThread = field(init=False)
    _is_stopping: bool = field(default=False, init=False)

    def start(self) -> None:
        """Returns when the server accepts connections."""
        started: Future[None] = SafeFuture()
        self._thread = SafeThread(target=self._run, args=(started,), name=self.name, daemon=True)
        self._thread.start()
        started.result(_START_TIMEOUT_S)

    def stop(self) -> None:
        """Ends the event loop soon. May be called twice."""
        # A second time it would stop the loop while it ends the connections.
        if not self._is_stopping:
            self._is_stopping = True
            with contextlib.suppress(RuntimeError):  # The thread has ended already.
                self.loop.call_soon_threadsafe(self.loop.stop)

    def join(self) -> None:
        """Waits for the end of the thread."""
        self._thread.join()

    def _run(self, started: Future[None]) -> None:
        loop = self.loop
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
            self.listening.close()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    async def _start(self) -> tuple[web.AppRunner, Listener]:
        runner = web.AppRunner(self.make_app(), handle_signals=False, shutdown_timeout=_ENDING_S)
        await runner.setup()

        def make_protocol(place: Place) -> PeerProtocol:
            assert runner.server is not None
            return PeerProtocol(
                runner.server,
                loop=self.loop,
                keep_alive_s=self.keep_alive_s,
                admission=self.admission,
                uploads=self.uploads,
                place=place,
                trouble=self.trouble,
            )

        def make_encrypted(place: Place) -> TLSProtocol:
            assert tls is not None, "it speaks TLS"
            protocol = tls.protocol(lambda: make_protocol(place), refused=lambda: self.admission.leave(place))
            place.end = protocol.abort
            return protocol

        tls = self.tls
        made = make_protocol if tls is None else make_encrypted
        listener = Listener(
            self.listening, self.admission, made, self.trouble, strangers=self.strangers, claims=self.claims
        )
        return runner, listener

    async def _stop(self, runner: web.AppRunner, listener: Listener) -> None:
        await listener.stop()
        if self.tls is not None:
            self.tls.close()
        await self.end()
        await runner.cleanup()
        self.uploads.close()
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
        self.trouble.note(logging.ERROR, "the server", f"{context.get('message', 'an error')}: {failure}")
