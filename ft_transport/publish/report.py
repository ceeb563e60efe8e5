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
"""``refused``: it answered with an error, or confirms another version. ``late``: its deadline ran out. ``superseded``:
a newer version was published before its turn. ``failed``: our own code, the engine's, or the publisher was closed.
``removed``: it was removed meanwhile, and counts for nothing."""
Policy: TypeAlias = Literal["all", "quorum", "best_effort"]
Verdict: TypeAlias = Literal["open", "good", "bad"]

POLICIES: Final = ("all", "quorum", "best_effort")


class EngineReport(Struct, frozen=True, kw_only=True):
    """One engine and one version.

    Attributes:
        url: Of the engine.
        outcome: What came of it.
        is_counted: Whether the policy counts it; one that failed before does not count until it is caught up.
        seconds: How long it took.
        num_attempts: How often it was tried; only connection errors are tried again.
        status: Of the answer that refused, if there was one.
        body: Of that answer, in part if it is long, whatever its type; or what went wrong.
        request: Method and URL of the request that failed.
        version: The version that the engine is known to use; ``None`` before it has confirmed one, and from when an
            update of its weights has begun until it has confirmed one again.
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
        """One line."""
        took = f"{self.url}: {self.outcome} after {self.seconds:.2f} s and {self.num_attempts} attempts"
        known = f", uses version {self.version}" if self.version is not None else ", version unknown"
        status = f"; status {self.status}" if self.status is not None else ""
        request = f" of {self.request}" if self.request else ""
        body = f": {self.body}" if self.body else ""
        return f"{took}{known}{status}{request}{body}"


class PublishReport(Struct, frozen=True, kw_only=True):
    """All engines and one version.

    Attributes:
        version: The version.
        engines: In the order in which the publisher was given them.
        verdict: What the policy makes of it.
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
        """Reports of the engines that do not use it, and will not by themselves."""
        return tuple(each for each in self.engines if each.outcome not in ("confirmed", "pending", "removed"))

    def __str__(self) -> str:
        """One line for each engine."""
        lines = [f"version {self.version}: {len(self.confirmed())} of {len(self.engines)} engines confirmed it"]
        return "\n  ".join([*lines, *map(str, self.engines)])


class EngineState(Struct, frozen=True, kw_only=True):
    """The state of one engine at the moment.

    Attributes:
        url: Of the engine.
        version: The version that it confirmed last, or answered that it serves; ``None`` if none is known.
        is_counted: Whether the policy counts it in the next publish.
        outcome: Of the last delivery; ``pending`` before the first, and during one.
        error: What went wrong with the last delivery, or when it was asked for its version after that; else empty.
    """

    url: str
    version: int | None
    is_counted: bool
    outcome: Outcome
    error: str = ""


def judge(engines: Sequence[EngineReport], policy: Policy) -> Verdict:
    """Whether enough engines use the version, or no longer can; without the engines that are left out.

    ``quorum``: more than half of those that count. Where all are left out, all count.
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
    """Ends the record of a publish: no engine is pending any more, or the publisher has given up."""
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
