"""What a snapshot of a replica's state consists of: what is copied at once, what later, and what is shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Final

import torch
from torch.optim import Optimizer

from ft_transport import HeldState
from manager.snapshots.boundary_keeper import BoundaryKeeper, KeptBoundary
from manager.snapshots.sink import SnapshotInProgress, SnapshotSink
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

_MAX_HELD_BYTES: Final = 16 << 20
"""The most that is copied for a snapshot that is then served from where the state lies."""
_MOST_COPIED_SHARE: Final = 0.25
"""Of what lasts: where steps change more, a copy in the background costs the boundary less."""


class StateTaking:
    """Looks at the state and tells the transport how to take it. Each caller has a section of the lock open.

    Args:
        sink: Where snapshots go.
        state: Calls the state functions.
        keeper: Knows what only optimizers and write sections change.
    """

    def __init__(self, sink: SnapshotSink, state: Callable[[], object], keeper: BoundaryKeeper) -> None:
        self._sink = sink
        self._state = state
        self._keeper = keeper

    def keep(self, optimizers: Sequence[Optimizer]) -> KeptBoundary | None:
        """Copy what may change before anybody says that a snapshot is needed; see `BoundaryKeeper.keep`."""
        return self._keeper.keep(optimizers)

    def hold(self, step: int, optimizers: Sequence[Optimizer]) -> HeldState | None:
        """Copy what cannot be served from where it lies; ``None`` if that is too much."""
        live = self._state()
        stable = self._keeper.stable(live)
        guarded = self._keeper.guarded(optimizers) | stable
        watched = _parameters_in(live, optimizers, guarded)
        return self._sink.hold_state(
            step,
            live,
            deferrable=belongs_to(guarded, at_least_bytes=0),
            max_bytes=_MAX_HELD_BYTES,
            check=self._keeper.watch(watched),
            lasts=_shareable(stable, storages_of_optimizers(often_stepping(optimizers))),
        )

    def hold_lasting(self, step: int, optimizers: Sequence[Optimizer]) -> HeldState | None:
        """Copy what steps change, to serve what lasts longer from where it lies; ``None`` if that is little.

        No arena is taken: one for the whole state would have to be made resident.
        """
        live = self._state()
        stable = self._keeper.stable(live)
        if not stable:
            return None
        lasts = _shareable(stable, storages_of_optimizers(often_stepping(optimizers)))
        lasting = [each for each in tensors_in(live) if lasts(each)]
        num_bytes = sum({memory_at(each): each.nbytes for each in lasting}.values())
        return self._sink.hold_state(
            step,
            live,
            deferrable=lasts,
            max_bytes=int(num_bytes * _MOST_COPIED_SHARE),
            check=self._keeper.watch(lasting),
            lasts=lasts,
        )

    def hold_kept(self, step: int, kept: KeptBoundary) -> HeldState:
        """Hold the state of a boundary that was kept; all that is not guarded has been copied."""
        live = kept.state()
        lasts = _shareable(self._keeper.stable(live), storages_of_optimizers(often_stepping(kept.optimizers)))
        state = self._sink.hold_state(step, live, deferrable=lambda _: True, max_bytes=0, check=kept.check, lasts=lasts)
        assert state is not None, "nothing is copied"
        return state

    def begin(
        self, step: int, optimizers: Sequence[Optimizer], *, may_defer: bool, may_share: bool
    ) -> SnapshotInProgress:
        """Begin a snapshot of the present state.

        Args:
            step: The committed step that it shows.
            optimizers: Those that are attached.
            may_defer: Whether what optimizers guard may be copied later, under the caller's section.
            may_share: Whether stable tensors may be served from where they lie; only with ``may_defer``.
        """
        state = self._state()
        deferrable = shareable = None
        deferred: list[torch.Tensor] = []
        shared: list[torch.Tensor] = []
        if may_defer:
            guarded = self._keeper.guarded(optimizers)
            deferrable = belongs_to(guarded)
            deferred = [each for each in parameters_of(optimizers) if memory_at(each) in guarded]
            if may_share and (stable := self._keeper.stable(state)):
                shareable = _shareable(stable, storages_of_optimizers(optimizers))
                shared = [each for each in tensors_in(state) if shareable(each)]
        return self._sink.begin_snapshot(
            step,
            state,
            deferrable=deferrable,
            shareable=shareable,
            check_deferred=self._keeper.watch(deferred),
            check_shared=self._keeper.watch(shared),
        )


def _parameters_in(state: object, optimizers: Sequence[Optimizer], guarded: Set[Memory]) -> list[torch.Tensor]:
    """The guarded tensors that count their changes: the optimizers' parameters themselves, and what is stable."""
    parameters = parameters_of(optimizers)
    own = {memory_at(parameter) for parameter in parameters}
    return [
        tensor
        for tensor in (*parameters, *(each for each in tensors_in(state) if memory_at(each) not in own))
        if memory_at(tensor) in guarded
    ]


def _shareable(stable: Set[Memory], stepped: Set[int]) -> Callable[[torch.Tensor], bool]:
    """Says of a tensor whether it is large, stable, and shares no memory with what optimizers' steps change."""
    is_stable = belongs_to(stable)
    return lambda tensor: is_stable(tensor) and storage_of(tensor) not in stepped
