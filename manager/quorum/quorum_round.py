"""One attempt at a step (`QuorumRound`), and this replica as a participant in it (`Participant`)."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch.distributed import DistError

from ft_transport.runtime.signal_safe import SafeFuture
from ft_transport.telemetry.metrics import MetricValues
from ft_transport.telemetry.recorder import Recording
from manager.collectives.managed_work import ManagedWork, uses_accelerator
from manager.collectives.reductions import Reduction
from manager.config import ManagerConfig
from manager.errors import (
    ManagerError,
    ReductionMismatchError,
    ReplicaFaultError,
    ReportedError,
    UnfinishedReductionError,
)
from manager.quorum.decision import Decision, next_lineage
from manager.quorum.membership import Membership
from manager.quorum.process_group import group_number
from manager.quorum.reports import Claim
from manager.recovery.replica import Replica

logger = logging.getLogger(__name__)

_OWN: Final = "this replica's own error: "
_MAX_OWN_ERRORS: Final = 3
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_GLOO: Final = "gloo/transport"
"""A part of the messages of gloo's errors: the path of a C++ source file."""


def _current_device() -> int | None:
    return torch.accelerator.current_device_index() if uses_accelerator() else None


@dataclass(slots=True)
class QuorumRound:
    """One attempt at a step, from `Manager.start_quorum` to `Manager.should_commit`.

    Attributes:
        num_missed_heartbeats: Result of `Membership.num_missed_heartbeats` at the beginning of the attempt.
        decision: The decision of the quorum; ``None`` before the quorum is formed.
        quorum: Completes when the quorum is formed and the process group is ready.
        error: The first error of the attempt, which prevents the commit; ``None`` without one.
        is_own_error: Whether this replica, and no other one, caused the error.
        works: The collectives that this replica has begun.
        gradients: The result of ``gradients_of`` in the first `Manager.allreduce`; ``None`` before that call.
        num_microbatches: Number of the step's microbatches, over all replicas; 0 if the loop has not asked for its own.
        num_own_microbatches: Number of this replica's microbatches.
        weighting: Description of the microbatches; equal on all replicas.
        is_drawing: Whether the loop has yet to draw some of this replica's microbatches.
        num_averaging: Number of calls of `Manager.average_gradients` that have begun but not returned.
        reductions: Digest of the reductions, which the next quorum compares; empty if they have been compared already.
        is_left: Whether `Manager.start_quorum` has been called for the next attempt.
        is_over: Whether `Manager.should_commit` has ended the reductions.
        is_voted: Whether the replica's ranks have voted on the commit.
        is_committed: Whether the replica's ranks have committed the step.
        device: Index of the accelerator of the thread that made this object; ``None`` if the process uses none.
    """

    num_missed_heartbeats: int
    decision: Decision | None = None
    quorum: Future[None] = field(default_factory=SafeFuture)
    error: ReportedError | None = None
    is_own_error: bool = False
    works: list[ManagedWork] = field(default_factory=list)
    gradients: dict[int, tuple[int, torch.Tensor]] | None = None
    num_microbatches: int = 0
    num_own_microbatches: int = 0
    weighting: str = ""
    is_drawing: bool = False
    num_averaging: int = 0
    reductions: Claim = field(default_factory=Claim)
    is_left: bool = False
    is_over: bool = False
    is_voted: bool = False
    is_committed: bool = False
    device: int | None = field(default_factory=_current_device)
    _reducing: dict[int, ManagedWork] = field(default_factory=dict)

    def use_device(self) -> None:
        """Make the calling thread use `device`, before it sets a process group up.

        Every thread begins with device 0, and NCCL connects the device of the thread that calls ``configure``.
        """
        if self.device is not None:
            torch.accelerator.set_device_index(self.device)

    def share_microbatches(self, total: int, weighting: str) -> int:
        """Divide the step's microbatches among the replicas; see `Manager.num_microbatches`."""
        if total < 1 or self.num_microbatches not in (0, total):
            raise ManagerError(
                f"expected one positive number of microbatches in each step, got {total} after {self.num_microbatches}"
            )
        decision = self.decision
        if not self.num_microbatches and decision is not None:
            if self.works:
                raise ManagerError("expected num_microbatches before the first allreduce of the step, got it after it")
            own = (
                range(decision.participating_rank, total, decision.num_participants)
                if decision.participating_rank is not None
                else ()
            )
            self.num_microbatches, self.num_own_microbatches, self.weighting = total, len(own), weighting
        return self.num_own_microbatches

    def weight(self, decision: Decision) -> float | None:
        """Return the factor of this replica in averages; ``None`` if all replicas have equally many microbatches."""
        total = self.num_microbatches
        return self.num_own_microbatches / total if total % decision.num_participants else None

    def note_reducing(self, local: torch.Tensor, work: ManagedWork) -> None:
        """Record that a reduction uses the tensor until a wait for ``work`` has ended."""
        if local.numel():
            self._reducing[local.data_ptr()] = work

    def refuse_early(self, reduction: Reduction) -> None:
        """Make sure that the loop has drawn all microbatches before it averages, as often as the other replicas.

        Raises:
            ManagerError: Some of this replica's microbatches are not drawn.
        """
        if self.is_drawing and reduction.is_average:
            raise ManagerError(
                "expected the loop to average after its last microbatch, got an average before it: other replicas may "
                "have more or fewer microbatches; call manager.average_gradients(model) after the loop over "
                "ElasticBatches, and use no_sync() of DistributedDataParallel in it"
            )

    def refuse_twice(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """Make sure that no other reduction uses the tensor.

        Raises:
            UnfinishedReductionError: Another reduction uses it.
        """
        earlier = self._reducing.get(local.data_ptr()) if local.numel() else None
        if earlier is not None and not earlier.is_completed():
            raise UnfinishedReductionError(
                f"expected a tensor that is not being reduced, got one of shape {list(tensor.shape)} for the second "
                "time in this step; call .wait() on the result of the first allreduce before you reduce it again"
            )

    def forget_works(self) -> None:
        """Drop the references to finished collectives and to gradients."""
        self.works.clear()
        self._reducing.clear()
        self.gradients = None

    def refusals(self) -> list[str]:
        """Return the reasons not to commit, as text. A prefix marks errors that this replica caused (`OwnErrors`)."""
        if self.error is None:
            return []
        has_others = self.decision is not None and len(self.decision.group_members) > 1
        return [f"{_OWN}{self.error}" if self.is_own_error and has_others else str(self.error)]

    def end_quorum(self, error: BaseException | None) -> None:
        """Complete `quorum`. It may be complete already, if a signal handler has raised; then nothing happens.

        Args:
            error: The error of the quorum; ``None`` after a success.
        """
        with suppress(InvalidStateError):
            if error is not None:
                self.quorum.set_exception(error)
            else:
                self.quorum.set_result(None)


class Participant:
    """This replica in its quorum: the objects and values that the parts of the loop share.

    The training thread calls it, or the quorum thread while the training thread waits. Any thread may call
    `report_error`.

    Args:
        config: The configuration.
        replica: This replica, which must have a transport.
        membership: The membership of this replica in its job.
        waiting: Returns a context manager that logs a body that takes too long (`StallWatch.waiting`).

    Attributes:
        config: The configuration.
        replica: This replica.
        membership: The membership of this replica in its job.
        waiting: Returns a context manager that logs a body that takes too long.
        state: The replica's state.
        snapshots: Takes and serves snapshots, from which other replicas heal.
        peers: Receives the state of other replicas.
        metrics: Metrics of rounds and quorums.
        round: The present round; ``None`` before the first.
        is_settled: Whether the state is certainly the last committed one, so that the next quorum may form in the
            background.
        irregularity: Why the state has a lineage of its own; empty if it has the common lineage.
        is_irregularity_new: Whether the irregularity has yet to be compared with the other replicas, in a quorum.
        announced_to: Replicas that take a snapshot for this replica at their next step boundary.
        reductions: Digest of the last committed step's reductions, for the next quorum to compare; empty if the
            members have compared them already.
        healing: The record of a heal, from its quorum to the first commit after it; ``None`` at other times.
    """

    def __init__(
        self,
        config: ManagerConfig,
        replica: Replica,
        membership: Membership,
        waiting: Callable[..., AbstractContextManager[None]],
    ) -> None:
        assert replica.snapshots is not None, "there are snapshots with a transport"
        assert replica.peers is not None, "peers are received from with a transport"
        self.config = config
        self.replica = replica
        self.state = replica.state
        self.snapshots = replica.snapshots
        self.peers = replica.peers
        self.membership = membership
        self.waiting = waiting
        self.metrics = MetricValues("loop")
        self.round: QuorumRound | None = None
        self.is_settled = False
        self.irregularity = ""
        self.is_irregularity_new = False
        self.announced_to: frozenset[str] = frozenset()
        self.reductions = Claim()
        self.healing: Recording | None = None
        self._has_hinted = False
        self._error_mutex = threading.Lock()

    @property
    def name(self) -> str:
        """The replica's id and step, as the start of log messages."""
        return f"replica {self.membership.replica_id} step {self.state.step}"

    def report_error(self, error: Exception, *, is_own: bool = False) -> None:
        """Prevent the commit of this step, and abort the process group; see `Manager.report_error`.

        Args:
            error: The cause. Only the first error of a round counts.
            is_own: Whether this replica caused the error. Ignored if another replica may have caused it: if it is an
                error of a collective, or if a member has left the process group.
        """
        current = self.round
        with self._error_mutex:
            if current is None or current.error is not None:
                return
            group = self.membership.process_group
            if isinstance(error, ReductionMismatchError):
                current.is_own_error = error.differs_from_most(self.membership.replica_id)
            else:
                current.is_own_error = is_own and not (_is_of_collectives(error) or group.have_members_left())
            current.error = ReportedError(error)
        logger.warning("%s: this step will not be committed: %s", self.name, format_error(error))
        self.membership.process_group.abort()
        self.record("errors", "a step will not be committed", current.decision, error=format_error(error))

    def record(
        self, kind: Literal["quorums", "commits", "errors"], what: str, decision: Decision | None, **fields: object
    ) -> None:
        """Write a structured log record for torchft's tools, with torchft's logger name and fields.

        Args:
            kind: The part of the logger's name after ``torchft_``.
            what: The message.
            decision: The decision of the quorum; ``None`` before the quorum is formed.
            **fields: Fields besides the ones that every record has.
        """
        log = logging.getLogger(f"torchft_{kind}")
        if log.isEnabledFor(logging.INFO):
            common = {
                "job_id": os.environ.get("JOB_ID", "unknown"),
                "replica_id": self.membership.replica_id,
                "rank": self.membership.group_rank,
                "quorum_id": group_number(decision.group) if decision is not None else -1,
            }
            log.info("%s", what, extra={**common, **fields})

    def check_irregular_steps(self) -> None:
        """Give the state a lineage of its own if an optimizer did not make exactly one step for the last commit."""
        irregularity = self.state.ledger.irregularity(self.state.optimizers())
        if not irregularity:
            return
        self.is_settled = False
        # Lineage first: if a signal handler raises below, the next call changes the lineage once more, which is safe.
        self.state.lineage = next_lineage(self.state.lineage, f"stepped {irregularity}", self.state.step)
        self.state.ledger.replaced()
        self.irregularity = irregularity
        self.is_irregularity_new = True

    def log_irregular_steps(self) -> None:
        """Warn of irregular optimizer steps, unless all replicas made the same steps.

        Without a gradient scaler, the first irregular steps cause a warning even if all replicas made them: the
        optimizer probably does not step with each commit.
        """
        if not self.irregularity or not self.is_irregularity_new:
            return
        self.is_irregularity_new = False
        step, lineage = self.state.step, self.state.lineage
        others = [each for each in self.membership.members if each.replica_id != self.membership.replica_id]
        differing = [each.replica_id for each in others if each.step == step and each.lineage != lineage]
        is_hint = not differing and not self.state.scalers.known() and not self._has_hinted
        self._has_hinted = self._has_hinted or is_hint
        logger.log(
            logging.WARNING if differing or is_hint else logging.DEBUG,
            "%s: expected each attached optimizer to make one step for the commit, got %s; %s. Optimizers that do not "
            "step with each commit: attach(..., every_commit=False)",
            self.name,
            self.irregularity,
            f"{differing} made other steps; the minority heals" if differing else "all replicas made the same steps",
        )

    def disown_state(self, irregularity: str) -> None:
        """Give the state a lineage of its own, so that this replica heals in the next quorum.

        Args:
            irregularity: Why the state differs from that of the other replicas.
        """
        self.reductions = Claim()
        self.irregularity = irregularity
        self.state.lineage = next_lineage(self.state.lineage, irregularity, self.state.step)
        self.is_settled = False


class OwnErrors:
    """Counts the steps since the last commit that failed because of this replica. All its ranks count the same steps.

    A replica that fails in every step prevents all others from committing. After a few failed steps it must leave.
    """

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def committed(self) -> None:
        """Reset the count after a commit."""
        self._reasons.clear()

    def refused(self, step: int, refusals: Sequence[str]) -> None:
        """Count a step that was not committed.

        Args:
            step: The last committed step.
            refusals: The reasons of all ranks of the replica.

        Raises:
            ReplicaFaultError: This replica has caused too many failed steps in a row.
        """
        own = [refusal.replace(_OWN, "", 1) for refusal in refusals if _OWN in refusal]
        self._reasons += own[:1]
        if own and len(self._reasons) >= _MAX_OWN_ERRORS:
            raise ReplicaFaultError(
                step=step, num_failures=len(self._reasons), reasons=tuple(self._reasons[-_MAX_OWN_ERRORS:])
            )


def is_own_shortage(error: Exception) -> bool:
    """Return whether the error is a lack of descriptors or memory in this process, which no other replica can cause."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def _is_of_collectives(error: Exception) -> bool:
    """Return whether the error comes from a collective, so that another replica may have caused it."""
    return isinstance(error, (DistError, TimeoutError)) or _GLOO in str(error)


def format_error(error: BaseException) -> str:
    """Return type and message of an error, for logs and other replicas."""
    return f"{type(error).__name__}: {error}"


def refusal_cause(error: ReportedError | None, *, has_enough: bool, was_silent: bool) -> str:
    """Return the first reason why a rank did not commit a step, as a label of a metric.

    Args:
        error: The error of this rank in the step; ``None`` without one.
        has_enough: Whether at least ``min_replica_size`` replicas contributed.
        was_silent: Whether the Lighthouse may have declared this replica dead since the step began.
    """
    if error is not None:
        return type(error.original_exception).__name__
    if not has_enough:
        return "TooFewReplicas"
    return "MissedHeartbeats" if was_silent else "AnotherRank"
