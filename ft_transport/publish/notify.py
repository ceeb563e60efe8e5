"""All engines of one publisher: which version each of them uses; all are notified of a new one at once."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import aiohttp
import msgspec

from ft_transport.errors import EngineRefusedError, EngineUnreachableError, TransportError
from ft_transport.publish.engines.engine import LEFT_PAUSED, Delivery, Engine, EngineConnection
from ft_transport.publish.report import EngineReport, Policy, PublishReport, judge

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
_TICK_S: Final = 0.25
_NUM_DOUBTFUL: Final = 4
"""An engine that hangs for good must not keep every version on disk."""
_CLOSING_S: Final = 15.0

Post = Callable[[PublishReport], None]


@dataclass(slots=True)
class _Known:
    """What is known of an engine.

    Attributes:
        version: The one that it confirmed last; ``None`` if it never did.
        is_counted: Whether it confirmed the last version that it was notified of.
        doubtful: Versions that it may have begun to load, and not confirmed; the latest few.
        serving: Versions that it lists as served, beside the one that it confirmed.
        newest: The newest version that it is to be notified of.
        is_left_paused: See `EngineConnection`.
        mutex: It is notified of one version after the other.
        unfinished: What goes on beside the attempts, such as resuming it.
    """

    version: int | None = None
    is_counted: bool = True
    doubtful: tuple[int, ...] = ()
    serving: set[int] = field(default_factory=set)
    newest: int = -1
    is_left_paused: bool = False
    mutex: asyncio.Lock = field(default_factory=asyncio.Lock)
    unfinished: set[asyncio.Task[None]] = field(default_factory=set)


class EngineNotifier:
    """Notifies engines, on a thread of its own.

    Args:
        engines: Engines to notify.
        policy: When a version counts as published.
        timeout: Deadline of each engine, from when it is notified.
        tick: Called now and then while an engine is being notified; it may block for a moment.
    """

    def __init__(self, engines: Sequence[Engine], policy: Policy, timeout: timedelta, tick: Callable[[], None]) -> None:
        self._engines = tuple(engines)
        self._policy: Policy = policy
        self._timeout_s = timeout.total_seconds()
        self._tick = tick
        self._known = [_Known() for _ in self._engines]
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._session: aiohttp.ClientSession | None = None
        self._notifying: set[asyncio.Task[PublishReport]] = set()

    def notify(self, delivery: Delivery, post: Post) -> Future[PublishReport]:
        """Begins to notify all engines of a version.

        Args:
            delivery: The version.
            post: Called when the outcome is decided, and again when the last engine has been heard of; it may block
                for a moment.

        Returns:
            The last report.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ft-transport-publish", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._notify_all(delivery, post), self._loop)

    def versions_in_use(self) -> set[int] | None:
        """Versions that engines may be using; ``None`` if one has never confirmed any."""
        versions: set[int] = set()
        for known in self._known:
            if known.version is None:
                return None
            versions |= {known.version, *known.doubtful, *known.serving}
        return versions

    def close(self) -> None:
        """Gives up engines that are being notified, and ends the thread. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            thread.join(3 * _CLOSING_S)
            if thread.is_alive():
                logger.warning("an engine's deliver does not give way: its thread is left behind")
        if not self._loop.is_running():
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _end(self) -> None:
        for task in self._notifying:
            task.cancel()
        if self._notifying:
            await asyncio.wait(self._notifying, timeout=_CLOSING_S)
        # What was given up ends now, and may leave an engine to be resumed.
        for _ in range(2):
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                await asyncio.wait(others, timeout=_CLOSING_S)
        for engine, known in zip(self._engines, self._known, strict=True):
            if known.is_left_paused:
                logger.warning("%s: %s", engine.url, LEFT_PAUSED)
        if self._session is not None:
            await self._session.close()
        self._loop.stop()

    async def _notify_all(self, delivery: Delivery, post: Post) -> PublishReport:
        task = asyncio.current_task()
        assert task is not None, "it runs on the loop"
        self._notifying.add(task)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        reports = [
            EngineReport(url=engine.url, outcome="pending", is_counted=known.is_counted, version=known.version)
            for engine, known in zip(self._engines, self._known, strict=True)
        ]
        is_posted = False
        ticking = asyncio.ensure_future(self._keep_ticking())
        for known in self._known:
            known.newest = max(known.newest, delivery.version)
        notifying = {
            asyncio.ensure_future(self._notify_one(number, delivery)): number for number in range(len(self._engines))
        }
        try:
            pending = set(notifying)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    reports[notifying[each]] = each.result()
                report = self._report(delivery, reports)
                if report.verdict != "open" and pending and not is_posted:
                    is_posted = True
                    await asyncio.to_thread(post, report)
            report = self._report(delivery, reports)
            await asyncio.to_thread(post, report)
            return report
        except asyncio.CancelledError:
            given_up = [
                msgspec.structs.replace(each, outcome="failed", body="given up: the publisher was closed")
                if each.outcome == "pending"
                else each
                for each in reports
            ]
            post(self._report(delivery, given_up))
            raise
        finally:
            ticking.cancel()
            for each in notifying:
                each.cancel()
            self._notifying.discard(task)

    def _report(self, delivery: Delivery, reports: Sequence[EngineReport]) -> PublishReport:
        return PublishReport(
            version=delivery.version,
            engines=tuple(reports),
            verdict=judge(reports, self._policy),
            is_final=all(each.outcome != "pending" for each in reports),
        )

    async def _keep_ticking(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._tick)
            except TransportError as error:
                logger.warning("the other ranks could not be shown that this one is alive: %s", error)
            await asyncio.sleep(_TICK_S)

    async def _notify_one(self, number: int, delivery: Delivery) -> EngineReport:
        """Notifies one engine, as often as its connection breaks, until its deadline. Raises nothing."""
        engine, known = self._engines[number], self._known[number]
        attempt = _Attempt(engine, known, delivery)
        started_s = time.monotonic()
        is_counted = known.is_counted
        outcome = await self._outcome(known, attempt)
        if outcome["outcome"] == "confirmed":
            known.doubtful = ()
        elif outcome["outcome"] != "superseded":
            known.is_counted = False
        if outcome["outcome"] != "confirmed" and attempt.may_be_loading:
            # Its request was given up here, which need not keep the engine from going on with it.
            known.doubtful = (*known.doubtful, delivery.version)[-_NUM_DOUBTFUL:]
        facts = {
            "url": engine.url,
            "is_counted": is_counted,
            "seconds": time.monotonic() - started_s,
            "num_attempts": attempt.number,
            "version": known.version,
            **outcome,
        }
        report = msgspec.convert(facts, EngineReport)
        if report.outcome not in ("confirmed", "superseded"):
            logger.warning("version %d: an engine is left out until it is caught up: %s", delivery.version, report)
        elif report.outcome == "confirmed" and not is_counted:
            logger.info("version %d: caught up: %s", delivery.version, report)
        return report

    async def _outcome(self, known: _Known, attempt: _Attempt) -> dict[str, object]:
        assert self._session is not None, "it was made"
        late: dict[str, object] = {"outcome": "late", "body": f"no answer within {self._timeout_s:g} s"}
        try:
            # The attempt that holds it has a deadline, too.
            await asyncio.wait_for(known.mutex.acquire(), self._timeout_s + _CLOSING_S)
        except (TimeoutError, asyncio.TimeoutError):
            return late
        if known.newest > attempt.delivery.version:
            known.mutex.release()
            return {"outcome": "superseded", "body": f"version {known.newest} was published before its turn"}
        delivering = asyncio.ensure_future(attempt.until_it_answers(self._session))
        # Also if it does not give way when it is given up: then the engine stays taken.
        delivering.add_done_callback(lambda _: known.mutex.release())
        try:
            await asyncio.wait({delivering}, timeout=self._timeout_s)
        finally:
            delivering.cancel()
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
                known.version, known.is_counted = delivering.result(), True
                return {"outcome": "confirmed"}
            case EngineRefusedError():
                return {
                    "outcome": "refused",
                    "status": error.status,
                    "body": error.body or str(error),
                    "request": error.request,
                }
            case _:
                logger.error(
                    "version %d: %s could not be notified", attempt.delivery.version, attempt.engine.url, exc_info=error
                )
                return {"outcome": "failed", "body": f"{type(error).__name__}: {error}"}


@dataclass(slots=True)
class _Attempt:
    """One engine and one version.

    Attributes:
        engine: The engine.
        known: What is known of it.
        delivery: The version.
        number: How often it was tried.
        failure: Why the last attempt did not get through.
        may_be_loading: Whether the engine may have heard of it.
        connection: To the engine; ``None`` before the first try.
    """

    engine: Engine
    known: _Known
    delivery: Delivery
    number: int = 0
    failure: EngineUnreachableError | None = None
    may_be_loading: bool = False
    connection: EngineConnection | None = None

    @property
    def is_left_paused(self) -> bool:
        """See `EngineConnection`."""
        return self.connection is not None and self.connection.is_left_paused

    async def until_it_answers(self, session: aiohttp.ClientSession) -> int:
        """Tries again while no connection can be made, or it breaks.

        Raises:
            EngineRefusedError: It answered with an error, or uses another version.
            RuntimeError: The engine's own code wants to end the process.
        """
        connection = self.connection = EngineConnection(session, self.engine.url, self.engine.headers)
        connection.unfinished = self.known.unfinished
        connection.serving = self.known.serving
        connection.is_left_paused = self.known.is_left_paused
        pause_s = _FIRST_PAUSE_S
        while True:
            if self.known.unfinished:
                # What resumes it must not come in the middle of the next attempt.
                await asyncio.wait(self.known.unfinished)
            self.number += 1
            was_heard, self.may_be_loading = self.may_be_loading, True
            try:
                try:
                    version = await self.engine.deliver(connection, self.delivery)
                finally:
                    self.known.is_left_paused = connection.is_left_paused
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
                        peer=self.engine.url,
                    )
                return version
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
