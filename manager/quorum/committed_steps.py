"""Enforces one optimizer step for each commit, and marks the state as partial if a committed step fails."""

from __future__ import annotations

from torch.optim import Optimizer

from manager.errors import ManagerError
from manager.quorum.comparison import StateComparison
from manager.quorum.reports import Claim
from manager.quorum.round import Participant, format_error
from manager.state.replica_state import StateObserver


class CommittedSteps(StateObserver):
    """Checks the optimizer steps of one replica against its commits. Called on the threads that change the state.

    Args:
        participant: The replica in its quorum.
        comparison: Compares states; discards digests of a replaced state.
    """

    def __init__(self, participant: Participant, comparison: StateComparison) -> None:
        self._participant = participant
        self._state = participant.state
        self._comparison = comparison

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse a step without a commit, or by an unregistered scaler."""
        current, ledger = self._participant.round, self._state.ledger
        if current is None or self._state.registry.is_calling() or not ledger.steps_with_commits(optimizer):
            return
        if not current.is_committed:
            happened = "the step was not committed" if current.is_over else "it was not called since start_quorum"
            raise ManagerError(
                f"expected should_commit() to return True before {type(optimizer).__name__}.step(), and {happened}; "
                "call step only `if manager.should_commit():`. Optimizers that do not step with each commit: "
                "attach(..., every_commit=False)"
            )
        self._state.scalers.check_stepping(optimizer)
        if ledger.num_steps(optimizer):
            raise ManagerError(
                f"expected one step of {type(optimizer).__name__} for each should_commit(), got another one; "
                "optimizers that do not step with each commit: attach(..., every_commit=False)"
            )

    def step_failed(self, optimizer: Optimizer, error: BaseException) -> None:
        """Mark the state as partial: the other replicas rely on the committed step."""
        current = self._participant.round
        if current is not None and current.is_committed:
            self._state.mark_partial(
                self._state.step,
                f"the step was committed, and {type(optimizer).__name__} did not make it: {format_error(error)}",
            )

    def other_gradients(self, optimizer: Optimizer) -> None:
        """Compare the next states: a closure's gradients come from this replica's batch alone, without averaging."""
        current = self._participant.round
        if current is not None and current.is_committed:
            self._comparison.suspect(
                f"the closure of {type(optimizer).__name__}.step() computed gradients that were not averaged", current
            )

    def replaced(self) -> None:
        """Discard all claims about the previous state."""
        self._participant.irregularity = ""
        self._participant.reductions = Claim()
        self._comparison.forget()
