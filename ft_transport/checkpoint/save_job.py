"""One save of a checkpoint store: the phases in which a writer process writes the copy of the state.

The store's thread turns the copy (``staging``) into snapshots in memory files. The writer process maps those files,
digests them, and writes them to disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from ft_transport.checkpoint import writer_process as messages
from ft_transport.checkpoint.collective_write import CollectiveWrite, TakenSnapshot
from ft_transport.checkpoint.manifest import Trust
from ft_transport.checkpoint.plan import RankPlan
from ft_transport.checkpoint.settings import StoreSettings
from ft_transport.checkpoint.staging import StagedState
from ft_transport.checkpoint.writer_process import WriterAnswer, WriterProcess, WriterRequest
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import decode_message
from ft_transport.errors import CheckpointExistsError, TransportError, WriterFailedError
from ft_transport.runtime.signal_safe import SafeFuture
from ft_transport.transfer.server import SnapshotLease

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=WriterAnswer)

MAX_TIMEOUTS: Final = 10
"""Limit for rereading written files and for deleting old checkpoints, in multiples of ``StoreSettings.timeout``."""
_MAX_ATTEMPTS: Final = 3
"""Number of attempts of a save whose errors are retryable."""
_PAUSE_S: Final = 0.1
"""Pause before the second attempt; the pause before the third one is twice as long."""
_LEAST_BYTES_PER_S: Final = 1 << 20
"""A disk that writes more slowly than this counts as stuck."""

_header_decoder: Final = msgspec.msgpack.Decoder(tuple[bytes, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResources:
    """The resources that all saves of a store use on one rank.

    Attributes:
        agreement: The group's agreement for the store's thread.
        collective: Writes checkpoint directories together with the other ranks.
        writer: This rank's writer process.
        trust: Signs the list of files if a job token is set.
        consolidate: Path of the part of the state that is also written to consolidated files; ``None`` for no part.
        completed: Called on the first rank with the step of a checkpoint that has just become complete, before any
            rank reports the save as done.
        take_damage: Returns whether this process has read a damaged checkpoint since the last call. If so, a save
            shares no files with the last checkpoint.
    """

    agreement: Agreement
    collective: CollectiveWrite
    writer: WriterProcess
    settings: StoreSettings
    trust: Trust
    consolidate: str | None
    completed: Callable[[int], None]
    take_damage: Callable[[], bool]

    def start_writer(self) -> None:
        """Start the writer process unless it is running.

        Raises:
            WriterFailedError: The process could not be started.
        """
        if not self.writer.is_alive():
            self.writer.start(self.settings.timeout.total_seconds())


class SaveJob:
    """One save: a `WriteJob` whose snapshot is mapped by this rank's writer process. For the store's thread only.

    Args:
        resources: The store's resources.
        step: The committed step.
        staged: The copied state of this rank. `run` releases it.
        overwrite: Whether the save may replace a checkpoint of this step.

    Attributes:
        planned: A future that completes when the ranks have planned the save, or when the save has ended.
    """

    def __init__(self, resources: SaveResources, step: int, staged: StagedState, *, overwrite: bool) -> None:
        self.planned: Final[Future[None]] = SafeFuture()
        self._resources = resources
        self._timeout_s = resources.settings.timeout.total_seconds()
        self._step = step
        self._staged = staged
        self._overwrite = overwrite
        self._snapshots: Sequence[SnapshotLease] = ()

    def run(self) -> None:
        """Save the state: stage, agree, compare, write and commit.

        If a rank's snapshot fails, the save fails at once: training has continued, so the state of the step no longer
        exists. Any other failed save starts over, up to ``_MAX_ATTEMPTS`` attempts in all, if the error of every rank
        that failed is

        - an ``OSError`` whose number is in ``coordination.votes.RETRYABLE_ERRNOS``: EIO, ESTALE, EBUSY, ETIMEDOUT and
          other errors of a disk or a file server that a retry may cure; or
        - an error of ``ft_transport.errors`` with ``retryable = True``. Of the errors of a save, only
          `WriterFailedError` can be cured by a retry: the writer process died or hung.

        All other errors are final, such as a full disk (ENOSPC), a refused permission (EACCES), a missing rank, or
        replicas with different values. All ranks decide alike (``coordination.votes.tally``).

        Raises:
            TransportError: The save failed; the same error on every rank.
        """
        resources, collective, step = self._resources, self._resources.collective, self._step
        resources.agreement.step = step
        try:
            with collective.attempt(step):
                collective.stage(self)
            for attempt in range(1, _MAX_ATTEMPTS + 1):
                try:
                    with collective.attempt(step):
                        location, plan = collective.agree(step, self, is_retry=attempt > 1)
                        self._note_plan()
                        collective.compare(self)
                        describe = self.write(location, plan)
                        resources.writer.last = collective.commit(step, describe, lambda: resources.completed(step))
                        return
                except TransportError as error:
                    if not resources.agreement.may_try_again or attempt == _MAX_ATTEMPTS:
                        raise
                    logger.warning("step %d: the save failed, attempt %d follows: %s", step, attempt + 1, error)
                time.sleep(attempt * _PAUSE_S)
        finally:
            self._staged.release()

    def end(self) -> None:
        """Let the writer process unmap the snapshot. Called after the future of the save has its result."""
        self._note_plan()
        with contextlib.suppress(WriterFailedError):
            self._resources.writer.call(messages.Drop(), timeout_s=self._timeout_s)

    def settings(self) -> Mapping[str, object]:
        """Complete the copy of the state, and return the settings that must be equal on all ranks."""
        self._staged.snapshots()
        return {"step": self._step, "local_keys": self._staged.local_keys, "overwrite": self._overwrite}

    def admit(self, *, is_retry: bool) -> None:
        """Refuse to replace a checkpoint, unless ``overwrite`` is set or an earlier attempt of this save wrote it.

        Raises:
            CheckpointExistsError: A checkpoint of this step exists, and the save may not replace it.
        """
        root = self._resources.collective.root
        root.refuse_foreign(self._step)
        if not (self._overwrite or is_retry) and root.find(self._step) is not None:
            raise CheckpointExistsError(
                f"expected no checkpoint of this step in {root.name}, there is one; overwrite=True replaces it",
                step=self._step,
            )

    def take(self) -> TakenSnapshot:
        """Pass the descriptors of the snapshot to the writer process, which maps the snapshot's memory."""
        self._resources.start_writer()
        snapshots = self._snapshots = self._staged.snapshots()
        taken = self._ask(
            messages.Take(
                rank=self._resources.agreement.rank,
                starts=tuple(snapshot.start for snapshot in snapshots),
                num_bytes=tuple(snapshot.num_bytes for snapshot in snapshots),
                hash_name=self._resources.trust.hash_name,
            ),
            messages.Taken,
            [snapshot.descriptor for snapshot in snapshots],
        )
        return TakenSnapshot(taken.structure, taken.values, self._resources.writer.number)

    def header(self) -> bytes:
        """Return the safetensors headers of all parts of the snapshot."""
        return msgspec.msgpack.encode([_header_of(snapshot) for snapshot in self._snapshots])

    def plan(self, headers: Sequence[bytes]) -> Sequence[RankPlan]:
        """Let the first rank's writer process divide the work among the ranks."""
        by_rank = tuple(decode_message(each, _header_decoder) for each in headers)
        return self._ask(messages.Plan(by_rank, self._resources.consolidate), messages.RankPlans).plans

    def digest(self, plan: RankPlan) -> bytes:
        """Return digests of the items that other ranks also have."""
        return self._ask(messages.Digest(plan.compared), messages.Bytes).content

    def compare(self, digests: Sequence[bytes]) -> None:
        """Compare the digests of all ranks in the first rank's writer process.

        Raises:
            ReplicasDivergedError: An item differs between the ranks that have it.
        """
        self._ask(messages.Compare(tuple(digests)), messages.Done)

    def write(self, location: str, plan: RankPlan) -> Callable[[], bytes]:
        """Write this rank's own files and, together with the other ranks, the consolidated files.

        Returns:
            A function that returns the list of files. `CollectiveWrite.commit` calls it on the first rank.
        """
        agreement, trust = self._resources.agreement, self._resources.trust
        if plan.files:
            create = messages.Create(location)
            agreement.on_first("create the consolidated files", lambda: self._ask(create, messages.Done))
        more_s = sum(snapshot.num_bytes for snapshot in self._staged.snapshots()) / _LEAST_BYTES_PER_S
        writer = self._resources.writer
        if self._resources.take_damage():
            writer.last = ""
        request = messages.Write(location, plan, writer.last)
        written = agreement.run("write", lambda: self._ask(request, messages.Written, more_s=more_s))
        consolidated: list[bytes] = []
        if plan.files:
            # Several ranks have written each of these files. One rank rereads and digests it.
            reread = messages.Reread(location, plan.files[agreement.rank :: agreement.size])
            more_s = MAX_TIMEOUTS * self._timeout_s
            own = agreement.run("digest consolidated files", lambda: self._ask(reread, messages.Written, more_s=more_s))
            consolidated = agreement.gather("gather their digests", msgspec.msgpack.encode(own))
        gathered = agreement.gather("gather what was written", msgspec.msgpack.encode(written))

        def describe() -> bytes:
            body = self._ask(
                messages.Describe(
                    location=location,
                    step=self._step,
                    local_keys=self._staged.local_keys,
                    written=tuple(gathered),
                    reread=tuple(consolidated),
                    job=trust.job if trust.keys is not None else "",
                ),
                messages.Bytes,
            ).content
            # This process signs the list: the writer process never has the keys.
            return trust.seal(body)

        return describe

    def _note_plan(self) -> None:
        if not self.planned.done():
            self.planned.set_result(None)

    def _ask(
        self, request: WriterRequest, expected: type[A], descriptors: Sequence[int] = (), *, more_s: float = 0.0
    ) -> A:
        """Send a request to the writer process. The answer must arrive within the store's timeout plus ``more_s``."""
        check, timeout_s = self._resources.agreement.check_others, self._timeout_s + more_s
        answer = self._resources.writer.call(request, descriptors, timeout_s=timeout_s, check=check)
        assert isinstance(answer, expected), "each request has its own type of answer"
        return answer


def _header_of(snapshot: SnapshotLease) -> bytes:
    num_bytes = int.from_bytes(os.pread(snapshot.descriptor, 8, snapshot.start), "little")
    return os.pread(snapshot.descriptor, num_bytes, snapshot.start + 8)
