"""The state of a replica, as ``/state`` shows it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from ft_transport.telemetry.process_state import HolderStatus, LockStatus, ManagerStatus
from manager.state.replica_state import ReplicaState

T = TypeVar("T")


def telling(owner: T, tell: Callable[[T], ManagerStatus]) -> Callable[[], ManagerStatus | None]:
    """Return ``tell`` of an owner while the owner exists: showing its state keeps no manager alive."""
    found = weakref.ref(owner)

    def told() -> ManagerStatus | None:
        present = found()
        return tell(present) if present is not None else None

    return told


def told_state(state: ReplicaState) -> ManagerStatus:
    """Return the state of a manager without a quorum. Any thread may call it."""
    partial, waits = state.partial, state.lock.contended
    is_training = state.training_thread is not None
    return ManagerStatus(
        activity="training" if is_training else "idle",
        activity_s=time.monotonic() - state.steps.began_s if is_training else 0.0,
        step=state.step,
        batches=state.batches_committed,
        partial=partial.reason if partial is not None else "",
        lock=LockStatus(
            holders=tuple(
                HolderStatus(kind=holder.kind, what=holder.what, age_s=holder.age_s) for holder in state.lock.holders()
            ),
            num_waits=waits.num,
            waited_s=waits.total_s,
            longest_wait_s=waits.longest_s,
        ),
        steps=state.steps.recent(),
        num_committed=state.steps.num_committed,
        num_refused=state.steps.num_refused,
    )
