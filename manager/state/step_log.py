"""A log of a replica's last steps: their lengths and results."""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from ft_transport.telemetry.process_state import NUM_STEPS, StepStatus

_MAX_CAUSE: Final = 300


class StepLog:
    """The last steps. The training thread writes; any thread may read.

    Attributes:
        began_s: Monotonic time at which the present step began.
        num_committed: Number of committed steps.
        num_refused: Number of steps that were not committed.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.began_s = time.monotonic()
        self.num_committed = 0
        self.num_refused = 0
        self._has_begun = False
        # Step, length, period, participants, cause. Tuples: dataclasses would take ten times as long to make.
        self._kept: deque[tuple[int, float, float, int, str]] = deque(maxlen=NUM_STEPS)
        self._is_followed = True

    def begin(self) -> float | None:
        """Record the beginning of a step.

        Returns:
            Seconds since the beginning of the previous step, if that has ended: the loop's whole time for a step,
            including its work between the end and this boundary.
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
        """Without a quorum: record the end of the previous step if the state shows a later one, and a beginning."""
        if self._has_begun and step > earlier:
            self.end(earlier)
        self._has_begun = True
        self.begin()

    def end(self, step: int, *, num_participants: int = 0, cause: str = "") -> float:
        """Record the end of a step.

        Args:
            step: The committed step at its beginning.
            num_participants: Number of participating replicas.
            cause: Why the step was not committed; empty if it was.

        Returns:
            Seconds since its beginning.
        """
        length_s = time.monotonic() - self.began_s
        self._kept.append((step, length_s, 0.0, num_participants, cause[:_MAX_CAUSE]))
        self._is_followed = False
        if cause:
            self.num_refused += 1
        else:
            self.num_committed += 1
        return length_s

    def recent(self) -> tuple[StepStatus, ...]:
        """Return the steps, the newest last."""
        return tuple(
            StepStatus(
                step=step,
                length_s=length_s,
                period_s=period_s,
                is_committed=not cause,
                num_participants=num_participants,
                cause=cause,
            )
            for step, length_s, period_s, num_participants, cause in self._kept.copy()
        )
