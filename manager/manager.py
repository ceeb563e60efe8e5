"""The manager of one replica in a fault-tolerant loop: quorum, healing, collectives and commits, over its state."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch.distributed import ReduceOp
from torch.optim import Optimizer
from typing_extensions import Unpack

import ft_transport
from ft_transport import is_dtensor
from ft_transport.runtime.deadline import Deadline
from manager.collectives.gloo import ReplicaProcessGroup
from manager.collectives.managed_work import ManagedWork, forget_frames, never_failing, wait_all
from manager.collectives.reconfigurable import Reconfigurable
from manager.config import ManagerConfig, TorchftKeywords, named_arguments
from manager.errors import CommitFailedError, ConfigError, ManagerError, StateTornError
from manager.quorum import events
from manager.quorum.decision import Decision, Rules, commit_refusals, next_lineage
from manager.quorum.group_ranks import Exchange
from manager.quorum.membership import Membership
from manager.quorum.participant import QuorumParticipant, QuorumRequest, QuorumRound, format_error
from manager.quorum.spans import span, spanned
from manager.state.guard_marks import warn_of_unguarded
from manager.state.ownership import ends_what_it_owns

if TYPE_CHECKING:
    from ft_transport import CheckpointStore, HTTPTransport

T = TypeVar("T")

logger = logging.getLogger(__name__)

_OTHER_KEYWORDS: Final = ("pg", "load_state_dict", "state_dict", "config", "checkpoint_store", "save_every")
"""For advice where a keyword has a typo: those that are neither torchft's nor settings."""


class Manager(QuorumParticipant):
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

    @ends_what_it_owns
    def __init__(
        self,
        pg: ReplicaProcessGroup | Reconfigurable | None = None,
        load_state_dict: Callable[[Any], object] | None = None,
        state_dict: Callable[[], object] | None = None,
        *positional: Any,
        config: ManagerConfig | None = None,
        checkpoint_transport: HTTPTransport[Any] | None = None,
        timeout: timedelta | None = None,
        prefault: bool = False,
        checkpoint_store: CheckpointStore | None = None,
        save_every: int | None = None,
        **keywords: Unpack[TorchftKeywords],
    ) -> None:
        """Make a manager, and join the job if it is told how.

        Args:
            pg: Runs the collectives between replicas; a process group of torchft, or one of torch's that can be
                reconfigured, will do. Default: gloo.
            load_state_dict: With ``state_dict``, registered under the key ``default`` (as in torchft).
            state_dict: See ``load_state_dict``.
            *positional: What follows in torchft's ``Manager``, in its order: ``min_replica_size`` and so on.
            config: How to take part in the quorum.
            checkpoint_transport: Serves this replica's snapshots and receives others'. The manager owns it and shuts
                it down, also where this constructor raises. For a quorum there is a default one.
            timeout: Deadline of every wait for the lock, and `ManagerConfig.timeout`. Default: 60 s.
            prefault: See `StateManager`.
            checkpoint_store: See `StateManager`.
            save_every: See `StateManager`.
            **keywords: Instead of ``config``, its fields under torchft's names. With any of them, or with ``config``,
                the manager joins the job at once. Without, it joins with the first `start_quorum` if
                ``TORCHFT_LIGHTHOUSE`` is set, and has no quorum otherwise.

        Raises:
            ConfigError: The settings cannot work, a keyword is unknown, or ``config`` was given beside them.
            QuorumError: The Lighthouse or the replica's store cannot be reached.
            TransportError: The address that peers are told does not lead to this transport.
        """
        also: dict[str, Any] = {"timeout": timeout, "checkpoint_transport": checkpoint_transport}
        also = {name: value for name, value in also.items() if value is not None}
        given = named_arguments(positional, {**also, **keywords}, others=_OTHER_KEYWORDS)
        timeout = given.pop("timeout", None)
        checkpoint_transport = given.pop("checkpoint_transport", None)
        if config is not None and (given or timeout is not None):
            names = sorted({*given, *(["timeout"] if timeout is not None else [])})
            raise ConfigError(f"expected the settings in config or one by one, got both: config and {names}")
        wants_quorum = config is not None or bool(given) or pg is not None
        if config is None:
            config = ManagerConfig.from_keywords(cast("TorchftKeywords", given), timeout=timeout)
        if wants_quorum:
            config = config.with_environment()
            if checkpoint_transport is None:
                checkpoint_transport = ft_transport.HTTPTransport(config.timeout)
        super().__init__(
            config,
            load_state_dict,
            state_dict,
            process_group=pg,
            checkpoint_transport=checkpoint_transport,
            prefault=prefault,
            checkpoint_store=checkpoint_store,
            save_every=save_every,
        )
        # torchft's DiLoCo reads it under this name.
        self._use_async_quorum = config.use_async_quorum
        self._has_participated = False
        self._num_refused_commits = 0
        if wants_quorum:
            try:
                self._join(config)
            except BaseException:
                self._shut_down(wait=True)
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
            timeout: For the quorum, all its attempts and the meeting of its members together; receiving a state has
                ``timeout`` of the configuration, as in torchft. Default: what the configuration says of each.

        Raises:
            QuorumError: There was no quorum.
            HealFailedError: This replica could not be healed ``max_heal_attempts`` times in a row.
            StateTornError: It holds part of a state, and may not heal.
        """
        deadline = Deadline.after(timeout)
        membership = self._joined()
        if self._round is not None:
            self._leave(self._round, deadline)
        warn_of_unguarded(self._attached_optimizers())
        self._note_irregular_steps()
        self._check_registered()
        self._has_participated = self.is_participating()
        self._training_thread = threading.get_ident()
        rules = Rules(
            min_replica_size=self._config.min_replica_size,
            world_size_mode=self._config.world_size_mode,
            init_sync=self._config.init_sync,
            compare_every=self._config.compare_every,
        )
        request = QuorumRequest(
            rules=rules,
            deadline=deadline,
            shrink_only=shrink_only,
            may_heal=allow_heal,
        )
        current = QuorumRound(membership.num_missed_heartbeats())
        try:
            self._round = current
            if self._is_settled and self._use_async_quorum and self._torn is None:
                # The quorum tells only later who needs a snapshot of this boundary.
                can_serve = self._begin_step(self._step, hold=True)
                assert self._executor is not None, "there is one since the manager joined"
                self._executor.submit(self._form_quorum_in_background, current, request, can_serve)
            else:
                self._form_quorum_and_heal(current, request)
        except BaseException as error:
            if self._snapshot_scheduler is not None:
                self._snapshot_scheduler.settle()
            # Where a handler raised, frames hold sections of the lock, and the error is kept: by the round, which
            # this frame must not keep in turn, and perhaps by the caller.
            traceback.clear_frames(error.__traceback__)
            current.end_quorum(error)
            del current
            raise

    @spanned("wait_quorum")
    def wait_quorum(self) -> None:
        """Wait until the quorum is there and its process group is set up. As in torchft.

        Raises:
            QuorumError: There was none.
        """
        self._wait_for_round(self._current_round())

    @spanned("allreduce")
    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = ReduceOp.AVG
    ) -> ManagedWork:
        """Begin to reduce ``tensor`` in place over the participants. As in torchft.

        A replica that does not participate contributes zeros. What goes wrong does not raise: it is reported, the work
        is done, and the step will not be committed; the tensor's values mean nothing then.

        Args:
            tensor: Dense; averaged over the participants by default. Of a DTensor the local part, which has to be the
                same part on all replicas: that is, ranks of one number in replicas of one layout.
            should_quantize: Accepted as torchft does without Triton: the tensor is sent as it is.
            reduce_op: What to do. ``AVG`` needs a floating-point dtype.

        Returns:
            The work; `should_commit` waits for those that nobody has waited for.

        Raises:
            QuorumError: There was no quorum.
            TypeError: It is no tensor.
            ValueError: The average of integers was asked for.
        """
        del should_quantize
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"expected a tensor to reduce, got {type(tensor).__name__}; a parameter that the loss does not depend "
                "on has no gradient: leave it out on all replicas, or give all of them one of zeros"
            )
        is_average = reduce_op == ReduceOp.AVG
        if is_average and not (torch.is_floating_point(tensor) or torch.is_complex(tensor)):
            raise ValueError(f"expected a floating-point tensor to average, got {tensor.dtype}")
        current = self._current_round()
        self._wait_for_round(current)
        # Registered before it begins: what is interrupted from here on, is known not to be reduced.
        managed = ManagedWork(tensor, self.report_error)
        current.works.append(managed)
        if current.error is not None:
            return managed
        num_participants = self.num_participants()
        local = tensor.to_local() if is_dtensor(tensor) else tensor
        if not self.is_participating():
            local.zero_()

        finish = partial(_average, local, num_participants) if is_average and num_participants > 1 else None
        try:
            managed.begin(self._joined().allreduce(local, ReduceOp.SUM if is_average else reduce_op), finish)
        except Exception as error:
            self.report_error(error)
            forget_frames(error)
        return managed

    @spanned("should_commit")
    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Whether to step the optimizer; ends the step. As in torchft, and called once per step on every rank.

        All ranks of the replica get the same answer. Where it is yes, the step counts as committed from here on.

        Args:
            timeout: For everything that this waits for: quorum, collectives, and the other ranks of the replica.
                Default: what the configuration says of each.

        Raises:
            QuorumError: There was no quorum, or a rank of this replica did not answer.
            CommitFailedError: More than ``max_retries`` steps in a row were not committed.
        """
        deadline = Deadline.after(timeout)
        membership, current = self._joined(), self._current_round()
        self._wait_for_round(current, deadline)
        with self._stall_watch.waiting(f"{self._name()}: waiting for {len(current.works)} collectives"):
            if not wait_all(current.works, deadline) and current.error is None:
                self.report_error(ManagerError("expected every collective to be waited for, one was interrupted"))
        current.works.clear()
        current.is_over = True
        if torch.accelerator.is_available():
            with span("should_commit::current_stream::synchronize"):
                torch.accelerator.synchronize()
        error = membership.group_error()
        if error is not None:
            self.report_error(error)
        refusals = commit_refusals(
            num_participants=self.num_participants(),
            min_replica_size=self._config.min_replica_size,
            errors=[str(current.error)] if current.error is not None else [],
            has_missed_heartbeats=membership.num_missed_heartbeats() != current.num_missed_heartbeats,
        )
        with self._stall_watch.waiting(f"{self._name()}: waiting for the other ranks of this replica to agree"):
            # Where the others do not answer, whether they committed is not known.
            self._is_settled = False
            refusals = membership.agree(
                Exchange.COMMIT,
                refusals,
                step=self._step,
                lineage=self._lineage,
                timeout=self._config.timeout,
                deadline=deadline,
            )
        current.is_voted = True
        self._record(events.COMMITS, "a step is over", current.decision, step=self._step, commit_result=not refusals)
        if refusals:
            self._refuse_commit(membership, refusals)
            return False
        # First of all: where a signal handler raises below, the state goes by another name than the others'.
        self._ledger.committed()
        # From here on the caller may change what a newcomer has been shared, also where no lock is taken for it.
        self._before_change(True)
        decision = current.decision
        assert decision is not None, "a replica without a decision has an error"
        self._lineage = next_lineage(self._lineage, decision.group, self._step + 1)
        self._step += 1
        self._batches_committed += decision.num_participants
        self._is_past_step = True
        self._irregularity = ""
        self._num_refused_commits = 0
        current.is_committed = True
        self._is_settled = True
        logger.info(
            "%s: committed with %d participants, lineage %s", self._name(), decision.num_participants, self._lineage
        )
        return True

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | None = None
    ) -> torch.futures.Future[T]:
        """Return a future that never fails: where ``fut`` does, it is reported. As in torchft.

        Args:
            fut: A future of a collective that did not go through `allreduce`.
            default: The result if it fails or does not come.
            timeout: How long to wait for it. Default: ``timeout`` of the configuration.
        """
        timeout = timeout if timeout is not None else self._config.timeout
        return never_failing(fut, default, timeout, self.report_error)

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
        """Whether this replica contributes to this step; does not wait. As in torchft.

        Until the quorum is there, the answer is that of the step before.
        """
        current = self._round
        if current is None:
            return False
        decision = current.decision
        if decision is None:
            return self._has_participated and not current.quorum.done()
        return decision.participating_rank is not None

    def replica_id(self) -> str:
        """Return the name of this replica among those that live: the configured one and a random part.

        Raises:
            QuorumError: It cannot join the job.
        """
        return self._joined().replica_id

    # ------------------------------------------------------------------------------------------------- the commit

    def _refuse_commit(self, membership: Membership, refusals: tuple[str, ...]) -> None:
        self._num_refused_commits += 1
        logger.warning(
            "%s: not committed, %d in a row: %s", self._name(), self._num_refused_commits, "; ".join(refusals)
        )
        if self._round is not None and self._round.error is not None:
            membership.abort()
        max_retries = self._config.max_retries
        if max_retries is not None and self._num_refused_commits > max_retries:
            raise CommitFailedError(step=self._step, num_failures=self._num_refused_commits, reasons=refusals)

    def _before_step(self, optimizer: Optimizer) -> None:
        super()._before_step(optimizer)
        current = self._round
        if current is None or self._registry.is_calling() or not self._ledger.steps_with_commits(optimizer):
            return
        if not current.is_committed:
            happened = "the step was not committed" if current.is_over else "it was not called since start_quorum"
            raise ManagerError(
                f"expected should_commit() to return True before {type(optimizer).__name__}.step(), and {happened}; "
                "call step only `if manager.should_commit():`. Optimizers that do not step with each commit: "
                "attach(..., every_commit=False)"
            )
        if self._ledger.num_steps(optimizer):
            raise ManagerError(
                f"expected one step of {type(optimizer).__name__} for each should_commit(), got another one; "
                "optimizers that do not step with each commit: attach(..., every_commit=False)"
            )

    def _note_failed_step(self, optimizer: Optimizer, error: BaseException) -> None:
        """The others count on this replica having made the step that it committed."""
        current = self._round
        if current is not None and current.is_committed:
            self._torn = StateTornError(
                step=self._step,
                reason=f"the step was committed, and {type(optimizer).__name__} did not make it: {format_error(error)}",
            )

    # ------------------------------------------------------------------------- what torchft's classes read besides

    @property
    def _pg(self) -> Any:
        """The process group between replicas: ``ManagedProcessGroup``, and so HSDP, wraps it."""
        return self._process_group if self._process_group is not None else self._joined().process_group

    def _manager_state_dict(self) -> dict[str, object]:
        with self.reading("the state of the manager"):
            return self.replica_state()

    def _decision(self) -> Decision | None:
        if self._round is None:
            return None
        self._wait_for_round(self._round)
        return self._round.decision


def _average(total: torch.Tensor, num_participants: int) -> None:
    with span("allreduce::callback"):
        total.div_(num_participants)
