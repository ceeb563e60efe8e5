"""What a fault-tolerant loop counts: quorums, steps that were committed, and why others were not."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ft_transport.telemetry.readings import PREFIX, Counts, Durations, Metric, Reading, Source
from manager.errors import ReportedError

if TYPE_CHECKING:
    from manager.quorum.membership import Membership

ABANDONED: Final = "Abandoned"
"""The cause where `Manager.should_commit` was not called."""
_TOO_FEW_REPLICAS: Final = "TooFewReplicas"
_MISSED_HEARTBEATS: Final = "MissedHeartbeats"
_ANOTHER_RANK: Final = "AnotherRank"

_KNOWN: Final = tuple((cause,) for cause in (_TOO_FEW_REPLICAS, _MISSED_HEARTBEATS, _ANOTHER_RANK, ABANDONED))
_BOUNDS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

_COMMITTED: Final = Metric(
    name=f"{PREFIX}steps_committed_total", kind="counter", help="Steps that this process has committed."
)
_REFUSED: Final = Metric(
    name=f"{PREFIX}steps_refused_total",
    kind="counter",
    help="Steps that were begun and not committed, by the first cause.",
    labels=("cause",),
)
_QUORUMS: Final = Metric(
    name=f"{PREFIX}quorum_seconds",
    kind="histogram",
    help="How long the Lighthouse, and the other ranks, took to tell who takes part.",
)
_FAILED: Final = Metric(
    name=f"{PREFIX}quorum_failures_total",
    kind="counter",
    help="How often there was no quorum, by the type of the error.",
    labels=("cause",),
)
_PERIODS: Final = Metric(
    name=f"{PREFIX}step_seconds",
    kind="histogram",
    help="From one step boundary to the next: all that the training loop does for a step.",
)
_LENGTHS: Final = Metric(
    name=f"{PREFIX}step_until_commit_seconds",
    kind="histogram",
    help="From a step boundary to the end of should_commit, whatever its answer.",
)
_CONFIGURED: Final = Metric(
    name=f"{PREFIX}process_group_seconds",
    kind="histogram",
    help="How long it took to make a process group with other members than before.",
)
_PARTICIPANTS: Final = Metric(
    name=f"{PREFIX}participants", kind="gauge", help="Replicas that contribute to the step, by the last quorum."
)
_DEPARTURES: Final = Metric(
    name=f"{PREFIX}departures_total", kind="counter", help="Other replicas that a quorum no longer had."
)
_STANDSTILL: Final = Metric(
    name=f"{PREFIX}standstill_seconds_total",
    kind="counter",
    help="How long no step was committed before a quorum without a replica that had left.",
)
_RECOVERY: Final = Metric(
    name=f"{PREFIX}recovery_seconds_total",
    kind="counter",
    help="From this replica's request for a quorum until it had healed.",
)
_MEMBER: Final = Metric(
    name=f"{PREFIX}member_info",
    kind="gauge",
    help="1; the labels say which replica, and which of its ranks, this process is.",
    labels=("replica", "group_rank"),
)
_MISSED: Final = Metric(
    name=f"{PREFIX}missed_heartbeats_total",
    kind="counter",
    help="How often the Lighthouse may have taken this replica for dead; its rank 0 alone knows.",
)


class LoopMetrics:
    """Counts them. The training thread adds, or the quorum thread while that waits; any may read. Knows nobody."""

    def __init__(self) -> None:
        """Begin at nothing."""
        self.committed = Counts(_COMMITTED)
        self.refused = Counts(_REFUSED, known=_KNOWN)
        self.quorums = Durations(_QUORUMS, _BOUNDS_S)
        self.failed_quorums = Counts(_FAILED)
        self.configured = Durations(_CONFIGURED, _BOUNDS_S)
        self.periods = Durations(_PERIODS, _BOUNDS_S)
        self.lengths = Durations(_LENGTHS, _BOUNDS_S)
        self.departures = Counts(_DEPARTURES)
        self.standstill_s = Counts(_STANDSTILL)
        self.recovery_s = Counts(_RECOVERY)
        self.num_participants = 0

    def readings(self) -> Iterator[Reading]:
        """See ``telemetry.readings.Source``."""
        durations = (self.quorums, self.configured, self.periods, self.lengths)
        changes = (self.departures, self.standstill_s, self.recovery_s)
        for each in (self.committed, self.refused, self.failed_quorums, *changes, *durations):
            yield from each.readings()
        yield Reading(metric=_PARTICIPANTS, value=self.num_participants)


def refusal_cause(error: ReportedError | None, *, has_enough: bool, was_silent: bool) -> str:
    """Why a rank did not commit a step: the first reason, in the order of `commit_refusals`.

    Args:
        error: What went wrong in the step on this rank, if anything did.
        has_enough: Whether as many replicas contributed as are needed.
        was_silent: Whether heartbeats were missed since the step began.
    """
    if error is not None:
        return type(error.original_exception).__name__
    if not has_enough:
        return _TOO_FEW_REPLICAS
    return _MISSED_HEARTBEATS if was_silent else _ANOTHER_RANK


def member_readings(membership: Membership) -> Source:
    """Tell who this process is; ``membership`` is held weakly."""
    reference = weakref.ref(membership)

    def readings() -> Iterator[Reading]:
        member = reference()
        if member is not None:
            yield Reading(metric=_MEMBER, labels=(member.replica_id, str(member.group_rank)), value=1)
            yield Reading(metric=_MISSED, value=member.num_missed_heartbeats())

    return readings
