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
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

from ft_transport import RankGoneError, TransportError
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.runtime.signal_safe import SafeEvent
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.runtime.unix_sockets import shared_address
from ft_transport.telemetry.metrics import MetricValues
from ft_transport.telemetry.process_state import KeptStatus
from ft_transport.transfer.kept import KeptInProgress, KeptSnapshots
from ft_transport.transfer.kept_part import KeptPart
from manager.errors import ManagerError
from manager.recovery.kept_partners import KeptPartners
from manager.recovery.kept_resume import KeptResume, local_key
from manager.recovery.kept_steps import KeepSettings, KeptSteps
from manager.recovery.local_state import LocalState
from manager.recovery.peers import PeerRecovery, Recovery
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


class Keeping(StateObserver):
    """Takes the snapshots that the keeper of this process holds, and resumes from those of earlier processes.

    Only the training thread may call the methods. All ranks of the replica make the same calls.

    Args:
        state: The replica's state.
        transport: Serves a kept snapshot to this process.
        peers: Loads a served snapshot.
        copier: Describes the state at a step boundary.
        local: The replica's local state.
        settings: How often to keep the state, and where.

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
        settings: KeepSettings,
    ) -> None:
        assert settings.every is not None, "the replica keeps its state"
        self._every = settings.every
        self._state = state
        self._copier = copier
        self._local = local
        self._settings = settings
        self._keys = transport.keys
        self._transport = transport
        self.kept = KeptSnapshots(transport.server, transport.keys, transport.new_server)
        self._resume = KeptResume(self.kept, state, transport, peers, local)
        self.counts = MetricValues("keeping", threading.RLock())
        self._group: RankGroup | None = None
        self._addresses = ""
        self._kept_steps: KeptSteps | None = None
        self._partners: KeptPartners | None = None
        self._first: tuple[int, float] | None = None
        self._interval_s = 0.0
        self._begun_s = 0.0
        self._failures = FailureLog()
        self._pool = SafeExecutor(1, "ft-transport-keep")
        self._job: Future[None] | None = None
        self._reporting: Future[None] | None = None
        self._stop_reporting = SafeEvent()
        self._is_prefaulted = False
        self._newest: int | None = None
        self._agreed: KeptPart | None = None
        self._unagreed: KeptPart | None = None
        self._agreement: Agreement | None = None
        self._is_replaced = False
        state.add_observer(self)

    def boundary(self) -> None:
        """Begin a snapshot if one is due at this step boundary. A failure is logged, and training continues."""
        self._opened()
        step = self._state.step
        if self._is_replaced:
            self._drop_other_history(step)
        if step == 0:
            return  # Most optimizers have no states yet.
        self._prefault()
        if step % self._every or step == self._newest:
            return
        self._measure_interval(step)
        if not self._may_still_copy():
            # It may still wait for the reports of other ranks; at the latest now, it has to stop.
            self._stop()
        if not self._is_ready():
            # Training does not wait for memory, for the last snapshot, or for other ranks.
            self.counts.add("kept_snapshots_failed_total", "Unfinished")
            self._decline(step)
            return
        try:
            begin_copy(self._state.lock, f"kept snapshot of step {step}", BOUNDARY_TIMEOUT, self._take, self._submit)
        except (ManagerError, TransportError) as error:
            self.counts.add("kept_snapshots_failed_total", type(error).__name__)
            self._failures.not_taken(step, error)
            self._decline(step)
        else:
            self._failures.taken()
            self._newest = step

    def keep_now(self) -> None:
        """Keep the state of the present boundary, and wait until the keeper has it.

        Raises:
            LockTimeoutError: Another thread held the write lock until the deadline.
            TransportError: The state cannot be captured, or the key-value store does not answer.
        """
        self._opened()
        if self._is_replaced:
            self._drop_other_history(self._state.step)
        if self._state.step != self._newest:
            self._stop()
            self._wait_until_idle()
            self._settle()
            if self._unagreed is not None or not self.kept.history:
                # The earlier kept states stay: the other ranks may have decided differently about them.
                raise RankGoneError("expected the key-value store to decide about the last kept state")
            self._interval_s = 0.0  # Copies need not spare a training that ends.
            what = f"kept snapshot of step {self._state.step}"
            try:
                begin_copy(self._state.lock, what, self._state.timeout, self._take, self._submit)
            except (ManagerError, TransportError):
                self._decline(self._state.step)
                raise
            self._newest = self._state.step
        if self._job is not None:
            self._job.result()

    def wait_for_copies(self, timeout: timedelta) -> None:
        """Wait until all ranks have kept and copied the last snapshot, but not longer than ``timeout``."""
        if self._partners is not None and self._reporting is not None:
            with suppress(FutureTimeoutError):
                self._reporting.exception(timeout.total_seconds())

    def resume(self, ranks: Agreement, *, at_least: int) -> Recovery | None:
        """Load the newest kept step of all ranks; see `KeptResume.resume`."""
        self._opened()
        self._stop()
        self._wait_until_idle()
        self._begin_history()
        if self._opened().shared is not None:
            # Now all ranks have taken over the states of their own predecessors.
            ranks.run("find kept states", lambda: None)
            self.kept.adopt(self._addresses)
        recovery = self._resume.resume(ranks, at_least=at_least)
        if recovery is not None:
            assert self._resume.resumed is not None, "it was loaded"
            self._newest = recovery.step
            self._agreed = part = self._resume.resumed.of_rank(self._opened().rank)
            self._is_replaced = False
            self.counts.add("kept_resumes_total")
            # Equal on all ranks: each has its part then. Parts of another number of ranks are not copied again.
            if self._partners is not None and part.num_ranks == self._opened().size:
                # A host that was lost held copies as well.
                self._submit_report(part, None, 0.0)
            self._prefault()
        return recovery

    def status(self) -> KeptStatus:
        """Return what is kept, for status pages. Any thread may call this."""
        partners = self._partners
        return replace(self.kept.status(), partners=partners.partners if partners is not None else ())

    @property
    def has_failed(self) -> bool:
        """Whether a kept state could not be loaded on any rank; the same on all ranks."""
        return self._resume.has_failed

    def agreement(self) -> Agreement:
        """Return an agreement of all ranks of this replica, after taking over what an earlier process kept.

        Raises:
            ConfigurationError: This replica has several ranks, and ``torch.distributed`` is not initialised.
        """
        if self._agreement is None:
            self._agreement = Agreement(self._opened(), "resume", self._state.timeout)
        return self._agreement

    def replaced(self) -> None:
        """Record that the state is about to be replaced, so that later kept states do not belong to it."""
        self._newest = None
        self._is_replaced = True

    def close(self, *, is_over: bool) -> None:
        """Complete the last snapshot, and free the memory of this process.

        Args:
            is_over: Whether the training has ended. If not, the keeper holds the state for a restarted process.
        """
        self._stop()
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
            self._addresses = f"{shared_address(_PURPOSE, *job, os.getcwd(), *sys.argv, name)}/"
            self.kept.open(f"{self._addresses}{rank}", rank=group.rank, num_ranks=group.size)
            if self._settings.copies > 1 and group.size == 1:
                logger.warning("copies=%d has no effect: this replica has one rank", self._settings.copies)
            elif self._settings.copies > 1:
                self._partners = KeptPartners(group, self.kept, self._transport, self._settings, self.counts)
        return self._group

    def _stop(self) -> None:
        """Let the pool's thread stop waiting for other ranks, and copying."""
        self._stop_reporting.set()
        if self._partners is not None:
            self._partners.cancel()

    def _measure_interval(self, step: int) -> None:
        now_s = time.monotonic()
        if self._first is None:
            self._first = step, now_s
        first, first_s = self._first
        if step > first:
            self._interval_s = self._every * (now_s - first_s) / (step - first)

    def _may_still_copy(self) -> bool:
        """Whether other ranks may still be copying the last snapshot."""
        if self._partners is None:
            return False
        return time.monotonic() < self._begun_s + 2 * self._partners.copy_timeout_s(self._interval_s)

    def _is_ready(self) -> bool:
        """Whether a snapshot can begin without a wait."""
        return bool(self.kept.history and not self.kept.must_wait and self._is_idle() and self._unagreed is None)

    def _decline(self, step: int) -> None:
        """Let no rank wait for a step that this one does not keep."""
        self._steps().decline(step)
        if self._is_idle():
            self._job = self._pool.submit(self._settle)

    def _prefault(self) -> None:
        """Make memory for the snapshots resident. Until that is done, a death loses all steps since the last start."""
        if self._is_prefaulted:
            return
        self._is_prefaulted = True
        self._job = self._pool.submit(self._prepare)
        try:
            with self._state.lock.read("size of kept snapshots", BOUNDARY_TIMEOUT):
                self.kept.prefault(self._whole(self._state.content()))
        except (ManagerError, TransportError) as error:
            logger.warning("the memory for kept snapshots could not be prefaulted: %s", error)

    def _prepare(self) -> None:
        self.kept.attend()
        self._settle()

    def _whole(self, replicated: object) -> Mapping[str, object]:
        own = self.kept.own_part(self._state.step)
        local = self._local.part()
        key = local_key(own.rank, own.num_ranks)
        return {**cast("Mapping[str, object]", replicated), **({key: local} if local else {})}

    def _take(self, may_defer: bool) -> KeptInProgress:
        taking = self._copier.capture(may_defer=may_defer, may_share=False)
        return self.kept.begin(replace(taking, state=self._whole(taking.state)), retained=self._agreed)

    def _submit(self, unfinished: list[KeptInProgress], section: Section | None) -> None:
        part = self.kept.own_part(self._state.step)
        self._job = self._pool.submit(self._complete, part.step, unfinished, section)
        self._submit_report(part, self._job, self._interval_s)

    def _submit_report(self, part: KeptPart, job: Future[None] | None, interval_s: float) -> None:
        self._stop_reporting = stop = SafeEvent()
        self._unagreed, self._begun_s = part, time.monotonic()
        self._reporting = self._pool.submit(self._report, part, job, interval_s, stop)

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
        self._stop()
        self._wait_until_idle()
        self.kept.drop_from(step)
        self._begin_history()
        if self._agreed is not None and self._agreed.step >= step:
            self._agreed = None

    def _begin_history(self) -> None:
        self._steps().begin_history()
        self._unagreed = None
        self.kept.history = ""
        if self._is_prefaulted:
            self._job = self._pool.submit(self._settle)

    def _complete(self, step: int, unfinished: list[KeptInProgress], section: Section | None) -> None:
        """Complete a snapshot, on the pool's thread."""
        try:
            copy_and_publish(self._state, unfinished, section)
        except Exception as error:
            self.counts.add("kept_snapshots_failed_total", type(error).__name__)
            logger.warning("step %d: the snapshot for the keeper failed: %s", step, error)
            raise
        self.counts.add("kept_snapshots_total")
        self.counts.set("kept_step", to=step)

    def _report(self, part: KeptPart, job: Future[None] | None, interval_s: float, stop: SafeEvent) -> None:
        """Copy the snapshots of other ranks, report to them, and wait for their reports, on the pool's thread."""
        steps, step = self._steps(), part.step
        try:
            is_kept = job is None or job.exception() is None
            if is_kept and self._partners is not None:
                is_kept = self._partners.copy(part, steps, interval_s, stop)
            self._note_decision(part, steps.report(step, stop) if is_kept else steps.give_up(step))
            steps.post_declined()
        except TransportError as error:
            logger.debug("step %d: cannot agree with the other ranks about the kept snapshot: %s", step, error)
        except Exception:
            logger.exception("step %d: the kept snapshot could not be copied or reported to the other ranks", step)

    def _settle(self) -> None:
        """Stop waiting for ranks that have not kept a step, and post what this rank has declined."""
        unagreed, steps = self._unagreed, self._steps()
        try:
            if unagreed is not None:
                self._note_decision(unagreed, steps.give_up(unagreed.step))
            steps.post_declined()
            self.kept.history = self.kept.history or steps.history_name()
        except TransportError as error:
            logger.debug("cannot agree with the other ranks about kept snapshots: %s", error)

    def _note_decision(self, part: KeptPart, is_agreed: bool | None) -> None:
        if is_agreed is not None:
            self._unagreed = None
            self._agreed = part if is_agreed else self._agreed

    def _steps(self) -> KeptSteps:
        if self._kept_steps is None:
            self._kept_steps = KeptSteps(self._opened(), self._state.timeout)
        return self._kept_steps
