"""What a replica tells of its state to who watches it; whoever watches keeps no state alive."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from ft_transport.telemetry.told import ToldHolder, ToldLock, ToldManager
from manager.state.lock import StateLock
from manager.state.replica_state import ReplicaState


def told_lock(lock: StateLock) -> ToldLock:
    """The lock, now. Any thread may ask."""
    waits = lock.costs.contended
    return ToldLock(
        holders=tuple(ToldHolder(kind=holder.kind, what=holder.what, age_s=holder.age_s) for holder in lock.holders()),
        num_waits=waits.num,
        waited_s=waits.total_s,
        longest_wait_s=waits.longest_s,
    )


def telling_state(state: ReplicaState) -> Callable[[], ToldManager | None]:
    """What a manager without a quorum tells: asked by any thread."""
    found = weakref.ref(state)

    def told() -> ToldManager | None:
        present = found()
        if present is None:
            return None
        partial = present.partial
        return ToldManager(
            activity="training" if present.training_thread is not None else "idle",
            activity_s=time.monotonic() - present.steps.began_s if present.training_thread is not None else 0.0,
            step=present.step,
            batches=present.batches_committed,
            partial=partial.reason if partial is not None else "",
            lock=told_lock(present.lock),
            steps=present.steps.recent(),
            num_committed=present.steps.num_committed,
            num_refused=present.steps.num_refused,
        )

    return told
