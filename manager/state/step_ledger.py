"""Checks that every attached optimizer steps exactly once for each commit.

A commit names the step that the state will show; the optimizers step after it. If an optimizer fails, skips its step or
steps twice, the replica has other weights than its peers under the same step number. The ledger counts the steps and
describes irregular ones. The description becomes part of the state's lineage: replicas that all did the same (a
gradient scaler that skips a step everywhere) still match, and one that differs has another lineage and heals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch.optim import Optimizer

from manager.state.guard_marks import local_updates_of


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
