"""One replica among the others: it forms a quorum at every step, and is healed if it is behind."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from ft_transport.runtime.deadline import Deadline
from ft_transport.runtime.handler_safety import SafeExecutor, SafeFuture
from manager.collectives.gloo import ReplicaProcessGroup
from manager.collectives.managed_work import ManagedWork
from manager.collectives.reconfigurable import Reconfigurable
from manager.config import LIGHTHOUSE_ENV, ManagerConfig
from manager.errors import (
    HealFailedError,
    ManagerError,
    QuorumError,
    QuorumTimeoutError,
    ReportedError,
    StatesDivergedError,
)
from manager.quorum import events
from manager.quorum.comparison import StateComparison
from manager.quorum.decision import NO_WHOLE_STATE, Decision, DoesNotFit, Heals, Rules, StandsBy, UpToDate, next_lineage
from manager.quorum.divergence import Claim
from manager.quorum.group_ranks import Exchange
from manager.quorum.membership import Membership, group_number
from manager.quorum.spans import span, spanned
from manager.quorum.stall_watch import StallWatch
from manager.quorum.structure import Structure, Tables, describe, structure_of
from manager.recovery.healing import Healer
from manager.state.compatibility import tables_of
from manager.state.registration_check import check_registered
from manager.state_manager import StateManager

if TYPE_CHECKING:
    from ft_transport import CheckpointStore, HTTPTransport

logger = logging.getLogger(__name__)

_STALL_SHARE: Final = 0.5
_MAX_STAND_BYS: Final = 10
_MAX_MISFITS: Final = 1
_NO_DEADLINE: Final = Deadline()


@dataclass(slots=True)
class QuorumRound:
    """One attempt at a step, from `Manager.start_quorum` to `Manager.should_commit`.

    Attributes:
        num_missed_heartbeats: How often the replica had been silent for too long when it began.
        decision: What the quorum decided; ``None`` until then.
        quorum: Done when it has and the process group is set up.
        error: The first thing that went wrong.
        works: The collectives begun.
        is_over: Whether `Manager.should_commit` has been called.
        is_voted: Whether the ranks of the replica have agreed on the commit.
        is_committed: Whether they committed.
    """

    num_missed_heartbeats: int
    decision: Decision | None = None
    quorum: Future[None] = field(default_factory=SafeFuture)
    error: ReportedError | None = None
    works: list[ManagedWork] = field(default_factory=list)
    is_over: bool = False
    is_voted: bool = False
    is_committed: bool = False

    def end_quorum(self, error: BaseException | None) -> None:
        """Let those who wait for the quorum go on, once; a handler may have raised after it had ended."""
        with suppress(InvalidStateError):
            if error is not None:
                self.quorum.set_exception(error)
            else:
                self.quorum.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumRequest:
    """What `Manager.start_quorum` was called with."""

    rules: Rules
    deadline: Deadline
    shrink_only: bool
    may_heal: bool


class QuorumParticipant(StateManager):
    """Forms quorums, sets up the process groups that go with them, and heals. ``Manager`` is its interface.

    Everything but `report_error` belongs to the training thread, or to the quorum thread while that waits for it.

    Args:
        config: How to take part.
        load_state_dict: See `StateManager`.
        state_dict: See `StateManager`.
        process_group: Runs the collectives; ``None`` for gloo.
        checkpoint_transport: Serves this replica's snapshots and receives others'.
        prefault: See `StateManager`.
        checkpoint_store: See `StateManager`.
        save_every: See `StateManager`.
    """

    def __init__(
        self,
        config: ManagerConfig,
        load_state_dict: Callable[[Any], object] | None,
        state_dict: Callable[[], object] | None,
        *,
        process_group: ReplicaProcessGroup | Reconfigurable | None,
        checkpoint_transport: HTTPTransport[Any] | None,
        prefault: bool,
        checkpoint_store: CheckpointStore | None = None,
        save_every: int | None = None,
    ) -> None:
        super().__init__(
            load_state_dict,
            state_dict,
            checkpoint_transport=checkpoint_transport,
            timeout=config.timeout,
            prefault=prefault,
            checkpoint_store=checkpoint_store,
            save_every=save_every,
        )
        self._config = config
        self._process_group = process_group
        self._membership: Membership | None = None
        self._executor: SafeExecutor | None = None
        self._stall_watch = StallWatch(config.timeout.total_seconds() * _STALL_SHARE)
        self._unclosed.add(self._stall_watch.close)
        self._round: QuorumRound | None = None
        self._error_mutex = threading.Lock()
        self._is_settled = False
        self._irregularity = ""
        self._comparison: StateComparison | None = None
        if self._keeper is not None:
            self._comparison = StateComparison(lock=self._lock, keeper=self._keeper, state=self.replica_state)
        self._checked_registration: tuple[int, ...] = ()
        self._tables: Tables = {}
        self._structure: Structure = ()
        self._known_unfit: set[str] = set()
        self._unfit_decision: Decision | None = None
        self._announced_to: frozenset[str] = frozenset()
        self._healer = self._new_healer()

    def report_error(self, e: Exception) -> None:
        """Report what spoils this step: it will not be committed. As in torchft; from any thread.

        The process group is ended, so that the other replicas need not wait for this one.
        """
        current = self._round
        with self._error_mutex:
            if current is None or current.error is not None:
                return
            current.error = ReportedError(e)
        logger.warning("%s: this step will not be committed: %s", self._name(), format_error(e))
        if self._membership is not None:
            self._membership.abort()
            self._record(events.ERRORS, "a step will not be committed", current.decision, error=format_error(e))

    def errored(self) -> ReportedError | None:
        """Return the first thing that went wrong in this step, with its ``original_exception``. As in torchft."""
        return self._round.error if self._round is not None else None

    def _shut_down(self, wait: bool) -> None:
        """Leave the job as well."""
        with ExitStack() as closing:
            closing.callback(super()._shut_down, wait)
            closing.callback(self._stall_watch.close)
            if self._comparison is not None:
                closing.callback(self._comparison.close)
            if self._executor is not None:
                closing.callback(self._executor.shutdown, wait=wait)
            if self._membership is not None:
                closing.callback(self._membership.close)

    # -------------------------------------------------------------------------------------------------------- joining

    def _new_healer(self) -> Healer:
        # A quorum is healed from its members; a checkpoint shows an older step.
        recover = partial(self.recover, from_checkpoints=False)
        return Healer(self._config, recover=recover, lineage=lambda: self._lineage, watch=self._stall_watch)

    def _joined(self) -> Membership:
        if self._membership is None:
            is_told = bool(self._config.lighthouse_addr or os.environ.get(LIGHTHOUSE_ENV))
            if is_told and self._transport is not None and self._training_thread is None:
                self._config = self._config.with_environment()
                self._healer = self._new_healer()
                self._join(self._config)
                return self._joined()
            raise ManagerError(
                "expected a manager that takes part in a quorum, and this one was made without: give Manager "
                "min_replica_size=... or a config, or set TORCHFT_LIGHTHOUSE, to use start_quorum and what belongs to "
                "it; without a quorum, call start_step at each boundary"
            )
        return self._membership

    def _refuse_start_step(self) -> None:
        if self._membership is not None:
            raise ManagerError(
                "expected start_quorum at the step boundary, got start_step: this manager takes part in a quorum, "
                "which counts the steps; a manager made without min_replica_size and config has no quorum"
            )

    def _join(self, config: ManagerConfig) -> None:
        assert self._transport is not None, "a quorum needs a transport"
        self._transport.check_address(config.connect_timeout)
        self._membership = Membership(config, address=self.metadata(), process_group=self._process_group)
        self._unclosed.add(self._membership.close)
        self._executor = SafeExecutor(1, "ft-transport-quorum")

    def _record(self, log: logging.Logger, what: str, decision: Decision | None, **fields: int | bool | str) -> None:
        membership = self._membership
        if membership is not None:
            quorum_id = group_number(decision.group) if decision is not None else -1
            events.record(
                log,
                what,
                replica_id=membership.replica_id,
                rank=membership.group_rank,
                quorum_id=quorum_id,
                **fields,
            )

    def _name(self) -> str:
        who = self._membership.replica_id if self._membership is not None else "?"
        return f"replica {who} step {self._step}"

    # ------------------------------------------------------------------------------------------------------ the round

    def _current_round(self) -> QuorumRound:
        if self._round is None:
            raise ManagerError("expected start_quorum before this, and it was not called")
        return self._round

    def _wait_for_round(self, current: QuorumRound, deadline: Deadline = _NO_DEADLINE) -> None:
        self._await(current.quorum, "the quorum to be formed", deadline)
        current.quorum.result()

    def _await(self, quorum: Future[None], what: str, deadline: Deadline) -> None:
        if quorum.done():
            return
        left = deadline.left()
        with self._stall_watch.waiting(f"{self._name()}: waiting for {what}"), suppress(FutureTimeoutError):
            quorum.exception(left.total_seconds() if left is not None else None)
        if not quorum.done():
            raise QuorumTimeoutError(
                f"{self._name()}: expected {what} within the caller's timeout; call with a longer one"
            )

    def _leave(self, earlier: QuorumRound, deadline: Deadline) -> None:
        """Make sure that nothing of an earlier step goes on in the next one."""
        # Whether it failed has been told to whoever waited for it.
        self._await(earlier.quorum, "a quorum that nobody waited for", deadline)
        failed = earlier.quorum.exception() is not None
        if failed:
            self._announced_to = frozenset()
            # Where a handler raised in start_quorum, what that had begun may still be under way.
            assert self._executor is not None, "there is one since the manager joined"
            self._await(self._executor.submit(_do_nothing), "what an interrupted start_quorum had begun", deadline)
        if not earlier.is_over:
            # The other replicas may wait in collectives that this one has not even begun.
            logger.warning("%s: the step before was abandoned, and its process group is ended", self._name())
            self._joined().abort()
        if failed or not earlier.is_over:
            self._is_settled = False
        if not failed and not earlier.is_voted:
            # The other ranks of this replica may be voting on the step, and wait for this one.
            earlier.is_voted = True
            refusals = self._joined().agree(
                Exchange.COMMIT,
                ("the step was abandoned",),
                step=self._step,
                lineage=self._lineage,
                timeout=self._config.timeout,
                deadline=deadline,
            )
            if not refusals:
                logger.warning(
                    "%s: the other ranks of this replica have committed the step with a vote that was interrupted on "
                    "this one; it heals now",
                    self._name(),
                )

    def _check_registered(self) -> None:
        """Before the first step, and after each change: what is trained has to be registered.

        Raises:
            RegistryError: It is not.
        """
        optimizers = self._attached_optimizers()
        signature = (self._registry.num_changes, *map(id, optimizers))
        if signature != self._checked_registration:
            check_registered(self._registry, optimizers)
            self._note_structure()
            self._checked_registration = signature
        decision = self._unfit_decision
        if decision is not None:
            assert self._executor is not None, "there is one since the manager joined"
            self._note_structure()
            self._executor.submit(self._joined().tell_tables, decision, self._tables)
            self._unfit_decision = None

    def _note_structure(self) -> None:
        """Look at what the state looks like, for the other replicas to compare."""
        assert self._transport is not None, "a quorum needs a transport"
        self._tables = tables_of(self._registry)
        self._structure = structure_of(self._tables, self._transport.token_proof())

    def _note_unfit(self, decision: Decision) -> None:
        """Somebody's state does not fit: what is format_error of this one's may be old, and is looked at once more."""
        unknown = set(decision.unfit) - self._known_unfit
        if decision.unfit and self._joined().replica_id not in decision.unfit:
            self._unfit_decision = decision
        self._known_unfit = set(decision.unfit)
        if unknown and self._joined().replica_id not in unknown:
            logger.warning(
                "%s: the state of %s differs from this one's in keys, dtypes, shapes or job token; unless it changes, "
                "they take no part",
                self._name(),
                sorted(unknown),
            )

    def _misfit_error(self, decision: Decision, role: DoesNotFit) -> HealFailedError:
        membership = self._joined()
        differing = describe(role.parts, self._tables, membership.told_tables(decision))
        address = role.holder.addresses[membership.group_rank]
        holder = f"{role.holder.replica_id} at {address}"
        reason = f"no further attempt can succeed: the state of {holder} differs from this replica's: {differing}"
        return HealFailedError(step=decision.step, reasons=(reason,))

    def _note_irregular_steps(self) -> None:
        """Give a state that was not stepped as it was committed a name of its own."""
        irregularity = self._ledger.irregularity(self._attached_optimizers())
        if not irregularity:
            return
        self._is_settled = False
        # First the name: where a handler raises below, the state gets another one once more, and not its old one back.
        self._lineage = next_lineage(self._lineage, f"stepped {irregularity}", self._step)
        self._ledger.replaced()
        if irregularity != self._irregularity:
            logger.warning(
                "%s: expected each attached optimizer to make one step for the commit, got %s; unless all replicas did "
                "the same, this one heals now. Optimizers that do not step with each commit: attach(..., "
                "every_commit=False)",
                self._name(),
                irregularity,
            )
        self._irregularity = irregularity

    # ----------------------------------------------------------------------------------------------------- the quorum

    @spanned("_async_quorum")
    def _form_quorum_in_background(self, current: QuorumRound, request: QuorumRequest, can_serve: bool) -> None:
        """On the quorum thread, while ``forward`` runs."""
        try:
            try:
                decision = self._ask(request, can_serve=can_serve, is_waiting=False)
                if isinstance(decision.role, UpToDate):
                    self._request_snapshot(decision.role)
            finally:
                if self._snapshot_scheduler is not None:
                    self._snapshot_scheduler.settle()
            current.decision = decision
            if isinstance(decision.role, UpToDate):
                self._check_serving(decision.role)
                self._set_up(decision, request.deadline)
            else:
                self.report_error(QuorumError(f"this replica is behind step {decision.step}, and heals next"))
        except BaseException as error:
            current.end_quorum(error)
        else:
            current.end_quorum(None)

    @spanned("_async_quorum")
    def _form_quorum_and_heal(self, current: QuorumRound, request: QuorumRequest) -> None:
        """On the training thread, before ``forward``. Returns when this replica is up to date, or cannot be."""
        num_stand_bys = num_misfits = 0
        try:
            while True:
                if self._snapshot_scheduler is not None:
                    # What was served before is of an earlier attempt, though perhaps at the same step.
                    self._snapshot_scheduler.state_replaced()
                decision = self._ask(request, can_serve=True, is_waiting=True)
                current.decision = decision
                current.num_missed_heartbeats = self._joined().num_missed_heartbeats()
                match decision.role:
                    case UpToDate() as role:
                        self._lineage = decision.lineage
                        self._request_snapshot(role)
                        self._begin_step(self._step)
                        self._check_serving(role)
                        self._set_up(decision, request.deadline)
                        break
                    case Heals() as role:
                        if self._heal(decision, role):
                            break
                    case StandsBy() as role:
                        if not request.may_heal:
                            self._refuse_torn_state()
                            self.report_error(QuorumError(f"this replica is behind step {decision.step}"))
                            break
                        if not role.may_heal:
                            self.report_error(
                                QuorumError(
                                    f"this replica is behind step {decision.step}, and heals next: its other ranks "
                                    "have begun the step already"
                                )
                            )
                            break
                        num_stand_bys += 1
                        if num_stand_bys > _MAX_STAND_BYS:
                            raise QuorumError(
                                f"{self._name()}: expected a snapshot of step {decision.step} from one of "
                                f"{sorted(role.announced_to)}, and none came in {_MAX_STAND_BYS} quorums"
                            )
                        logger.info("%s: waits for a snapshot after step %d", self._name(), decision.step)
                        self._announced_to = role.announced_to
                        continue
                    case DoesNotFit() as role:
                        num_misfits += 1
                        if num_misfits > _MAX_MISFITS:
                            raise self._misfit_error(decision, role)
                        # What was told of either state may be old.
                        self._note_structure()
        except BaseException:
            self._is_settled = False
            raise
        current.end_quorum(None)

    def _ask(self, request: QuorumRequest, *, can_serve: bool, is_waiting: bool) -> Decision:
        start_s = time.monotonic()
        membership = self._joined()
        with (
            self._naming_differences(),
            self._stall_watch.waiting(
                f"{self._name()}: waiting for a quorum", missing=membership.missing, thread_id=self._training_thread
            ),
            span("_client::_quorum"),
        ):
            decision = membership.decide(
                step=self._step if self._torn is None else NO_WHOLE_STATE,
                lineage=self._lineage,
                rules=request.rules,
                can_serve=can_serve,
                may_heal=request.may_heal and is_waiting,
                is_irregular=bool(self._irregularity),
                claim=self._comparison.claim(request.deadline.cap(self._timeout)) if self._comparison else Claim(),
                structure=self._structure,
                announced_to=self._announced_to,
                num_failed_heals=self._healer.num_failures,
                deadline=request.deadline,
                shrink_only=request.shrink_only,
            )
        self._announced_to = frozenset()
        self._tell_divergence(decision)
        self._note_unfit(decision)
        logger.debug(
            "%s: quorum of %d for step %d after %.1f ms: %s",
            self._name(),
            len(decision.group_members),
            decision.step,
            (time.monotonic() - start_s) * 1e3,
            decision,
        )
        return decision

    @contextmanager
    def _naming_differences(self) -> Iterator[None]:
        try:
            yield
        except StatesDivergedError as error:
            table = self._comparison.table(self._timeout) if self._comparison is not None else None
            error.tensors = self._joined().differing_tensors(error, table or {})
            logger.error("%s: %s", self._name(), error)
            raise

    def _tell_divergence(self, decision: Decision) -> None:
        divergence = decision.divergence
        if divergence is None:
            return
        own = self._joined().replica_id
        if own in divergence.replicas and self._comparison is not None:
            # Until it has healed it holds no state that counts: not for a comparison either, if others die meanwhile.
            self._comparison.forget()
            self._irregularity = "the state differs from that of most replicas"
            self._lineage = next_lineage(self._lineage, self._irregularity, self._step)
            self._is_settled = False
        logger.error(
            "%s: the state of %s at step %d differs from that of most replicas; %s",
            self._name(),
            sorted(divergence.replicas),
            divergence.step,
            "this replica heals" if own in divergence.replicas else "it takes no part before it has healed",
        )

    def compare_replicas(self) -> None:
        """Compare the states of all replicas at the next step boundary, once; as with ``compare_every``.

        All replicas call this in the same step. The next `start_quorum` digests what attached optimizers change, and
        the one after it compares: a replica that differs from most heals, and without a majority all of them raise
        ``StatesDivergedError``.
        """
        self._joined()
        if self._comparison is not None:
            self._comparison.is_wanted = True

    def _begin_step(self, step: int, *, hold: bool = False) -> bool:
        is_kept = super()._begin_step(step, hold=hold)
        comparison, every = self._comparison, self._config.compare_every
        if comparison is not None and (comparison.is_wanted or (every is not None and step > 0 and step % every == 0)):
            comparison.begin(step, self._lineage, self._attached_optimizers())
        return is_kept

    def _note_replaced(self) -> None:
        super()._note_replaced()
        self._irregularity = ""
        if self._comparison is not None:
            self._comparison.forget()

    def _request_snapshot(self, role: UpToDate) -> None:
        """Let a snapshot be taken: at this boundary if it has not passed, or else at the next."""
        if not (role.serves_now or role.serves_next):
            return
        logger.info("%s: serves %s now, %s next", self._name(), role.serves_now, role.serves_next)
        if self._snapshot_scheduler is not None:
            # They wait for each other: nobody's optimizer steps before the newcomer is healed.
            with span("_checkpoint_transport::send_checkpoint"):
                self._snapshot_scheduler.request(share=True)

    def _check_serving(self, role: UpToDate) -> None:
        """Do not let everybody wait for a snapshot that does not come: the step is repeated instead."""
        if (
            role.serves_now
            and self._snapshot_scheduler is not None
            and not self._snapshot_scheduler.shows_present_state()
        ):
            self.report_error(QuorumError(f"no snapshot could be taken for {role.serves_now}"))

    def _set_up(self, decision: Decision, deadline: Deadline = _NO_DEADLINE) -> None:
        if self.errored() is not None:
            # What was broken up in this step is not set up again under the same key.
            return
        try:
            with (
                self._stall_watch.waiting(
                    f"{self._name()}: waiting for the members of process group {decision.group}",
                    thread_id=self._training_thread,
                ),
                span("_pg::configure"),
            ):
                seconds = self._joined().configure(decision, deadline)
        except Exception as error:
            self.report_error(error)
            return
        if seconds:
            self._record(events.QUORUMS, "a new quorum", decision, step=decision.step)
            logger.info(
                "%s: process group %s of %s set up in %.1f ms",
                self._name(),
                decision.group,
                decision.group_members,
                seconds * 1e3,
            )

    # -------------------------------------------------------------------------------------------------------- healing

    def _heal(self, decision: Decision, role: Heals) -> bool:
        """Receive the state from one of the sources. Returns whether it worked; else asks to be called again.

        Raises:
            HealFailedError: It has been tried often enough.
        """
        assert self._executor is not None, "there is one since the manager joined"
        membership, healer = self._joined(), self._healer
        # The others wait for this replica there, so it meets them while the state arrives.
        meeting = self._executor.submit(self._set_up, decision)
        with span("_checkpoint_transport::recv_checkpoint"):
            failures = healer.receive(decision, role.sources, group_rank=membership.group_rank, name=self._name())
        meeting.result()
        # All ranks of the replica are healed, or none counts as healed.
        refusals = membership.agree(
            Exchange.HEAL, failures[-1:], step=self._step, lineage=self._lineage, timeout=2 * self._config.timeout
        )
        if not refusals:
            healer.succeeded()
            self._forget_gradients()
            self._begin_step(self._step)
            return True
        membership.abort()
        healer.failed(decision.step, failures or refusals, agreed=refusals)
        if self._round is not None:
            self._round.error = None
        return False

    def _forget_gradients(self) -> None:
        """Let what is left of gradients count for nothing: they belong to the state that has been replaced.

        They are set to zero where they are, as a training loop may be about to reduce them.
        """
        attached = (
            parameter
            for optimizer in self._attached_optimizers()
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        for parameter in chain(self._registry.parameters(), attached):
            if parameter.grad is not None:
                parameter.grad.detach().zero_()


def _do_nothing() -> None:
    """Comes after all that was submitted before."""


def format_error(error: BaseException) -> str:
    """Type and message of an error, for logs and other replicas."""
    return f"{type(error).__name__}: {error}"
