"""What a fault-tolerant loop tells to who watches it; whoever watches keeps no manager alive."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Final

from ft_transport.telemetry.told import Activity, ToldManager, ToldMember
from manager.quorum.decision import DoesNotFit, StandsBy
from manager.quorum.held_process_group import group_number
from manager.quorum.round import Participant
from manager.state.telling import told_lock

_QUICK_S: Final = 1.0
"""A quorum that is formed beside ``forward`` is nothing to wait for, unless it takes longer."""


def telling_loop(participant: Participant) -> Callable[[], ToldManager | None]:
    """What is asked by any thread, when somebody watches."""
    found = weakref.ref(participant)

    def told() -> ToldManager | None:
        present = found()
        return _told(present) if present is not None else None

    return told


def _told(participant: Participant) -> ToldManager:
    state, membership, current = participant.state, participant.membership, participant.round
    decision = current.decision if current is not None else None
    partial, said = state.partial, membership.said
    activity = _activity(participant)
    return ToldManager(
        replica_id=membership.replica_id,
        group_rank=membership.group_rank,
        activity=activity,
        activity_s=time.monotonic() - state.steps.began_s if activity != "idle" else 0.0,
        step=state.step,
        batches=state.batches_committed,
        partial=partial.reason if partial is not None else "",
        quorum=str(group_number(decision.group)) if decision is not None else "",
        members=tuple(
            ToldMember(replica_id=member.replica_id, step=member.step, addresses=member.addresses)
            for member in membership.members
        ),
        num_participants=decision.num_participants if decision is not None else 0,
        lighthouse=membership.lighthouse,
        is_lighthouse_lost=membership.is_lighthouse_lost(),
        lock=told_lock(state.lock),
        steps=state.steps.recent(),
        num_committed=state.steps.num_committed,
        num_refused=state.steps.num_refused,
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
