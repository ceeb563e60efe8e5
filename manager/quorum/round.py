"""One attempt at a step, and what the replica says of itself in it."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.distributed import DistError

from ft_transport.runtime.deadline import Deadline
from ft_transport.runtime.handler_safety import SafeFuture
from ft_transport.telemetry.recorder import Recording
from manager.collectives.managed_work import ManagedWork
from manager.errors import ReductionMismatchError, ReplicaFaultError, ReportedError, UnfinishedReductionError
from manager.quorum import telemetry
from manager.quorum.decision import Decision, Rules, next_lineage
from manager.quorum.divergence import Claim
from manager.quorum.held_process_group import group_number
from manager.quorum.membership import Membership
from manager.state.replica_state import ReplicaState

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
        num_missed_heartbeats: How often the replica had been silent for too long when it began.
        decision: What the quorum decided; ``None`` until then.
        quorum: Done when it has and the process group is set up.
        error: The first thing that went wrong.
        is_own_error: Whether it came from this replica itself, beside others that could have gone on.
        works: The collectives begun.
        gradients: The parameters that have gradients (``gradients_of``), as the first `Manager.allreduce` found them.
        num_averaging: Calls of `Manager.average_gradients` that have begun and not ended.
        reductions: What was reduced, where only the next quorum can compare it.
        is_left: Whether `Manager.start_quorum` was called again.
        is_over: Whether its reductions have ended, in `Manager.should_commit`.
        is_voted: Whether the ranks of the replica have agreed on the commit.
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
        """Note that a tensor is reduced until ``work`` is waited for."""
        if local.numel():
            self._reducing[local.data_ptr()] = work

    def refuse_twice(self, tensor: torch.Tensor, local: torch.Tensor) -> None:
        """Make sure that a tensor is not being reduced already.

        Raises:
            UnfinishedReductionError: It is.
        """
        earlier = self._reducing.get(local.data_ptr()) if local.numel() else None
        if earlier is not None and not earlier.is_completed():
            raise UnfinishedReductionError(
                f"expected a tensor that is not being reduced, got one of shape {list(tensor.shape)} for the second "
                "time in this step; call .wait() on what the first allreduce returned before you reduce it again"
            )

    def forget_works(self) -> None:
        """Let the collectives go, and the gradients with them: all have been waited for."""
        self.works.clear()
        self._reducing.clear()
        self.gradients = None

    def refusals(self) -> list[str]:
        """Why the step is not committed; ranks tell each other as text whose error it is (`OwnErrors`)."""
        if self.error is None:
            return []
        has_others = self.decision is not None and len(self.decision.group_members) > 1
        return [f"{_OWN}{self.error}" if self.is_own_error and has_others else str(self.error)]

    def end_quorum(self, error: BaseException | None) -> None:
        """Let those who wait for the quorum go on, once; a handler may have raised after it had ended."""
        with suppress(InvalidStateError):
            if error is not None:
                self.quorum.set_exception(error)
            else:
                self.quorum.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuorumRequest:
    """What `Manager.start_quorum` was called with.

    Attributes:
        rules: What has to be the same on all replicas.
        deadline: Of the caller.
        shrink_only: Whether new replicas have to wait.
        may_heal: Whether this replica heals if it is behind.
    """

    rules: Rules
    deadline: Deadline
    shrink_only: bool
    may_heal: bool


class Participant:
    """What this replica is to the others: its state, its name, its round, and whether its state is the common one.

    The training thread changes it, or the quorum thread while the training thread waits. `report_error` may be called
    by any thread.

    Args:
        state: The replica's state.
        membership: Its place among the others.

    Attributes:
        state: See above.
        membership: See above.
        round: The present round; ``None`` before the first.
        is_settled: Whether the state is known to be what all have committed.
        irregularity: Why the state goes by a name of its own; empty if it does not.
        is_irregularity_new: Whether no quorum has shown yet if the others did the same.
        announced_to: Replicas that have promised this one a snapshot.
        reductions: A digest of what was reduced for the present step, where no member compared it before.
        healing: The record of a heal, from the quorum that orders it to the first step that is committed after it.
    """

    def __init__(self, state: ReplicaState, membership: Membership) -> None:
        self.state = state
        self.membership = membership
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
            error: What spoils the step.
            is_own: Whether it came from this replica. It counts as others' all the same where a member of the process
                group has left, or where it is one of collectives.
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
        self.record(telemetry.ERRORS, "a step will not be committed", current.decision, error=format_error(error))

    def record(self, log: logging.Logger, what: str, decision: Decision | None, **fields: int | bool | str) -> None:
        """Write a structured log record, as torchft does."""
        telemetry.record(
            log,
            what,
            replica_id=self.membership.replica_id,
            rank=self.membership.group_rank,
            quorum_id=group_number(decision.group) if decision is not None else -1,
            **fields,
        )

    def note_irregular_steps(self) -> None:
        """Give a state that was not stepped as it was committed a name of its own."""
        irregularity = self.state.ledger.irregularity(self.state.optimizers())
        if not irregularity:
            return
        self.is_settled = False
        # First the name: where a handler raises below, the state gets another one once more, and not its old one back.
        self.state.lineage = next_lineage(self.state.lineage, f"stepped {irregularity}", self.state.step)
        self.state.ledger.replaced()
        self.irregularity = irregularity
        self.is_irregularity_new = True

    def tell_irregular_steps(self) -> None:
        """Warn of a state that was not stepped as it was committed, unless all replicas did the same.

        Without a scaler, a warning says so once: these may be optimizers that do not step with each commit.
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
        """Give the state a name of its own, so that this replica heals: the others hold another one."""
        self.reductions = Claim()
        self.irregularity = irregularity
        self.state.lineage = next_lineage(self.state.lineage, irregularity, self.state.step)
        self.is_settled = False


class OwnErrors:
    """Counts the steps since the last commit that errors of this replica's own failed: the same on all of its ranks.

    A replica that fails at every step keeps all others from committing for as long as it lives. After a few it leaves.
    """

    def __init__(self) -> None:
        self._reasons: list[str] = []

    def committed(self) -> None:
        """Forget them."""
        self._reasons.clear()

    def refused(self, step: int, refusals: Sequence[str]) -> None:
        """Count a step that was not committed.

        Args:
            step: The last committed one.
            refusals: What all ranks of the replica have agreed on.

        Raises:
            ReplicaFaultError: It was one too many.
        """
        own = [refusal.replace(_OWN, "", 1) for refusal in refusals if _OWN in refusal]
        self._reasons += own[:1]
        if own and len(self._reasons) >= _MAX_OWN_ERRORS:
            raise ReplicaFaultError(
                step=step, num_failures=len(self._reasons), reasons=tuple(self._reasons[-_MAX_OWN_ERRORS:])
            )


def is_own_shortage(error: Exception) -> bool:
    """Whether this process, and no other replica, lacks what a process group needs."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def _is_of_collectives(error: Exception) -> bool:
    """Whether it may come from another replica, by way of a collective that this one has made by itself."""
    return isinstance(error, (DistError, TimeoutError)) or _GLOO in str(error)


def format_error(error: BaseException) -> str:
    """Type and message of an error, for logs and other replicas."""
    return f"{type(error).__name__}: {error}"
