"""Forms the quorum of each step.

A replica with the last committed state forms the quorum in the background, while ``forward`` runs. Any other replica
forms it before ``forward``, and heals.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from ft_transport.runtime.deadline import Deadline
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.telemetry.recorder import phase
from manager.errors import HealFailedError, HyperparametersDivergedError, QuorumError, StatesDivergedError
from manager.quorum.comparison import Hyperparameters, StateComparison
from manager.quorum.decision import Decision, DoesNotFit, Follows, Heals, StandsBy, UpToDate
from manager.quorum.differences import StructureWatch
from manager.quorum.following import Follower
from manager.quorum.healing import Healer, prepare_newcomer
from manager.quorum.membership import QuorumRequest
from manager.quorum.quorum_round import Participant, QuorumRound, is_own_shortage
from manager.quorum.rank_exchange import Exchange
from manager.quorum.reports import NO_WHOLE_STATE, Following, StateReport
from manager.quorum.telemetry import MembershipLog, begin_heal_record, end_heal_record, span, spanned

logger = logging.getLogger(__name__)

_MAX_STAND_BYS: Final = 10
_MAX_BUSY: Final = 1000
"""Largest number of quorums in which a newcomer waits until the sources have served other receivers."""
_MAX_MISFITS: Final = 1
_GIVEN_UP: Final = "the step failed before this rank had healed"
_OTHER_STATE: Final = "its steps are no longer those of the others"


@dataclass(slots=True, kw_only=True)
class _Attempts:
    """Counts the quorums of one round. ``began_s`` is the beginning of the round, by the monotonic clock."""

    began_s: float
    num_stand_bys: int = 0
    num_busy: int = 0
    num_misfits: int = 0


class QuorumFormation:
    """Forms the quorum of each round, heals this replica if needed, and configures the process group.

    Args:
        participant: This replica and its quorum.
        executor: Runs jobs on the quorum thread.

    Attributes:
        comparison: Digests the state, for the comparison between replicas.
        structures: Compares the structures of the replicas' states.
        hyperparameters: Digests the hyperparameters, for the comparison between replicas.
        changes: Logs which replicas join and leave.
        follower: Follows other replicas, while it receives their state.
    """

    def __init__(self, participant: Participant, executor: SafeExecutor) -> None:
        self._participant = participant
        self._state = participant.state
        self._executor = executor
        self.structures = StructureWatch(participant, executor)
        self.comparison = StateComparison(participant)
        self.hyperparameters = Hyperparameters(participant)
        self.changes = MembershipLog(participant)
        self._healer = Healer(participant)
        self.follower = Follower(participant, participant.config.replay_bytes)
        self._is_prepared = False
        participant.state.registry.loaders.may_heal = True

    def begin_step(self, *, hold: bool = False) -> bool:
        """Run the step boundary, and begin to digest the state if the replicas compare it at this step.

        Args:
            hold: Whether optimizers wait until the quorum is formed, so that the quorum can still request a snapshot.

        Returns:
            Whether a snapshot of this boundary has begun or can still be requested.
        """
        can_serve = self._participant.replica.begin_step(self._state.step, hold=hold)
        if self.follower.following in (Following.NO, Following.COMPARES):
            self.comparison.begin_if_due()
        return can_serve

    @spanned("_async_quorum")
    def form_in_background(self, current: QuorumRound, request: QuorumRequest, can_serve: bool) -> None:
        """Form the quorum of a round on the quorum thread, while ``forward`` runs.

        Args:
            current: The round.
            request: The arguments of ``start_quorum``.
            can_serve: Whether a snapshot of the step boundary can still be taken for newcomers.
        """
        try:
            try:
                decision = self._ask(request, can_serve=can_serve, is_waiting=False)
                if isinstance(decision.role, UpToDate):
                    self._request_snapshot(decision.role)
            finally:
                self._participant.snapshots.settle()
            current.decision = decision
            match decision.role:
                case UpToDate() as role:
                    self.follower.counted()
                    self._check_serving(role)
                    self._configure(decision, request.deadline)
                case Follows():
                    self._configure(decision, request.deadline)
                case _:
                    reason = f"this replica is behind step {decision.step}; it heals before its next step"
                    self.follower.failed(reason)
                    self._participant.report_error(QuorumError(reason))
        except BaseException as error:
            current.end_quorum(error)
        else:
            current.end_quorum(None)

    @spanned("_async_quorum")
    def form_and_heal(self, current: QuorumRound, request: QuorumRequest) -> None:
        """Form quorums on the training thread, before ``forward``, until the replica is up to date or cannot heal."""
        membership, attempts = self._participant.membership, _Attempts(began_s=time.monotonic())
        # A loader that is ahead raises here, before other replicas wait for this one.
        self._participant.replica.check_loaders()
        try:
            if request.may_heal and not self._is_prepared:
                self._is_prepared = True
                prepare_newcomer(self._participant, request.deadline)
            is_ready = False
            while not is_ready:
                # Earlier snapshots belong to an earlier attempt, which may have had the same step number.
                self._participant.snapshots.replaced()
                if self._participant.healing is not None:
                    self._participant.healing.phase("quorum")
                with self._serving(request.deadline):
                    decision = self._ask(request, can_serve=True, is_waiting=True)
                current.decision = decision
                current.num_missed_heartbeats = membership.num_missed_heartbeats()
                is_ready = self._take_role(decision, request, attempts)
        except BaseException as error:
            self._participant.is_settled = False
            end_heal_record(self._participant, error)
            if isinstance(error, HealFailedError):
                # This process probably exits now. Without heartbeats the other replicas stop waiting for it sooner.
                membership.stop_heartbeats()
            raise
        healing = self._participant.healing
        if healing is not None:
            # The last phase, which ends with the first commit to which this replica contributes.
            healing.phase("first_step" if self.follower.following is Following.NO else "follow")
            healing.leave()
        current.end_quorum(None)

    def _take_role(self, decision: Decision, request: QuorumRequest, attempts: _Attempts) -> bool:
        """Do what a quorum decided; return whether the step can begin. If not, another quorum is needed."""
        participant = self._participant
        match decision.role:
            case UpToDate() as role:
                self.follower.counted()
                self._state.lineage = decision.lineage
                self._request_snapshot(role)
                self.begin_step()
                self._check_serving(role)
                self._configure(decision, request.deadline)
                return True
            case Follows():
                self.begin_step()
                self._configure(decision, request.deadline)
                return True
            case Heals() as role:
                if not role.is_following:
                    self.follower.abandon(_OTHER_STATE)
                begin_heal_record(participant, attempts.began_s, refusal=self.follower.refusal)
                has_healed = self._heal(decision, role)
                if has_healed and not role.is_following:
                    seconds = time.monotonic() - attempts.began_s
                    self.changes.log_heal(decision, seconds, self._healer.source)
                return has_healed
            case StandsBy() as role:
                self.follower.failed(_OTHER_STATE)
                if not self.follower.must_wait:
                    self.follower.abandon(_OTHER_STATE)
                if not self._may_wait_for_snapshot(request, decision, role):
                    return True
                # Counted, not timed, so that all ranks give up together. A source cuts off receivers that are too slow.
                attempts.num_busy += role.awaits_receivers
                attempts.num_stand_bys += not role.awaits_receivers
                if attempts.num_stand_bys > _MAX_STAND_BYS or attempts.num_busy > _MAX_BUSY:
                    num_quorums = attempts.num_stand_bys + attempts.num_busy - 1
                    raise QuorumError(
                        f"{participant.name}: expected a snapshot of step {decision.step} from one of "
                        f"{sorted(role.announced_to)}, got none in {num_quorums} quorums"
                    )
                logger.info("%s: waits for a snapshot after step %d", participant.name, decision.step)
                participant.announced_to = role.announced_to
                return False
            case DoesNotFit() as role:
                self.follower.abandon(_OTHER_STATE)
                attempts.num_misfits += 1
                if attempts.num_misfits > _MAX_MISFITS:
                    raise self.structures.error(decision, role)
                # This replica may have reported an outdated structure.
                self.structures.refresh()
                return False

    def _serving(self, deadline: Deadline) -> AbstractContextManager[None]:
        """Serve the state while this replica waits for a quorum: another replica may still be healing from this one.

        This happens only after a failed step, when healing replicas may not have noticed the failure yet. A replica
        without the common state serves nothing.
        """
        participant, state = self._participant, self._state
        if participant.is_settled or state.partial is not None or state.follows or not state.lineage:
            return nullcontext()
        return self._participant.snapshots.serving(deadline.cap(state.timeout))

    def _may_wait_for_snapshot(self, request: QuorumRequest, decision: Decision, role: StandsBy) -> bool:
        """Return whether this replica, which is behind, may ask for another quorum. If not, fail the step."""
        if not request.may_heal:
            self._state.refuse_partial()
            self._participant.report_error(
                QuorumError(f"this replica is behind step {decision.step}, and start_quorum forbids it to heal")
            )
        elif not role.may_heal:
            self._participant.report_error(
                QuorumError(
                    f"this replica is behind step {decision.step}, and its other ranks have begun the step already; it "
                    "heals before its next step"
                )
            )
        return request.may_heal and role.may_heal

    # ------------------------------------------------------------------------------------------------- the Lighthouse

    def _ask(self, request: QuorumRequest, *, can_serve: bool, is_waiting: bool) -> Decision:
        start_s = time.monotonic()
        participant, state, membership = self._participant, self._state, self._participant.membership
        with (
            self._reporting_failures(),
            self._participant.waiting(
                f"{participant.name}: waiting for a quorum",
                missing=membership.missing,
                thread_id=state.training_thread,
            ),
            span("_client::_quorum"),
        ):
            report = StateReport(
                step=state.step if state.partial is None else NO_WHOLE_STATE,
                lineage=state.lineage,
                can_serve=can_serve,
                is_full=participant.snapshots.is_full(),
                # The thread of a transfer still writes into the tensors.
                may_heal=request.may_heal and is_waiting and not self.follower.must_wait,
                is_irregular=bool(participant.irregularity),
                claim=self.comparison.claim(request.deadline.cap(state.timeout)),
                reductions=participant.reductions,
                hyperparameters=self.hyperparameters.claim,
                structure=self.structures.structure,
                following=self.follower.report(),
            )
            decision = membership.decide(
                report,
                request,
                announced_to=participant.announced_to,
                num_failed_heals=self._healer.num_failures,
            )
        participant.announced_to = frozenset()
        self.comparison.is_wanted = self.comparison.is_wanted or decision.compares_next
        self._participant.metrics.add("quorum_seconds", by=time.monotonic() - start_s)
        self._participant.metrics.set("participants", to=decision.num_participants)
        self.changes.log_changes(decision)
        participant.log_irregular_steps()
        self.comparison.handle_divergence(decision)
        self.hyperparameters.handle_divergence(decision)
        self.structures.log_unfit(decision)
        logger.debug(
            "%s: quorum of %d for step %d after %.1f ms: %s",
            participant.name,
            len(decision.group_members),
            decision.step,
            (time.monotonic() - start_s) * 1e3,
            decision,
        )
        return decision

    @contextmanager
    def _reporting_failures(self) -> Iterator[None]:
        """Count a failed quorum. If the replicas' states differ, add the differences to the error and log it."""
        try:
            yield
        except Exception as error:
            self._participant.metrics.add("quorum_failures_total", type(error).__name__)
            if isinstance(error, StatesDivergedError):
                is_of_hyperparameters = isinstance(error, HyperparametersDivergedError)
                (self.hyperparameters if is_of_hyperparameters else self.comparison).find_differences(error)
                logger.error("%s: %s", self._participant.name, error)
            raise

    def _configure(self, decision: Decision, deadline: Deadline) -> None:
        participant = self._participant
        current = participant.round
        if current is not None and current.error is not None:
            # A process group that was aborted in this step cannot be configured again under the same key.
            participant.membership.process_group.decline(decision, str(current.error))
            return
        if current is not None:
            current.use_device()
        try:
            with (
                self._participant.waiting(
                    f"{participant.name}: waiting for the members of process group {decision.group}",
                    thread_id=self._state.training_thread,
                ),
                span("_pg::configure"),
            ):
                membership = participant.membership
                seconds = membership.process_group.configure(decision, deadline, replica_id=membership.replica_id)
        except Exception as error:
            participant.report_error(error, is_own=is_own_shortage(error))
            return
        if seconds:
            self._participant.metrics.add("process_group_seconds", by=seconds)
            participant.record("quorums", "a new quorum", decision, step=decision.step)
            logger.info(
                "%s: process group %s of %s set up in %.1f ms",
                participant.name,
                decision.group,
                decision.group_members,
                seconds * 1e3,
            )

    # -------------------------------------------------------------------------------------------------------- healing

    def _request_snapshot(self, role: UpToDate) -> None:
        """Request a snapshot for healing replicas: of this step boundary, or of the next one if this one has passed."""
        if not (role.serves_now or role.serves_next):
            return
        name = self._participant.name
        logger.info("%s: serves its state to %s now, to %s at the next step", name, role.serves_now, role.serves_next)
        # The snapshot may share the trainer's memory: no optimizer steps before the newcomer has healed.
        with span("_checkpoint_transport::send_checkpoint"):
            self._participant.snapshots.request(share=role.may_lend)

    def _check_serving(self, role: UpToDate) -> None:
        """Fail the step at once if a snapshot for healing replicas could not be taken. They would wait for it."""
        if role.serves_now and not self._participant.snapshots.shows_present_state():
            self._participant.report_error(
                QuorumError(f"expected a snapshot for {role.serves_now}, which heal now, but could not take one")
            )

    def _heal(self, decision: Decision, role: Heals) -> bool:
        """Receive the common state, and agree with the other ranks of this replica whether all have received it.

        Returns:
            Whether all have received it. If not, the replica forms another quorum and heals there.

        Raises:
            HealFailedError: The last possible attempt has failed.
        """
        participant, membership, healer = self._participant, self._participant.membership, self._healer
        # The other replicas wait in the process group already, so this replica joins it while it receives the state.
        configuring = self._executor.submit(self._configure, decision, Deadline())
        with span("_checkpoint_transport::recv_checkpoint"):
            failures = (self.follower if role.is_following else healer).receive(decision, role)
        phase("rendezvous")
        configuring.result()
        # The replica has healed only if all of its ranks have.
        has_failed = participant.round is not None and participant.round.error is not None
        refusals = membership.agree(
            Exchange.HEAL,
            failures[-1:] or ((_GIVEN_UP,) if has_failed else ()),
            timeout=2 * self._participant.config.timeout,
            deadline=Deadline(),
        )
        if not refusals:
            healer.succeeded()
            if not role.is_following:
                healer.warn_of_damage(decision)
            self._state.forget_gradients()
            self.begin_step()
            return True
        self.follower.abandon("what no optimizer computes could not be received")
        membership.process_group.abort()
        if participant.round is not None:
            participant.round.error = None
        if all(_GIVEN_UP in refusal for refusal in refusals):
            # A source that gave the step up may have served its state of before or after ``forward``. With a lineage of
            # its own, the received state counts in the next quorum only if no other replica has a better one.
            participant.disown_state(f"healed in a step that was given up, {membership.replica_id}")
        else:
            healer.failed(decision.step, failures or refusals, agreed=refusals)
        return False
