"""One save of a checkpoint store: its steps, and a writer process that holds, digests and writes the snapshot."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from ft_transport.checkpoint.collective_write import CollectiveWrite, TakenSnapshot
from ft_transport.checkpoint.digested_file import write_small
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.manifest import MANIFEST_NAME, Trust
from ft_transport.checkpoint.plan import RankPlan
from ft_transport.checkpoint.settings import StoreSettings
from ft_transport.checkpoint.staging import StagedState
from ft_transport.checkpoint.writer_process import (
    Bytes,
    Compare,
    Create,
    Describe,
    Digest,
    Done,
    Drop,
    Plan,
    RankPlans,
    Reread,
    Take,
    Taken,
    Write,
    WriterAnswer,
    WriterProcess,
    WriterRequest,
    Written,
    encode_written,
)
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import from_msgpack
from ft_transport.errors import CheckpointExistsError, DeadlineExceededError, TransportError, WriterFailedError
from ft_transport.runtime.signal_safe import SafeFuture
from ft_transport.settings import check_duration
from ft_transport.transfer.server import SnapshotLease

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=WriterAnswer)

MAX_TIMEOUTS: Final = 10
"""Rereading written files, or deleting old checkpoints, may take this many times ``timeout``."""
_MAX_ATTEMPTS: Final = 3
"""Number of attempts of a save, if its errors may pass."""
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_LEAST_BYTES_PER_S: Final = 1 << 20
"""A slower disk counts as hanging."""

_header_decoder: Final = msgspec.msgpack.Decoder(tuple[bytes, ...])


class SaveHandle:
    """A save that runs in the background of training. Thread-safe.

    Attributes:
        step: Its step.
        is_skipped: Whether nothing is saved: the save before was not finished, or the checkpoint is the resumed one.
    """

    def __init__(self, step: int, *, is_skipped: bool = False) -> None:
        self.step = step
        self.is_skipped = is_skipped
        self.planned: Future[None] = SafeFuture()
        self.future: Future[None] = SafeFuture()
        self.future.set_running_or_notify_cancel()
        if is_skipped:
            self.end(None)

    def note_plan(self) -> None:
        """Note that the ranks have planned the save. Idempotent."""
        if not self.planned.done():
            self.planned.set_result(None)

    def end(self, error: BaseException | None) -> None:
        """Note the outcome."""
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)
        self.note_plan()

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self.future.done()

    def result(self, timeout: timedelta | None = None) -> None:
        """Wait until the checkpoint is complete.

        Args:
            timeout: ``None`` waits as long as the ranks show heartbeats.

        Raises:
            TransportError: The save failed; the same error on every rank.
            DeadlineExceededError: The save is still running.
        """
        if timeout is not None:
            check_duration("timeout", timeout, at_least=timedelta(0))
        try:
            self.future.result(None if timeout is None else timeout.total_seconds())
        except FutureTimeoutError:
            if self.future.done():
                raise  # This is the save's own error.
            raise DeadlineExceededError(f"expected the checkpoint within {timeout}", step=self.step) from None

    def exception(self) -> BaseException | None:
        """Wait, and return the error of the save, ``None`` if it succeeded."""
        return self.future.exception()


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMeans:
    """The resources that all saves of a store share on one rank.

    Attributes:
        agreement: The group's agreement, for the store's thread only.
        collective: The collective write into the store's directory.
        directory: Used on the first rank only.
        writer: This rank's writer process.
        settings: The store's settings.
        trust: Signs the list of files.
        consolidate: Path of the part of the state that also goes to consolidated files.
        retire_old: Called on the first rank with the step of a complete checkpoint, before any rank learns of it.
    """

    agreement: Agreement
    collective: CollectiveWrite
    directory: NumberedDirectory
    writer: WriterProcess
    settings: StoreSettings
    trust: Trust
    consolidate: str | None
    retire_old: Callable[[int], None]

    def start_writer(self) -> None:
        """Make sure that a writer process exists.

        Raises:
            WriterFailedError: The process could not be started.
        """
        if not self.writer.is_alive():
            self.writer.start(self.settings.timeout.total_seconds())


class SaveJob:
    """One save: the `WriteJob` whose snapshot lies in this rank's writer process. For the store's thread.

    Args:
        means: The store's resources.
        step: The committed step.
        staged: The state of this rank; `run` releases it.
        overwrite: Whether the save may replace a checkpoint of this step.

    Attributes:
        handle: Shows the trainer the progress of the save.
    """

    def __init__(self, means: SaveMeans, step: int, staged: StagedState, *, overwrite: bool) -> None:
        self.handle: Final = SaveHandle(step)
        self._means = means
        self._step = step
        self._staged = staged
        self._overwrite = overwrite
        self._files: Sequence[SnapshotLease] = ()

    def run(self) -> None:
        """Save the state: stage, agree, write and commit; start over after a failure that may pass.

        Raises:
            TransportError: The save failed; the same error on every rank.
        """
        means, collective, step = self._means, self._means.collective, self._step
        means.agreement.step = step
        attempt, pause_s = 1, _FIRST_PAUSE_S
        try:
            while True:
                try:
                    with collective.attempt(step):
                        collective.stage(self)
                        directory, plan = collective.agree(step, self, is_retry=attempt > 1)
                        self.handle.note_plan()
                        collective.compare(self)
                        describe = self.write(directory, plan)
                        collective.commit(step, describe, lambda: means.retire_old(step))
                        return
                except TransportError as error:
                    # The vote decides by type and errno, the same on all ranks.
                    if not means.agreement.may_try_again or attempt == _MAX_ATTEMPTS:
                        raise
                    attempt += 1
                    logger.warning("step %d: writing it failed, attempt %d follows: %s", step, attempt, error)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._staged.release()

    def drop(self) -> None:
        """Let the writer free the memory of this save."""
        with contextlib.suppress(WriterFailedError):
            self._ask(Drop(), Done)

    def settings(self) -> Mapping[str, object]:
        """See `WriteJob`."""
        self._staged.files()
        return {"step": self._step, "local_keys": self._staged.local_keys, "overwrite": self._overwrite}

    def admit(self, *, is_retry: bool) -> None:
        """See `WriteJob`.

        Raises:
            CheckpointExistsError: A checkpoint of this step exists, and the save may not replace it.
        """
        directory = self._means.directory
        directory.refuse_foreign(self._step)
        if not (self._overwrite or is_retry) and directory.find(self._step) is not None:
            raise CheckpointExistsError(
                f"expected no checkpoint of this step in {directory.root}, there is one; overwrite=True replaces it",
                step=self._step,
            )

    def take(self) -> TakenSnapshot:
        """See `WriteJob`."""
        self._means.start_writer()
        files = self._files = self._staged.files()
        taken = self._ask(
            Take(
                rank=self._means.agreement.rank,
                starts=tuple(file.start for file in files),
                num_bytes=tuple(file.num_bytes for file in files),
                hash_name=self._means.trust.hash_name,
            ),
            Taken,
            descriptors=[file.descriptor for file in files],
        )
        return TakenSnapshot(taken.structure, taken.values, self._means.writer.number)

    def header(self) -> bytes:
        """See `WriteJob`; reads the headers of all parts of the snapshot in memory that the writer has also mapped."""
        return msgspec.msgpack.encode([_header_of(file) for file in self._files])

    def plan(self, headers: Sequence[bytes]) -> Sequence[RankPlan]:
        """See `WriteJob`."""
        by_rank = tuple(from_msgpack(each, _header_decoder) for each in headers)
        return self._ask(Plan(by_rank, self._means.consolidate), RankPlans).plans

    def digest(self, plan: RankPlan) -> bytes:
        """See `WriteJob`."""
        (digests,) = self._ask(Digest(plan.compared), Bytes, check=self._means.agreement.check_others).parts
        return digests

    def compare(self, digests: Sequence[bytes]) -> None:
        """See `WriteJob`."""
        self._ask(Compare(tuple(digests)), Done)

    def write(self, directory: Path, plan: RankPlan) -> Callable[[], None]:
        """Write each rank's own file, and the consolidated files that all ranks write together.

        Returns:
            The first rank's remaining work in the commit: the list of files.
        """
        agreement, trust, timeout_s = self._means.agreement, self._means.trust, self._timeout_s
        created: Written | None = None
        if plan.files:
            created = agreement.on_first(
                "create the consolidated files", lambda: self._ask(Create(str(directory)), Written)
            )
        num_bytes = sum(file.num_bytes for file in self._staged.files())
        written = agreement.run(
            "write",
            lambda: self._ask(
                Write(str(directory), plan),
                Written,
                check=agreement.check_others,
                timeout_s=timeout_s + num_bytes / _LEAST_BYTES_PER_S,
            ),
        )
        consolidated: list[bytes] = []
        if plan.files:
            # Several ranks have written these files; one rank digests each as it is on disk.
            reread = agreement.run(
                "digest the consolidated files",
                lambda: self._ask(
                    Reread(str(directory), plan.files[agreement.rank :: agreement.size]),
                    Written,
                    check=agreement.check_others,
                    timeout_s=MAX_TIMEOUTS * timeout_s,
                ),
            )
            consolidated = agreement.gather("gather their digests", encode_written(reread))
            if created is not None:
                consolidated.insert(0, encode_written(created))
        gathered = agreement.gather("gather what was written", encode_written(written))

        def describe() -> None:
            (body,) = self._ask(
                Describe(
                    directory=str(directory),
                    step=self._step,
                    local_keys=self._staged.local_keys,
                    written=tuple(gathered),
                    reread=tuple(consolidated),
                    job=trust.job if trust.keys is not None else "",
                ),
                Bytes,
            ).parts
            # The keys stay in this process.
            write_small(directory / MANIFEST_NAME, trust.seal(body), is_private=self._means.settings.private)

        return describe

    @property
    def _timeout_s(self) -> float:
        return self._means.settings.timeout.total_seconds()

    def _ask(
        self,
        request: WriterRequest,
        expected: type[A],
        *,
        descriptors: Sequence[int] = (),
        check: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
    ) -> A:
        answer = self._means.writer.call(
            request, descriptors, timeout_s=self._timeout_s if timeout_s is None else timeout_s, check=check
        )
        assert isinstance(answer, expected), "the answer to it"
        return answer


def _header_of(file: SnapshotLease) -> bytes:
    num_bytes = int.from_bytes(os.pread(file.descriptor, 8, file.start), "little")
    return os.pread(file.descriptor, num_bytes, file.start + 8)
