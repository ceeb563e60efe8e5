"""The last steps that a replica tried: how long each took, and how each ended."""

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
        # Step, length, period, participants and cause: values with names take ten times as long to make.
        self._kept: deque[tuple[int, float, float, int, str]] = deque(maxlen=NUM_STEPS)
        self._is_followed = True

    def begin(self) -> float | None:
        """Note that a step begins.

        Returns:
            Seconds since the step before began, if that one has ended: what the loop takes for a step, with all that it
            does between its end and this boundary.
        """
        now_s = time.monotonic()
        period_s = None
        if not self._is_followed:
            period_s = now_s - self.began_s
            step, length_s, _, num_participants, cause = self._kept[-1]
            self._kept[-1] = (step, length_s, period_s, num_participants, cause)
            self._is_followed = True
        self.began_s = now_s
        return period_s

    def boundary(self, earlier: int, step: int) -> None:
        """Without a quorum: the step before has ended here, if the state shows a later one now."""
        if self._has_begun and step > earlier:
            self.end(earlier)
        self._has_begun = True
        self.begin()

    def end(self, step: int, *, num_participants: int = 0, cause: str = "") -> float:
        """It has ended.

        Args:
            step: The committed step that it began with.
            num_participants: How many replicas took part.
            cause: Why it was not committed; empty if it was.

        Returns:
            Seconds since its boundary.
        """
        length_s = time.monotonic() - self.began_s
        self._kept.append((step, length_s, 0.0, num_participants, cause[:_MAX_CAUSE]))
        self._is_followed = False
        if cause:
            self.num_refused += 1
        else:
            self.num_committed += 1
        return length_s

    def recent(self) -> tuple[ToldStep, ...]:
        """The newest at the end."""
        return tuple(
            ToldStep(
                step=step,
                length_s=length_s,
                period_s=period_s,
                is_committed=not cause,
                num_participants=num_participants,
                cause=cause,
            )
            for step, length_s, period_s, num_participants, cause in self._kept.copy()
        )
