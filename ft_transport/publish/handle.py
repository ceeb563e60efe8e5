"""What a caller of ``Publisher.publish`` has of a version: its outcome, whenever it is wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ft_transport.errors import PublishError
from ft_transport.publish.report import PublishReport


@dataclass(frozen=True, slots=True)
class PublishHandle:
    """A version that is on disk and that engines are notified of. Any thread of any rank may wait for the outcome.

    Attributes:
        version: Its number.
        directory: Where it lies.
    """

    version: int
    directory: Path
    _wait: Callable[[Callable[[PublishReport], bool], float], PublishReport]
    _timeout_s: float

    def result(self, timeout: timedelta | None = None) -> PublishReport:
        """Waits until the policy is met, or cannot be any more; slower engines may still be pending then.

        Args:
            timeout: By default what the engines have, and a little more.

        Raises:
            PublishError: It cannot be met; names the engines, with status and body of a refusal. ``report`` has all.
            DeadlineExceededError: It was not decided in time.
            RankGoneError: Rank 0, which notifies the engines, is gone.
        """
        report = self._wait(lambda each: each.verdict != "open", self._seconds(timeout))
        if report.verdict == "bad":
            raise _failure(report)
        return report

    def report(self, timeout: timedelta | None = None) -> PublishReport:
        """Waits until no engine is pending any more; raises as `result`, but no PublishError."""
        return self._wait(lambda each: each.is_final, self._seconds(timeout))

    def _seconds(self, timeout: timedelta | None) -> float:
        return self._timeout_s if timeout is None else timeout.total_seconds()


def _failure(report: PublishReport) -> PublishError:
    error = PublishError(f"expected engines to use version {report.version}; {report}")
    error.report = report
    return error
