"""Counts the optimizers' steps for each commit, and records the duration and outcome of the last training steps.

Optimizers step after the commit. If an optimizer fails, skips its step or steps twice, the replica has other weights
than its peers, but the same step number. So the `StepLedger` counts the steps, and describes deviations. The
description becomes part of the state's lineage. If all replicas deviate alike (the gradient scaler of each skips
a step, for example), their lineages still match. A replica that deviates alone has another lineage, and heals.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from torch.optim import Optimizer

from ft_transport.telemetry.process_state import NUM_STEPS, StepStatus
from manager.state.optimizer_guard import local_updates_of


class StepLedger:
    """Counts the steps of each optimizer since the last commit. Only the training thread may use this object."""

    def __init__(self) -> None:
        self._num_steps: dict[int, int] | None = None  # before the first commit, and after a load
        self._free: set[int] = set()

    def let_step_freely(self, optimizers: Sequence[Optimizer]) -> None:
        """Do not check these optimizers, because they do not step once for each commit."""
        self._free |= {id(optimizer) for optimizer in optimizers}

    def steps_with_commits(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer must step exactly once for each commit."""
        return id(optimizer) not in self._free and not any(local_updates_of(optimizer))

    def committed(self) -> None:
        """Record a commit: until the next commit, each optimizer must step once."""
        self._num_steps = {}

    def replaced(self) -> None:
        """Record that another state was loaded: steps are not counted until the next commit."""
        self._num_steps = None

    def stepped(self, optimizer: Optimizer) -> None:
        """Count a successful step of this optimizer."""
        if self._num_steps is not None:
            self._num_steps[id(optimizer)] = self._num_steps.get(id(optimizer), 0) + 1

    def num_steps(self, optimizer: Optimizer) -> int:
        """Return how often the optimizer has stepped since the last commit."""
        return (self._num_steps or {}).get(id(optimizer), 0)

    def irregularity(self, optimizers: Sequence[Optimizer]) -> str:
        """Return how often each optimizer stepped since the last commit, as text; empty if each stepped once.

        Args:
            optimizers: The attached optimizers, in the order of attachment, which is the same on all replicas.
        """
        stepped = self._num_steps
        if stepped is None:
            return ""
        if len(stepped) == len(optimizers) and all(stepped.get(id(each)) == 1 for each in optimizers):
            return ""
        attached = [optimizer for optimizer in optimizers if self.steps_with_commits(optimizer)]
        # If an optimizer is attached twice, each of its steps is counted twice.
        num_attachments = Counter(id(optimizer) for optimizer in attached)
        numbers = {id(optimizer): self.num_steps(optimizer) / num_attachments[id(optimizer)] for optimizer in attached}
        if all(number == 1 for number in numbers.values()):
            return ""
        names = {id(optimizer): type(optimizer).__name__ for optimizer in attached}
        return ", ".join(f"{names[key]} {index}: {number:g}" for index, (key, number) in enumerate(numbers.items()))


_MAX_CAUSE: Final = 300
"""Maximum characters of the recorded cause of a step that was not committed."""


class StepLog:
    """A log of the last training steps. The training thread writes; any thread may read.

    Attributes:
        began_s: Time at which the present step began, in seconds of the monotonic clock.
        num_committed: Number of committed steps of this process.
        num_refused: Number of steps of this process that were not committed.
    """

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.num_committed = 0
        self.num_refused = 0
        self._has_begun = False
        # Step, length, period, participants, cause. Tuples, because a dataclass would take ten times as long to make.
        self._recent: deque[tuple[int, float, float, int, str]] = deque(maxlen=NUM_STEPS)
        self._is_followed = True

    def begin(self) -> float | None:
        """Record the beginning of a step.

        Returns:
            Seconds since the beginning of the previous step: the training loop's whole time for that step. ``None``
            without a previous step that has ended.
        """
        now_s = time.monotonic()
        period_s = None
        if not self._is_followed:
            period_s = now_s - self.began_s
            step, length_s, _, num_participants, cause = self._recent[-1]
            self._recent[-1] = (step, length_s, period_s, num_participants, cause)
            self._is_followed = True
        self.began_s = now_s
        return period_s

    def boundary(self, earlier: int, step: int) -> None:
        """Record a step boundary of a manager without a quorum.

        Args:
            earlier: The step that the state showed before this boundary. That step ends if the state shows a later one
                now.
            step: The step that the state shows now.
        """
        if self._has_begun and step > earlier:
            self.end(earlier)
        self._has_begun = True
        self.begin()

    def end(self, step: int, *, num_participants: int = 0, cause: str = "") -> float:
        """Record the end of a step.

        Args:
            step: The committed step that the state showed at the beginning.
            num_participants: Number of replicas that took part.
            cause: Why the step was not committed; empty for a committed step.

        Returns:
            Seconds since the beginning of the step.
        """
        length_s = time.monotonic() - self.began_s
        self._recent.append((step, length_s, 0.0, num_participants, cause[:_MAX_CAUSE]))
        self._is_followed = False
        if cause:
            self.num_refused += 1
        else:
            self.num_committed += 1
        return length_s

    def recent(self) -> tuple[StepStatus, ...]:
        """Return the recorded steps, the newest last."""
        return tuple(
            StepStatus(
                step=step,
                length_s=length_s,
                period_s=period_s,
                is_committed=not cause,
                num_participants=num_participants,
                cause=cause,
            )
            for step, length_s, period_s, num_participants, cause in self._recent.copy()
        )
