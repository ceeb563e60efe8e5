"""Engines are asked now and then which version they serve; one that has lost it is told again, without a publish."""

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
"""An engine that is down, or does not keep what it is told, is asked at least so many times less often."""

_own_random = random.Random()
"""Not the process's generator: what the trainer draws from that must not depend on how often an engine was."""

Finding: TypeAlias = Literal["good", "lost", "down", "busy"]


class EnginePoller:
    """Watches engines, on the loop that notifies them.

    Args:
        interval_s: How often each engine is asked, at least.
        newest: Returns the newest version, if there is one.
        deliver: Delivers it to an engine; it ends by itself.
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
        """Asks one engine until this is cancelled."""
        pause_s = self._interval_s
        while True:
            # Not all engines at once, though all of them were told at once.
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
        """Asks an idle engine, and says what that means.

        Returns:
            ``lost``: it has to be told again. ``down``: it did not answer. ``busy``: a delivery was more urgent.
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
            # It is there, and has no route that tells.
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
    """Whether an engine that answers has to be told of the newest version again.

    Args:
        known: What was known of it before it answered.
        newest: The newest version.
        version: The one that it serves; ``None`` for none of this publisher's.
        says: Whether it can say so.
        was_resumed: It was left paused, and is not any more: it is another process.
    """
    if says and version is not None and version > newest:
        return False  # Somebody else's, who is further.
    match known.outcome:
        case "confirmed":
            return version != newest if says else known.was_down
        case "unreachable" | "late":
            return True
        case _:
            # It would refuse it again, unless it was restarted.
            is_behind = known.version is not None and (version is None or version < known.version)
            return known.was_down or was_resumed or (says and is_behind)


async def _answer(engine: PolledEngine, connection: EngineConnection, newest: Delivery) -> int | Exception | None:
    """What somebody else's code returned or raised; on the loop's own thread nothing else may come of it."""
    try:
        version: object = await engine.served_version(connection, newest)
    except (EngineRefusedError, EngineUnreachableError) as error:
        return error
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return RuntimeError(f"{type(error).__name__}: {error}")
    if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
        return TypeError(f"expected served_version to return a number or None, got {type(version).__name__}")
    return version
