"""The routes for who watches a process: see ``wire.routes`` and ``telemetry.watch``."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from ft_transport.http.scraping import Scraping
from ft_transport.telemetry.exposition import Exposition, accepted
from ft_transport.telemetry.watch import Watch
from ft_transport.wire.routes import METRICS_ROUTE, STATE_ROUTE


class WatchRoutes:
    """Answers those requests. Belongs to the server's event loop.

    Args:
        watch: What is told.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._scraping = Scraping(Exposition(watch.metrics))

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Adds all routes."""
        router.add_get(STATE_ROUTE, self._state, allow_head=True)
        router.add_get(METRICS_ROUTE, self._metrics, allow_head=True)

    async def _state(self, _request: web.Request) -> web.StreamResponse:
        # A part may have to wait for a moment, and the loop waits for nothing.
        body = await asyncio.get_running_loop().run_in_executor(None, self._encoded_state)
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    def _encoded_state(self) -> bytes:
        return msgspec.json.encode(self._watch.state())

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        try:
            body, content_type = await self._scraping.scrape(accepted(request.headers.get("Accept", "")))
        except asyncio.TimeoutError:
            raise web.HTTPServiceUnavailable(text="what is counted could not be read in time") from None
        return web.Response(body=body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})
