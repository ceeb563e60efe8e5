"""Keeps the state of one rank beyond the death of its process, and resumes from it without a network.

Every ``keep_every`` steps, `Keeping` takes a snapshot of the rank's whole state, its local state included. The keeper
of this process holds the snapshot (``ft_transport.transfer.kept``), and gives it to the restarted process.

The ranks of a replica must resume at the same step. So each rank retains the newest step that all ranks have kept (the
agreed step) and at most one newer snapshot, about which the ranks decide together (``kept_steps``). It drops a snapshot
only after that decision. So there is always a step that all ranks have, whenever they die. All of this runs on a
thread; if it is not finished at a step to be kept, that step is not kept.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from ft_transport import TransportError
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.runtime.signal_safe import SafeEvent
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.runtime.unix_sockets import shared_address
from ft_transport.telemetry.metrics import MetricValues
from ft_transport.transfer.kept import KeptInProgress, KeptSnapshots
from manager.errors import ManagerError, StateMismatchError
from manager.recovery.kept_steps import KeptSteps
from manager.recovery.local_state import LocalState
from manager.recovery.peers import PeerOptions, PeerRecovery, Recovery
from manager.recovery.rank_agreement import replica_ranks
from manager.snapshots.boundary_copy import BoundaryCopier
from manager.snapshots.requests import BOUNDARY_TIMEOUT, FailureLog, begin_copy, copy_and_publish
from manager.state.lock import Section
from manager.state.optimizer_guard import StateObserver
from manager.state.replica_state import ReplicaState

if TYPE_CHECKING:
    from ft_transport import HTTPTransport

logger = logging.getLogger(__name__)

_PURPOSE: Final = "kept state"
_JOB_VARIABLES: Final = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "TORCHFT_LIGHTHOUSE")
_SOURCE: Final = "the keeper of this host"

_MISFIT: Final = "misfit"
"""Outcome of a rank whose kept state does not fit the registered objects. Nothing was loaded."""
_MAX_SHOWN: Final = 500

_outcome_decoder: Final = msgspec.msgpack.Decoder(str)
_steps_decoder: Final = msgspec.msgpack.Decoder(tuple[int, list[int]])


class Keeping(StateObserver):
    """Takes the snapshots that the keeper of this process holds, and resumes from those of an earlier process.

    Only the training thread may call the methods. All ranks of the replica make the same calls.

    Args:
        state: The replica's state.
        transport: Serves a kept snapshot to this process.
        peers: Loads a served snapshot.
        copier: Describes the state at a step boundary.
        local: The replica's local state.
        every: Interval of the snapshots, in steps.

    Attributes:
        counts: Metrics: the number of kept snapshots, and of boundaries at which none could be taken.
        kept: The kept snapshots.
    """

    def __init__(
        self,
        state: ReplicaState,
        transport: HTTPTransport[Any],
        peers: PeerRecovery,
        copier: BoundaryCopier,
        local: LocalState,
        *,
        every: int,
    ) -> None:
        self._state = state
        self._peers = peers
        self._copier = copier
        self._local = local
        self._every = every
        self._keys = transport.keys
        self._transport = transport
        self.kept = KeptSnapshots(transport.server, transport.keys)
        self.counts = MetricValues("keeping", threading.RLock())
        self._group: RankGroup | None = None
        self._kept_steps: KeptSteps | None = None
        self._failures = FailureLog()
        self._pool = SafeExecutor(1, "ft-transport-keep")
        self._job: Future[None] | None = None
        self._reporting: Future[None] | None = None
        self._stop_reporting = SafeEvent()
        self._is_prefaulted = False
        self._newest: int | None = None
        self._agreed: int | None = None
        self._unagreed: int | None = None
        self._is_replaced = False
        self._has_failed = False
        state.add_observer(self)

    def boundary(self) -> None:
        """Begin a snapshot if one is due at this step boundary. A failure is logged, and training continues."""
        self._opened()
        step = self._state.step
        if self._is_replaced:
            self._drop_other_history(step)
        if step == 0:
            return  # Most optimizers have no states yet.
        if not self._is_prefaulted:
            self._is_prefaulted = True
            self._prefault()
        if step % self._every or step == self._newest:
            return
        # It may still wait for the reports of other ranks; at the latest now, it has to stop.
        self._stop_reporting.set()
        if self.kept.is_preparing or not self._is_idle() or self._unagreed is not None:
            # Training does not wait for memory, for the last snapshot, or for other ranks.
            self.counts.add("kept_snapshots_failed_total", "Unfinished")
            if self._is_idle() and self._unagreed is not None:
                self._job = self._pool.submit(self._give_up, self._unagreed)
            return
        try:
            begin_copy(self._state.lock, f"kept snapshot of step {step}", BOUNDARY_TIMEOUT, self._take, self._submit)
        except (ManagerError, TransportError) as error:
            self.counts.add("kept_snapshots_failed_total", type(error).__name__)
            self._failures.not_taken(step, error)
        else:
            self._failures.taken()
            self._newest = step

    def keep_now(self) -> None:
        """Keep the state of the present boundary, and wait until the keeper has it.

        Raises:
            LockTimeoutError: Another thread held the write lock until the deadline.
            TransportError: The state cannot be captured.
        """
        self._opened()
        self._stop_reporting.set()
        self._wait_until_idle()
        if self._state.step == self._newest:
            return
        if self._unagreed is not None:
            self._give_up(self._unagreed)
        what = f"kept snapshot of step {self._state.step}"
        begin_copy(self._state.lock, what, self._state.timeout, self._take, self._submit)
        self._newest = self._state.step
        assert self._job is not None, "it was submitted"
        self._job.result()

    def resume(self, ranks: Agreement, *, newer_than: int) -> Recovery | None:
        """Load the newest step that all ranks have kept. If it cannot be loaded, load the one before it.

        Args:
            ranks: All ranks of the replica.
            newer_than: A durable checkpoint has this step; older kept steps are not loaded. -1 without a checkpoint.

        Returns:
            The result on this rank; ``None`` if no newer step could be loaded on all ranks. If a load failed halfway,
            the state is partial then.
        """
        named = ranks.values_of_all(
            "name the kept states", lambda: (newer_than, list(self.kept.steps())), _steps_decoder
        )
        newer_than = named[0][0]
        common = set.intersection(*(set(steps) for _, steps in named))
        for step in sorted(common, reverse=True):
            if step <= newer_than:
                break
            recovered: list[Recovery] = []
            outcomes = ranks.values_of_all(
                "load a kept state", partial(self._outcome, ranks, step, recovered), _outcome_decoder
            )
            if not any(outcomes):
                self.kept.retain_only(step)
                self._newest = self._agreed = step
                self._is_replaced = False
                self.counts.add("kept_resumes_total")
                logger.info("resumed step %d from %s; the ranks had kept %s", step, _SOURCE, [k for _, k in named])
                return recovered[0]
            self._has_failed = self._has_failed or any(each not in {"", _MISFIT} for each in outcomes)
            if recovered:
                self._state.mark_partial(step, f"other ranks could not load their kept states: {outcomes}")
                logger.warning("step %d from %s is not used: %s", step, _SOURCE, outcomes)
        if any(steps for _, steps in named):
            logger.info("no kept state is loaded: the ranks had kept the steps %s", [steps for _, steps in named])
        return None

    @property
    def has_failed(self) -> bool:
        """Whether a kept state was found damaged, on any rank; the same on all ranks."""
        return self._has_failed

    def agreement(self) -> Agreement:
        """Return an agreement of all ranks of this replica, after taking over what an earlier process kept.

        Raises:
            ConfigurationError: This replica has several ranks, and ``torch.distributed`` is not initialised.
        """
        return Agreement(self._opened(), "resume", self._state.timeout)

    def replaced(self) -> None:
        """Record that the state is about to be replaced, so that later kept states do not belong to it."""
        self._newest = None
        self._is_replaced = True

    def close(self, *, is_over: bool) -> None:
        """Complete the last snapshot, and free the memory of this process.

        Args:
            is_over: Whether the training has ended. If not, the keeper holds the state for a restarted process.
        """
        self._stop_reporting.set()
        self._pool.shutdown(wait=True)
        self.kept.close(is_over=is_over)

    def _opened(self) -> RankGroup:
        if self._group is None:
            self._group = group = replica_ranks(self._keys)
            rank = str(group.rank) if group.size > 1 else os.environ.get("RANK", "0")
            if self._local.rank is not None:
                rank = str(self._local.rank)
            # A process of another job must not resume from this state, even if its model has the same shapes.
            job = [os.environ.get(name, "") for name in _JOB_VARIABLES]
            name = self._local.replica_name or ""
            self.kept.open(shared_address(_PURPOSE, *job, os.getcwd(), *sys.argv, name, rank))
        return self._group

    def _prefault(self) -> None:
        self._job = self._pool.submit(self.kept.attend)
        try:
            with self._state.lock.read("size of kept snapshots", BOUNDARY_TIMEOUT):
                self.kept.prefault(self._whole(self._state.content()))
        except (ManagerError, TransportError) as error:
            logger.warning("the memory for kept snapshots could not be prefaulted: %s", error)

    def _whole(self, replicated: object) -> Mapping[str, object]:
        return {**cast("Mapping[str, object]", replicated), **self._local.part()}

    def _take(self, may_defer: bool) -> KeptInProgress:
        taking = self._copier.capture(may_defer=may_defer, may_share=False)
        return self.kept.begin(replace(taking, state=self._whole(taking.state)), retained=self._agreed)

    def _submit(self, unfinished: list[KeptInProgress], section: Section | None) -> None:
        self._stop_reporting = stop = SafeEvent()
        step = self._unagreed = self._state.step
        self._job = self._pool.submit(self._complete, step, unfinished, section)
        self._reporting = self._pool.submit(self._report, self._job, step, stop)

    def _is_idle(self) -> bool:
        jobs = (self._job, self._reporting)
        return all(job is None or job.done() for job in jobs)

    def _wait_until_idle(self) -> None:
        for job in (self._job, self._reporting):
            if job is not None:
                job.exception()

    def _drop_other_history(self, step: int) -> None:
        """After the state was replaced: drop the kept states of this step and of later ones, on all ranks alike."""
        self._is_replaced = False
        if step == self._newest:
            return
        self._stop_reporting.set()
        self._wait_until_idle()
        self.kept.drop_from(step)
        self._steps().begin_history()
        self._unagreed = None
        if self._agreed is not None and self._agreed >= step:
            self._agreed = None

    def _complete(self, step: int, unfinished: list[KeptInProgress], section: Section | None) -> None:
        """Complete a snapshot, on the pool's thread."""
        try:
            copy_and_publish(unfinished, section)
        except Exception as error:
            self._unagreed = None
            self.counts.add("kept_snapshots_failed_total", type(error).__name__)
            logger.warning("step %d: the snapshot for the keeper failed: %s", step, error)
            raise
        self.counts.add("kept_snapshots_total")
        self.counts.set("kept_step", to=step)

    def _report(self, job: Future[None], step: int, stop: SafeEvent) -> None:
        """Report a complete snapshot to the other ranks, and wait for their reports, on the pool's thread."""
        if job.exception() is not None:
            return
        try:
            self._note_decision(step, self._steps().report(step, stop))
        except TransportError as error:
            logger.debug("step %d: cannot report the kept snapshot to the other ranks: %s", step, error)

    def _give_up(self, step: int) -> None:
        """Stop waiting for ranks that have not kept a step."""
        try:
            self._note_decision(step, self._steps().give_up(step))
        except TransportError as error:
            logger.debug("step %d: cannot ask the other ranks about the kept snapshot: %s", step, error)

    def _note_decision(self, step: int, is_agreed: bool | None) -> None:
        if is_agreed is not None:
            self._unagreed = None
            self._agreed = step if is_agreed else self._agreed

    def _steps(self) -> KeptSteps:
        if self._kept_steps is None:
            self._kept_steps = KeptSteps(self._opened(), self._state.timeout)
        return self._kept_steps

    def _outcome(self, ranks: Agreement, step: int, recovered: list[Recovery]) -> str:
        """Load a kept state on this rank. Return why it could not be loaded; empty if it was."""
        try:
            load = partial(self._load, step)
            recovered.append(ranks.showing_life(load, 2 * self._state.timeout.total_seconds()))
        except (ManagerError, TransportError) as error:
            logger.warning("step %d from %s cannot be loaded: %s", step, _SOURCE, error)
            return _MISFIT if isinstance(error, StateMismatchError) else f"{type(error).__name__}: {error}"[:_MAX_SHOWN]
        return ""

    def _load(self, step: int) -> Recovery:
        options = PeerOptions(timeout=self._state.timeout, is_kept=True)
        with self.kept.serving(step):
            load_local = partial(self._local.load, step=step, source=_SOURCE)
            return self._peers.recover_kept(self._transport.metadata(), step, options, _SOURCE, load_local)
