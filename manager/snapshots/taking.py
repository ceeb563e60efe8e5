"""Takes snapshots of a replica's state: decides which tensors are copied at once, which later, and which are shared.

The caller of each function has a section of the lock open, on the training thread unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Final

import torch
from torch.optim import Optimizer

from ft_transport.state.snapshot import Taking
from manager.snapshots.boundary_keeper import BoundaryKeeper, KeptBoundary
from manager.state.guard_marks import often_stepping
from manager.state.guarded_memory import (
    Memory,
    belongs_to,
    memory_at,
    parameters_of,
    storage_of,
    storages_of_optimizers,
    tensors_in,
)
from manager.state.replica_state import ReplicaState

_MAX_HELD_BYTES: Final = 16 << 20
"""Maximum bytes copied for a snapshot that is otherwise served from live memory."""
_MOST_COPIED_SHARE: Final = 0.25
"""Maximum copied fraction of the lasting bytes: if steps change more, a copy in the background costs the boundary
less."""


def taking_at_once(state: ReplicaState, keeper: BoundaryKeeper, *, may_defer: bool, may_share: bool) -> Taking:
    """Take the present state.

    Args:
        state: The state.
        keeper: Knows the memory that only optimizers and write sections change.
        may_defer: Whether memory that optimizers guard may be copied later, under the caller's section.
        may_share: Whether stable tensors may be served from live memory; only with ``may_defer``.
    """
    live, optimizers = state.content(), state.optimizers()
    if not may_defer:
        return Taking(step=state.step, state=live)
    guarded = keeper.guarded(optimizers)
    stable = keeper.stable(live) if may_share else set()
    lasting = _lasting(stable, optimizers) if stable else None
    return Taking(
        step=state.step,
        state=live,
        deferrable=belongs_to(guarded),
        lasting=lasting,
        check_deferred=keeper.watch([each for each in parameters_of(optimizers) if memory_at(each) in guarded]),
        check_shared=keeper.watch([each for each in tensors_in(live) if lasting(each)] if lasting is not None else []),
    )


def taking_in_place(state: ReplicaState, keeper: BoundaryKeeper) -> Taking:
    """Hold the present state to serve it from live memory; other parts are copied."""
    live, optimizers = state.content(), state.optimizers()
    stable = keeper.stable(live)
    guarded = keeper.guarded(optimizers) | stable
    check = keeper.watch(_counting_tensors(live, optimizers, guarded))
    return Taking(
        step=state.step,
        state=live,
        deferrable=belongs_to(guarded, at_least_bytes=0),
        lasting=_lasting(stable, often_stepping(optimizers)),
        check_deferred=check,
        check_shared=check,
        max_held_bytes=_MAX_HELD_BYTES,
    )


def taking_lasting(state: ReplicaState, keeper: BoundaryKeeper) -> Taking | None:
    """Hold the present state to serve the tensors that outlast steps from live memory; ``None`` without any.

    Steps change little else, which is copied. An arena for the whole state would have to be made resident.
    """
    live = state.content()
    stable = keeper.stable(live)
    if not stable:
        return None
    is_lasting = _lasting(stable, often_stepping(state.optimizers()))
    lasting = [each for each in tensors_in(live) if is_lasting(each)]
    num_bytes = sum({memory_at(each): each.nbytes for each in lasting}.values())
    check = keeper.watch(lasting)
    return Taking(
        step=state.step,
        state=live,
        deferrable=is_lasting,
        lasting=is_lasting,
        check_deferred=check,
        check_shared=check,
        max_held_bytes=int(num_bytes * _MOST_COPIED_SHARE),
    )


def taking_kept(step: int, kept: KeptBoundary, keeper: BoundaryKeeper) -> Taking:
    """Hold the state of a kept boundary; everything unguarded has been copied. On any thread."""
    live = kept.state()
    return Taking(
        step=step,
        state=live,
        deferrable=lambda _: True,
        lasting=_lasting(keeper.stable(live), often_stepping(kept.optimizers)),
        check_deferred=kept.check,
        check_shared=kept.check,
    )


def _counting_tensors(state: object, optimizers: Sequence[Optimizer], guarded: Set[Memory]) -> list[torch.Tensor]:
    """Return the guarded tensors that count their changes: the optimizers' own parameters, and stable tensors."""
    parameters = parameters_of(optimizers)
    own = {memory_at(parameter) for parameter in parameters}
    return [
        tensor
        for tensor in (*parameters, *(each for each in tensors_in(state) if memory_at(each) not in own))
        if memory_at(tensor) in guarded
    ]


def _lasting(stable: Set[Memory], optimizers: Sequence[Optimizer]) -> Callable[[torch.Tensor], bool]:
    """Return a check that a tensor is large, stable, and shares no memory with tensors that optimizer steps change."""
    is_stable, stepped = belongs_to(stable), storages_of_optimizers(optimizers)
    return lambda tensor: is_stable(tensor) and storage_of(tensor) not in stepped
