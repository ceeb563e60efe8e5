"""Reports of the quorum loop: a log of replicas that join, leave and heal, and the manager's part of ``/state``."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from itertools import takewhile
from typing import Final

from ft_transport.errors import escape_peer_text
from ft_transport.telemetry.process_state import (
    NUM_CHANGES,
    Activity,
    Change,
    ManagerStatus,
    MembershipChange,
    MemberStatus,
)
from manager.quorum.decision import Decision, DoesNotFit, StandsBy, UpToDate
from manager.quorum.process_group import group_number
from manager.quorum.quorum_round import Participant

logger = logging.getLogger(__name__)

_MAX_ID: Final = 100
_MAX_TEXT: Final = 300
_QUICK_S: Final = 1.0
"""A quorum that forms during ``forward`` counts as waiting only after this long."""


class MembershipLog:
    """Logs which replicas have joined, left or healed since the previous quorum.

    Rank 0 of a replica logs at WARNING, its other ranks log at INFO. Only the quorum thread may call it, or the
    training thread while the quorum thread is idle; any thread may call the function that `recent` returns.

    Args:
        participant: This replica and its quorum.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._changes: deque[MembershipChange] = deque(maxlen=NUM_CHANGES)
        self._present: frozenset[str] = frozenset()
        self._known: frozenset[str] = frozenset()
        self._healing: tuple[str, ...] = ()
        self._last_quorum_s = 0.0

    def log_changes(self, decision: Decision) -> None:
        """Log the replicas that joined or left since the previous quorum. Without changes it only compares two sets.

        Args:
            decision: The decision of the new quorum.
        """
        role, membership = decision.role, self._participant.membership
        if isinstance(role, DoesNotFit):
            return
        now_s = time.monotonic()
        ago_s, self._last_quorum_s = now_s - self._last_quorum_s, now_s
        present = frozenset([member.replica_id for member in membership.members])
        healing = role.serves_now if isinstance(role, UpToDate) else ()
        if present == self._present and healing == self._healing:
            return
        group, known, is_first = frozenset(decision.group_members), self._known, not self._present
        joined = (group - known | set(healing) - set(self._healing)) - {membership.replica_id}
        self._present, self._healing, self._known = present, healing, known & present | group
        if is_first:
            return
        if known - present:
            self._log_departures(sorted(known - present), decision, now_s, ago_s)
        for replica_id in sorted(joined):
            heals = f"heals to step {decision.step}" if replica_id in healing else f"is at step {decision.step}"
            self._log("joined", replica_id, decision.step, f"joined: {heals}; {_replicas(decision)} train")

    def log_heal(self, decision: Decision, length_s: float, source: str) -> None:
        """Log that this replica has healed. At step 0 it only received the common initial state; this is not logged.

        Args:
            decision: The decision of the quorum in which it healed.
            length_s: Seconds since the replica asked for a quorum.
            source: The replicas that served the state, as text.
        """
        if decision.step == 0:
            return
        self._participant.metrics.add("recovery_seconds_total", by=length_s)
        sources = escape_peer_text(source, max_characters=_MAX_ID)
        text = f"healed to step {decision.step} in {length_s:.1f} s, from {sources}"
        self._log("healed", self._participant.membership.replica_id, decision.step, text, length_s)

    def recent(self) -> Callable[[], tuple[MembershipChange, ...]]:
        """Return a function that returns the last changes, the newest last. The function refers to no replica."""
        changes = self._changes
        return lambda: tuple(changes.copy())

    def _log_departures(self, left: list[str], decision: Decision, now_s: float, ago_s: float) -> None:
        steps, cost, standstill_s = self._participant.state.steps, "", 0.0
        # A replica that is behind cannot know how long the other replicas stood still.
        if isinstance(decision.role, UpToDate) and steps.num_committed:
            refused = list(takewhile(lambda step: not step.is_committed, reversed(steps.recent())))
            # Since the last commit, count only attempts at a step: between steps the loop may do other work.
            standstill_s = now_s - steps.began_s + sum(step.period_s for step in refused)
            lost = f", {len(refused)} attempted step{'s' * (len(refused) != 1)} lost" if refused else ""
            cost = f"all stood still for {standstill_s:.1f} s{lost}; "
        self._participant.metrics.add("departures_total", by=len(left))
        self._participant.metrics.add("standstill_seconds_total", by=standstill_s)
        is_alone = len(decision.group_members) == 1
        for replica_id in left:
            text = f"left: {cost}last in a quorum {ago_s:.1f} s ago; {_replicas(decision)} remain{'s' * is_alone}"
            self._log("left", replica_id, decision.step, text, standstill_s)

    def _log(self, kind: Change, replica_id: str, step: int, text: str, length_s: float = 0.0) -> None:
        participant = self._participant
        subject = escape_peer_text(replica_id, max_characters=_MAX_ID)
        self._changes.append(
            MembershipChange(
                unix_s=datetime.now(timezone.utc).timestamp(),
                kind=kind,
                replica_id=subject,
                step=step,
                length_s=length_s,
                text=text[:_MAX_TEXT],
            )
        )
        level = logging.INFO if participant.membership.group_rank else logging.WARNING
        logger.log(level, "%s: %s%s", participant.name, "" if kind == "healed" else f"replica {subject} ", text)


def _replicas(decision: Decision) -> str:
    count = len(decision.group_members)
    return f"{count} replica{'s' * (count != 1)}"


def loop_status(participant: Participant) -> ManagerStatus:
    """Return the status of a manager in a quorum, for ``/state``. Any thread may call it."""
    state, membership, current = participant.state, participant.membership, participant.round
    decision, report = current.decision if current is not None else None, membership.last_report
    activity = _activity(participant)
    return replace(
        state.status(),
        replica_id=membership.replica_id,
        group_rank=membership.group_rank,
        activity=activity,
        activity_s=time.monotonic() - state.steps.began_s if activity != "idle" else 0.0,
        quorum=str(group_number(decision.group)) if decision is not None else "",
        members=tuple(
            MemberStatus(replica_id=member.replica_id, step=member.step, addresses=member.addresses)
            for member in membership.members
        ),
        num_participants=decision.num_participants if decision is not None else 0,
        lighthouse=membership.lighthouse,
        is_lighthouse_lost=membership.is_lighthouse_lost(),
        rules=report.rules if report is not None else (),
        structure=report.structure if report is not None else (),
        store_address=report.store_address if report is not None else "",
    )


def _activity(participant: Participant) -> Activity:
    current, steps = participant.round, participant.state.steps
    if current is None:
        return "idle"
    if participant.healing is not None:
        return "healing"
    is_new = not steps.num_committed
    if not current.quorum.done() and (is_new or time.monotonic() - steps.began_s > _QUICK_S):
        return "waiting"
    decision = current.decision
    if decision is not None and isinstance(decision.role, (StandsBy, DoesNotFit)):
        return "waiting"
    return "training"
