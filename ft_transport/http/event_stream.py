"""Server-sent events for all who watch one thing: found out once for all of them, while there are any, and never else.

See https://html.spec.whatwg.org/multipage/server-sent-events.html. Who does not read as fast as events come misses
some, and who does not read at all is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Final

from aiohttp import web

logger = logging.getLogger(__name__)

MAX_WATCHERS: Final = 16
_PERIOD_S: Final = 1.0
_KEEP_ALIVE_S: Final = 15.0
_WRITE_S: Final = 5.0
"""How long a watcher may take for what does not fit into the buffers of its connection."""
_BUFFER_BYTES: Final = 128 << 10
_RETRY: Final = b"retry: 2000\n\n"
_KEEP_ALIVE: Final = b": still here\n\n"
_RETRY_AFTER_S: Final = 5


class EventStream:
    """One thing that is watched. Belongs to the server's event loop.

    Args:
        produce: What each event says: one line of JSON. Called on a thread beside the loop, one call at a time.
        headers: Of each answer.
        period_s: From one event to the next, if finding it out takes no more than half of that.
        max_watchers: Further ones are told to come back later.
        write_s: How long a watcher may take for what does not fit into the buffers of its connection.
    """

    def __init__(
        self,
        produce: Callable[[], bytes],
        *,
        headers: Mapping[str, str],
        period_s: float = _PERIOD_S,
        max_watchers: int = MAX_WATCHERS,
        write_s: float = _WRITE_S,
    ) -> None:
        self._produce = produce
        self._headers = headers
        self._period_s = period_s
        self._max_watchers = max_watchers
        self._write_s = write_s
        self._num_watchers = 0
        self._event = b""
        self._number = 0
        self._changed = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    @property
    def num_watchers(self) -> int:
        """How many there are now."""
        return self._num_watchers

    async def watch(self, request: web.Request) -> web.StreamResponse:
        """Answers one watcher, until it leaves or is cut off."""
        if self._num_watchers >= self._max_watchers:
            raise web.HTTPServiceUnavailable(
                text=f"{self._max_watchers} watch already; close one of their pages", headers=self._retry_headers()
            )
        self._num_watchers += 1
        try:
            if self._pump is None:
                self._event = b""
                self._pump = asyncio.get_running_loop().create_task(self._run())
            response = web.StreamResponse(headers={**self._headers, "Content-Type": "text/event-stream; charset=utf-8"})
            await self._send_all(request, response)
            return response
        finally:
            self._num_watchers -= 1
            if not self._num_watchers and self._pump is not None:
                self._pump.cancel()
                self._pump = None

    async def _send_all(self, request: web.Request, response: web.StreamResponse) -> None:
        try:
            _keep_little(request)
            await response.prepare(request)
            await self._write(response, _RETRY)
            number = -1
            while True:
                if self._event and self._number != number:
                    number = self._number
                    await self._write(response, self._event)
                    continue
                try:
                    await asyncio.wait_for(self._changed.wait(), _KEEP_ALIVE_S)
                except asyncio.TimeoutError:
                    await self._write(response, _KEEP_ALIVE)
        except (OSError, asyncio.TimeoutError):  # It left, or does not read.
            if request.transport is not None:
                request.transport.abort()

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        await asyncio.wait_for(response.write(data), self._write_s)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            try:
                line = await loop.run_in_executor(None, self._produce)
            except Exception:
                logger.exception("what is watched could not be found out")
            else:
                self._number += 1
                self._event = b"data: " + line + b"\n\n"
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
            took_s = loop.time() - began_s
            await asyncio.sleep(max(self._period_s - took_s, took_s))

    def _retry_headers(self) -> dict[str, str]:
        return {"Retry-After": str(_RETRY_AFTER_S)}


def _keep_little(request: web.Request) -> None:
    """Bounds what the system keeps for who does not read."""
    connected = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connected is not None:
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
