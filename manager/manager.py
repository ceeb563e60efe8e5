"""The manager of one replica in a fault-tolerant loop: quorum, healing, collectives and commits, over its state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import ReduceOp
from typing_extensions import Unpack

from ft_transport import HTTPTransport, TransportError
from manager.config import ManagerConfig, TorchftKeywords
from manager.errors import (
    CommitFailedError,
    ConfigError,
    HealFailedError,
    ManagerError,
    QuorumError,
    StateTornError,
)
from manager.membership import Membership
from manager.process_group import ManagedWork, ReplicaProcessGroup, wait_all
from manager.quorum import NO_WHOLE_STATE, Decision, Heals, Rules, StandsBy, UpToDate, commit_refusals, next_lineage
from manager.stall_watch import StallWatch
from manager.state_manager import StateManager

logger = logging.getLogger(__name__)

_STALL_SHARE: Final = 0.5
_MAX_STAND_BYS: Final = 10


@dataclass(slots=True)
class _Round:
    """One attempt at a step, from `Manager.start_quorum` to `Manager.should_commit`.

    Attributes:
        num_lapses: How often the replica had been silent for too long when it began.
        decision: What the quorum decided; ``None`` until then.
        quorum: Done when it has and the process group is set up.
        error: The first thing that went wrong.
        works: The collectives begun.
        has_works: Whether any was.
        is_over: Whether `Manager.should_commit` has been called.
    """

    num_lapses: int
    decision: Decision | None = None
    quorum: Future[None] = field(default_factory=Future)
    error: Exception | None = None
    works: list[ManagedWork] = field(default_factory=list)
    has_works: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What `Manager.start_quorum` was called with."""

    rules: Rules
    timeout: timedelta
    shrink_only: bool
    may_heal: bool


class Manager(StateManager):
    """Keeps a replica and its peers at the same state, whoever of them dies.

    Without a quorum it is a `StateManager`. With one, the training loop is that of torchft::

        manager = Manager(min_replica_size=2, replica_id="replica_0")
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        manager.attach(optimizer)
        while manager.current_step() < num_steps:
            manager.start_quorum()
            loss(model).backward()
            for parameter in model.parameters():
                manager.allreduce(parameter.grad)
            if manager.should_commit():
                optimizer.step()

    torchft's ``DistributedDataParallel``, ``Optimizer``, ``LocalSGD`` and ``DiLoCo`` do these calls by themselves.

    The thread that calls ``start_quorum`` is the training thread; ``allreduce``, ``should_commit`` and all that changes
    the state belong to it. ``report_error`` may be called from any thread.
    """

    def __init__(
        self,
        pg: ReplicaProcessGroup | None = None,
        load_state_dict: Callable[[Any], object] | None = None,
        state_dict: Callable[[], object] | None = None,
        *,
        config: ManagerConfig | None = None,
        checkpoint_transport: HTTPTransport[Any] | None = None,
        timeout: timedelta | None = None,
        prepare_memory: bool = True,
        **keywords: Unpack[TorchftKeywords],
    ) -> None:
        """Make a manager, and join the job if it is told how.

        Args:
            pg: Runs the collectives between replicas; a process group of torchft will do. Default: gloo.
            load_state_dict: With ``state_dict``, registered under the key ``default`` (as in torchft).
            state_dict: See ``load_state_dict``.
            config: How to take part in the quorum.
            checkpoint_transport: Serves this replica's snapshots and receives others'. The manager owns it and shuts
                it down. For a quorum there is a default one.
            timeout: Deadline of every wait for the lock, and `ManagerConfig.timeout`. Default: 60 s.
            prepare_memory: See `StateManager`.
            **keywords: Instead of ``config``, its fields under torchft's names. With any of them, or with ``config``,
                the manager joins the job at once; else with the first `start_quorum`.

        Raises:
            ConfigError: The settings cannot work, or ``config`` was given beside them.
            QuorumError: The Lighthouse or the replica's store cannot be reached.
            TransportError: The address that peers are told does not lead to this transport.
        """
        if config is not None and (keywords or timeout is not None):
            given = sorted({*keywords, *(["timeout"] if timeout is not None else [])})
            raise ConfigError(f"expected the settings in config or one by one, got both: config and {given}")
        wants_quorum = config is not None or bool(keywords) or pg is not None
        if config is None:
            config = ManagerConfig.from_keywords(keywords, timeout=timeout)
        if wants_quorum:
            config = config.with_environment()
            if checkpoint_transport is None:
                checkpoint_transport = HTTPTransport(config.timeout)
        super().__init__(
            load_state_dict,
            state_dict,
            checkpoint_transport=checkpoint_transport,
            timeout=config.timeout,
            prepare_memory=prepare_memory,
        )
        self._config = config
        self._process_group = pg
        # torchft's DiLoCo reads it under this name.
        self._use_async_quorum = config.use_async_quorum
        self._membership: Membership | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._stall_watch = StallWatch(config.timeout.total_seconds() * _STALL_SHARE)
        self._round: _Round | None = None
        self._error_mutex = threading.Lock()
        self._is_settled = False
        self._announced_to: frozenset[str] = frozenset()
        self._heal_reasons: list[str] = []
        self._num_failed_heals = 0
        self._num_refused_commits = 0
        self._num_steps_since_commit = 0
        if wants_quorum:
            try:
                self._join(config)
            except BaseException:
                super().shutdown()
                raise

    # ------------------------------------------------------------------------------------------------- the round

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Begin a step: find out who takes part, and heal first if this replica is behind. As in torchft.

        This is the step boundary: what is registered shows `current_step`. Call it before data is drawn and
        ``forward`` runs. With ``use_async_quorum`` it returns at once as a rule; a replica that may be behind (it has
        just started, or its last step was not committed) waits for the quorum, and returns healed.

        Args:
            allow_heal: Whether this replica heals if it is behind. Otherwise it takes no part then.
            shrink_only: Whether new replicas have to wait.
            timeout: For the quorum. Default: ``quorum_timeout``.

        Raises:
            QuorumError: There was no quorum.
            HealFailedError: This replica could not be healed ``max_heal_attempts`` times in a row.
            StateTornError: It holds part of a state, and may not heal.
        """
        membership = self._joined()
        if self._round is not None:
            self._leave(self._round)
        self._training_thread = threading.get_ident()
        rules = Rules(
            min_replica_size=self._config.min_replica_size,
            world_size_mode=self._config.world_size_mode,
            init_sync=self._config.init_sync,
        )
        request = _Request(
            rules=rules,
            timeout=timeout if timeout is not None else self._config.quorum_timeout,
            shrink_only=shrink_only,
            may_heal=allow_heal,
        )
        self._round = current = _Round(membership.num_lapses())
        try:
            if self._is_settled and self._use_async_quorum and self._torn is None:
                # The quorum tells only later who needs a snapshot of this boundary.
                can_serve = self.start_step(self._step, hold=True)
                assert self._executor is not None, "there is one since the manager joined"
                self._executor.submit(self._form_quorum_in_background, current, request, can_serve)
            else:
                self._form_quorum_and_heal(current, request)
        except BaseException as error:
            if self._snapshotter is not None:
                self._snapshotter.settle()
            current.quorum.set_exception(error)
            raise

    def wait_quorum(self) -> None:
        """Wait until the quorum is there and its process group is set up. As in torchft.

        Raises:
            QuorumError: There was none.
        """
        self._wait_for_round(self._current_round())

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = ReduceOp.AVG
    ) -> ManagedWork:
        """Begin to reduce ``tensor`` in place over the participants. As in torchft.

        A replica that does not participate contributes zeros. What goes wrong does not raise: it is reported, the work
        is done, and the step will not be committed; the tensor's values mean nothing then.

        Args:
            tensor: Dense; averaged over the participants by default.
            should_quantize: Accepted as torchft does without Triton: the tensor is sent as it is.
            reduce_op: What to do. ``AVG`` needs a floating-point dtype.

        Returns:
            The work; `should_commit` waits for those that nobody has waited for.

        Raises:
            QuorumError: There was no quorum.
            ValueError: The average of integers was asked for.
        """
        del should_quantize
        is_average = reduce_op == ReduceOp.AVG
        if is_average and not (torch.is_floating_point(tensor) or torch.is_complex(tensor)):
            raise ValueError(f"expected a floating-point tensor to average, got {tensor.dtype}")
        current = self._current_round()
        self._wait_for_round(current)
        if current.error is not None:
            return ManagedWork(None, tensor, lambda: None, self.report_error)
        num_participants = self.num_participants()
        if not self.is_participating():
            tensor.zero_()

        def finish() -> None:
            if is_average and num_participants > 1:
                tensor.div_(num_participants)

        try:
            work = self._joined().allreduce(tensor, ReduceOp.SUM if is_average else reduce_op)
        except Exception as error:
            self.report_error(error)
            work = None
        managed = ManagedWork(work, tensor, finish, self.report_error)
        current.works.append(managed)
        current.has_works = True
        return managed

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Whether to step the optimizer; ends the step. As in torchft, and called once per step on every rank.

        All ranks of the replica get the same answer. Where it is yes, the step counts as committed from here on.

        Args:
            timeout: For the agreement within the replica. Default: ``timeout`` of the configuration.

        Raises:
            QuorumError: There was no quorum, or a rank of this replica did not answer.
            CommitFailedError: More than ``max_retries`` steps in a row were not committed.
        """
        membership, current = self._joined(), self._current_round()
        self._wait_for_round(current)
        with self._stall_watch.waiting(f"{self._name()}: waiting for {len(current.works)} collectives"):
            wait_all(current.works)
        current.works.clear()
        current.is_over = True
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        error = membership.group_error()
        if error is not None:
            self.report_error(error)
        refusals = commit_refusals(
            num_participants=self.num_participants(),
            min_replica_size=self._config.min_replica_size,
            errors=[_say(current.error)] if current.error is not None else [],
            has_lapsed=membership.num_lapses() != current.num_lapses,
        )
        with self._stall_watch.waiting(f"{self._name()}: waiting for the other ranks of this replica to agree"):
            refusals = membership.agree(
                "commit",
                refusals,
                step=self._step,
                lineage=self._lineage,
                timeout=timeout if timeout is not None else self._config.timeout,
            )
        self._is_settled = not refusals
        if refusals:
            self._refuse_commit(membership, refusals)
            return False
        decision = current.decision
        assert decision is not None, "a replica without a decision has an error"
        self._lineage = next_lineage(self._lineage, decision.group, self._step + 1)
        self._step += 1
        self._batches_committed += decision.num_participants
        self._is_past_step = True
        self._num_steps_since_commit = 0
        self._num_refused_commits = 0
        logger.info(
            "%s: committed with %d participants, lineage %s", self._name(), decision.num_participants, self._lineage
        )
        return True

    def report_error(self, e: Exception) -> None:
        """Report what spoils this step: it will not be committed. As in torchft; from any thread.

        The process group is ended, so that the other replicas need not wait for this one.
        """
        current = self._round
        with self._error_mutex:
            if current is None or current.error is not None:
                return
            current.error = e
        logger.warning("%s: this step will not be committed: %s", self._name(), _say(e))
        if self._membership is not None:
            self._membership.break_up()

    def errored(self) -> Exception | None:
        """Return the first thing that went wrong in this step. As in torchft."""
        return self._round.error if self._round is not None else None

    # --------------------------------------------------------------------------------------------- what is known

    def batches_committed(self) -> int:
        """How many batches were committed, over all steps and replicas. As in torchft."""
        return self._batches_committed

    def num_participants(self) -> int:
        """How many replicas contribute to this step; waits for the quorum. As in torchft."""
        decision = self._decision()
        return decision.num_participants if decision is not None else 0

    def participating_rank(self) -> int | None:
        """Return this replica's rank among those that contribute, ``None`` if it does not. As in torchft."""
        decision = self._decision()
        return decision.participating_rank if decision is not None else None

    def is_participating(self) -> bool:
        """Whether this replica contributes to this step. As in torchft."""
        return self.participating_rank() is not None

    def replica_id(self) -> str:
        """Return the name of this start of the replica: the configured one and a random part.

        Raises:
            QuorumError: It cannot join the job.
        """
        return self._joined().replica_id

    def shutdown(self, wait: bool = True) -> None:
        """Leave the job, end the threads and the transport. May be called twice.

        Args:
            wait: Whether to return only when the server has ended.
        """
        if self._membership is not None:
            self._membership.close()
        if self._executor is not None:
            self._executor.shutdown(wait=wait)
        self._stall_watch.close()
        super().shutdown(wait)

    # --------------------------------------------------------------------------------------------------- joining

    def _joined(self) -> Membership:
        if self._membership is None:
            self._config = self._config.with_environment()
            if self._transport is None:
                raise ManagerError(
                    "expected a checkpoint_transport to heal with, or settings for a quorum; got neither"
                )
            self._join(self._config)
        assert self._membership is not None, "it has just been made"
        return self._membership

    def _join(self, config: ManagerConfig) -> None:
        assert self._transport is not None, "a quorum needs a transport"
        self._transport.check_address(config.connect_timeout)
        self._membership = Membership(config, address=self.metadata(), process_group=self._process_group)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ft-transport-quorum")

    # ------------------------------------------------------------------------------------------------ the quorum

    def _form_quorum_in_background(self, current: _Round, request: _Request, can_serve: bool) -> None:
        """On the quorum thread, while ``forward`` runs."""
        try:
            try:
                decision = self._ask(request, can_serve=can_serve, is_waiting=False)
                if isinstance(decision.role, UpToDate):
                    self._request_snapshot(decision.role)
            finally:
                if self._snapshotter is not None:
                    self._snapshotter.settle()
            current.decision = decision
            if isinstance(decision.role, UpToDate):
                self._check_serving(decision.role)
                self._set_up(decision)
            else:
                self.report_error(QuorumError(f"this replica is behind step {decision.step}, and heals next"))
        except BaseException as error:
            current.quorum.set_exception(error)
        else:
            current.quorum.set_result(None)

    def _form_quorum_and_heal(self, current: _Round, request: _Request) -> None:
        """On the training thread, before ``forward``. Returns when this replica is up to date, or cannot be."""
        num_stand_bys = 0
        try:
            while True:
                if self._snapshotter is not None:
                    # What was served before is of an earlier attempt, though perhaps at the same step.
                    self._snapshotter.state_replaced()
                decision = self._ask(request, can_serve=True, is_waiting=True)
                current.decision = decision
                current.num_lapses = self._joined().num_lapses()
                match decision.role:
                    case UpToDate() as role:
                        self._lineage = decision.lineage
                        self._request_snapshot(role)
                        self.start_step(self._step)
                        self._check_serving(role)
                        self._set_up(decision)
                        break
                    case Heals() as role:
                        if self._heal(decision, role):
                            break
                    case StandsBy() as role:
                        if not request.may_heal:
                            self._refuse_torn_state()
                            self.report_error(QuorumError(f"this replica is behind step {decision.step}"))
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
        except BaseException:
            self._is_settled = False
            raise
        current.quorum.set_result(None)

    def _ask(self, request: _Request, *, can_serve: bool, is_waiting: bool) -> Decision:
        start_s = time.monotonic()
        with self._stall_watch.waiting(f"{self._name()}: waiting for a quorum"):
            decision = self._joined().decide(
                step=self._step if self._torn is None else NO_WHOLE_STATE,
                lineage=self._lineage,
                rules=request.rules,
                can_serve=can_serve,
                may_heal=request.may_heal and is_waiting,
                announced_to=self._announced_to,
                num_failed_heals=self._num_failed_heals,
                timeout=request.timeout,
                shrink_only=request.shrink_only,
            )
        self._announced_to = frozenset()
        logger.debug(
            "%s: quorum of %d for step %d after %.1f ms: %s",
            self._name(),
            len(decision.group_members),
            decision.step,
            (time.monotonic() - start_s) * 1e3,
            decision,
        )
        return decision

    def _request_snapshot(self, role: UpToDate) -> None:
        """Let a snapshot be taken: at this boundary if it has not passed, or else at the next."""
        if not (role.serves_now or role.serves_next):
            return
        logger.info("%s: serves %s now, %s next", self._name(), role.serves_now, role.serves_next)
        if self._snapshotter is not None:
            # They wait for each other: nobody's optimizer steps before the newcomer is healed.
            self._snapshotter.request(lend=True)

    def _check_serving(self, role: UpToDate) -> None:
        """Do not let everybody wait for a snapshot that does not come: the step is repeated instead."""
        if role.serves_now and self._snapshotter is not None and not self._snapshotter.shows_present_state():
            self.report_error(QuorumError(f"no snapshot could be taken for {role.serves_now}"))

    def _set_up(self, decision: Decision) -> None:
        if self.errored() is not None:
            # What was broken up in this step is not set up again under the same key.
            return
        try:
            with self._stall_watch.waiting(
                f"{self._name()}: waiting for the members of process group {decision.group}"
            ):
                seconds = self._joined().set_up(decision)
        except Exception as error:
            self.report_error(error)
            return
        if seconds:
            logger.info(
                "%s: process group %s of %s set up in %.1f ms",
                self._name(),
                decision.group,
                decision.group_members,
                seconds * 1e3,
            )

    # --------------------------------------------------------------------------------------------------- healing

    def _heal(self, decision: Decision, role: Heals) -> bool:
        """Receive the state from one of the sources. Returns whether it worked; else asks to be called again.

        Raises:
            HealFailedError: It has been tried often enough.
        """
        assert self._executor is not None, "there is one since the manager joined"
        # The others wait for this replica there, so it meets them while the state arrives.
        meeting = self._executor.submit(self._set_up, decision)
        failed = () if self._heal_from_any(decision, role) else (self._heal_reasons[-1],)
        meeting.result()
        # All ranks of the replica are healed, or none counts as healed.
        refusals = self._joined().agree(
            "heal", failed, step=self._step, lineage=self._lineage, timeout=2 * self._config.timeout
        )
        healed = not refusals
        if refusals and not failed:
            self._heal_reasons.extend(refusals)
        if healed:
            self._heal_reasons.clear()
            self._num_failed_heals = 0
            self.start_step(self._step)
            return True
        self._num_failed_heals += 1
        self._joined().break_up()
        if self._num_failed_heals >= self._config.max_heal_attempts:
            reasons = tuple(self._heal_reasons)
            self._heal_reasons.clear()
            self._num_failed_heals = 0
            raise HealFailedError(step=decision.step, reasons=reasons)
        if self._round is not None:
            self._round.error = None
        return False

    def _heal_from_any(self, decision: Decision, role: Heals) -> bool:
        deadline_s = time.monotonic() + self._config.timeout.total_seconds()
        for position, source in enumerate(role.sources):
            address = source.addresses[self._joined().group_rank]
            start_s = time.monotonic()
            # One that is too slow must leave time for another, however many there are.
            is_last = position == len(role.sources) - 1
            share_s = max(0.0, deadline_s - start_s) / (1 if is_last else 2)
            try:
                with self._stall_watch.waiting(f"{self._name()}: receiving step {decision.step} from {address}"):
                    self.recover(
                        address,
                        decision.step,
                        timedelta(seconds=share_s),
                        unreachable_timeout=self._config.connect_timeout,
                        is_fresh=True,
                        verify=self._config.verify_heal,
                    )
                if self._lineage != decision.lineage:
                    raise QuorumError(
                        f"expected lineage {decision.lineage!r} of step {decision.step}, got {self._lineage!r}"
                    )
            except (TransportError, ManagerError) as error:
                self._heal_reasons.append(f"{source.replica_id} at {address}: {_say(error)}")
                logger.warning("%s: healing from %s failed: %s", self._name(), source.replica_id, _say(error))
                continue
            logger.info(
                "%s: healed to step %d from %s in %.1f ms",
                self._name(),
                decision.step,
                source.replica_id,
                (time.monotonic() - start_s) * 1e3,
            )
            return True
        return False

    # ------------------------------------------------------------------------------------------------- the commit

    def _refuse_commit(self, membership: Membership, refusals: tuple[str, ...]) -> None:
        self._num_refused_commits += 1
        logger.warning(
            "%s: not committed, %d in a row: %s", self._name(), self._num_refused_commits, "; ".join(refusals)
        )
        if self._round is not None and self._round.error is not None:
            membership.break_up()
        max_retries = self._config.max_retries
        if max_retries is not None and self._num_refused_commits > max_retries:
            raise CommitFailedError(step=self._step, num_failures=self._num_refused_commits, reasons=refusals)

    def _leave(self, earlier: _Round) -> None:
        """Make sure that nothing of an earlier step goes on in the next one."""
        # Whether it failed has been told to whoever waited for it.
        with self._stall_watch.waiting(f"{self._name()}: waiting for a quorum that nobody waited for"):
            failed = earlier.quorum.exception() is not None
        if failed:
            self._announced_to = frozenset()
        if earlier.has_works and not earlier.is_over:
            logger.warning("%s: the step before was abandoned with collectives under way", self._name())
            self._joined().break_up()
        if failed or not earlier.is_over:
            self._is_settled = False

    def _note_change(self) -> None:
        super()._note_change()
        self._num_steps_since_commit += 1

    def _note_failed_step(self, error: BaseException) -> None:
        """The others count on this replica having made the step that it committed."""
        current = self._round
        has_stepped = self._num_steps_since_commit >= len(self._attached_optimizers())
        if current is not None and current.is_over and self._is_settled and not has_stepped:
            self._torn = StateTornError(
                step=self._step, reason=f"the step was committed, and the optimizer did not make it: {_say(error)}"
            )

    def _current_round(self) -> _Round:
        if self._round is None:
            raise ManagerError("expected start_quorum before this, and it was not called")
        return self._round

    def _wait_for_round(self, current: _Round) -> None:
        if not current.quorum.done():
            with self._stall_watch.waiting(f"{self._name()}: waiting for the quorum to be formed"):
                current.quorum.result()
        current.quorum.result()

    def _decision(self) -> Decision | None:
        if self._round is None:
            return None
        self._wait_for_round(self._round)
        return self._round.decision

    def _name(self) -> str:
        who = self._membership.replica_id if self._membership is not None else "?"
        return f"replica {who} step {self._step}"


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
