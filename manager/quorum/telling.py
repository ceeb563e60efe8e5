"""The state of a fault-tolerant loop, as ``/state`` shows it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

from ft_transport.telemetry.process_state import Activity, ManagerStatus, MemberStatus
from manager.quorum.decision import DoesNotFit, StandsBy
from manager.quorum.held_process_group import group_number
from manager.quorum.round import Participant

_QUICK_S: Final = 1.0
"""A quorum that forms during ``forward`` counts as waiting only after this long."""


def told_loop(participant: Participant) -> ManagerStatus:
    """Return the state of a manager in a quorum. Any thread may call it."""
    state, membership, current = participant.state, participant.membership, participant.round
    decision, said = current.decision if current is not None else None, membership.said
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
        rules=said.rules if said is not None else (),
        structure=said.structure if said is not None else (),
        store_address=said.store_address if said is not None else "",
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
