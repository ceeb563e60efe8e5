"""Which steps an optimizer may make in a quorum: one with each commit, and none that is not made to its end."""

from __future__ import annotations

from torch.optim import Optimizer

from manager.errors import ManagerError
from manager.quorum.comparison import StateComparison
from manager.quorum.divergence import Claim
from manager.quorum.round import Participant, format_error
from manager.state.replica_state import StateObserver


class CommittedSteps(StateObserver):
    """Holds the optimizers of one replica to what its rounds commit. Called on the threads that change the state.

    Args:
        participant: The replica among the others.
        comparison: Forgets what it has of a state that is replaced.
    """

    def __init__(self, participant: Participant, comparison: StateComparison) -> None:
        self._participant = participant
        self._state = participant.state
        self._comparison = comparison

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse a step that no commit allows, or by a scaler that nobody registered."""
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
        """The others count on this replica having made the step that it committed."""
        current = self._participant.round
        if current is not None and current.is_committed:
            self._state.mark_partial(
                self._state.step,
                f"the step was committed, and {type(optimizer).__name__} did not make it: {format_error(error)}",
            )

    def other_gradients(self, optimizer: Optimizer) -> None:
        """A closure that computes gradients computes them of this replica's batch, and nobody averages them."""
        current = self._participant.round
        if current is not None and current.is_committed:
            self._comparison.suspect(
                f"the closure of {type(optimizer).__name__}.step() computed gradients that were not averaged", current
            )

    def replaced(self) -> None:
        """Another state is loaded: nothing that was said of the one before counts."""
        self._participant.irregularity = ""
        self._participant.reductions = Claim()
        self._comparison.forget()
