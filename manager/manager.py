"""The manager of one replica in a fault-tolerant loop: quorum, healing, collectives and commits, over its state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.optim import Optimizer
from typing_extensions import Unpack

import ft_transport
from ft_transport import ConfigurationError
from ft_transport.runtime.deadline import Deadline
from manager.collectives.managed_work import ManagedWork, never_failing
from manager.collectives.process_group import Reconfigurable, ReplicaProcessGroup
from manager.collectives.reductions import named_parameters
from manager.config import LIGHTHOUSE_ENV, ManagerConfig, TorchftKeywords, named_arguments
from manager.errors import ManagerError, ReportedError
from manager.lifecycle import ends_what_it_owns
from manager.quorum.loop import QuorumLoop
from manager.quorum.telemetry import StallWatch, spanned
from manager.state_manager import StateManager

if TYPE_CHECKING:
    from ft_transport import CheckpointStore, HTTPTransport

T = TypeVar("T")

_OTHER_KEYWORDS: Final = ("pg", "load_state_dict", "state_dict", "config", "checkpoint_store", "save_every")
"""Keywords that are neither torchft's nor settings, for advice on a typo."""
_STALL_SHARE: Final = 0.5
"""Fraction of ``timeout``: longer waits are logged."""


class Manager(StateManager):
    """Keeps a replica and its peers at the same state, also when one of them dies.

    Without a quorum it is a `StateManager`. With one, the training loop is that of torchft::

        manager = Manager(min_replica_size=2, replica_id="replica_0")
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        manager.attach(optimizer)
        while manager.current_step() < num_steps:
            manager.start_quorum()
            loss(model).backward()
            manager.average_gradients(model)
            if manager.should_commit():
                optimizer.step()

    torchft's ``DistributedDataParallel``, ``Optimizer``, ``LocalSGD`` and ``DiLoCo`` do these calls by themselves.

    The thread that calls ``start_quorum`` is the training thread; ``allreduce``, ``should_commit`` and all that changes
    the state belong to it. ``report_error`` may be called from any thread. After ``shutdown``, and in a forked child, a
    call that would need the manager's threads raises ``ManagerClosedError``.
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
        """Make a manager, and join the job if a quorum is configured.

        Args:
            pg: Runs the collectives between replicas; a process group of torchft, or one of torch's that can be
                reconfigured, will do. Default: gloo.
            load_state_dict: With ``state_dict``, registered under the key ``default`` (as in torchft).
            state_dict: See ``load_state_dict``.
            *positional: The next arguments of torchft's ``Manager``, in its order: ``min_replica_size`` and so on.
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
            ConfigurationError: The settings cannot work, a keyword is unknown, or ``config`` was given beside them.
            QuorumError: The Lighthouse or the replica's store cannot be reached.
            TransportError: The advertised address does not lead to this transport.
        """
        also: dict[str, Any] = {"timeout": timeout, "checkpoint_transport": checkpoint_transport}
        also = {name: value for name, value in also.items() if value is not None}
        given = named_arguments(positional, {**also, **keywords}, others=_OTHER_KEYWORDS)
        timeout = given.pop("timeout", None)
        checkpoint_transport = given.pop("checkpoint_transport", None)
        if config is not None and (given or timeout is not None):
            names = sorted({*given, *(["timeout"] if timeout is not None else [])})
            raise ConfigurationError(f"expected the settings in config or one by one, got both: config and {names}")
        wants_quorum = config is not None or bool(given) or pg is not None
        if config is None:
            config = ManagerConfig.from_keywords(cast("TorchftKeywords", given), timeout=timeout)
        if wants_quorum:
            config = config.with_environment()
            if checkpoint_transport is None:
                # So that monitors and the other replicas' logs show its name.
                named = ft_transport.TransportSettings(replica=config.replica_id) if config.replica_id else None
                checkpoint_transport = ft_transport.HTTPTransport(config.timeout, settings=named)
        super().__init__(
            load_state_dict,
            state_dict,
            checkpoint_transport=checkpoint_transport,
            timeout=config.timeout,
            prefault=prefault,
            checkpoint_store=checkpoint_store,
            save_every=save_every,
        )
        if self._replica.checkpoints is not None:
            # A Lighthouse inside this process serves no other replica.
            has_peers = bool(config.lighthouse_addr or os.environ.get(LIGHTHOUSE_ENV))
            self._replica.checkpoints.replica_name = config.replica_id or ("" if has_peers else None)
        self._config = config
        self._process_group = pg
        # torchft's DiLoCo reads it under this name.
        self._use_async_quorum = config.use_async_quorum
        self._loop: QuorumLoop | None = None
        self._stall_watch = StallWatch(config.timeout.total_seconds() * _STALL_SHARE)
        self._unclosed.add(self._stall_watch.close)
        if wants_quorum:
            try:
                self._join()
            except BaseException:
                self._shut_down(wait=True)
                raise

    # ------------------------------------------------------------------------------------------------- the round

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Begin a step: form the quorum, and heal first if this replica is behind. As in torchft.

        This is the step boundary: what is registered shows `current_step`. Call it before data is drawn and
        ``forward`` runs. With ``use_async_quorum`` it returns at once as a rule; a replica that may be behind (it has
        just started, or its last step was not committed) waits for the quorum, and returns healed.

        Args:
            allow_heal: Whether this replica heals if it is behind. Otherwise it takes no part then.
            shrink_only: Whether new replicas have to wait.
            timeout: For the quorum, all its attempts and the meeting of its members together; receiving a state has
                ``timeout`` of the configuration, as in torchft. Default: the configuration's timeout of each.

        Raises:
            QuorumError: There was no quorum.
            HealFailedError: This replica could not be healed three times in a row.
            StateTornError: It holds part of a state, and may not heal.
            LoaderOrderError: A registered loader was drawn from before, or is not where it was loaded.
        """
        deadline = Deadline.after(timeout)
        self._joined().start(
            may_heal=allow_heal, shrink_only=shrink_only, deadline=deadline, is_async=self._use_async_quorum
        )

    @spanned("wait_quorum")
    def wait_quorum(self) -> None:
        """Wait until the quorum is there and its process group is set up. As in torchft.

        Raises:
            QuorumError: There was no quorum.
        """
        self._joined().wait()

    @spanned("allreduce")
    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = ReduceOp.AVG
    ) -> ManagedWork:
        """Begin to reduce ``tensor`` in place over the participants. As in torchft.

        It only begins: wait for the work before anything reads or changes the tensor. For gradients there is
        `average_gradients`, which waits. All replicas reduce the same tensors in the same order.

        A replica that does not participate contributes zeros. Errors are not raised but reported: the work is done,
        and the step will not be committed; the tensor's values mean nothing then.

        Args:
            tensor: Dense; averaged over the participants by default. Of a DTensor the local part, which has to be the
                same part on all replicas: that is, ranks of one number in replicas of one layout.
            should_quantize: Accepted as torchft does without Triton: the tensor is sent as it is.
            reduce_op: The reduction. ``AVG`` needs a floating-point dtype.

        Returns:
            The work; `should_commit` waits for any that has not been waited for.

        Raises:
            QuorumError: There was no quorum.
            TypeError: ``tensor`` is no tensor.
            ValueError: The average of integers was asked for.
            UnfinishedReductionError: The tensor is being reduced already.
        """
        del should_quantize
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"expected a tensor to reduce, got {type(tensor).__name__}; a parameter that the loss does not depend "
                "on has no gradient: leave it out on all replicas, or give all of them one of zeros"
            )
        if reduce_op == ReduceOp.AVG and not (torch.is_floating_point(tensor) or torch.is_complex(tensor)):
            raise ValueError(f"expected a floating-point tensor to average, got {tensor.dtype}")
        return self._joined().allreduce(tensor, reduce_op)

    @spanned("average_gradients")
    def average_gradients(self, trained: nn.Module | Optimizer | Iterable[torch.Tensor]) -> bool:
        """Average the gradients over the replicas, and wait for that; after ``backward``, before anything reads them.

        Small gradients travel together. A parameter without a gradient on this replica counts as zeros, and has the
        average afterwards; one without a gradient on any replica keeps none. A sparse gradient is sent dense, and stays
        sparse if no replica had a dense one; rows whose average is zero are left out.

        Args:
            trained: The object with gradients: the model, its optimizer, or the parameters; the same on all replicas.

        Returns:
            Whether they are averaged. If not, that was reported: the gradients mean nothing, and `should_commit` will
            return ``False``.

        Raises:
            QuorumError: There was no quorum.
            TypeError: ``trained`` has no parameters.
        """
        return self._joined().average_gradients(named_parameters(trained))

    @spanned("should_commit")
    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Whether to step the optimizer; ends the step. As in torchft, and called once per step on every rank.

        All ranks of the replica get the same answer. Where it is yes, the step counts as committed from here on.

        Args:
            timeout: For everything that this waits for: quorum, collectives, and the other ranks of the replica.
                Default: the configuration's timeout of each.

        Raises:
            QuorumError: There was no quorum, or a rank of this replica did not answer.
            CommitFailedError: More than ``max_retries`` steps in a row were not committed.
            UnfinishedReductionError: A tensor was changed or replaced before its reduction was waited for.
            ManagerError: There was no `start_quorum` since the call before.
            ReplicaFaultError: Errors of this replica's own failed three steps, and the others could have continued.
        """
        deadline = Deadline.after(timeout)
        return self._joined().commit(deadline)

    def report_error(self, e: Exception) -> None:
        """Report an error that spoils this step: it will not be committed. As in torchft; from any thread.

        The process group is ended, so that the other replicas need not wait for this one. A replica that spoils three
        steps by errors of its own, without a commit between them, leaves: `should_commit` raises ``ReplicaFaultError``.
        """
        if self._loop is not None:
            self._loop.report_error(e, is_own=True)

    def errored(self) -> ReportedError | None:
        """Return the first error of this step, with its ``original_exception``. As in torchft."""
        return self._loop.errored() if self._loop is not None else None

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
        return never_failing(fut, default, timeout, self._report_failed_collective)

    def compare_replicas(self) -> None:
        """Compare the states of all replicas at the next step boundary, once; as with ``compare_every``.

        All replicas call this in the same step. The next `start_quorum` digests what attached optimizers change, and
        the one after it compares: a replica that differs from most heals, and without a majority all of them raise
        ``StatesDivergedError``.
        """
        self._joined().compare_at_next_boundary()

    # --------------------------------------------------------------------------------------------- what is known

    def batches_committed(self) -> int:
        """Return the number of committed batches, over all steps and replicas. As in torchft."""
        return self._state.batches_committed

    def num_participants(self) -> int:
        """Return the number of replicas that contribute to this step; waits for the quorum. As in torchft.

        Raises:
            ManagerClosedError: This is a forked child of the manager's process.
        """
        self._usability.require_process()
        return self._loop.num_participants() if self._loop is not None else 0

    def participating_rank(self) -> int | None:
        """Return this replica's rank among those that contribute, ``None`` if it does not. As in torchft.

        Raises:
            ManagerClosedError: This is a forked child of the manager's process.
        """
        self._usability.require_process()
        decision = self._loop.decision() if self._loop is not None else None
        return decision.participating_rank if decision is not None else None

    def is_participating(self) -> bool:
        """Whether this replica contributes to this step; does not wait. As in torchft.

        Until the quorum is there, the answer is that of the step before.
        """
        return self._loop.is_participating() if self._loop is not None else False

    def replica_id(self) -> str:
        """Return the name of this replica among those that live: the configured one and a random part.

        Raises:
            QuorumError: It cannot join the job.
        """
        loop = self._loop if self._loop is not None else self._joined()
        return loop.membership.replica_id

    # ------------------------------------------------------------------------------------------------- joining, leaving

    def _report_failed_collective(self, error: Exception) -> None:
        if self._loop is not None:
            self._loop.report_error(error, is_own=False)

    def _joined(self) -> QuorumLoop:
        self._usability.require()
        if self._loop is None:
            is_told = bool(self._config.lighthouse_addr or os.environ.get(LIGHTHOUSE_ENV))
            if not is_told or self._replica.transport is None or self._state.training_thread is not None:
                raise ManagerError(
                    "expected a manager that takes part in a quorum, and this one was made without: give Manager "
                    "min_replica_size=... or a config, or set TORCHFT_LIGHTHOUSE, to use start_quorum and what belongs "
                    "to it; without a quorum, call start_step at each boundary"
                )
            self._config = self._config.with_environment()
            self._join()
        assert self._loop is not None, "it has just been made"
        return self._loop

    def _join(self) -> None:
        self._loop = QuorumLoop(self._config, self._replica, self._process_group, self._stall_watch)
        self._unclosed.add(self._loop.membership.close)

    def _refuse_start_step(self) -> None:
        if self._loop is not None:
            raise ManagerError(
                "expected start_quorum at the step boundary, got start_step: this manager takes part in a quorum, "
                "which counts the steps; a manager made without min_replica_size and config has no quorum"
            )

    def _shut_down(self, wait: bool) -> None:
        """Leave the job as well."""
        with ExitStack() as closing:
            closing.callback(super()._shut_down, wait)
            closing.callback(self._stall_watch.close)
            if self._loop is not None:
                closing.callback(self._loop.close, wait=wait)

    # ------------------------------------------------------------------------- what torchft's classes read besides

    @property
    def _pg(self) -> Any:
        """The process group between replicas: ``ManagedProcessGroup``, and so HSDP, wraps it."""
        held = self._process_group
        if held is not None:
            return held
        loop = self._loop if self._loop is not None else self._joined()
        return loop.membership.process_group.wrapped

    def _manager_state_dict(self) -> dict[str, object]:
        with self.reading("the state of the manager"):
            return self.replica_state()
