"""The fault-tolerant loop of one replica. Each round is one attempt at a step: a quorum, the work, and a vote."""

from __future__ import annotations

import logging
import traceback
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, Final

import torch

from ft_transport.runtime.deadline import Deadline
from ft_transport.telemetry.metrics import weakly
from manager.collectives.managed_work import ManagedWork
from manager.collectives.process_group import Reconfigurable, ReplicaProcessGroup
from manager.collectives.reductions import NamedParameters
from manager.config import ManagerConfig
from manager.errors import (
    CommitFailedError,
    ManagerError,
    QuorumTimeoutError,
    ReplicaFaultError,
    ReportedError,
    UnfinishedReductionError,
)
from manager.lifecycle import OwnedExecutor
from manager.quorum.decision import Decision, commit_refusals, next_lineage
from manager.quorum.formation import QuorumFormation
from manager.quorum.membership import Membership, QuorumRequest
from manager.quorum.quorum_round import OwnErrors, Participant, QuorumRound, refusal_cause
from manager.quorum.rank_exchange import Exchange
from manager.quorum.reports import Claim
from manager.quorum.steps import CommittedSteps, StepReductions
from manager.quorum.telemetry import StallWatch, loop_status
from manager.recovery.replica import Replica
from manager.state.optimizer_guard import warn_of_unguarded
from manager.state.optimizer_states import parameters_of
from manager.state.replica_state import status_report

logger = logging.getLogger(__name__)

_NO_DEADLINE: Final = Deadline()


class QuorumLoop:
    """Runs the rounds of one replica for `Manager`, which is the public interface.

    Only the training thread may call its methods, except `report_error`, which any thread may call.

    Args:
        config: The configuration, completed from the environment.
        replica: This replica, which must have a transport.
        process_group: Runs the collectives; ``None`` for gloo.
        watch: Logs waits that take too long.

    Attributes:
        membership: The membership of this replica in its job.

    Raises:
        QuorumError: The Lighthouse or the replica's key-value store does not answer.
        TransportError: The address that peers receive does not lead to this replica's transport.
    """

    def __init__(
        self,
        config: ManagerConfig,
        replica: Replica,
        process_group: ReplicaProcessGroup | Reconfigurable | None,
        watch: StallWatch,
    ) -> None:
        transport = replica.transport
        assert transport is not None, "a quorum needs a transport"
        transport.check_address(config.connect_timeout)
        self._config = config
        self._state = replica.state
        self.membership = Membership(
            config,
            address=transport.metadata(),
            keys=transport.keys,
            process_group=process_group,
            ask_state=transport.ask_state,
        )
        self._executor = OwnedExecutor(1, "ft-transport-quorum")
        self._participant = participant = Participant(config, replica, self.membership, watch.waiting)
        self._formation = QuorumFormation(participant, self._executor)
        self._reductions = StepReductions(participant, self._formation.structures)
        self._participated_last_round = False
        self._num_refused_commits = 0
        self._own_errors = OwnErrors()
        self._errors = transport.process_status.errors
        transport.process_status.metrics.collect(participant.metrics.readings)
        transport.process_status.metrics.collect(weakly(self.membership.readings))
        transport.process_status.set_part("manager", status_report(participant, loop_status))
        transport.process_status.set_part("changes", self._formation.changes.recent())
        self._state.add_observer(CommittedSteps(participant, self._formation.comparison))
        self._state.add_observer(self._formation.follower)

    # ------------------------------------------------------------------------------------------------------ the round

    def start(self, *, may_heal: bool, shrink_only: bool, deadline: Deadline, is_async: bool) -> None:
        """Begin a round; see `Manager.start_quorum`."""
        participant, state = self._participant, self._state
        period_s = state.steps.begin()
        if period_s is not None:
            self._participant.metrics.add("step_seconds", by=period_s)
        if participant.round is not None:
            participant.round.is_left = True
            self._leave(participant.round, deadline)
        self.membership.process_group.begin_step()
        warn_of_unguarded(state.optimizers())
        participant.check_irregular_steps()
        self._formation.follower.begin_round()
        self._formation.structures.check_registered()
        self._formation.hyperparameters.digest(
            is_after_commit=participant.round is not None and participant.round.is_committed
        )
        self._participated_last_round = self.is_participating()
        state.note_training_thread()
        request = QuorumRequest(deadline=deadline, shrink_only=shrink_only, may_heal=may_heal)
        current = QuorumRound(self.membership.num_missed_heartbeats())
        try:
            participant.round = current
            if participant.is_settled and is_async and state.partial is None:
                # Only the quorum, which is not formed yet, shows which replicas need a snapshot of this step boundary.
                can_serve = self._formation.begin_step(hold=True)
                self._executor.submit(self._formation.form_in_background, current, request, can_serve)
            else:
                self._formation.form_and_heal(current, request)
        except BaseException as error:
            self._participant.snapshots.settle()
            # The round refers to the error, and the error to frames that may hold sections of the lock: clear them.
            # The error also refers to this frame, so this frame must not refer to the round.
            traceback.clear_frames(error.__traceback__)
            current.end_quorum(error)
            del current
            raise

    def wait(self) -> None:
        """Wait until the quorum is formed; see `Manager.wait_quorum`."""
        self._wait_for(self._current_round())

    def allreduce(self, tensor: torch.Tensor, reduce_op: Any) -> ManagedWork:
        """Begin to reduce a tensor; see `Manager.allreduce`."""
        current = self._current_round()
        self._wait_for(current)
        return self._reductions.begin(current, tensor, reduce_op)

    def num_microbatches(self, total: int, weighting: str) -> int:
        """Divide the step's microbatches among the replicas; see `Manager.num_microbatches`.

        Args:
            total: Number of microbatches.
            weighting: Describes the microbatches. Replicas with other descriptions cannot average with this one.
        """
        current = self._current_round()
        self._wait_for(current)
        return current.share_microbatches(total, weighting)

    def note_drawing(self, *, is_drawing: bool) -> None:
        """Record whether the loop has yet to draw some of this replica's microbatches of the step."""
        self._current_round().is_drawing = is_drawing

    def average_gradients(self, parameters: NamedParameters) -> bool:
        """Average the gradients over the replicas; see `Manager.average_gradients`."""
        current = self._current_round()
        self._wait_for(current)
        gradient = next((each.grad for _, each in parameters if each.grad is not None), None)
        if gradient is not None and gradient.requires_grad:
            self._formation.comparison.suspect(
                "backward(create_graph=True) lets an optimizer differentiate gradients", current
            )
        return self._reductions.average_gradients(current, parameters)

    def commit(self, deadline: Deadline) -> bool:
        """End the round: vote on the commit, and return the result; see `Manager.should_commit`."""
        participant, state, current = self._participant, self._state, self._current_round()
        if current.is_over or current.is_left:
            raise ManagerError(
                f"{participant.name}: expected start_quorum before should_commit, but this step is over already; call "
                "each of the two once per step, and call start_quorum again if it raised"
            )
        self._wait_for(current, deadline)
        is_averaged = bool(current.works) or not self._has_gradients()
        self._reductions.end(current, deadline)
        refusals = commit_refusals(
            num_participants=self.num_participants(),
            min_replica_size=self._config.min_replica_size,
            errors=current.refusals(),
            has_missed_heartbeats=self.membership.num_missed_heartbeats() != current.num_missed_heartbeats,
        )
        with self._participant.waiting(
            f"{participant.name}: waiting for the other ranks of this replica to vote on the commit"
        ):
            # If the other ranks do not answer, this rank cannot know whether they have committed.
            participant.is_settled = False
            refusals = self._agree(refusals, deadline)
        current.is_voted = True
        participant.record("commits", "a step is over", current.decision, step=state.step, commit_result=not refusals)
        if refusals:
            if participant.healing is not None:
                participant.healing.retry(f"the first step was not committed: {'; '.join(refusals)}")
            self._refuse_commit(current, refusals)
            if current.error is not None and isinstance(current.error.original_exception, UnfinishedReductionError):
                # A mistake in the user's loop, which would repeat it in each step.
                raise current.error.original_exception
            return False
        self._accept(current)
        if not is_averaged:
            self._formation.comparison.suspect(
                "the parameters have gradients, and this step averaged none (manager.average_gradients)", current
            )
        return True

    def compare_at_next_boundary(self) -> None:
        """Compare the replicas' states at the next step boundary; see `Manager.compare_replicas`."""
        self._formation.comparison.is_wanted = True

    # --------------------------------------------------------------------------------------------------------- status

    def report_error(self, error: Exception, *, is_own: bool) -> None:
        """Prevent the commit of this step; see `Participant.report_error`."""
        self._participant.report_error(error, is_own=is_own)

    def errored(self) -> ReportedError | None:
        """Return the error that prevents the commit of this step, if any; see `Manager.errored`."""
        current = self._participant.round
        return current.error if current is not None else None

    def decision(self) -> Decision | None:
        """Wait for the decision of the present quorum, and return it; ``None`` before the first round."""
        current = self._participant.round
        if current is None:
            return None
        self._wait_for(current)
        return current.decision

    def num_participants(self) -> int:
        """Return the number of replicas that contribute to this step; see `Manager.num_participants`."""
        decision = self.decision()
        return decision.num_participants if decision is not None else 0

    def is_participating(self) -> bool:
        """Return whether this replica contributes to this step; see `Manager.is_participating`."""
        current = self._participant.round
        if current is None:
            return False
        decision = current.decision
        if decision is None:
            return self._participated_last_round and not current.quorum.done()
        return decision.participating_rank is not None

    # ------------------------------------------------------------------------------------------------------- shutdown

    def close(self, *, wait: bool) -> None:
        """Leave the job, and end the threads.

        Args:
            wait: Whether to wait until the quorum thread has ended.
        """
        healing, self._participant.healing = self._participant.healing, None
        if healing is not None:
            healing.end("abandoned")
        with ExitStack() as closing:
            closing.callback(self._formation.comparison.close)
            closing.callback(self._formation.follower.close, wait=wait)
            closing.callback(self._executor.shutdown, wait=wait)
            closing.callback(self.membership.close)

    # -------------------------------------------------------------------------------------------------------- private

    def _has_gradients(self) -> bool:
        """Return whether any parameter has a gradient. Optimizers that do not step with each commit do not count."""
        state = self._state
        stepping = [each for each in state.optimizers() if state.ledger.steps_with_commits(each)]
        return any(parameter.grad is not None for parameter in parameters_of(stepping))

    def _current_round(self) -> QuorumRound:
        if self._participant.round is None:
            raise ManagerError("expected a call of start_quorum before this call, got none")
        return self._participant.round

    def _wait_for(self, current: QuorumRound, deadline: Deadline = _NO_DEADLINE) -> None:
        self._await(current.quorum, "the quorum to be formed", deadline)
        current.quorum.result()

    def _await(self, quorum: Future[None], what: str, deadline: Deadline) -> None:
        if quorum.done():
            return
        left, name = deadline.left(), self._participant.name
        with self._participant.waiting(f"{name}: waiting for {what}"), suppress(FutureTimeoutError):
            quorum.exception(left.total_seconds() if left is not None else None)
        if not quorum.done():
            raise QuorumTimeoutError(f"{name}: expected {what} within the caller's timeout; pass a longer one")

    def _agree(self, refusals: tuple[str, ...], deadline: Deadline) -> tuple[str, ...]:
        return self.membership.agree(
            Exchange.COMMIT,
            refusals,
            timeout=self._config.timeout,
            deadline=deadline,
        )

    def _leave(self, earlier: QuorumRound, deadline: Deadline) -> None:
        """End the work of an earlier round, so that none of it continues in the next round."""
        participant = self._participant
        # The error of this quorum does not matter here: callers that waited for the quorum have received the error.
        self._await(earlier.quorum, "the quorum of the previous step to be formed", deadline)
        failed = earlier.quorum.exception() is not None
        if failed:
            participant.announced_to = frozenset()
            # If a signal handler raised in start_quorum, work on the quorum thread may continue.
            self._await(self._executor.submit(_do_nothing), "the work of an interrupted start_quorum to end", deadline)
        if not earlier.is_over:
            self._participant.metrics.add("steps_refused_total", "Abandoned")
            # The other replicas may wait in collectives that this replica has not begun.
            logger.warning(
                "%s: should_commit was not called for the previous step; its process group is aborted", participant.name
            )
            self.membership.process_group.abort()
        if failed or not earlier.is_over:
            participant.is_settled = False
        if not failed and not earlier.is_voted:
            # The other ranks of this replica may have begun the vote on the step, and wait for this rank.
            earlier.is_voted = True
            if not self._agree(("should_commit was not called for the step",), deadline):
                logger.warning(
                    "%s: an exception interrupted should_commit on this rank after its vote, and the other ranks of "
                    "this replica have committed the step; this rank heals",
                    participant.name,
                )

    def _refuse_commit(self, current: QuorumRound, refusals: tuple[str, ...]) -> None:
        self._num_refused_commits += 1
        has_enough = self.num_participants() >= self._config.min_replica_size
        was_silent = self.membership.num_missed_heartbeats() != current.num_missed_heartbeats
        first_cause = refusal_cause(current.error, has_enough=has_enough, was_silent=was_silent)
        self._participant.metrics.add("steps_refused_total", first_cause)
        cause = "; ".join(refusals)
        length_s = self._state.steps.end(self._state.step, num_participants=self.num_participants(), cause=cause)
        self._participant.metrics.add("step_until_commit_seconds", by=length_s)
        self._errors.note(self._participant.name, f"not committed: {cause}")
        logger.warning(
            "%s: not committed, failed attempt %d: %s",
            self._participant.name,
            self._num_refused_commits,
            cause,
        )
        if current.error is not None:
            self.membership.process_group.abort()
        try:
            self._own_errors.refused(self._state.step, refusals)
        except ReplicaFaultError:
            self.membership.stop_heartbeats()
            raise
        max_retries = self._config.max_retries
        if max_retries is not None and self._num_refused_commits > max_retries:
            raise CommitFailedError(step=self._state.step, num_failures=self._num_refused_commits, reasons=refusals)

    def _accept(self, current: QuorumRound) -> None:
        """Record the commit of the step."""
        participant, state, decision = self._participant, self._state, current.decision
        # This comes first. If a signal handler raises below, the ledger still expects a step of every optimizer; then
        # the lineage differs from that of the other replicas, and this replica heals.
        state.ledger.committed()
        # From here on the caller may change memory that a newcomer reads, even without the lock.
        state.announce("step")
        assert decision is not None, "a replica without a decision has an error"
        state.lineage = next_lineage(state.lineage, decision.group, state.step + 1)
        state.step += 1
        state.batches_committed += decision.num_participants
        state.is_past_step = True
        participant.irregularity = ""
        if current.reductions.digest:
            participant.reductions = replace(current.reductions, step=state.step, lineage=state.lineage)
        else:
            participant.reductions = Claim()
        self._num_refused_commits = 0
        self._own_errors.committed()
        current.is_committed = True
        self._participant.metrics.add("steps_committed_total")
        length_s = state.steps.end(state.step - 1, num_participants=decision.num_participants)
        self._participant.metrics.add("step_until_commit_seconds", by=length_s)
        participant.is_settled = True
        if participant.healing is not None and not state.follows:
            participant.healing.describe(step=state.step)
            participant.healing.end()
            participant.healing = None
        logger.info(
            "%s: committed with %d participants, lineage %s",
            participant.name,
            decision.num_participants,
            state.lineage,
        )


def _do_nothing() -> None:
    """Do nothing. The quorum thread runs this job after all earlier jobs, so its result shows that they have ended."""
