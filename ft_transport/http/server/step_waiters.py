"""Receivers that wait for a future step: its snapshot is reserved for them as soon as it exists.

Between the arrival of a snapshot and the moment at which the waiting request looks, a busy machine may publish further
ones, which would replace it: a receiver that requested the step in time would get the error that it is past. The same
holds between two requests of one receiver if the first was answered that the step has not come yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Waiter(Protocol):
    """A waiting reader of snapshots."""

    @property
    def is_closed(self) -> Callable[[], bool]:
        """Returns whether the reader's connection is closed. The function also identifies the reader."""


W = TypeVar("W", bound=Waiter)


@dataclass(frozen=True, slots=True, eq=False)
class _Wait(Generic[W]):
    step: int
    waiter: W
    until_s: float


@dataclass(slots=True, eq=False)
class StepWaiters(Generic[W]):
    """At most one step for each reader. Not thread-safe: the cache's lock protects it."""

    _waits: dict[Callable[[], bool], _Wait[W]] = field(default_factory=dict)

    def begin(self, step: int, waiter: W, *, now_s: float) -> None:
        """Note that a reader waits for a step, in place of the step that it waited for before."""
        # Without this, entries of closed connections would stay for ever.
        self._waits = {
            name: wait for name, wait in self._waits.items() if wait.until_s > now_s and not wait.waiter.is_closed()
        }
        self._waits[waiter.is_closed] = _Wait(step, waiter, math.inf)

    def end(self, waiter: W, *, until_s: float) -> None:
        """Note that a reader's request ended, and that the reader may ask again until ``until_s``."""
        wait = self._waits.get(waiter.is_closed)
        if wait is not None:
            self._waits[waiter.is_closed] = _Wait(wait.step, waiter, until_s)

    def come(self, step: int, *, now_s: float, lease_s: float) -> dict[Callable[[], bool], tuple[W, float]]:
        """Remove and return the readers that wait for a step, each with the time until which to reserve it.

        For a reader whose request is waiting now, that is without an end, until it has looked; for others, the lease.
        """
        come = {name: wait for name, wait in self._waits.items() if wait.step == step and wait.until_s > now_s}
        for name in come:
            del self._waits[name]
        return {
            name: (wait.waiter, math.inf if wait.until_s == math.inf else now_s + lease_s)
            for name, wait in come.items()
        }
