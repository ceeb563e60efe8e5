"""Whether every attached optimizer made exactly the step that was committed, once for each commit.

A commit says of a state which step it shows; the optimizers make it so afterwards. Where one of them fails, is skipped
or steps twice, the replica holds other weights than its peers under the same step number. The ledger counts, and names
what happened, so that the name can become a part of the state's lineage: replicas that all did the same (a gradient
scaler that skips a step everywhere) stay equal, and one that did something else differs by name and is healed.
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
        """Expect nothing of these optimizers: commits do not go with their steps."""
        self._free |= {id(optimizer) for optimizer in optimizers}

    def steps_with_commits(self, optimizer: Optimizer) -> bool:
        """Whether one step of the optimizer goes with each commit."""
        return id(optimizer) not in self._free and not any(local_updates_of(optimizer))

    def committed(self) -> None:
        """Expect one step of each optimizer from here on."""
        self._num_steps = {}

    def replaced(self) -> None:
        """Expect nothing: the state is another one now."""
        self._num_steps = None

    def stepped(self, optimizer: Optimizer) -> None:
        """Note a step that succeeded."""
        if self._num_steps is not None:
            self._num_steps[id(optimizer)] = self._num_steps.get(id(optimizer), 0) + 1

    def num_steps(self, optimizer: Optimizer) -> int:
        """Steps of the optimizer since the last commit."""
        return (self._num_steps or {}).get(id(optimizer), 0)

    def irregularity(self, optimizers: Sequence[Optimizer]) -> str:
        """Say how often each optimizer stepped for the last commit; empty if each did once, as it should.

        Args:
            optimizers: Those that are attached, in the order of attachment, which is the same on all replicas.
        """
        stepped = self._num_steps
        if stepped is None:
            return ""
        if len(stepped) == len(optimizers) and all(stepped.get(id(each)) == 1 for each in optimizers):
            return ""
        attached = [optimizer for optimizer in optimizers if self.steps_with_commits(optimizer)]
        # One that is attached twice tells of each step twice.
        num_attachments = Counter(id(optimizer) for optimizer in attached)
        numbers = {id(optimizer): self.num_steps(optimizer) / num_attachments[id(optimizer)] for optimizer in attached}
        if all(number == 1 for number in numbers.values()):
            return ""
        names = {id(optimizer): type(optimizer).__name__ for optimizer in attached}
        return ", ".join(f"{names[key]} {index}: {number:g}" for index, (key, number) in enumerate(numbers.items()))
