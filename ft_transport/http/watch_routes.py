"""The routes for who watches a process: see ``wire.routes`` and ``telemetry.watch``."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from ft_transport.http.event_stream import EventStream
from ft_transport.http.job_watch import JobWatch, alone
from ft_transport.http.page import WATCH_HEADERS, load_page
from ft_transport.http.rate_probe import Connect
from ft_transport.http.scraping import Scrape, Scraping
from ft_transport.telemetry.encoding import encode_told
from ft_transport.telemetry.exposition import Exposition, accepted
from ft_transport.telemetry.job import KnownJob
from ft_transport.telemetry.watch import Watch
from ft_transport.wire.routes import (
    EVENTS_ROUTE,
    JOB_EVENTS_ROUTE,
    JOB_ROUTE,
    METRICS_ROUTE,
    PAGE_ROUTE,
    STATE_ROUTE,
)

_JSON: Final = "application/json"


class WatchRoutes:
    """Answers those requests. Belongs to the server's event loop.

    Args:
        watch: What is told.
        connect: Connects to other processes of the job.
        address: Where this one is reached.
        name: How it calls itself.
    """

    def __init__(self, watch: Watch, *, connect: Connect, address: str, name: str) -> None:
        self._watch = watch
        self._scraping = Scraping(Exposition(watch.metrics).encode)
        self._states = Scraping(self._state_in_form)
        self._address = address
        self._name = name
        self._page = load_page()
        self._job = JobWatch(self._find_job, connect)
        self._events = EventStream(self._encoded_state, headers=WATCH_HEADERS)
        self._job_events = EventStream(self._encoded_job, headers=WATCH_HEADERS)

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Adds all routes."""
        router.add_get(STATE_ROUTE, self._state, allow_head=True)
        router.add_get(METRICS_ROUTE, self._metrics, allow_head=True)
        router.add_get(PAGE_ROUTE, self._show, allow_head=True)
        router.add_get(JOB_ROUTE, self._show, allow_head=True)
        router.add_get(EVENTS_ROUTE, self._events.watch, allow_head=False)
        router.add_get(JOB_EVENTS_ROUTE, self._job_events.watch, allow_head=False)

    async def _state(self, _request: web.Request) -> web.StreamResponse:
        # A part may have to wait for a moment, and the loop waits for nothing; nor do peers for a crowd that watches.
        body, content_type = await _in_time(self._states, _JSON)
        return web.Response(body=body, headers={**WATCH_HEADERS, "Content-Type": content_type})

    async def _show(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._page.body, headers=self._page.headers)

    def _state_in_form(self, form: str) -> Scrape:
        return self._encoded_state(), form

    def _encoded_state(self) -> bytes:
        return encode_told(self._watch.state())

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        body, content_type = await _in_time(self._scraping, accepted(request.headers.get("Accept", "")))
        return web.Response(body=body, headers={**WATCH_HEADERS, "Content-Type": content_type})

    def _encoded_job(self) -> bytes:
        return encode_told(self._job.look())

    def _find_job(self) -> KnownJob:
        find = self._watch.find_job
        job = find() if find is not None else KnownJob()
        return job if job.members else alone(self._address, self._name)


async def _in_time(scraping: Scraping, form: str) -> Scrape:
    try:
        return await scraping.scrape(form)
    except asyncio.TimeoutError:
        raise web.HTTPServiceUnavailable(text="what is told could not be found out in time") from None
