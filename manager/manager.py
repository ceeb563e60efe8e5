"""The manager of one replica in a fault-tolerant training loop: quorum, healing, collectives and commits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import torch
import torch.distributed as dist
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

_OTHER_KEYWORDS: Final = (
    "pg",
    "load_state_dict",
    "state_dict",
    "config",
    "checkpoint_store",
    "save_every",
    "keep_every",
    "copies",
    "failure_domain",
)
"""Keywords that are neither torchft's nor fields of `ManagerConfig`."""
_STALL_SHARE: Final = 0.5
"""Fraction of ``timeout`` after which a wait is logged."""


class Manager(StateManager):
    """Keeps all replicas of a training job in the same state when replicas fail, leave and join.

    Without a quorum it does the same as a `StateManager`. With a quorum, the training loop is that of torchft::

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

    torchft's ``DistributedDataParallel``, ``Optimizer``, ``LocalSGD`` and ``DiLoCo`` make these calls themselves.

    The thread that calls ``start_quorum`` is the training thread. Only this thread may call ``allreduce`` and
    ``should_commit`` and change the state. Any thread may call ``report_error``. After ``shutdown``, and in a forked
    child, a method that needs the manager's threads raises ``ManagerClosedError``.
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
        keep_every: int | None = None,
        copies: int = 1,
        failure_domain: str | None = None,
        **keywords: Unpack[TorchftKeywords],
    ) -> None:
        """Create a manager. The manager joins the job at once if a setting of the quorum is given.

        Args:
            pg: Process group for collectives between replicas: one of torchft, or one of torch that can be
                reconfigured. Default: gloo.
            load_state_dict: Load function, registered with ``state_dict`` under the key ``default``, as in torchft.
            state_dict: State function; see ``load_state_dict``.
            *positional: Further arguments of torchft's ``Manager`` in torchft's order, from ``min_replica_size`` on.
            config: Settings of the quorum.
            checkpoint_transport: Serves this replica's snapshots and receives snapshots of peers. The manager shuts it
                down, even if this constructor raises. Default in a quorum: a new ``HTTPTransport``.
            timeout: Deadline of every wait for the lock, and value of `ManagerConfig.timeout`. Default: 60 s.
            prefault: As for `StateManager`.
            checkpoint_store: As for `StateManager`.
            save_every: As for `StateManager`.
            keep_every: As for `StateManager`.
            copies: As for `StateManager`.
            failure_domain: As for `StateManager`.
            **keywords: Fields of `ManagerConfig`, instead of ``config``. If no keyword, no ``config`` and no ``pg`` is
                given, the manager joins the job in the first `start_quorum`, provided that ``TORCHFT_LIGHTHOUSE`` is
                set. Otherwise it has no quorum.

        Raises:
            ConfigurationError: The settings contradict each other, a keyword is unknown, or both ``config`` and
                keywords were given.
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
            group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
            config = config.with_environment(group=group)
            if checkpoint_transport is None:
                # Monitors and the logs of other replicas show this name.
                named = ft_transport.TransportSettings(replica=config.replica_id) if config.replica_id else None
                checkpoint_transport = ft_transport.HTTPTransport(config.timeout, settings=named)
        super().__init__(
            load_state_dict,
            state_dict,
            checkpoint_transport=checkpoint_transport,
            timeout=config.timeout,
            # A newcomer that follows is served from a copy.
            prefault=prefault or config.replay_bytes is not None,
            checkpoint_store=checkpoint_store,
            save_every=save_every,
            keep_every=keep_every,
            copies=copies,
            failure_domain=failure_domain,
        )
        # Without an address, this process starts a Lighthouse, which no other replica uses.
        has_peers = bool(config.lighthouse_addr or os.environ.get(LIGHTHOUSE_ENV))
        self._replica.local.replica_name = config.replica_id or ("" if has_peers else None)
        self._replica.local.rank = config.rank
        self._config = config
        self._process_group = pg
        # torchft's DiLoCo reads this private name.
        self._use_async_quorum = config.use_async_quorum
        self._loop: QuorumLoop | None = None
        self._stall_watch = StallWatch(config.timeout.total_seconds() * _STALL_SHARE)
        self._unclosed.add(self._stall_watch.close)
        if wants_quorum:
            try:
                self._join()
            except BaseException:
                self._shut_down(wait=True, is_over=False)
                raise

    # ------------------------------------------------------------------------------------------------- one step

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Begin a step: form the quorum, and heal this replica if it is behind. As in torchft.

        The call is the step boundary, at which the registered state is that of `current_step`. Call it before you draw
        data and run ``forward``. With ``use_async_quorum`` the call usually returns before the quorum has formed. A
        replica may be behind if it has just started, or if its last step was not committed. Such a replica waits for
        the quorum, and heals, before the call returns.

        Args:
            allow_heal: Whether this replica heals if it is behind. If false, it takes no part in a step while behind.
            shrink_only: Whether the quorum admits only replicas that were in the last quorum.
            timeout: Deadline to form the quorum and its process group, over all attempts. Default: the timeouts of
                the configuration. The deadline to receive a state is ``timeout`` of the configuration, as in torchft.

        Raises:
            QuorumError: The quorum could not be formed.
            HealFailedError: Healing this replica failed three times in a row.
            StateTornError: This replica has only part of a state, and ``allow_heal`` is false.
            LoaderOrderError: A batch of a registered loader was drawn too early, or from an outdated iterator.
        """
        deadline = Deadline.after(timeout)
        loop = self._joined()
        self._replica.end_if_preempted(self.current_step(), loop.membership.stop_heartbeats)
        loop.start(may_heal=allow_heal, shrink_only=shrink_only, deadline=deadline, is_async=self._use_async_quorum)

    @spanned("wait_quorum")
    def wait_quorum(self) -> None:
        """Wait until the quorum has formed and its process group is configured. As in torchft.

        Raises:
            QuorumError: The quorum could not be formed.
        """
        self._joined().wait()

    @spanned("allreduce")
    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = ReduceOp.AVG
    ) -> ManagedWork:
        """Start to reduce ``tensor`` in place over the participating replicas. As in torchft.

        Wait for the returned work before you read or change the tensor. To average gradients, call
        `average_gradients`, which waits. All replicas must reduce the same tensors in the same order.

        A replica that does not participate contributes zeros. A failed reduction raises no error. The failure is
        reported, the work completes, the tensor's values are undefined, and the step is not committed.

        Args:
            tensor: A dense tensor. If it is a DTensor, its local shard is reduced, which must be the same shard on all
                replicas.
            should_quantize: Ignored: the tensor is sent unquantized, as torchft does without Triton.
            reduce_op: The reduction. ``AVG`` needs a floating-point dtype.

        Returns:
            The work. `should_commit` waits for all unfinished work.

        Raises:
            QuorumError: The quorum could not be formed.
            TypeError: ``tensor`` is not a tensor.
            ValueError: ``AVG`` was requested for integers.
            UnfinishedReductionError: An earlier reduction of the tensor has not ended.
        """
        del should_quantize
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"expected a tensor to reduce, got {type(tensor).__name__}; a parameter that the loss does not depend "
                "on has no gradient: leave it out on all replicas, or set a gradient of zeros on all replicas"
            )
        if reduce_op == ReduceOp.AVG and not (torch.is_floating_point(tensor) or torch.is_complex(tensor)):
            raise ValueError(f"expected a floating-point tensor to average, got {tensor.dtype}")
        return self._joined().allreduce(tensor, reduce_op)

    def num_microbatches(self, total: int) -> int:
        """Return how many of the ``total`` microbatches of this step are this replica's, after waiting for the quorum.

        The microbatches whose number modulo `num_participants` is `participating_rank` are this replica's; a replica
        that does not participate has none. The averages of the step are then weighted by these numbers, so that the
        average of each replica's own mean is the mean over all microbatches. Call it before the first `allreduce` of
        the step, on all replicas and ranks with the same ``total``.

        Raises:
            ManagerError: The call was late, or an earlier call in the step had another ``total``.
            QuorumError: The quorum could not be formed.
        """
        return self._joined().num_microbatches(total, f"{total} microbatches")

    @spanned("average_gradients")
    def average_gradients(self, trained: nn.Module | Optimizer | Iterable[torch.Tensor]) -> bool:
        """Average gradients over the replicas, and wait until they are averaged. Call it right after ``backward``.

        Small gradients are sent together. If a parameter has no gradient on this replica but on another replica, this
        replica contributes zeros and receives the average. If no replica has a gradient for the parameter, the gradient
        stays ``None``. A sparse gradient is sent as a dense tensor. Its average is sparse, without the rows that are
        zero, unless a replica has a dense gradient.

        Args:
            trained: The model, its optimizer, or the parameters; the same on all replicas.

        Returns:
            Whether the gradients are averaged. If not, their values are undefined, the failure is reported, and
            `should_commit` will return ``False``.

        Raises:
            QuorumError: The quorum could not be formed.
            TypeError: ``trained`` has no parameters.
        """
        return self._joined().average_gradients(named_parameters(trained))

    @spanned("should_commit")
    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End the step, and return whether it is committed. If it is, step the optimizer. As in torchft.

        Call it once per step on every rank. All ranks of the replica receive the same result.

        Args:
            timeout: Deadline for the quorum, the collectives and the other ranks of the replica together.
                Default: the timeouts of the configuration.

        Raises:
            QuorumError: The quorum could not be formed, or a rank of this replica did not respond.
            CommitFailedError: More than ``max_retries`` steps in a row were not committed.
            UnfinishedReductionError: A tensor was changed or replaced before its reduction ended.
            ManagerError: `start_quorum` was not called since the last `should_commit`.
            ReplicaFaultError: This replica's own errors failed three steps that other replicas could have committed.
        """
        deadline = Deadline.after(timeout)
        return self._joined().commit(deadline)

    def report_error(self, e: Exception) -> None:
        """Report an error of this step, so that the step is not committed. As in torchft. Any thread may call this.

        The call aborts the process group, so that the other replicas do not wait for this replica. If this replica
        reports errors in three steps without a commit between them, `should_commit` raises ``ReplicaFaultError``.
        """
        if self._loop is not None:
            self._loop.report_error(e, is_own=True)

    def errored(self) -> ReportedError | None:
        """Return the first error that was reported in this step, if any. As in torchft."""
        return self._loop.errored() if self._loop is not None else None

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | None = None
    ) -> torch.futures.Future[T]:
        """Return a future that never fails. If ``fut`` fails, its error is reported for this step. As in torchft.

        Args:
            fut: The future of a collective that was not started with `allreduce`.
            default: The result of the returned future if ``fut`` fails or exceeds ``timeout``.
            timeout: Time limit of ``fut``. Default: ``timeout`` of the configuration.
        """
        timeout = timeout if timeout is not None else self._config.timeout
        return never_failing(fut, default, timeout, self._report_failed_collective)

    def compare_replicas(self) -> None:
        """Compare the states of all replicas once, as `ManagerConfig.compare_every` does regularly.

        All replicas must call this in the same step. The next `start_quorum` digests the memory that attached
        optimizers change. The `start_quorum` after that compares the digests: a replica that differs from the majority
        heals, and without a majority all replicas raise ``StatesDivergedError``.
        """
        self._joined().compare_at_next_boundary()

    # ----------------------------------------------------------------------------------------------------- figures

    def batches_committed(self) -> int:
        """Return the number of batches in all committed steps, summed over the replicas. As in torchft."""
        return self._state.batches_committed

    def num_participants(self) -> int:
        """Return the number of replicas that contribute to this step, after waiting for the quorum. As in torchft.

        Raises:
            ManagerClosedError: This is a forked child of the manager's process.
        """
        self._usability.require_process()
        return self._loop.num_participants() if self._loop is not None else 0

    def participating_rank(self) -> int | None:
        """Return this replica's rank among the contributing replicas; ``None`` if it does not contribute.

        As in torchft. The call waits for the quorum.

        Raises:
            ManagerClosedError: This is a forked child of the manager's process.
        """
        self._usability.require_process()
        decision = self._loop.decision() if self._loop is not None else None
        return decision.participating_rank if decision is not None else None

    def is_participating(self) -> bool:
        """Return whether this replica contributes, as of the last quorum, without waiting. As in torchft."""
        return self._loop.is_participating() if self._loop is not None else False

    def replica_id(self) -> str:
        """Return the id of this replica in the quorum: the configured ``replica_id`` and a random part.

        Raises:
            QuorumError: This replica cannot join the job.
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
            has_address = bool(self._config.lighthouse_addr or os.environ.get(LIGHTHOUSE_ENV))
            if not has_address or self._replica.transport is None or self._state.training_thread is not None:
                raise ManagerError(
                    "expected a manager that takes part in a quorum, but this one has no quorum: give Manager "
                    "min_replica_size=... or a config, or set TORCHFT_LIGHTHOUSE, to call start_quorum; without a "
                    "quorum, call start_step at each step boundary"
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

    def _shut_down(self, wait: bool, is_over: bool) -> None:
        """Leave the job, and release the resources of the `StateManager`."""
        with ExitStack() as closing:
            closing.callback(super()._shut_down, wait, is_over)
            closing.callback(self._stall_watch.close)
            if self._loop is not None:
                closing.callback(self._loop.close, wait=wait)

    # ------------------------------------------------------------------------- private names that torchft's classes use

    @property
    def _pg(self) -> Any:
        """The process group between replicas. torchft's ``ManagedProcessGroup``, which HSDP needs, wraps it."""
        held = self._process_group
        if held is not None:
            return held
        loop = self._loop if self._loop is not None else self._joined()
        return loop.membership.process_group.wrapped

    def _manager_state_dict(self) -> dict[str, object]:
        with self.reading("the state of the manager"):
            return self.replica_state()
