"""What is asked for again and again, found out once at a time however many ask: who is asked is training."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

_TIMEOUT_S: Final = 5.0
"""Nothing that is read waits; Prometheus itself gives up after 10 s unless it is told otherwise."""

Scrape = tuple[bytes, str]


class Scraping:
    """Answers on one thread beside the event loop. Belongs to the loop.

    Whoever asks while a scrape runs gets the next one, and shares it with all others who did: a crowd costs two.

    Args:
        produce: Finds out what is told, in a form; called on that thread.
        timeout_s: How long a scrape may take, and how long one may wait for another one's.
    """

    def __init__(self, produce: Callable[[str], Scrape], *, timeout_s: float = _TIMEOUT_S) -> None:
        self._produce = produce
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._running: asyncio.Future[Scrape] | None = None
        self._last: dict[str, tuple[float, Scrape]] = {}

    async def scrape(self, form: str) -> Scrape:
        """What is told, as of this call or later.

        Args:
            form: One of a few.

        Raises:
            asyncio.TimeoutError: It takes too long.
        """
        return await asyncio.wait_for(self._scrape(form, time.monotonic()), self._timeout_s)

    async def _scrape(self, form: str, asked_s: float) -> Scrape:
        async with self._turn:
            began_s, last = self._last.get(form, (float("-inf"), None))
            if last is not None and began_s >= asked_s:
                return last
            if self._running is not None:
                # One that somebody has given up. Another thread would wait for the same.
                await asyncio.wait({self._running})
                self._running.exception()
            began_s = time.monotonic()
            loop = asyncio.get_running_loop()
            self._running = loop.run_in_executor(None, self._produce, form)
            await asyncio.wait({self._running})
            done, self._running = self._running, None
            self._last[form] = began_s, done.result()
            return self._last[form][1]
