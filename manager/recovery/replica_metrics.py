"""What is told of one replica to who scrapes its transport.

Nothing here keeps the replica: a manager may be dropped while its transport still answers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from ft_transport.telemetry.readings import PREFIX, Counts, Metric, Reading, Source
from manager.state.replica_state import ReplicaState

if TYPE_CHECKING:
    from ft_transport import CheckpointStore, HTTPTransport

_STEP: Final = Metric(name=f"{PREFIX}step", kind="gauge", help="The committed step that the state shows.")
_BATCHES: Final = Metric(
    name=f"{PREFIX}batches_committed", kind="gauge", help="Batches that went into the state, over all replicas."
)
_PARTIAL: Final = Metric(
    name=f"{PREFIX}state_is_partial", kind="gauge", help="1 while the state is not that of any one step, else 0."
)
_RECOVERIES: Final = Metric(
    name=f"{PREFIX}recoveries_total",
    kind="counter",
    help="States that were received from peers and loaded, those of a warm join too.",
)
_RESUMES: Final = Metric(
    name=f"{PREFIX}resumes_total", kind="counter", help="States that were loaded from checkpoints."
)


def recoveries() -> Counts:
    """A counter of states from peers."""
    return Counts(_RECOVERIES)


def resumes() -> Counts:
    """A counter of states from checkpoints."""
    return Counts(_RESUMES)


def collect_metrics(
    transport: HTTPTransport[Any], state: ReplicaState, store: CheckpointStore | None, *counts: Counts
) -> None:
    """Have what a replica counts told by its transport.

    Args:
        transport: Its transport.
        state: Its state; held weakly.
        store: Its checkpoints, whose records count; ``None`` without any.
        *counts: What else it counts.
    """
    metrics = transport.watch.metrics
    metrics.collect(state.lock.costs.readings)
    metrics.collect(_of_state(state))
    for each in counts:
        metrics.collect(each.readings)
    if store is not None:
        metrics.follow(store.recorder)


def _of_state(state: ReplicaState) -> Source:
    reference = weakref.ref(state)

    def readings() -> Iterator[Reading]:
        alive = reference()
        if alive is not None:
            yield Reading(metric=_STEP, value=alive.step)
            yield Reading(metric=_BATCHES, value=alive.batches_committed)
            yield Reading(metric=_PARTIAL, value=int(alive.partial is not None))

    return readings
