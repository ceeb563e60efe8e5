"""The delivery of one version to one engine, and the record that a publisher has of each engine.

Only the event loop of the `EngineNotifier` changes records; any thread may read them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import aiohttp
import msgspec

from ft_transport.errors import EngineRefusedError, EngineUnreachableError, escape_peer_text
from ft_transport.publish.engines.adapters import check_applied
from ft_transport.publish.engines.engine import (
    LEFT_PAUSED,
    NO_ROUTE,
    Delivery,
    Engine,
    EngineConnection,
    Link,
    PolledEngine,
)
from ft_transport.publish.report import EngineReport, EngineState, Outcome

logger = logging.getLogger(__name__)

_NUM_DOUBTFUL: Final = 4
"""Maximum length of `EngineRecord.doubtful`, so that an engine that hangs does not keep ever more versions on disk."""
_GIVING_WAY_S: Final = 15.0
_ANSWER_S: Final = 5.0
Finding: TypeAlias = Literal["good", "lost", "down", "busy"]


@dataclass(slots=True, eq=False)
class EngineRecord:
    """A publisher's record of one of its engines.

    Attributes:
        engine: The engine.
        link: State that remains if the engine is removed from the publisher and added again.
        version: The version that the engine last confirmed or reported to serve; ``None`` if it reported none.
        has_reported: Whether the engine has ever reported a version.
        is_counted: Whether the engine confirmed the version of its last delivery.
        outcome: Outcome of the last delivery; ``None`` before the first delivery.
        doubtful: The newest few versions that the engine may have begun to load but has not confirmed.
        loading: The version that is being delivered; ``None`` without a running delivery.
        serving: Versions that the engine lists as served, besides ``version``.
        newest: The newest version whose delivery to the engine was requested; -1 if there was no delivery.
        failure: Error of the last delivery; empty if the delivery succeeded.
        poll_failure: Error of the last poll; empty if the poll succeeded.
        was_down: Whether a poll since the last delivery failed.
        is_removed: Whether the engine was removed from the publisher.
        tasks: The waiting and running deliveries.
        watching: The task that polls the engine; ``None`` if the engine is not polled.
    """

    engine: Engine
    link: Link
    version: int | None = None
    has_reported: bool = False
    is_counted: bool = True
    outcome: Outcome | None = None
    doubtful: tuple[int, ...] = ()
    loading: int | None = None
    serving: set[int] = field(default_factory=set)
    newest: int = -1
    failure: str = ""
    poll_failure: str = ""
    was_down: bool = False
    is_removed: bool = False
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)
    watching: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Base URL of the engine."""
        return self.engine.url

    @property
    def used(self) -> int | None:
        """The version that the engine certainly uses; ``None`` if the version is unknown."""
        return None if self.link.is_in_doubt else self.version

    def connection(self, session: aiohttp.ClientSession) -> EngineConnection:
        """Return a connection to the engine."""
        return EngineConnection(session, self.engine, self.link, self.serving)

    def versions_in_use(self) -> set[int] | None:
        """Return all versions that the engine may be using; ``None`` if the engine may use any version."""
        if not self.has_reported:
            return None
        versions = {*self.doubtful, *self.serving}
        return versions | {each for each in (self.version, self.loading) if each is not None}

    def state(self) -> EngineState:
        """Return the state of the engine for `Publisher.engines`."""
        return EngineState(
            url=self.url,
            version=self.used,
            is_counted=self.is_counted,
            outcome=self.outcome if self.outcome is not None and not self.tasks else "pending",
            error=self.poll_failure or self.failure,
        )


@dataclass(slots=True)
class EngineDelivery:
    """The delivery of one version to one engine.

    Attributes:
        record: Record of the engine; `run` writes the outcome to the record.
        delivery: The version to deliver.
        timeout_s: Seconds that the delivery may take, from the end of the engine's previous delivery.
        number: Number of attempts so far.
        failure: Error of the last attempt that did not reach the engine; ``None`` if there was no such attempt.
        may_be_loading: Whether a request with the version may have reached the engine.
    """

    record: EngineRecord
    delivery: Delivery
    timeout_s: float
    number: int = 0
    failure: EngineUnreachableError | None = None
    may_be_loading: bool = False

    async def run(self, session: aiohttp.ClientSession) -> EngineReport:
        """Wait until the engine is free, then repeat the delivery until the engine answers or the deadline expires.

        A failure of the engine raises no error; the returned report has the outcome.

        Args:
            session: The HTTP session.
        """
        record, version = self.record, self.delivery.version
        started_s, is_counted = time.monotonic(), record.is_counted
        report = await self._take_turn()
        if report is None:
            report = await self._until_deadline(session)
        if report.outcome == "confirmed":
            record.doubtful = ()
        elif report.outcome != "superseded":
            record.is_counted = False
        if report.outcome != "confirmed" and self.may_be_loading:
            # Cancelling the request here does not stop the engine, which may still load the version.
            record.doubtful = (*record.doubtful, version)[-_NUM_DOUBTFUL:]
        report = msgspec.structs.replace(
            report,
            is_counted=is_counted,
            seconds=time.monotonic() - started_s,
            num_attempts=self.number,
            version=record.used,
        )
        if report.outcome == "superseded":
            return report
        record.outcome, record.was_down, record.poll_failure = report.outcome, False, ""
        record.failure = "" if report.outcome == "confirmed" else f"version {version}: {report}"
        if record.failure:
            logger.warning("version %d: an engine does not count until it confirms a version: %s", version, report)
        elif not is_counted:
            logger.info("version %d: an engine has confirmed this version, and counts again: %s", version, report)
        return report

    async def _take_turn(self) -> EngineReport | None:
        """Acquire the engine's mutex. If this version will not be delivered, return a report instead."""
        record, mutex = self.record, self.record.link.mutex
        if record.link.polling is not None:
            record.link.polling.cancel()
        try:
            # The delivery that holds the mutex has a deadline of ``timeout_s`` as well.
            await asyncio.wait_for(mutex.acquire(), self.timeout_s + _GIVING_WAY_S)
        except (TimeoutError, asyncio.TimeoutError):
            return self._report("late", self._late())
        if record.is_removed:
            # wait_for of Python 3.11 loses a cancellation that arrives at the same time as the mutex.
            mutex.release()
            raise asyncio.CancelledError
        if record.newest > self.delivery.version:
            mutex.release()
            return self._report("superseded", f"version {record.newest} was published before its turn")
        return None

    async def _until_deadline(self, session: aiohttp.ClientSession) -> EngineReport:
        """Attempt the delivery until the engine answers or the deadline expires, then release the mutex."""
        record, mutex = self.record, self.record.link.mutex
        record.loading = self.delivery.version
        attempts = asyncio.ensure_future(self._until_it_answers(session))
        # The mutex stays locked if the engine's ``deliver`` ignores its cancellation.
        attempts.add_done_callback(lambda _: mutex.release())
        try:
            await asyncio.wait({attempts}, timeout=self.timeout_s)
        finally:
            attempts.cancel()
            record.loading = None
        if not attempts.done():
            # The cancelled attempt has not ended yet.
            left_paused = f"; {LEFT_PAUSED}" if record.link.is_left_paused else ""
            if self.failure is not None:
                return self._report("unreachable", f"{self.failure}{left_paused}")
            return self._report("late", f"{self._late()}{left_paused}")
        if attempts.cancelled():
            return self._report("failed", "the engine's deliver() raised CancelledError")
        error = attempts.exception()
        match error:
            case None:
                record.version, record.has_reported, record.is_counted = attempts.result(), True, True
                record.link.is_in_doubt = False
                return self._report("confirmed")
            case EngineRefusedError():
                report = self._report("refused", _shown(error.body or str(error)))
                return msgspec.structs.replace(report, status=error.status, request=error.request)
            case _:
                logger.error("version %d: %s could not be notified", self.delivery.version, record.url, exc_info=error)
                return self._report("failed", _shown(f"{type(error).__name__}: {error}"))

    def _report(self, outcome: Outcome, body: str = "") -> EngineReport:
        return EngineReport(url=self.record.url, outcome=outcome, body=body)

    def _late(self) -> str:
        return f"no answer within {self.timeout_s:g} s"

    async def _until_it_answers(self, session: aiohttp.ClientSession) -> int:
        """Deliver the version; retry while the connection fails. Return the version that the engine confirms.

        Raises:
            EngineRefusedError: The engine answered with an error, or confirmed another version.
            RuntimeError: The ``deliver`` of the engine raised SystemExit or KeyboardInterrupt.
        """
        record = self.record
        connection = record.connection(session)
        check_applied(record.engine, self.delivery)
        pause_s = 0.1
        while True:
            if record.link.unfinished:
                # A task that still resumes the engine must not interfere with the next attempt.
                await asyncio.wait(record.link.unfinished)
            self.number += 1
            was_loading, self.may_be_loading = self.may_be_loading, True
            try:
                version = await record.engine.deliver(connection, self.delivery)
            except EngineUnreachableError as error:
                self.failure = error
                if isinstance(error.__cause__, aiohttp.ClientConnectorError):
                    self.may_be_loading = was_loading
            except (SystemExit, KeyboardInterrupt) as error:
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            else:
                if version != self.delivery.version:
                    raise EngineRefusedError(
                        f"expected the engine to confirm version {self.delivery.version}, got {version}",
                        peer=record.url,
                    )
                return version
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)


def _shown(text: str) -> str:
    """Shorten and escape an engine's text for reports and logs."""
    return escape_peer_text(text, max_characters=3000)


async def poll(record: EngineRecord, newest: Delivery, session: aiohttp.ClientSession) -> Finding:
    """Poll an idle engine for its version, and update the engine's record.

    Returns:
        ``good``: the engine needs nothing. ``lost``: the engine needs the newest version again. ``down``: the engine
        did not answer. ``busy``: a delivery cancelled the poll.
    """
    link = record.link
    await link.mutex.acquire()
    was_left_paused = link.is_left_paused
    link.polling = answering = asyncio.ensure_future(_served_version(record, newest, session))
    answering.add_done_callback(lambda _: link.mutex.release())
    try:
        await asyncio.wait({answering}, timeout=_ANSWER_S)
    finally:
        is_late = not answering.done()
        answering.cancel()
        link.polling = None
    if not is_late and answering.cancelled():
        return "busy"
    answer = f"no answer within {_ANSWER_S:g} s" if is_late else answering.result()
    if isinstance(answer, str):
        failure = f"the poll for its version failed: {answer}"
        if not record.was_down:
            logger.info("%s: %s", record.url, failure)
        record.was_down, record.poll_failure = True, failure
        return "down"
    is_reported, version = answer
    was_resumed = was_left_paused and not link.is_left_paused
    is_lost = needs_delivery(record, newest.version, version, is_reported=is_reported, was_resumed=was_resumed)
    record.was_down, record.poll_failure = False, ""
    if not is_lost:
        return "good"
    if is_reported:
        record.version, record.has_reported = version, True
    served = f"version {version}" if version is not None else "no version" if is_reported else "an unknown version"
    logger.info("%s serves %s, probably after a restart: delivering version %d", record.url, served, newest.version)
    return "lost"


def needs_delivery(
    record: EngineRecord, newest: int, version: int | None, *, is_reported: bool, was_resumed: bool
) -> bool:
    """Return whether the newest version must be delivered again to an engine that has answered a poll.

    Args:
        record: The engine's record before the poll.
        newest: The newest version.
        version: The version in the answer; ``None`` if the engine serves none of this publisher's versions.
        is_reported: Whether the engine can report its version. If it cannot, ``version`` is ``None``.
        was_resumed: Whether the engine was restarted: an earlier delivery left it paused, and it is not paused now.
    """
    if is_reported and version is not None and version > newest:
        return False  # Another publisher has delivered a newer version.
    match record.outcome:
        case "confirmed":
            return version != newest if is_reported else record.was_down
        case "unreachable" | "late":
            return True
        case _:
            # An engine that was not restarted would refuse the version again.
            is_behind = record.version is not None and (version is None or version < record.version)
            return record.was_down or was_resumed or (is_reported and is_behind)


async def _served_version(
    record: EngineRecord, newest: Delivery, session: aiohttp.ClientSession
) -> tuple[bool, int | None] | str:
    """Return whether an engine can report its version, and the version. After a failure, return the error as text."""
    assert isinstance(record.engine, PolledEngine), "only a PolledEngine is polled"
    try:
        version: object = await record.engine.served_version(record.connection(session), newest)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if isinstance(error, EngineRefusedError) and error.status in NO_ROUTE:
            return False, None  # The engine runs, but has no route that reports its version.
        return f"{type(error).__name__}: {error}"
    if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
        return f"TypeError: expected a whole number or None from served_version, got {type(version).__name__}"
    return True, version
