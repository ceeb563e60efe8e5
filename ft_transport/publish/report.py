"""Reports on the delivery of versions to engines, and the verdict of a publisher's policy."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from ft_transport.coordination.ranks import RankGroup, decode_message
from ft_transport.coordination.store import AT_ONCE
from ft_transport.errors import DeadlineExceededError, PublishError, RankGoneError
from ft_transport.runtime.deadline import Backoff
from ft_transport.runtime.signal_safe import SafeCondition
from ft_transport.telemetry.metrics import Reading

Outcome: TypeAlias = Literal[
    "pending", "confirmed", "refused", "unreachable", "late", "superseded", "failed", "removed"
]
"""The outcome of a delivery. ``pending``: it has not ended. ``confirmed``: the engine uses the version. ``refused``:
the engine answered with an error, or confirmed another version. ``unreachable``: no connection succeeded before the
deadline. ``late``: the engine did not answer before the deadline. ``superseded``: a newer version was published before
the delivery began. ``failed``: the code of this package or of the engine raised an error, or the publisher was closed.
``removed``: the engine was removed from the publisher during the delivery; the policy ignores the engine."""
Policy: TypeAlias = Literal["all", "quorum", "best_effort"]
Verdict: TypeAlias = Literal["open", "good", "bad"]
POLICIES: Final = ("all", "quorum", "best_effort")
_LONGEST_PAUSE_S: Final = 0.25
"""Longest pause between two polls of the store, short enough for users and long enough for a thousand waiting ranks."""
_NUM_REPORTS: Final = 256
"""Number of newest versions whose reports are kept."""
_CREDENTIALS: Final = re.compile(r"//[^/]*@")


class EngineReport(Struct, frozen=True, kw_only=True):
    """The outcome of the delivery of one version to one engine.

    Attributes:
        url: URL of the engine.
        outcome: Outcome of the delivery.
        is_counted: Whether the policy counts the engine. After a failed delivery, an engine does not count until it has
            confirmed a version.
        seconds: Duration of the delivery in seconds, including the wait for the previous delivery.
        num_attempts: Number of attempts. Another attempt follows only after a connection error.
        status: HTTP status with which the engine refused the version; ``None`` without a refusal.
        body: The beginning of the engine's answer if it refused the version; otherwise a description of the error.
        request: Method and URL of the request that the engine refused.
        version: The version that the engine certainly uses; ``None`` before its first confirmation, and from the start
            of an update of the engine's weights until its next confirmation.
    """

    url: str
    outcome: Outcome
    is_counted: bool = True
    seconds: float = 0.0
    num_attempts: int = 0
    status: int | None = None
    body: str = ""
    request: str = ""
    version: int | None = None

    def __str__(self) -> str:
        """Return the report as one line."""
        took = f"{self.url}: {self.outcome} after {self.seconds:.2f} s and {self.num_attempts} attempts"
        known = f", uses version {self.version}" if self.version is not None else ", uses an unknown version"
        status = f"; status {self.status}" if self.status is not None else ""
        request = f" of {self.request}" if self.request else ""
        body = f": {self.body}" if self.body else ""
        return f"{took}{known}{status}{request}{body}"


class PublishReport(Struct, frozen=True, kw_only=True):
    """The outcome of the delivery of one version to all engines.

    Attributes:
        version: The version.
        engines: One report for each engine, in the order in which the engines were added to the publisher.
        verdict: Whether the policy is met. ``good``: enough engines use the version. ``bad``: so many engines have
            failed that the policy can no longer be met. ``open``: undecided.
        is_final: Whether every delivery has ended.
    """

    version: int
    engines: tuple[EngineReport, ...]
    verdict: Verdict
    is_final: bool

    def confirmed(self) -> tuple[str, ...]:
        """Return the URLs of the engines that have confirmed this version."""
        return tuple(each.url for each in self.engines if each.outcome == "confirmed")

    def failed(self) -> tuple[EngineReport, ...]:
        """Return the reports on failed deliveries, except those to removed engines."""
        return tuple(each for each in self.engines if each.outcome not in ("confirmed", "pending", "removed"))

    def __str__(self) -> str:
        """Return the report as text, with one line for each engine."""
        lines = [f"version {self.version}: {len(self.confirmed())} of {len(self.engines)} engines confirmed it"]
        return "\n  ".join([*lines, *map(str, self.engines)])


class EngineState(Struct, frozen=True, kw_only=True):
    """The current state of one engine.

    Attributes:
        url: URL of the engine.
        version: The version that the engine certainly uses; ``None`` if the version is unknown.
        is_counted: Whether the policy will count the engine in the next publish.
        outcome: Outcome of the last delivery; ``pending`` before the first delivery and during a delivery.
        error: Error of the last poll, or of the last delivery if that poll succeeded; empty if both succeeded.
    """

    url: str
    version: int | None
    is_counted: bool
    outcome: Outcome
    error: str = ""


def judge(engines: Sequence[EngineReport], policy: Policy) -> Verdict:
    """Apply a policy to the reports of all engines.

    Only reports with ``is_counted`` matter; if no report has it, all reports matter. The policy says how many of these
    engines must confirm the version: ``all``, ``quorum`` (more than half) or ``best_effort`` (none).

    Returns:
        ``good`` if enough engines have confirmed the version; ``bad`` if enough confirmations are no longer possible;
        otherwise ``open``. With ``best_effort``, the verdict is ``open`` until every delivery has ended.
    """
    present = [each for each in engines if each.outcome != "removed"]
    counted = [each for each in present if each.is_counted] or present
    num_confirmed = sum(each.outcome == "confirmed" for each in counted)
    num_pending = sum(each.outcome == "pending" for each in counted)
    num_needed = {"all": len(counted), "quorum": len(counted) // 2 + 1 if counted else 0, "best_effort": 0}[policy]
    if num_confirmed + num_pending < num_needed:
        return "bad"
    if policy == "best_effort":
        return "open" if num_pending else "good"
    return "good" if num_confirmed >= num_needed else "open"


_report_decoder: Final = msgspec.json.Decoder(PublishReport)


class ReportStore:
    """Passes the reports of rank 0 to all ranks. Only rank 0 posts; any thread of any rank may wait for a report.

    Args:
        group: The ranks of the publisher.
        silence: Longest time without a heartbeat of rank 0, after which a wait for a report fails.
    """

    def __init__(self, group: RankGroup, silence: timedelta) -> None:
        self._is_first = group.rank == 0
        self._messages = group.messages("publish/reports", silence)
        self._silence = silence
        self._posted: dict[int, PublishReport] = {}
        self._changed = SafeCondition()

    def post(self, report: PublishReport) -> None:
        """Send a report to all ranks, in place of an earlier one on this version. The verdict must not be ``open``."""
        with self._changed:
            self._posted[report.version] = report
            old = list(self._posted)[:-_NUM_REPORTS]
            for version in old:
                del self._posted[version]
            self._changed.notify_all()
        if self._messages is not None:
            for key in _keys(report.version)[: 1 + report.is_final]:
                self._messages.post(key, msgspec.json.encode(report))
            for key in [key for version in old for key in _keys(version)]:
                self._messages.channel.remove(key, self._silence)

    def beat(self) -> None:
        """Post a heartbeat of rank 0."""
        if self._messages is not None:
            self._messages.beat()

    def wait(self, version: int, timeout_s: float, *, is_final: bool) -> PublishReport:
        """Wait for the report of a version.

        Args:
            version: The version.
            timeout_s: Longest wait in seconds.
            is_final: Whether to wait until every delivery has ended, instead of only for the verdict.

        Raises:
            DeadlineExceededError: No report arrived within ``timeout_s``.
            RankGoneError: Rank 0 posts no heartbeat, or the store does not answer.
        """
        if self._messages is None or self._is_first:
            with self._changed:
                if not self._changed.wait_for(
                    lambda: version in self._posted and self._posted[version].is_final >= is_final, timeout=timeout_s
                ):
                    raise _late(version, timeout_s, self._posted.get(version))
                return self._posted[version]
        messages, key = self._messages, _keys(version)[is_final]
        deadline_s = time.monotonic() + timeout_s
        (found,) = messages.wait({0: key}, deadline_s=deadline_s, backoff=Backoff(_LONGEST_PAUSE_S))
        if found is not None:
            return decode_message(messages.opened(key, found), _report_decoder)
        if time.monotonic() <= deadline_s:
            raise RankGoneError(
                f"expected a heartbeat of rank 0, which notifies the engines of version {version}, got none for "
                f"{self._silence.total_seconds():g} s",
                ranks=(0,),
            )
        key = _keys(version)[0]
        known = messages.channel.get([key], AT_ONCE)
        raise _late(
            version,
            timeout_s,
            decode_message(messages.opened(key, known[0]), _report_decoder) if known is not None else None,
        )


@dataclass(frozen=True, slots=True)
class PublishHandle:
    """A published version. Any thread of any rank may use the handle to wait for the outcome.

    Attributes:
        version: Number of the version.
        directory: Directory with the files of the version.
    """

    version: int
    directory: Path
    _reports: ReportStore
    _timeout_s: float

    def result(self, timeout: timedelta | None = None) -> PublishReport:
        """Wait until the policy is met, and return the report. Some engines may still be pending then.

        Args:
            timeout: Longest wait. Default: a little more than twice the publisher's ``engine_timeout``.

        Raises:
            PublishError: The policy can no longer be met. The message has a line for each engine; the attribute
                ``report`` is the `PublishReport`.
            DeadlineExceededError: The policy was still undecided when ``timeout`` had passed.
            RankGoneError: Rank 0, which notifies the engines, has exited.
        """
        report = self._reports.wait(self.version, self._seconds(timeout), is_final=False)
        if report.verdict == "bad":
            error = PublishError(f"expected engines to use version {report.version}; {report}")
            error.report = report
            raise error
        return report

    def report(self, timeout: timedelta | None = None) -> PublishReport:
        """Wait until every delivery has ended, and return the report, whatever the verdict.

        Raises:
            DeadlineExceededError: A delivery did not end in time.
            RankGoneError: Rank 0, which notifies the engines, has exited.
        """
        return self._reports.wait(self.version, self._seconds(timeout), is_final=True)

    def _seconds(self, timeout: timedelta | None) -> float:
        return self._timeout_s if timeout is None else timeout.total_seconds()


def _keys(version: int) -> tuple[str, str]:
    """Return the keys for the report with which the policy was decided, and for the final report."""
    return f"report/{version}/decided", f"report/{version}/final"


def _late(version: int, timeout_s: float, report: PublishReport | None) -> DeadlineExceededError:
    known = f"; so far: {report}" if report is not None else ""
    return DeadlineExceededError(f"expected a report on version {version} within {timeout_s:g} s{known}")


class EngineLag:
    """Measures how far engines are behind the published versions. Thread-safe.

    Args:
        states: Returns the state of each engine.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, states: Callable[[], Sequence[EngineState]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._states = states
        self._clock = clock
        self._mutex = threading.Lock()
        self._published: deque[tuple[int, float]] = deque(maxlen=1000)

    def published(self, version: int) -> None:
        """Record that a version was published. Its number is greater than those of all earlier versions."""
        with self._mutex:
            self._published.append((version, self._clock()))

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics of the publisher, and of each of the first hundred engines."""
        states, now_s = self._states(), self._clock()
        with self._mutex:
            published = tuple(self._published)
        yield Reading("engines", len(states))
        yield Reading("published_version", published[-1][0] if published else None)
        if not states:
            for name in ("engine_version", "engine_lag_versions", "engine_lag_seconds"):
                yield Reading(name, None)
        for state in states[:100]:
            version = state.version if state.version is not None else -1
            missing = [since_s for number, since_s in published if number > version]
            labels = (_shown(state.url),)
            yield Reading("engine_version", version, labels)
            yield Reading("engine_lag_versions", len(missing), labels)
            yield Reading("engine_lag_seconds", now_s - missing[0] if missing else 0.0, labels)


def _shown(url: str) -> str:
    """Return a URL without user name and password."""
    return _CREDENTIALS.sub("//", url, count=1)
