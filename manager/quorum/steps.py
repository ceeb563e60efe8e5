"""The reductions and the optimizer steps of one training step.

A reduction that fails does not raise; it prevents the commit. All reductions end before the commit. Then each optimizer
must make exactly one step. If that step fails, the replica's state is partial.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch.optim import Optimizer

from ft_transport.runtime.deadline import Deadline
from ft_transport.state.placements import is_dtensor
from manager.collectives.managed_work import ManagedWork, forget_frames, uses_accelerator, wait_all
from manager.collectives.reductions import NamedParameters, ReducedTensor, Reduction, average_gradients, gradients_of
from manager.errors import ManagerError, ReductionMismatchError
from manager.quorum.comparison import StateComparison
from manager.quorum.differences import StructureWatch
from manager.quorum.quorum_round import Participant, QuorumRound, format_error
from manager.quorum.reports import Claim
from manager.quorum.telemetry import span
from manager.state.optimizer_guard import StateObserver
from manager.state.optimizer_states import parameters_of

logger = logging.getLogger(__name__)

_NO_PARAMETER: Final = (None, None)


class StepReductions:
    """Begins and ends the reductions of a step. For the training thread only, after the quorum is formed.

    Args:
        participant: This replica and its quorum.
        structures: Checks that averaged gradients belong to registered parameters.
    """

    def __init__(self, participant: Participant, structures: StructureWatch) -> None:
        self._participant = participant
        self._state = participant.state
        self._structures = structures
        self._shapes: frozenset[torch.Size] = frozenset()
        self._shapes_of: tuple[int, ...] | None = None

    def begin(self, current: QuorumRound, tensor: torch.Tensor, reduce_op: Any) -> ManagedWork:
        """Begin to reduce one tensor; see `Manager.allreduce`."""
        number, parameter = self._parameter_of(current, tensor)
        is_first = not current.works
        if is_first:
            self._state.scalers.begin_step()
        self._state.scalers.refuse_unscaled([tensor], self._state.optimizers, is_first=is_first)
        name = f"parameter {number}" if number is not None else ""
        return self._reduce(current, parameter, tensor, Reduction(name, reduce_op))

    def average_gradients(self, current: QuorumRound, parameters: NamedParameters) -> bool:
        """Average all gradients over the replicas; see `Manager.average_gradients`."""
        gradients = [each.grad for _, each in parameters if each.grad is not None]
        self._structures.check_averaged(gradients)
        self._state.scalers.begin_step()
        self._state.scalers.refuse_unscaled(gradients, self._state.optimizers, is_first=False)
        # If a signal handler raises before the averages are stored, the count stays above 0, and `end` fails the step.
        current.num_averaging += 1
        is_averaged = average_gradients(parameters, partial(self._reduce, current, None))
        current.num_averaging -= 1
        # A collective that the process group aborted on the device raised nothing.
        noticed = self._participant.membership.process_group.error() if is_averaged else None
        if noticed is not None:
            self._participant.report_error(noticed)
        return is_averaged and noticed is None

    def end(self, current: QuorumRound, deadline: Deadline) -> None:
        """Wait for the reductions of the round, and check that the other replicas made the same reductions.

        An error is not raised; it prevents the commit.

        Args:
            current: The round.
            deadline: The caller's deadline.
        """
        participant, group = self._participant, self._participant.membership.process_group
        if current.num_averaging:
            participant.report_error(
                ManagerError(
                    "expected average_gradients to return, but an exception ended it before all gradients were "
                    "averaged; repeat the step"
                )
            )
        if current.error is None:
            try:
                group.end_step()
            except Exception as error:
                participant.report_error(error)
                forget_frames(error)
        with participant.waiting(f"{participant.name}: waiting for {len(current.works)} collectives"):
            if not wait_all(current.works, deadline) and current.error is None:
                participant.report_error(
                    ManagerError("expected the wait for each collective to end, but one was interrupted")
                )
        self._structures.check_averaged([work.tensor for work in current.works])
        current.forget_works()
        # If a signal handler raises here, the round is not over, and the next one begins with another process group.
        if current.error is None:
            self._compare(current, deadline)
        current.is_over = True
        noticed: Exception | None
        try:
            if uses_accelerator():
                with (
                    participant.waiting(f"{participant.name}: waiting for the device to finish the collectives"),
                    span("should_commit::current_stream::synchronize"),
                ):
                    group.wait_for_device(deadline.cap(participant.config.timeout))
            noticed = group.error()
        except TimeoutError as error:
            noticed = error
        if noticed is not None:
            participant.report_error(noticed)

    def _parameter_of(self, current: QuorumRound, tensor: torch.Tensor) -> tuple[int | None, torch.Tensor | None]:
        """Find the parameter that has this tensor as its gradient.

        Returns:
            The parameter's index and the parameter; ``(None, None)`` for other tensors, such as buckets of gradients.
        """
        # Compare shapes first, because the map of gradients costs 1 µs for each parameter.
        if self._shapes_of is not self._structures.checked:
            self._shapes_of = self._structures.checked
            self._shapes = frozenset(each.shape for each in parameters_of(self._state.optimizers()))
        if tensor.shape not in self._shapes:
            return _NO_PARAMETER
        gradients = current.gradients
        if gradients is not None:
            number, parameter = gradients.get(id(tensor), _NO_PARAMETER)
            # Otherwise gradients were replaced since the map was made, and this tensor has the ``id`` of a freed one.
            if parameter is None or parameter.grad is tensor:
                return number, parameter
        gradients = current.gradients = gradients_of(parameters_of(self._state.optimizers()))
        return gradients.get(id(tensor), _NO_PARAMETER)

    def _reduce(
        self, current: QuorumRound, parameter: torch.Tensor | None, tensor: torch.Tensor, reduction: Reduction
    ) -> ManagedWork:
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        current.refuse_early(reduction)
        current.refuse_twice(tensor, local)
        # Append before the reduction begins, so that `end` finds an interrupted reduction and fails the step.
        managed = ManagedWork(tensor, self._participant.report_error)
        current.works.append(managed)
        if current.error is not None:
            return managed
        decision = current.decision
        assert decision is not None, "a replica without a decision has an error"
        divisor = decision.num_participants if reduction.is_average else 1
        try:
            if reduction.is_average and current.weighting:
                reduction = replace(reduction, weighting=current.weighting)
                weight = current.weight(decision)
                divisor = divisor if weight is None else 1
                if weight:
                    local.mul_(weight)
            # Not a product with 0: without a backward pass, the values may be anything.
            if decision.participating_rank is None or (reduction.weighting and not current.num_own_microbatches):
                local.fill_(reduction.neutral(local.dtype))
            current.note_reducing(local, managed)
            finish = partial(_finish, ReducedTensor(tensor, local, parameter), divisor)
            managed.begin(self._participant.membership.process_group.allreduce(local, reduction), finish)
        except Exception as error:
            self._participant.report_error(error)
            forget_frames(error)
        return managed

    def _compare(self, current: QuorumRound, deadline: Deadline) -> None:
        participant, group = self._participant, self._participant.membership.process_group
        try:
            with participant.waiting(f"{participant.name}: waiting for the reductions of the other replicas"):
                current.reductions = group.compare_step(deadline.left())
        except ReductionMismatchError as error:
            participant.report_error(error)
            forget_frames(error)
        except Exception as error:
            # This replica has all results. A member that does not end its reductions does not commit, and heals.
            logger.info("%s: another replica did not end its reductions of this step: %s", participant.name, error)
            forget_frames(error)
            group.abort()


def _finish(reduced: ReducedTensor, num_participants: int) -> None:
    reduced.check()
    if num_participants > 1:
        with span("allreduce::callback"):
            reduced.divide(num_participants)


class CommittedSteps(StateObserver):
    """Checks that an optimizer steps only after a commit, and only once. The thread that changes the state calls it.

    Args:
        participant: This replica and its quorum.
        comparison: Compares the replicas' states.
    """

    def __init__(self, participant: Participant, comparison: StateComparison) -> None:
        self._participant = participant
        self._state = participant.state
        self._comparison = comparison

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse a step without a commit, a second step after it, and a step by an unregistered gradient scaler."""
        current, ledger = self._participant.round, self._state.ledger
        if current is None or self._state.registry.is_calling() or not ledger.steps_with_commits(optimizer):
            return
        if not current.is_committed:
            happened = "the step was not committed" if current.is_over else "it was not called since start_quorum"
            raise ManagerError(
                f"expected should_commit() to return True before {type(optimizer).__name__}.step(), but {happened}; "
                "call step only `if manager.should_commit():`. If this optimizer does not step with each commit: "
                "attach(..., every_commit=False)"
            )
        self._state.scalers.check_stepping(optimizer)
        if ledger.num_steps(optimizer):
            raise ManagerError(
                f"expected one step of {type(optimizer).__name__} for each should_commit(), got another one; "
                "if this optimizer does not step with each commit: attach(..., every_commit=False)"
            )

    def step_failed(self, optimizer: Optimizer, error: BaseException) -> None:
        """Mark the state as partial, because this replica has committed a step that it did not make."""
        current = self._participant.round
        if current is not None and current.is_committed:
            self._state.mark_partial(
                self._state.step,
                f"the step was committed, and {type(optimizer).__name__}.step() failed: {format_error(error)}",
            )

    def other_gradients(self, optimizer: Optimizer) -> None:
        """Compare the replicas' states after this step, because a closure computed gradients that were not averaged."""
        current = self._participant.round
        if current is not None and current.is_committed:
            self._comparison.suspect(
                f"the closure of {type(optimizer).__name__}.step() computed gradients that were not averaged", current
            )

    def replaced(self) -> None:
        """Discard the digests of the state that a load replaces."""
        self._participant.irregularity = ""
        self._participant.reductions = Claim()
        self._comparison.forget()
