"""The last steps that a replica has tried: how long each took, and what became of it."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from ft_transport.telemetry.told import NUM_STEPS, ToldStep

_MAX_CAUSE: Final = 300


class StepLog:
    """Keeps the last steps. The training thread tells it; any thread may ask.

    Attributes:
        began_s: When the present step began, by the monotonic clock.
        num_committed: How many were committed.
        num_refused: How many were not.
    """

    def __init__(self) -> None:
        """Begin without a step."""
        self.began_s = time.monotonic()
        self.num_committed = 0
        self.num_refused = 0
        self._has_begun = False
        self._kept: deque[tuple[int, float, int, str]] = deque(maxlen=NUM_STEPS)

    def begin(self) -> None:
        """A step begins."""
        self.began_s = time.monotonic()

    def boundary(self, earlier: int, step: int) -> None:
        """Without a quorum: the step before has ended here, if the state shows a later one now."""
        if self._has_begun and step > earlier:
            self.end(earlier)
        self._has_begun = True
        self.begin()

    def end(self, step: int, *, num_participants: int = 0, cause: str = "") -> None:
        """It has ended.

        Args:
            step: The committed step that it began with.
            num_participants: How many replicas took part.
            cause: Why it was not committed; empty if it was.
        """
        self._kept.append((step, time.monotonic() - self.began_s, num_participants, cause[:_MAX_CAUSE]))
        if cause:
            self.num_refused += 1
        else:
            self.num_committed += 1

    def recent(self) -> tuple[ToldStep, ...]:
        """The newest at the end."""
        return tuple(
            ToldStep(
                step=step, length_s=length_s, is_committed=not cause, num_participants=num_participants, cause=cause
            )
            for step, length_s, num_participants, cause in self._kept.copy()
        )
