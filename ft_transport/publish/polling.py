"""Polls of the engines' versions: an engine that lost the newest version gets it again, without a publish."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final, Literal, TypeAlias

import aiohttp

from ft_transport.errors import EngineRefusedError, EngineUnreachableError
from ft_transport.publish.delivery import KnownEngine
from ft_transport.publish.engines.engine import NO_ROUTE, Delivery, EngineConnection, PolledEngine

logger = logging.getLogger(__name__)

_ANSWER_S: Final = 5.0
_MAX_BACKOFF: Final = 6
"""Largest factor by which the poll interval grows for an engine that is down, or loses versions again and again."""

_own_random = random.Random()
"""Separate from the process's generator: the trainer's random numbers must not depend on the number of polls."""

Finding: TypeAlias = Literal["good", "lost", "down", "busy"]


class EnginePoller:
    """Polls engines, on the loop that notifies them.

    Args:
        interval_s: Longest time between two polls of an engine, in seconds.
        newest: Returns the newest version, if any.
        deliver: Delivers that version to an engine; ends by itself.
    """

    def __init__(
        self,
        interval_s: float,
        newest: Callable[[], Delivery | None],
        deliver: Callable[[KnownEngine, Delivery], Awaitable[object]],
    ) -> None:
        self._interval_s = interval_s
        self._newest = newest
        self._deliver = deliver

    async def watch(self, known: KnownEngine, session: aiohttp.ClientSession) -> None:
        """Poll one engine until this is cancelled."""
        pause_s = self._interval_s
        while True:
            # Spreads the polls: all engines were notified at the same time.
            await asyncio.sleep(pause_s * _own_random.uniform(0.8, 1.0))
            newest = self._newest()
            if newest is None or known.outcome is None or known.link.is_busy:
                continue
            finding = await self.look(known, newest, session)
            if finding == "lost" and newest is self._newest():
                await self._deliver(known, newest)
            is_in_order = finding in ("good", "busy")
            pause_s = self._interval_s if is_in_order else min(2 * pause_s, _MAX_BACKOFF * self._interval_s)

    async def look(self, known: KnownEngine, newest: Delivery, session: aiohttp.ClientSession) -> Finding:
        """Poll an idle engine, and interpret its answer.

        Returns:
            ``lost``: the engine needs the newest version again. ``down``: it did not answer. ``busy``: a delivery took
            precedence.
        """
        link = known.link
        assert isinstance(known.engine, PolledEngine), "others are not watched"
        connection = known.connection(session)
        await link.mutex.acquire()
        link.asking = asking = asyncio.ensure_future(_answer(known.engine, connection, newest))
        asking.add_done_callback(lambda _: link.mutex.release())
        try:
            await asyncio.wait({asking}, timeout=_ANSWER_S)
        finally:
            is_late = not asking.done()
            asking.cancel()
            link.asking = None
        if is_late:
            return self._down(known, f"no answer within {_ANSWER_S:g} s when it was asked for its version")
        if asking.cancelled():
            return "busy"
        answer = asking.result()
        if isinstance(answer, Exception):
            if not isinstance(answer, EngineRefusedError) or answer.status not in NO_ROUTE:
                return self._down(known, f"when it was asked for its version: {type(answer).__name__}: {answer}")
            # The engine runs, but has no route that reports its version.
            says, version = False, None
        else:
            says, version = True, answer
        was_resumed = link.is_left_paused and not connection.is_left_paused
        is_lost = needs_delivery(known, newest.version, version, says=says, was_resumed=was_resumed)
        link.is_left_paused = connection.is_left_paused
        known.was_down, known.poll_failure = False, ""
        if not is_lost:
            return "good"
        if says:
            known.version, known.has_said = version, True
        served = f"version {version}" if version is not None else "none" if says else "it does not say which"
        logger.info("%s serves %s, as if it had been restarted: it is told of %d", known.url, served, newest.version)
        return "lost"

    @staticmethod
    def _down(known: KnownEngine, failure: str) -> Finding:
        if not known.was_down:
            logger.info("%s: %s", known.url, failure)
        known.was_down, known.poll_failure = True, failure
        return "down"


def needs_delivery(known: KnownEngine, newest: int, version: int | None, *, says: bool, was_resumed: bool) -> bool:
    """Return whether an engine that answers needs the newest version again.

    Args:
        known: The engine's record from before the answer.
        newest: The newest version.
        version: The version that the engine serves; ``None`` for none of this publisher's.
        says: Whether the engine can report its version.
        was_resumed: The engine was left paused and no longer is: it is another process.
    """
    if says and version is not None and version > newest:
        return False  # A version of another publisher, which is ahead.
    match known.outcome:
        case "confirmed":
            return version != newest if says else known.was_down
        case "unreachable" | "late":
            return True
        case _:
            # The engine would refuse the version again, unless it was restarted.
            is_behind = known.version is not None and (version is None or version < known.version)
            return known.was_down or was_resumed or (says and is_behind)


async def _answer(engine: PolledEngine, connection: EngineConnection, newest: Delivery) -> int | Exception | None:
    """Return the result or the error of the engine's own code; nothing else may reach the loop's thread."""
    try:
        version: object = await engine.served_version(connection, newest)
    except (EngineRefusedError, EngineUnreachableError) as error:
        return error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return RuntimeError(f"{type(error).__name__}: {error}")
    if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
        return TypeError(f"expected served_version to return a number or None, got {type(version).__name__}")
    return version
