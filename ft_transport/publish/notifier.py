"""Delivers versions to all engines of a publisher at the same time, and tracks the version that each engine uses."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future

# Differs from the builtin one before Python 3.11.
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from ft_transport.errors import ConfigurationError, PublishError, TransportError
from ft_transport.publish.delivery import EngineDelivery, EngineRecord, poll
from ft_transport.publish.engines.adapters import refusal
from ft_transport.publish.engines.engine import LEFT_PAUSED, Delivery, Engine, Link, PolledEngine
from ft_transport.publish.report import EngineLag, EngineReport, EngineState, Policy, PublishReport, ReportStore, judge
from ft_transport.publish.versions import StoredVersions
from ft_transport.runtime.signal_safe import LazyThread, SafeFuture

logger = logging.getLogger(__name__)

_MAX_BACKOFF: Final = 6
"""Largest factor by which the poll interval grows for an engine that is down, or repeatedly loses versions."""
_own_random: Final = random.Random()
"""Own generator: drawing from Python's global one would make the trainer's random numbers depend on the polls."""
_CLOSING_S: Final = 15.0

T = TypeVar("T")


class EngineNotifier:
    """Delivers versions to engines and polls the engines, on its own thread. Thread-safe.

    Args:
        policy: The policy that decides when a version counts as published.
        timeout_s: Seconds that each engine has for a version.
        poll_interval_s: Seconds between two polls of an engine; ``None`` disables polling.
        reports: The store for reports. The notifier posts a report when the policy is decided, and another report when
            every delivery has ended.
        versions: The versions on disk. The notifier's thread deletes versions that no engine uses any more.

    Attributes:
        lag: Measures how far the engines are behind the newest version.
    """

    def __init__(
        self,
        policy: Policy,
        timeout_s: float,
        *,
        poll_interval_s: float | None,
        reports: ReportStore,
        versions: StoredVersions,
    ) -> None:
        self._policy: Policy = policy
        self._timeout_s = timeout_s
        self._reports = reports
        self._versions = versions
        self._mutex = threading.Lock()
        # Never changed in place: a change replaces the dict, so that readers need no lock.
        self._engines: dict[str, EngineRecord] = {}
        self._links: dict[str, Link] = {}
        self._newest: Delivery | None = None
        self._is_polling = True
        self._is_closed = False
        self._thread = LazyThread(self._run, "ft-transport-publish")
        self._session: aiohttp.ClientSession | None = None
        self._under_way: set[asyncio.Task[Any]] = set()
        self._unfinished: dict[Future[Any], int | None] = {}
        self._poll_interval_s = poll_interval_s
        self.lag = EngineLag(self.states)
        self._loop = asyncio.new_event_loop()

    def begin_with(self, newest: Delivery) -> None:
        """Set the version that is delivered to engines that are added before the next publish."""
        with self._mutex:
            self._newest = newest
        self.lag.published(newest.version)

    def notify(self, delivery: Delivery) -> Future[PublishReport]:
        """Start delivering a version to all engines.

        Returns:
            A future that returns the final report.

        Raises:
            PublishError: The notifier is closed.
        """
        with self._mutex:
            self._refuse_if_closed()
            self._newest = delivery
            self.lag.published(delivery.version)
            self._thread.start()
            engines = tuple(self._engines.values())
            return self._submit(lambda: self._notify_all(delivery, engines), delivery.version)

    def add(self, engine: Engine) -> Future[None] | None:
        """Add an engine, and start delivering the newest version to the engine.

        Returns:
            A future that completes when the delivery ends; ``None`` if no version exists yet.

        Raises:
            ConfigurationError: The object is not an engine, or another engine has the same URL.
            PublishError: The notifier is closed.
        """
        with self._mutex:
            self._refuse_if_closed()
            record = self.insert(engine)
            if self._newest is None:
                return None
            self._thread.start()
            newest = self._newest
            return self._submit(lambda: self._deliver_newest(record, newest))

    def remove(self, url: str) -> None:
        """Remove an engine, and cancel its running delivery.

        Raises:
            ConfigurationError: No engine has this URL.
            PublishError: The notifier is closed.
        """
        with self._mutex:
            self._refuse_if_closed()
            record = self._engines.get(url) or self._engines.get(url.rstrip("/"))
            if record is None:
                raise ConfigurationError(f"expected the URL of an engine, one of {sorted(self._engines)}, got {url!r}")
            record.is_removed = True
            self._engines = {each: other for each, other in self._engines.items() if other is not record}
            # If the engine is added again while a task still resumes it, both must use the same link.
            self._links = {each: link for each, link in self._links.items() if link.is_busy or link.is_left_paused}
            self._links[record.url] = record.link
            if self._thread.is_begun:
                self._loop.call_soon_threadsafe(self._give_up, record)

    def check_features(self, features: Mapping[str, object]) -> None:
        """Refuse an adapter that an engine would not apply in the same way as the trainer.

        Args:
            features: The adapter's features beyond plain LoRA, as returned by `features_of`.

        Raises:
            PublishError: An engine does not apply a feature; the message names the engine and the feature.
        """
        for record in self._engines.values():
            if reason := refusal(record.engine, features):
                raise PublishError(reason)

    def states(self) -> tuple[EngineState, ...]:
        """Return the state of each engine."""
        return tuple(record.state() for record in self._engines.values())

    def _delete_unused(self) -> None:
        """Delete the versions that no delivery needs and that certainly no engine uses."""
        with self._mutex:
            versions = {version for version in self._unfinished.values() if version is not None}
        for record in self._engines.values():
            used = record.versions_in_use()
            if used is None:
                return  # An engine that never reported a version may use any.
            versions |= used
        self._versions.delete_expired(versions)

    def wait(self, deadline_s: float) -> None:
        """Wait until all running deliveries have ended, at most until ``deadline_s`` (monotonic seconds)."""
        with self._mutex:
            unfinished = list(self._unfinished)
        for notification in unfinished:
            try:
                notification.exception(max(0.0, deadline_s - time.monotonic()))
            except FutureTimeoutError:
                logger.warning("deliveries to engines were still running, and are cancelled")

    def stop_polling(self) -> None:
        """Stop polling. Takes no lock, because the garbage collector may call this on any thread."""
        self._is_polling = False

    def close(self) -> None:
        """Cancel the running deliveries, and stop the thread. Idempotent."""
        with self._mutex:
            is_first, self._is_closed = not self._is_closed, True
        if self._thread.is_alive():
            if is_first:
                with self._mutex:
                    self._submit(self._end)
            self._thread.join(3 * _CLOSING_S)
            if self._thread.is_alive():
                logger.warning("an engine's deliver() ignores its cancellation: the publisher's thread is left running")
        if not self._loop.is_running():
            self._loop.close()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise PublishError("expected an open publisher, but this one is closed")

    def insert(self, engine: Engine) -> EngineRecord:
        """Add an engine without starting a delivery.

        Raises:
            ConfigurationError: The object is not an engine, or another engine has the same URL.
        """
        if not isinstance(engine, Engine):
            raise ConfigurationError(f"expected engines with url, headers and deliver, got {engine!r}")
        if engine.url in self._engines:
            raise ConfigurationError(f"expected engines with different URLs, got two with {engine.url}")
        record = EngineRecord(engine, self._links[engine.url] if engine.url in self._links else Link())
        self._engines = {**self._engines, engine.url: record}
        return record

    def _submit(self, start: Callable[[], Coroutine[Any, Any, T]], version: int | None = None) -> Future[T]:
        """Run a coroutine on the notifier's loop; return a future of its result.

        ``asyncio.run_coroutine_threadsafe`` does the same, but its future can deadlock with a signal handler.
        """
        future: Future[T] = SafeFuture()
        self._unfinished[future] = version

        def begin() -> None:
            task = self._loop.create_task(start())
            self._under_way.add(task)
            task.add_done_callback(settle)

        def settle(task: asyncio.Task[T]) -> None:
            self._under_way.discard(task)
            with self._mutex:
                del self._unfinished[future]
            if version is not None:
                self._delete_unused()
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
        watching = {record.watching for record in self._engines.values() if record.watching is not None}
        given_up = (self._under_way | watching) - {asyncio.current_task()}
        for task in given_up:
            task.cancel()
        if given_up:
            await asyncio.wait(given_up, timeout=_CLOSING_S)
        # The cancelled deliveries may have started tasks that resume an engine.
        for _ in range(2):
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if others:
                await asyncio.wait(others, timeout=_CLOSING_S)
        for url, link in {**self._links, **{record.url: record.link for record in self._engines.values()}}.items():
            if link.is_left_paused:
                logger.warning("%s: %s", url, LEFT_PAUSED)
        if self._session is not None:
            await self._session.close()
        self._loop.stop()

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # A connection for each request: uvicorn closes one after an error of its own without saying so, and
                # the next request, which may not be sent twice, would meet that.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _begin(self, record: EngineRecord, delivery: Delivery) -> asyncio.Task[EngineReport]:
        """Start the delivery to one engine, and its polls. Cancelling the returned task cancels the delivery."""
        session = self._open_session()
        record.newest = max(record.newest, delivery.version)
        task = asyncio.get_running_loop().create_task(EngineDelivery(record, delivery, self._timeout_s).run(session))
        record.tasks.add(task)
        task.add_done_callback(record.tasks.discard)
        interval_s = self._poll_interval_s
        if interval_s is not None and record.watching is None and isinstance(record.engine, PolledEngine):
            record.watching = asyncio.get_running_loop().create_task(self._watch(record, session, interval_s))
        return task

    def _give_up(self, record: EngineRecord) -> None:
        """Cancel the deliveries and polls of a removed engine."""
        for task in (*record.tasks, record.watching):
            if task is not None:
                task.cancel()
        self._delete_unused()

    async def _watch(self, record: EngineRecord, session: aiohttp.ClientSession, interval_s: float) -> None:
        """Poll one engine until the task is cancelled; deliver the newest version again if the engine lost it."""
        pause_s = interval_s
        while True:
            # The random factor spreads the polls of engines that were all notified at the same time.
            await asyncio.sleep(pause_s * _own_random.uniform(0.8, 1.0))
            newest = self._newest
            if not self._is_polling or newest is None or record.outcome is None or record.link.is_busy:
                continue
            finding = await poll(record, newest, session)
            if finding == "lost" and newest is self._newest and self._is_polling:
                await self._deliver_newest(record, newest)
            is_in_order = finding in ("good", "busy")
            pause_s = interval_s if is_in_order else min(2 * pause_s, _MAX_BACKOFF * interval_s)

    async def _deliver_newest(self, record: EngineRecord, delivery: Delivery) -> None:
        """Deliver the newest version to one engine that was added or has lost it."""
        if record.is_removed:
            return
        delivering = self._begin(record, delivery)
        try:
            await asyncio.wait({delivering})
        finally:
            delivering.cancel()
        self._delete_unused()

    async def _notify_all(self, delivery: Delivery, engines: Sequence[EngineRecord]) -> PublishReport:
        reports = [
            EngineReport(url=record.url, outcome="pending", is_counted=record.is_counted, version=record.used)
            for record in engines
        ]
        is_posted = False
        heartbeats = asyncio.ensure_future(self._show_heartbeats())
        numbers: dict[asyncio.Task[EngineReport], int] = {}
        for number, record in enumerate(engines):
            if record.is_removed:
                reports[number] = _removed(reports[number])
            else:
                numbers[self._begin(record, delivery)] = number
        try:
            pending = set(numbers)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    number = numbers[each]
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
                msgspec.structs.replace(each, outcome="failed", body="cancelled: the publisher was closed")
                if each.outcome == "pending"
                else each
                for each in reports
            ]
            self._reports.post(self._report(delivery, given_up))
            raise
        finally:
            heartbeats.cancel()
            for each in numbers:
                each.cancel()

    def _report(self, delivery: Delivery, reports: Sequence[EngineReport]) -> PublishReport:
        return PublishReport(
            version=delivery.version,
            engines=tuple(reports),
            verdict=judge(reports, self._policy),
            is_final=all(each.outcome != "pending" for each in reports),
        )

    async def _show_heartbeats(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._reports.beat)
            except TransportError as error:
                logger.warning("could not send the other ranks a heartbeat of rank 0: %s", error)
            await asyncio.sleep(0.25)


def _removed(report: EngineReport) -> EngineReport:
    return msgspec.structs.replace(report, outcome="removed", is_counted=False, body="the engine was removed")
