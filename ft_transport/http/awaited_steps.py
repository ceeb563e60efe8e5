"""Readers that wait for a snapshot of a step that is still to come: it is kept for them from the moment it is there.

Between the arrival of a snapshot and the moment at which the request that waits for it looks, a busy machine may
publish further ones, which would take its place: whoever asked in time would be told that the step is past. The same
holds between two requests of one receiver, of which the first was answered that the step has not come yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Waiter(Protocol):
    """A reader of snapshots that waits."""

    @property
    def is_closed(self) -> Callable[[], bool]:
        """Says whether the reader's connection is closed. The function itself names the reader, too."""


W = TypeVar("W", bound=Waiter)


@dataclass(frozen=True, slots=True, eq=False)
class _Wait(Generic[W]):
    step: int
    waiter: W
    until_s: float


@dataclass(slots=True, eq=False)
class AwaitedSteps(Generic[W]):
    """At most one step for each reader. Not thread-safe: the cache's lock protects it."""

    _waits: dict[Callable[[], bool], _Wait[W]] = field(default_factory=dict)

    def begin(self, step: int, waiter: W, *, now_s: float) -> None:
        """Notes that a reader waits for a step, in place of what it has waited for before."""
        # Whoever is gone would otherwise stay for ever.
        self._waits = {
            name: wait for name, wait in self._waits.items() if wait.until_s > now_s and not wait.waiter.is_closed()
        }
        self._waits[waiter.is_closed] = _Wait(step, waiter, math.inf)

    def end(self, waiter: W, *, until_s: float) -> None:
        """Notes that a reader does not ask any more, and may ask again until a point in time."""
        wait = self._waits.get(waiter.is_closed)
        if wait is not None:
            self._waits[waiter.is_closed] = _Wait(wait.step, waiter, until_s)

    def come(self, step: int, *, now_s: float, lease_s: float) -> dict[Callable[[], bool], tuple[W, float]]:
        """Takes out the readers that wait for a step: each with how long it is kept for them.

        For a reader that asks at this moment that is until it has looked, without an end; for others the lease.
        """
        come = {name: wait for name, wait in self._waits.items() if wait.step == step and wait.until_s > now_s}
        for name in come:
            del self._waits[name]
        return {
            name: (wait.waiter, math.inf if wait.until_s == math.inf else now_s + lease_s)
            for name, wait in come.items()
        }
