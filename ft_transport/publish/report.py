"""The outcome of notifying engines of a version, and the verdict of the policy on it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from ft_transport.telemetry.record import Transfer
from ft_transport.telemetry.recorder import Recording

Outcome: TypeAlias = Literal[
    "pending", "confirmed", "refused", "unreachable", "late", "superseded", "failed", "removed"
]
"""``refused``: the engine answered with an error, or confirmed another version. ``late``: its deadline expired.
``superseded``: a newer version was published before its turn. ``failed``: an error in our code or the engine's, or the
publisher was closed. ``removed``: the engine was removed meanwhile, and the policy ignores it."""
Policy: TypeAlias = Literal["all", "quorum", "best_effort"]
Verdict: TypeAlias = Literal["open", "good", "bad"]

POLICIES: Final = ("all", "quorum", "best_effort")


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
    match policy:
        case "all":
            num_needed = len(counted)
        case "quorum":
            num_needed = len(counted) // 2 + 1 if counted else 0
        case "best_effort":
            num_needed = 0
    if num_confirmed + num_pending < num_needed:
        return "bad"
    if policy == "best_effort":
        return "open" if num_pending else "good"
    return "good" if num_confirmed >= num_needed else "open"


def end_record(recording: Recording, notified: Future[PublishReport]) -> None:
    """End the record of a publish: no engine is pending any more, or the publisher has given up."""
    error = notified.exception() if not notified.cancelled() else None
    if notified.cancelled() or error is not None:
        recording.end("abandoned", error=error or "")
        return
    report = notified.result()
    for each in report.engines:
        recording.transfer(Transfer(peer=each.url, role="engine", num_bytes=0, length_s=each.seconds))
    for failed in report.failed():
        recording.retry(f"{failed.outcome}: {failed.body}", peer=failed.url)
    recording.end("failed" if report.failed() else "ok", error="; ".join(each.url for each in report.failed()))
