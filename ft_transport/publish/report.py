"""The outcome of notifying engines of a version, and the verdict of the policy on it."""

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

from ft_transport.coordination.ranks import RankGroup, from_json
from ft_transport.coordination.store import AT_ONCE
from ft_transport.errors import DeadlineExceededError, PublishError, RankGoneError
from ft_transport.runtime.deadline import Backoff
from ft_transport.runtime.signal_safe import SafeCondition
from ft_transport.telemetry.metrics import Reading

Outcome: TypeAlias = Literal[
    "pending", "confirmed", "refused", "unreachable", "late", "superseded", "failed", "removed"
]
"""``refused``: the engine answered with an error, or confirmed another version. ``late``: its deadline expired.
``superseded``: a newer version was published before its turn. ``failed``: an error in our code or the engine's, or the
publisher was closed. ``removed``: the engine was removed meanwhile, and the policy ignores it."""
Policy: TypeAlias = Literal["all", "quorum", "best_effort"]
Verdict: TypeAlias = Literal["open", "good", "bad"]
POLICIES: Final = ("all", "quorum", "best_effort")
_LONGEST_PAUSE_S: Final = 0.25
"""A thousand ranks may wait, and one process serves the store."""
_NUM_REPORTS: Final = 256
"""Number of versions whose reports are available; older reports are deleted."""
_CREDENTIALS: Final = re.compile(r"//[^/]*@")


class EngineReport(Struct, frozen=True, kw_only=True):
    """The outcome of one version at one engine.

    Attributes:
        url: URL of the engine.
        outcome: The outcome.
        is_counted: Whether the policy counts the engine; after a failure it does not count until it has caught up.
        seconds: Duration of the delivery, in seconds.
        num_attempts: Number of attempts; only connection errors are retried.
        status: HTTP status of the refusal, if any.
        body: Body of the refusal, truncated if it is long, of any content type; or a description of the error.
        request: Method and URL of the request that failed.
        version: The version that the engine is known to use; ``None`` before its first confirmation, and from the start
            of an update of its weights until its next confirmation.
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
        known = f", uses version {self.version}" if self.version is not None else ", version unknown"
        status = f"; status {self.status}" if self.status is not None else ""
        request = f" of {self.request}" if self.request else ""
        body = f": {self.body}" if self.body else ""
        return f"{took}{known}{status}{request}{body}"


class PublishReport(Struct, frozen=True, kw_only=True):
    """The outcome of one version at all engines.

    Attributes:
        version: The version.
        engines: The engines' reports, in the order in which the publisher got the engines.
        verdict: The verdict of the policy.
        is_final: Whether no engine is pending any more.
    """

    version: int
    engines: tuple[EngineReport, ...]
    verdict: Verdict
    is_final: bool

    def confirmed(self) -> tuple[str, ...]:
        """URLs of the engines that use this version."""
        return tuple(each.url for each in self.engines if each.outcome == "confirmed")

    def failed(self) -> tuple[EngineReport, ...]:
        """Reports of the engines that do not use this version, and will not without another delivery."""
        return tuple(each for each in self.engines if each.outcome not in ("confirmed", "pending", "removed"))

    def __str__(self) -> str:
        """Return the report, one line for each engine."""
        lines = [f"version {self.version}: {len(self.confirmed())} of {len(self.engines)} engines confirmed it"]
        return "\n  ".join([*lines, *map(str, self.engines)])


class EngineState(Struct, frozen=True, kw_only=True):
    """The current state of one engine.

    Attributes:
        url: URL of the engine.
        version: The version that the engine last confirmed or reported to serve; ``None`` if unknown.
        is_counted: Whether the policy counts the engine in the next publish.
        outcome: Outcome of the last delivery; ``pending`` before the first, and during one.
        error: Error of the last delivery, or of a later poll of the engine's version; else empty.
    """

    url: str
    version: int | None
    is_counted: bool
    outcome: Outcome
    error: str = ""


def judge(engines: Sequence[EngineReport], policy: Policy) -> Verdict:
    """Return whether enough engines use the version, or no longer can; ignores the engines that are left out.

    ``quorum``: more than half of the counted engines. If all engines are left out, all count.
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
    """Reports by version. Only rank 0 posts; any thread of any rank may wait.

    Args:
        group: The ranks.
        silence: Longest time without a heartbeat of rank 0 before a wait fails.
    """

    def __init__(self, group: RankGroup, silence: timedelta) -> None:
        self._is_first = group.rank == 0
        self._messages = group.messages("publish/reports", silence)
        self._silence = silence
        self._here: dict[int, PublishReport] = {}
        self._changed = SafeCondition()

    def post(self, report: PublishReport) -> None:
        """Publish the report of a version that has a verdict; a later report of the version replaces it."""
        with self._changed:
            self._here[report.version] = report
            old = list(self._here)[:-_NUM_REPORTS]
            for version in old:
                del self._here[version]
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
            timeout_s: How long to wait, in seconds.
            is_final: Whether to wait until no engine is pending any more, and not only for the verdict.

        Raises:
            DeadlineExceededError: No report arrived within ``timeout_s``.
            RankGoneError: Rank 0 posts no heartbeat, or the store does not answer.
        """
        if self._messages is None or self._is_first:
            with self._changed:
                if not self._changed.wait_for(
                    lambda: version in self._here and self._here[version].is_final >= is_final, timeout=timeout_s
                ):
                    raise _late(version, timeout_s, self._here.get(version))
                return self._here[version]
        messages, key = self._messages, _keys(version)[is_final]
        deadline_s = time.monotonic() + timeout_s
        (found,) = messages.wait({0: key}, deadline_s=deadline_s, backoff=Backoff(_LONGEST_PAUSE_S))
        if found is not None:
            return from_json(messages.opened(key, found), _report_decoder)
        if time.monotonic() <= deadline_s:
            raise RankGoneError(
                f"expected rank 0, which notifies the engines of version {version}, to show that it is alive; it has "
                f"not for {self._silence.total_seconds():g} s",
                ranks=(0,),
            )
        key = _keys(version)[0]
        known = messages.channel.get([key], AT_ONCE)
        raise _late(
            version,
            timeout_s,
            from_json(messages.opened(key, known[0]), _report_decoder) if known is not None else None,
        )


@dataclass(frozen=True, slots=True)
class PublishHandle:
    """A version on disk, of which engines are being notified. Any thread of any rank may wait for the outcome.

    Attributes:
        version: Its number.
        directory: Directory of the version.
    """

    version: int
    directory: Path
    _reports: ReportStore
    _timeout_s: float

    def result(self, timeout: timedelta | None = None) -> PublishReport:
        """Wait until the policy is met, or no longer can be; slower engines may still be pending then.

        Args:
            timeout: How long to wait. Default: a little longer than the engines' deadline.

        Raises:
            PublishError: The policy cannot be met; names the engines, with status and body of a refusal. ``report`` has
                all.
            DeadlineExceededError: No verdict arrived in time.
            RankGoneError: Rank 0, which notifies the engines, exited.
        """
        report = self._reports.wait(self.version, self._seconds(timeout), is_final=False)
        if report.verdict == "bad":
            error = PublishError(f"expected engines to use version {report.version}; {report}")
            error.report = report
            raise error
        return report

    def report(self, timeout: timedelta | None = None) -> PublishReport:
        """Wait until no engine is pending any more; raises as `result`, but no PublishError."""
        return self._reports.wait(self.version, self._seconds(timeout), is_final=True)

    def _seconds(self, timeout: timedelta | None) -> float:
        return self._timeout_s if timeout is None else timeout.total_seconds()


def _keys(version: int) -> tuple[str, str]:
    """Return the keys of the report with the verdict, and of the final report."""
    return f"report/{version}/decided", f"report/{version}/final"


def _late(version: int, timeout_s: float, report: PublishReport | None) -> DeadlineExceededError:
    known = f"; so far: {report}" if report is not None else ""
    return DeadlineExceededError(f"expected to hear of version {version} within {timeout_s:g} s{known}")


class EngineLag:
    """Compares the engines' versions with the published ones. Thread-safe.

    Args:
        states: Returns the states of the engines.
        clock: Monotonic seconds.
    """

    def __init__(
        self, states: Callable[[], Sequence[EngineState]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._states = states
        self._clock = clock
        self._mutex = threading.Lock()
        self._published: deque[tuple[int, float]] = deque(maxlen=1000)

    def published(self, version: int) -> None:
        """Record a published version, greater than every earlier one."""
        with self._mutex:
            self._published.append((version, self._clock()))

    def readings(self) -> Iterator[Reading]:
        """See ``telemetry.metrics.Source``. Only the first hundred engines have readings of their own."""
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
    """Return a URL without its user part, which may contain a password."""
    return _CREDENTIALS.sub("//", url, count=1)
