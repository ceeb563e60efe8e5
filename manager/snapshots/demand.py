"""Which snapshots somebody waits for: numbers and steps, without threads or state: each order is a unit test."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

_MAX_WANTED_STEPS: Final = 16
"""Steps to come that receivers may have asked for; more are forgotten, the latest first."""


@dataclass(slots=True)
class SnapshotDemand:
    """The requests that no snapshot has met yet. Not thread-safe: the scheduler's mutex protects it.

    A request is kept as the number that it was given, until more snapshots than that have been published: so one that
    fails or comes too early cannot make it forgotten.

    Attributes:
        step: The committed step that the state shows; ``None`` before the first boundary.
        epoch: Counts whatever may have changed the state: the same step number can stand for two states.
        published_epoch: The epoch that the newest snapshot shows.
        is_to_share: Whether a snapshot had better be served from where the state lies.
    """

    step: int | None = None
    epoch: int = 0
    published_epoch: int = -1
    is_to_share: bool = False
    _has_syncs: bool = False
    _wanted_after: int = -1
    _wanted_steps: list[int] = field(default_factory=list)

    def want_step(self, step: int) -> None:
        """Note that somebody waits for a snapshot of just this step, at whose boundary it is taken."""
        if self.step is None or step > self.step:
            self._wanted_steps = heapq.nsmallest(_MAX_WANTED_STEPS, {*self._wanted_steps, step})

    def want_after(self, num_published: int) -> None:
        """Note that somebody waits for a snapshot after the first ``num_published``."""
        self._wanted_after = max(self._wanted_after, num_published)

    def begin_boundary(self, step: int) -> None:
        """Note that the state shows ``step`` from here on."""
        self.step = step
        self.epoch += 1

    def take_boundary(self, num_published: int, *, is_sync: bool) -> bool:
        """Whether a snapshot of the present boundary is wanted. What only earlier ones would have met is forgotten.

        Args:
            num_published: How many snapshots have been published.
            is_sync: What seldom changes has just done so. From the first time on, a request without a step waits for
                such a moment, unless it is to be shared.
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
        """Whether somebody waits for the snapshot that follows ``num_before`` others."""
        return self._wanted_after >= num_before

    def forget(self, num_before: int | None = None) -> None:
        """Wait for nothing any more, because the snapshot failed for good.

        Args:
            num_before: How many snapshots preceded it. Those who were promised a later one still wait.
        """
        if num_before is None or self._wanted_after <= num_before:
            self._wanted_after = -1
