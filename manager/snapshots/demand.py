"""The open requests for snapshots: numbers and steps, without threads or state, so that each order is a unit test."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

_MAX_WANTED_STEPS: Final = 16
"""Maximum future steps that receivers may request; further ones are forgotten, the latest first."""


@dataclass(slots=True)
class SnapshotDemand:
    """The requests that no snapshot has met yet. Not thread-safe: the scheduler's mutex protects it.

    A request is stored as the number that it was given, until more snapshots than that have been published: so one that
    fails or comes too early does not drop it.

    Attributes:
        step: The committed step of the state; ``None`` before the first boundary.
        epoch: Counts possible changes of the state: the same step number can stand for two states.
        published_epoch: The epoch of the newest snapshot.
        is_to_share: Whether a snapshot should be served from live memory.
    """

    step: int | None = None
    epoch: int = 0
    published_epoch: int = -1
    is_to_share: bool = False
    _has_syncs: bool = False
    _wanted_after: int = -1
    _wanted_steps: list[int] = field(default_factory=list)

    def want_step(self, step: int) -> None:
        """Note a request for a snapshot of exactly this step, taken at its boundary."""
        if self.step is None or step > self.step:
            self._wanted_steps = heapq.nsmallest(_MAX_WANTED_STEPS, {*self._wanted_steps, step})

    def want_after(self, num_published: int) -> None:
        """Note a request for a snapshot after the first ``num_published``."""
        self._wanted_after = max(self._wanted_after, num_published)

    def begin_boundary(self, step: int) -> None:
        """Note that the state shows ``step`` from here on."""
        self.step = step
        self.epoch += 1

    def take_boundary(self, num_published: int, *, is_sync: bool) -> bool:
        """Return whether a snapshot of the present boundary is wanted; drop requests that only earlier ones could meet.

        Args:
            num_published: Number of published snapshots.
            is_sync: Whether tensors that seldom change have just changed. From the first time on, a request without a
                step waits for such a moment, unless it is to be shared.
        """
        assert self.step is not None, "the boundary has begun"
        self._has_syncs = self._has_syncs or is_sync
        is_urgent = is_sync or not self._has_syncs or self.step in self._wanted_steps
        if num_published > self._wanted_after:
            self._wanted_after = -1
        is_wanted = self._wanted_after >= 0 or self.step in self._wanted_steps
        self._wanted_steps = [wanted for wanted in self._wanted_steps if wanted > self.step]
        if not is_wanted:
            self.is_to_share = False
        return is_wanted and (is_urgent or self.is_to_share)

    def is_open(self, num_before: int) -> bool:
        """Return whether a request waits for the snapshot that follows ``num_before`` others."""
        return self._wanted_after >= num_before

    def forget(self, num_before: int | None = None) -> None:
        """Drop all requests, because the snapshot failed for good.

        Args:
            num_before: Number of snapshots before the failed one. Requests that were promised a later one stay open.
        """
        if num_before is None or self._wanted_after <= num_before:
            self._wanted_after = -1
