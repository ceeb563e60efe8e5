"""Reports of versions: rank 0 posts them, and every rank may wait for them, with its own deadline.

They are in the key-value store of ``torch.distributed``: no rank waits in a collective for HTTP. While engines are
notified, rank 0 posts heartbeats, so that no rank waits for a dead rank 0.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import msgspec

from ft_transport.coordination.plain_values import from_json
from ft_transport.coordination.ranks import RankGroup
from ft_transport.coordination.store_channel import AT_ONCE, Pacing
from ft_transport.errors import DeadlineExceededError, PublishError, RankGoneError
from ft_transport.publish.report import PublishReport
from ft_transport.runtime.handler_safety import SafeCondition

_LONGEST_PAUSE_S: Final = 0.25
"""A thousand ranks may wait, and one process serves the store."""
_NUM_KEPT: Final = 256
"""Number of versions whose reports are available; older reports are deleted."""

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
            old = list(self._here)[:-_NUM_KEPT]
            for version in old:
                del self._here[version]
            self._changed.notify_all()
        if self._messages is not None:
            for key in _keys(report.version)[: 1 + report.is_final]:
                self._messages.post(key, msgspec.json.encode(report))
            for key in [key for version in old for key in _keys(version)]:
                self._messages.channel.remove(key, self._silence)

    def tick(self) -> None:
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
        (found,) = messages.wait({0: key}, deadline_s=deadline_s, pacing=Pacing(_LONGEST_PAUSE_S))
        if found is not None:
            return from_json(messages.opened(key, found), _report_decoder)
        if time.monotonic() <= deadline_s:
            raise RankGoneError(
                f"expected rank 0, which tells the engines of version {version}, to show that it is alive; it has not "
                f"for {self._silence.total_seconds():g} s",
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
