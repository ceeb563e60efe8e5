"""The steps of a replica: how often each optimizer stepped for each commit, and a log of lengths and results.

A commit names the step that the state will show; the optimizers step after it. If an optimizer fails, skips its step or
steps twice, the replica has other weights than its peers under the same step number. The ledger counts the steps and
describes irregular ones. The description becomes part of the state's lineage: replicas that all did the same (a
gradient scaler that skips a step everywhere) still match, and one that differs has another lineage and heals.
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
    """Counts the steps of optimizers since the last commit. Belongs to the training thread."""

    def __init__(self) -> None:
        """Expect nothing before the first commit."""
        self._num_steps: dict[int, int] | None = None
        self._free: set[int] = set()

    def let_step_freely(self, optimizers: Sequence[Optimizer]) -> None:
        """Do not check these optimizers: their steps do not follow commits."""
        self._free |= {id(optimizer) for optimizer in optimizers}

    def steps_with_commits(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer has to step once for each commit."""
        return id(optimizer) not in self._free and not any(local_updates_of(optimizer))

    def committed(self) -> None:
        """Expect one step of each optimizer from now on."""
        self._num_steps = {}

    def replaced(self) -> None:
        """Expect nothing until the next commit: another state was loaded."""
        self._num_steps = None

    def stepped(self, optimizer: Optimizer) -> None:
        """Count a step that succeeded."""
        if self._num_steps is not None:
            self._num_steps[id(optimizer)] = self._num_steps.get(id(optimizer), 0) + 1

    def num_steps(self, optimizer: Optimizer) -> int:
        """Return the number of the optimizer's steps since the last commit."""
        return (self._num_steps or {}).get(id(optimizer), 0)

    def irregularity(self, optimizers: Sequence[Optimizer]) -> str:
        """Describe how often each optimizer stepped since the last commit; empty if each stepped once.

        Args:
            optimizers: The attached optimizers, in the order of attachment, which is the same on all replicas.
        """
        stepped = self._num_steps
        if stepped is None:
            return ""
        if len(stepped) == len(optimizers) and all(stepped.get(id(each)) == 1 for each in optimizers):
            return ""
        attached = [optimizer for optimizer in optimizers if self.steps_with_commits(optimizer)]
        # An optimizer that is attached twice reports each step twice.
        num_attachments = Counter(id(optimizer) for optimizer in attached)
        numbers = {id(optimizer): self.num_steps(optimizer) / num_attachments[id(optimizer)] for optimizer in attached}
        if all(number == 1 for number in numbers.values()):
            return ""
        names = {id(optimizer): type(optimizer).__name__ for optimizer in attached}
        return ", ".join(f"{names[key]} {index}: {number:g}" for index, (key, number) in enumerate(numbers.items()))


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
