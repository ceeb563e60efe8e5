"""One attempt at a step, and this replica's status in it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch.distributed import DistError

from ft_transport.runtime.signal_safe import SafeFuture
from ft_transport.telemetry.metrics import MetricValues
from ft_transport.telemetry.recorder import Recording
from manager.collectives.managed_work import ManagedWork
from manager.config import ManagerConfig
from manager.errors import ReductionMismatchError, ReplicaFaultError, ReportedError, UnfinishedReductionError
from manager.quorum.decision import Decision, next_lineage
from manager.quorum.membership import Membership
from manager.quorum.process_group import group_number
from manager.quorum.reports import Claim
from manager.quorum.telemetry import StallWatch
from manager.recovery.replica import Replica

logger = logging.getLogger(__name__)

_OWN: Final = "this replica's own error: "
_MAX_OWN_ERRORS: Final = 3
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_GLOO: Final = "gloo/transport"
"""In the messages of gloo's errors."""


@dataclass(slots=True)
class QuorumRound:
    """One attempt at a step, from `Manager.start_quorum` to `Manager.should_commit`.

    Attributes:
        num_missed_heartbeats: Number of the replica's missed heartbeats at its beginning.
        decision: The quorum's decision; ``None`` until then.
        quorum: Done when the quorum and the process group are ready.
        error: The first error.
        is_own_error: Whether this replica caused the error, and others could have continued.
        works: The collectives begun.
        gradients: The map of gradients (``gradients_of``) that the first `Manager.allreduce` made.
        num_averaging: Number of `Manager.average_gradients` calls in progress.
        reductions: Digest of the reductions, if only the next quorum can compare them.
        is_left: Whether `Manager.start_quorum` was called again.
        is_over: Whether the reductions have ended, in `Manager.should_commit`.
        is_voted: Whether the replica's ranks have voted on the commit.
        is_committed: Whether they committed.
    """

    num_missed_heartbeats: int
    decision: Decision | None = None
    quorum: Future[None] = field(default_factory=SafeFuture)
    error: ReportedError | None = None
    is_own_error: bool = False
    works: list[ManagedWork] = field(default_factory=list)
    gradients: dict[int, tuple[int, torch.Tensor]] | None = None
    num_averaging: int = 0
    reductions: Claim = field(default_factory=Claim)
    is_left: bool = False
    is_over: bool = False
    is_voted: bool = False
    is_committed: bool = False
    _reducing: dict[int, ManagedWork] = field(default_factory=dict)

    def note_reducing(self, local: torch.Tensor, work: ManagedWork) -> None:
        """Record that a reduction uses the tensor until a wait for ``work``."""
        if local.numel():
            self._reducing[local.data_ptr()] = work

    def refuse_twice(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """Make sure that no other reduction uses the tensor.

        Raises:
            UnfinishedReductionError: Another reduction uses it.
        """
        earlier = self._reducing.get(local.data_ptr()) if local.numel() else None
        if earlier is not None and not earlier.is_completed():
            raise UnfinishedReductionError(
                f"expected a tensor that is not being reduced, got one of shape {list(tensor.shape)} for the second "
                "time in this step; call .wait() on what the first allreduce returned before you reduce it again"
            )

    def forget_works(self) -> None:
        """Drop the finished collectives, and with them the gradients."""
        self.works.clear()
        self._reducing.clear()
        self.gradients = None

    def refusals(self) -> list[str]:
        """Return the reasons not to commit, as text that marks this replica's own errors (`OwnErrors`)."""
        if self.error is None:
            return []
        has_others = self.decision is not None and len(self.decision.group_members) > 1
        return [f"{_OWN}{self.error}" if self.is_own_error and has_others else str(self.error)]

    def end_quorum(self, error: BaseException | None) -> None:
        """Complete `quorum`, once: after an exception of a handler it may be complete already."""
        with suppress(InvalidStateError):
            if error is not None:
                self.quorum.set_exception(error)
            else:
                self.quorum.set_result(None)


class Participant:
    """This replica in its quorum: its state, its name, its round, and whether its state is the common one.

    The training thread changes it, or the quorum thread while the training thread waits. Any thread may call
    `report_error`.

    Args:
        config: The configuration.
        replica: The replica's parts; it has a transport.
        membership: The replica's membership.
        watch: Reports long waits.

    Attributes:
        config: See above.
        replica: See above.
        membership: See above.
        watch: See above.
        state: The replica's state.
        snapshots: The snapshots that heal newcomers.
        peers: Receives the state of other replicas.
        metrics: Counts rounds and quorums.
        round: The present round; ``None`` before the first.
        is_settled: Whether the state is known to be the committed one.
        irregularity: Why the state has a lineage of its own; empty if it does not.
        is_irregularity_new: Whether the next quorum has yet to show if the others did the same.
        announced_to: Replicas that have promised this one a snapshot.
        reductions: Digest of the present step's reductions, if the members have not compared them.
        healing: The record of a heal, from its quorum to the first commit after it.
    """

    def __init__(self, config: ManagerConfig, replica: Replica, membership: Membership, watch: StallWatch) -> None:
        assert replica.snapshots is not None, "there are snapshots with a transport"
        assert replica.peers is not None, "peers are received from with a transport"
        self.config = config
        self.replica = replica
        self.state = replica.state
        self.snapshots = replica.snapshots
        self.peers = replica.peers
        self.membership = membership
        self.watch = watch
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
        """The replica and its step, for logs."""
        return f"replica {self.membership.replica_id} step {self.state.step}"

    def report_error(self, error: Exception, *, is_own: bool = False) -> None:
        """See `Manager.report_error`.

        Args:
            error: The error that fails the step.
            is_own: Whether this replica caused it. An error of a collective, or after a member has left the process
                group, never counts as its own.
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
        """Write a structured log record under torchft's name, with torchft's fields: its tools collect these."""
        log = logging.getLogger(f"torchft_{kind}")
        if log.isEnabledFor(logging.INFO):
            common = {
                "job_id": os.environ.get("JOB_ID", "unknown"),
                "replica_id": self.membership.replica_id,
                "rank": self.membership.group_rank,
                "quorum_id": group_number(decision.group) if decision is not None else -1,
            }
            log.info("%s", what, extra={**common, **fields})

    def note_irregular_steps(self) -> None:
        """Give a state with irregular optimizer steps a lineage of its own."""
        irregularity = self.state.ledger.irregularity(self.state.optimizers())
        if not irregularity:
            return
        self.is_settled = False
        # Lineage first: after an exception of a handler below, a repeated call changes it once more, which is safe.
        self.state.lineage = next_lineage(self.state.lineage, f"stepped {irregularity}", self.state.step)
        self.state.ledger.replaced()
        self.irregularity = irregularity
        self.is_irregularity_new = True

    def tell_irregular_steps(self) -> None:
        """Warn of irregular optimizer steps, unless all replicas made the same ones.

        Without a scaler, warn once even then: these optimizers may not step with each commit.
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
            f"{differing} did something else, and the fewer heal" if differing else "all replicas did the same",
        )

    def disown_state(self, irregularity: str) -> None:
        """Give the state a lineage of its own, so that this replica heals: the others have another state."""
        self.reductions = Claim()
        self.irregularity = irregularity
        self.state.lineage = next_lineage(self.state.lineage, irregularity, self.state.step)
        self.is_settled = False


class OwnErrors:
    """Counts steps since the last commit that failed by this replica's own errors; equal on all of its ranks.

    A replica that fails in every step prevents all others from committing. After a few such steps it leaves.
    """

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def committed(self) -> None:
        """Reset the count."""
        self._reasons.clear()

    def refused(self, step: int, refusals: Sequence[str]) -> None:
        """Count a step that was not committed.

        Args:
            step: The last committed step.
            refusals: The reasons of all ranks of the replica.

        Raises:
            ReplicaFaultError: The count has reached its limit.
        """
        own = [refusal.replace(_OWN, "", 1) for refusal in refusals if _OWN in refusal]
        self._reasons += own[:1]
        if own and len(self._reasons) >= _MAX_OWN_ERRORS:
            raise ReplicaFaultError(
                step=step, num_failures=len(self._reasons), reasons=tuple(self._reasons[-_MAX_OWN_ERRORS:])
            )


def is_own_shortage(error: Exception) -> bool:
    """Return whether the error shows that this process lacks resources for a process group."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def _is_of_collectives(error: Exception) -> bool:
    """Return whether another replica may have caused the error through a collective."""
    return isinstance(error, (DistError, TimeoutError)) or _GLOO in str(error)


def format_error(error: BaseException) -> str:
    """Return type and message of an error, for logs and other replicas."""
    return f"{type(error).__name__}: {error}"


def refusal_cause(error: ReportedError | None, *, has_enough: bool, was_silent: bool) -> str:
    """The first reason, for the metrics, why a rank did not commit a step, in the order of `commit_refusals`.

    Args:
        error: The error of this rank in the step, if any.
        has_enough: Whether as many replicas contributed as are needed.
        was_silent: Whether heartbeats were missed since the step began.
    """
    if error is not None:
        return type(error.original_exception).__name__
    if not has_enough:
        return "TooFewReplicas"
    return "MissedHeartbeats" if was_silent else "AnotherRank"
