"""One version for one engine: tried until the engine answers or its deadline comes, and what came of it."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from ft_transport.errors import EngineRefusedError, EngineUnreachableError, escape_peer_text
from ft_transport.publish.engines.adapters import check_applied
from ft_transport.publish.engines.engine import LEFT_PAUSED, Delivery, EngineConnection
from ft_transport.publish.known_engine import KnownEngine
from ft_transport.publish.report import EngineReport

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
_NUM_DOUBTFUL: Final = 4
_MAX_SHOWN_CHARACTERS: Final = 3000
"""An engine that hangs for good must not keep every version on disk."""
_GIVING_WAY_S: Final = 15.0


async def deliver(
    known: KnownEngine, delivery: Delivery, session: aiohttp.ClientSession, timeout_s: float
) -> EngineReport:
    """Notifies one engine, as often as its connection breaks, until its deadline. Raises nothing.

    Args:
        known: The engine; what came of it is noted there.
        delivery: The version.
        session: Whose connections are used.
        timeout_s: The deadline, from when the engine is done with the version before.
    """
    attempt = _Attempt(known, delivery)
    started_s = time.monotonic()
    is_counted = known.is_counted
    outcome = await _outcome(known, attempt, session, timeout_s)
    if outcome["outcome"] == "confirmed":
        known.doubtful = ()
    elif outcome["outcome"] != "superseded":
        known.is_counted = False
    if outcome["outcome"] != "confirmed" and attempt.may_be_loading:
        # Its request was given up here, which need not keep the engine from going on with it.
        known.doubtful = (*known.doubtful, delivery.version)[-_NUM_DOUBTFUL:]
    report = EngineReport(
        url=known.url,
        is_counted=is_counted,
        seconds=time.monotonic() - started_s,
        num_attempts=attempt.number,
        version=None if attempt.is_in_doubt else known.version,
        **outcome,
    )
    if report.outcome == "superseded":
        return report
    known.outcome, known.was_down, known.poll_failure = report.outcome, False, ""
    known.failure = "" if report.outcome == "confirmed" else f"version {delivery.version}: {report}"
    if known.failure:
        logger.warning("version %d: an engine is left out until it is caught up: %s", delivery.version, report)
    elif not is_counted:
        logger.info("version %d: caught up: %s", delivery.version, report)
    return report


async def _outcome(
    known: KnownEngine, attempt: _Attempt, session: aiohttp.ClientSession, timeout_s: float
) -> dict[str, Any]:
    late: dict[str, Any] = {"outcome": "late", "body": f"no answer within {timeout_s:g} s"}
    mutex = known.link.mutex
    if known.link.asking is not None:
        known.link.asking.cancel()
    try:
        # The attempt that holds it has a deadline, too.
        await asyncio.wait_for(mutex.acquire(), timeout_s + _GIVING_WAY_S)
    except (TimeoutError, asyncio.TimeoutError):
        return late
    if known.is_removed:
        # wait_for of Python 3.11 loses a cancellation that comes together with the mutex.
        mutex.release()
        raise asyncio.CancelledError
    if known.newest > attempt.delivery.version:
        mutex.release()
        return {"outcome": "superseded", "body": f"version {known.newest} was published before its turn"}
    known.loading = attempt.delivery.version
    delivering = asyncio.ensure_future(attempt.until_it_answers(session))
    # Also if it does not give way when it is given up: then the engine stays taken.
    delivering.add_done_callback(lambda _: mutex.release())
    try:
        await asyncio.wait({delivering}, timeout=timeout_s)
    finally:
        delivering.cancel()
        known.loading = None
    if not delivering.done():
        # It has been given up, and does not know yet.
        left_paused = f"; {LEFT_PAUSED}" if attempt.is_left_paused else ""
        if attempt.failure is not None:
            return {"outcome": "unreachable", "body": f"{attempt.failure}{left_paused}"}
        return {**late, "body": f"{late['body']}{left_paused}"}
    if delivering.cancelled():
        return {"outcome": "failed", "body": "the engine's deliver was cancelled"}
    error = delivering.exception()
    match error:
        case None:
            known.version, known.has_said, known.is_counted = delivering.result(), True, True
            attempt.confirm()
            return {"outcome": "confirmed"}
        case EngineRefusedError():
            return {
                "outcome": "refused",
                "status": error.status,
                "body": _shown(error.body or str(error)),
                "request": error.request,
            }
        case _:
            logger.error("version %d: %s could not be notified", attempt.delivery.version, known.url, exc_info=error)
            return {"outcome": "failed", "body": _shown(f"{type(error).__name__}: {error}")}


def _shown(text: str) -> str:
    """The answer of an engine, as reports and logs show it."""
    return escape_peer_text(text, max_characters=_MAX_SHOWN_CHARACTERS)


@dataclass(slots=True)
class _Attempt:
    """One engine and one version.

    Attributes:
        known: The engine.
        delivery: The version.
        number: How often it was tried.
        failure: Why the last attempt did not get through.
        may_be_loading: Whether the engine may have heard of it.
        connection: To the engine; ``None`` before the first try.
    """

    known: KnownEngine
    delivery: Delivery
    number: int = 0
    failure: EngineUnreachableError | None = None
    may_be_loading: bool = False
    connection: EngineConnection | None = None

    @property
    def is_left_paused(self) -> bool:
        """See `EngineConnection`."""
        return self.connection is not None and self.connection.is_left_paused

    @property
    def is_in_doubt(self) -> bool:
        """See `EngineConnection`."""
        return self.connection.is_in_doubt if self.connection is not None else self.known.link.is_in_doubt

    def confirm(self) -> None:
        """Notes that the engine has confirmed the version."""
        assert self.connection is not None, "it was asked"
        self.connection.is_in_doubt = self.known.link.is_in_doubt = False

    async def until_it_answers(self, session: aiohttp.ClientSession) -> int:
        """Tries again while no connection can be made, or it breaks.

        Raises:
            EngineRefusedError: It answered with an error, or uses another version.
            RuntimeError: The engine's own code wants to end the process.
        """
        known = self.known
        connection = self.connection = known.connection(session)
        check_applied(known.engine, self.delivery)
        pause_s = _FIRST_PAUSE_S
        while True:
            if known.link.unfinished:
                # What resumes it must not come in the middle of the next attempt.
                await asyncio.wait(known.link.unfinished)
            self.number += 1
            was_heard, self.may_be_loading = self.may_be_loading, True
            try:
                try:
                    version = await known.engine.deliver(connection, self.delivery)
                finally:
                    known.link.is_left_paused = connection.is_left_paused
                    known.link.is_in_doubt = connection.is_in_doubt
            except EngineUnreachableError as error:
                self.failure = error
                if isinstance(error.__cause__, aiohttp.ClientConnectorError):
                    self.may_be_loading = was_heard
            except (SystemExit, KeyboardInterrupt) as error:
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            else:
                if version != self.delivery.version:
                    raise EngineRefusedError(
                        f"expected the engine to use version {self.delivery.version}, it uses {version}",
                        peer=known.url,
                    )
                return version
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
