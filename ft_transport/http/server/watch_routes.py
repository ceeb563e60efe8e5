"""The routes for monitoring a process: a page for browsers, ``/state``, and ``/metrics`` for Prometheus."""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import re
import time
from collections.abc import Callable
from importlib import resources
from typing import Final

from aiohttp import web

from ft_transport.telemetry.metrics import accepted, encode_metrics
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.telemetry.record import encode_json
from ft_transport.wire.routes import METRICS_ROUTE, PAGE_ROUTE, STATE_ROUTE

_JSON: Final = "application/json"
_PAGE: Final = "page.html"
_TIMEOUT_S: Final = 5.0
"""Longest time to collect the state or the metrics. Usually it takes milliseconds; Prometheus gives up after 10 s."""
_WRITE_S: Final = 5.0
"""How long a client may take to read a response, apart from what fits into the buffers of its connection."""
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Scrape = tuple[bytes, str]
"""The body of a response and its content type."""


class WatchRoutes:
    """The handlers of the monitoring routes. Used only on the server's event loop.

    Args:
        process_status: Status and metrics of this process.
    """

    def __init__(self, process_status: ProcessStatus) -> None:
        self._scraping = Coalescer(functools.partial(encode_metrics, process_status.metrics))
        self._states = Coalescer(lambda form: (encode_json(process_status.state()), form))

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add all routes."""
        router.add_get(STATE_ROUTE, self._state, allow_head=True)
        router.add_get(METRICS_ROUTE, self._metrics, allow_head=True)
        router.add_get(PAGE_ROUTE, self._page, allow_head=True)

    async def _state(self, request: web.Request) -> web.StreamResponse:
        return await _answer(request, self._states, _JSON)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return await _answer(request, self._scraping, accepted(request.headers.get("Accept", "")))

    async def _page(self, _request: web.Request) -> web.StreamResponse:
        body, headers = load_page()
        return web.Response(body=body, headers=headers)


class Coalescer:
    """Collects a result on a thread outside the event loop, once for all concurrent requests.

    Only one collection runs at a time. Requests that arrive meanwhile share the next collection, so that any number of
    concurrent requests costs at most two collections.

    Args:
        produce: Collects a result in the given form. Called on another thread.
        timeout_s: Longest wait of a request, in seconds.
    """

    def __init__(self, produce: Callable[[str], Scrape], *, timeout_s: float = _TIMEOUT_S) -> None:
        self._produce = produce
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._running: asyncio.Future[Scrape] | None = None
        self._last: dict[str, tuple[float, Scrape]] = {}

    async def scrape(self, form: str) -> Scrape:
        """Return a result whose collection began during this call.

        Args:
            form: The form of the result, such as a content type. There must be few forms, because the last result of
                each form stays in memory.

        Raises:
            asyncio.TimeoutError: The collection took too long.
        """
        return await asyncio.wait_for(self._scrape(form, time.monotonic()), self._timeout_s)

    async def _scrape(self, form: str, asked_s: float) -> Scrape:
        async with self._turn:
            began_s, last = self._last.get(form, (float("-inf"), None))
            if last is not None and began_s >= asked_s:
                return last
            if self._running is not None:
                # The request that started this collection has timed out. Waits for its end before the next one starts.
                await asyncio.wait({self._running})
                self._running.exception()
            began_s = time.monotonic()
            loop = asyncio.get_running_loop()
            self._running = loop.run_in_executor(None, self._produce, form)
            await asyncio.wait({self._running})
            done, self._running = self._running, None
            self._last[form] = began_s, done.result()
            return self._last[form][1]


async def _answer(request: web.Request, scraping: Coalescer, form: str) -> web.StreamResponse:
    try:
        body, content_type = await scraping.scrape(form)
    except asyncio.TimeoutError:
        raise web.HTTPServiceUnavailable(text="the process did not collect its state in time") from None
    response = web.Response(body=body, headers={**_HEADERS, "Content-Type": content_type})
    try:
        await response.prepare(request)
        await asyncio.wait_for(response.write_eof(), _WRITE_S)
    except (OSError, asyncio.TimeoutError):  # The client has disconnected, or does not read.
        if request.transport is not None:
            request.transport.abort()
    return response


@functools.cache
def load_page() -> tuple[bytes, dict[str, str]]:
    """Return the HTML page and its headers, which let a browser run only the page's own script."""
    body = resources.files(__package__).joinpath(_PAGE).read_bytes()
    policy = "; ".join(
        [
            "default-src 'none'",
            f"style-src {_hash('style', body)}",
            f"script-src {_hash('script', body)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )
    return body, {
        **_HEADERS,
        "Content-Security-Policy": policy,
        "Content-Type": "text/html; charset=utf-8",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
        "X-Frame-Options": "DENY",
    }


def _hash(element: str, body: bytes) -> str:
    """Return the hash of the page's only ``<element>`` for a Content Security Policy (level 3, section 2.3.1)."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>".encode(), body, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
