"""Notifies all engines of one publisher at once, and tracks the version that each engine uses."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from ft_transport.errors import ConfigurationError, PublishError, TransportError
from ft_transport.publish.delivery import EngineDelivery, KnownEngine, Link
from ft_transport.publish.engines.adapters import refusal
from ft_transport.publish.engines.engine import LEFT_PAUSED, Delivery, Engine, PolledEngine
from ft_transport.publish.polling import EnginePoller
from ft_transport.publish.report import EngineReport, EngineState, Policy, PublishReport, judge
from ft_transport.publish.report_store import ReportStore
from ft_transport.runtime.handler_safety import LazyThread, SafeFuture

logger = logging.getLogger(__name__)

_TICK_S: Final = 0.25
_CLOSING_S: Final = 15.0

T = TypeVar("T")


class EngineNotifier:
    """Notifies engines, on its own thread. Thread-safe.

    Args:
        policy: When a version counts as published.
        timeout_s: Deadline of each engine in seconds, from when it is notified.
        poll_interval_s: How often engines are polled for their version, in seconds; ``None`` for never.
        reports: Gets two reports of each version: one when the policy has decided, and one when no engine is pending
            any more.
        changed: Called on the notifier's thread when the engines' versions may have changed outside a publish.
    """

    def __init__(
        self,
        policy: Policy,
        timeout_s: float,
        *,
        poll_interval_s: float | None,
        reports: ReportStore,
        changed: Callable[[], None],
    ) -> None:
        self._policy: Policy = policy
        self._timeout_s = timeout_s
        self._reports = reports
        self._changed = changed
        self._mutex = threading.Lock()
        # Replaced as a whole, so that each reader sees one consistent state.
        self._engines: dict[str, KnownEngine] = {}
        self._left: dict[str, Link] = {}
        self._newest: Delivery | None = None
        self._is_polling = True
        self._is_closed = False
        self._thread = LazyThread(self._run, "ft-transport-publish")
        self._session: aiohttp.ClientSession | None = None
        self._under_way: set[asyncio.Task[Any]] = set()
        self._poller: EnginePoller | None = None
        if poll_interval_s is not None:
            self._poller = EnginePoller(poll_interval_s, self._newest_to_poll, self._tell)
        self._loop = asyncio.new_event_loop()

    def begin_with(self, newest: Delivery) -> None:
        """Record the version for engines that are added before the next publish."""
        with self._mutex:
            self._newest = newest

    def notify(self, delivery: Delivery) -> Future[PublishReport]:
        """Begin to notify all engines of a version.

        Returns:
            The final report.

        Raises:
            PublishError: The notifier is closed.
        """
        with self._mutex:
            self._refuse_if_closed()
            self._newest = delivery
            self._thread.start()
            engines = tuple(self._engines.values())
            return self._submit(lambda: self._notify_all(delivery, engines))

    def add(self, engine: Engine) -> Future[None] | None:
        """Add an engine, and begin to notify it of the newest version, if any.

        Returns:
            Completes when that delivery ends; ``None`` without a version.

        Raises:
            ConfigurationError: The object is not an engine, or its URL is already in use.
            PublishError: The notifier is closed.
        """
        with self._mutex:
            self._refuse_if_closed()
            known = self.insert(engine)
            if self._newest is None:
                return None
            self._thread.start()
            newest = self._newest
            return self._submit(lambda: self._tell(known, newest))

    def remove(self, url: str) -> None:
        """Remove an engine, and cancel a running delivery to it.

        Raises:
            ConfigurationError: No engine has this URL.
            PublishError: The notifier is closed.
        """
        with self._mutex:
            self._refuse_if_closed()
            known = self._engines.get(url) or self._engines.get(url.rstrip("/"))
            if known is None:
                raise ConfigurationError(f"expected the URL of an engine, one of {sorted(self._engines)}, got {url!r}")
            known.is_removed = True
            self._engines = {each: other for each, other in self._engines.items() if other is not known}
            # The engine may be added again while a task still resumes it.
            self._left = {each: link for each, link in self._left.items() if link.is_busy or link.is_left_paused}
            self._left[known.url] = known.link
            if self._thread.is_begun:
                self._loop.call_soon_threadsafe(self._give_up, known)

    def check_features(self, features: Mapping[str, object]) -> None:
        """Refuse an adapter that an engine would apply differently from the trainer.

        Args:
            features: See `features_of`.

        Raises:
            PublishError: Names the engine, and the feature that it does not apply.
        """
        for known in self._engines.values():
            if reason := refusal(known.engine, features):
                raise PublishError(reason)

    def states(self) -> tuple[EngineState, ...]:
        """Return the state of each engine."""
        return tuple(known.state() for known in self._engines.values())

    def versions_in_use(self) -> set[int] | None:
        """Return the versions that engines may be using; ``None`` if an engine never reported one."""
        versions: set[int] = set()
        for known in self._engines.values():
            used = known.versions_in_use()
            if used is None:
                return None
            versions |= used
        return versions

    def stop_polling(self) -> None:
        """Stop polling. The garbage collector may call it."""
        self._is_polling = False

    def close(self) -> None:
        """Cancel the running notifications, and end the thread. May be called twice."""
        with self._mutex:
            is_first, self._is_closed = not self._is_closed, True
        if self._thread.is_alive():
            if is_first:
                self._submit(self._end)
            self._thread.join(3 * _CLOSING_S)
            if self._thread.is_alive():
                logger.warning("an engine's deliver does not give way: its thread is left behind")
        if not self._loop.is_running():
            self._loop.close()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise PublishError("expected a publisher that is open, this one is closed")

    def insert(self, engine: Engine) -> KnownEngine:
        """Add an engine without a notification before the next publish.

        Raises:
            ConfigurationError: The object is not an engine, or its URL is already in use.
        """
        if not isinstance(engine, Engine):
            raise ConfigurationError(f"expected engines with url, headers and deliver, got {engine!r}")
        if engine.url in self._engines:
            raise ConfigurationError(f"expected each engine once, got another one of {engine.url}")
        known = KnownEngine(engine, self._left[engine.url] if engine.url in self._left else Link())
        self._engines = {**self._engines, engine.url: known}
        return known

    def _submit(self, start: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Work as ``asyncio.run_coroutine_threadsafe``, whose future a signal handler can leave locked for the loop."""
        future: Future[T] = SafeFuture()

        def begin() -> None:
            task = self._loop.create_task(start())
            self._under_way.add(task)
            task.add_done_callback(settle)

        def settle(task: asyncio.Task[T]) -> None:
            self._under_way.discard(task)
            if task.cancelled():
                future.cancel()
                future.set_running_or_notify_cancel()
            elif (error := task.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result())

        self._loop.call_soon_threadsafe(begin)
        return future

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _end(self) -> None:
        self._is_polling = False
        watching = {known.watching for known in self._engines.values() if known.watching is not None}
        given_up = (self._under_way | watching) - {asyncio.current_task()}
        for task in given_up:
            task.cancel()
        if given_up:
            await asyncio.wait(given_up, timeout=_CLOSING_S)
        # Cancelled deliveries end now, and may start tasks that resume an engine.
        for _ in range(2):
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                await asyncio.wait(others, timeout=_CLOSING_S)
        for url, link in {**self._left, **{known.url: known.link for known in self._engines.values()}}.items():
            if link.is_left_paused:
                logger.warning("%s: %s", url, LEFT_PAUSED)
        if self._session is not None:
            await self._session.close()
        self._loop.stop()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _begin(self, known: KnownEngine, delivery: Delivery) -> asyncio.Task[EngineReport]:
        """Begin to notify one engine. To give the delivery up, cancel the task."""
        session = self._open_session()
        known.newest = max(known.newest, delivery.version)
        task = asyncio.get_running_loop().create_task(EngineDelivery(known, delivery, self._timeout_s).run(session))
        known.tasks.add(task)
        task.add_done_callback(known.tasks.discard)
        if self._poller is not None and known.watching is None and isinstance(known.engine, PolledEngine):
            known.watching = asyncio.get_running_loop().create_task(self._poller.watch(known, session))
        return task

    def _give_up(self, known: KnownEngine) -> None:
        """Cancel the deliveries and the polls of a removed engine."""
        for task in (*known.tasks, known.watching):
            if task is not None:
                task.cancel()
        self._changed()

    def _newest_to_poll(self) -> Delivery | None:
        return self._newest if self._is_polling else None

    async def _tell(self, known: KnownEngine, delivery: Delivery) -> None:
        """Deliver the newest version to one engine, outside a publish."""
        if known.is_removed:
            return
        telling = self._begin(known, delivery)
        try:
            await asyncio.wait({telling})
        finally:
            telling.cancel()
        self._changed()

    async def _notify_all(self, delivery: Delivery, engines: Sequence[KnownEngine]) -> PublishReport:
        reports = [
            EngineReport(url=known.url, outcome="pending", is_counted=known.is_counted, version=known.used)
            for known in engines
        ]
        is_posted = False
        ticking = asyncio.ensure_future(self._keep_ticking())
        telling: dict[asyncio.Task[EngineReport], int] = {}
        for number, known in enumerate(engines):
            if known.is_removed:
                reports[number] = _removed(reports[number])
            else:
                telling[self._begin(known, delivery)] = number
        try:
            pending = set(telling)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    number = telling[each]
                    reports[number] = _removed(reports[number]) if each.cancelled() else each.result()
                report = self._report(delivery, reports)
                if report.verdict != "open" and pending and not is_posted:
                    is_posted = True
                    await asyncio.to_thread(self._reports.post, report)
            report = self._report(delivery, reports)
            await asyncio.to_thread(self._reports.post, report)
            return report
        except asyncio.CancelledError:
            given_up = [
                msgspec.structs.replace(each, outcome="failed", body="given up: the publisher was closed")
                if each.outcome == "pending"
                else each
                for each in reports
            ]
            self._reports.post(self._report(delivery, given_up))
            raise
        finally:
            ticking.cancel()
            for each in telling:
                each.cancel()

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
                await asyncio.to_thread(self._reports.tick)
            except TransportError as error:
                logger.warning("the other ranks could not be shown that this one is alive: %s", error)
            await asyncio.sleep(_TICK_S)


def _removed(report: EngineReport) -> EngineReport:
    return msgspec.structs.replace(report, outcome="removed", is_counted=False, body="given up: it was removed")
