"""One save of a checkpoint store: a copy of the state, and the steps in which a writer process writes it.

A state is copied before training goes on; the thread of the store turns the copy into snapshot files, which the writer
process holds, digests and writes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from ft_transport.checkpoint.collective_write import CollectiveWrite, TakenSnapshot
from ft_transport.checkpoint.digested_file import write_small
from ft_transport.checkpoint.manifest import MANIFEST_NAME, Trust
from ft_transport.checkpoint.plan import RankPlan
from ft_transport.checkpoint.settings import StoreSettings
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
)
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import from_msgpack
from ft_transport.errors import CheckpointError, CheckpointExistsError, SnapshotError, TransportError, WriterFailedError
from ft_transport.runtime.signal_safe import SafeFuture
from ft_transport.settings import default_num_threads
from ft_transport.state.snapshot import PendingSnapshot, Taking
from ft_transport.state.stager import Stager
from ft_transport.transfer.server import SnapshotLease
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.snapshot import MemoryFile

logger = logging.getLogger(__name__)

State: TypeAlias = Mapping[str, object] | Callable[[], Mapping[str, object]]
"""A state, or a function that returns it."""
Lease: TypeAlias = Callable[[], SnapshotLease]
"""Returns a snapshot that a transport serves, and may wait for it."""

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


class StagedState:
    """The parts of one save, in order. Only the store's thread calls the methods.

    Attributes:
        local_keys: Top-level keys of the rank-local part.
        parts: Copies, or functions that return a snapshot that a transport serves.
        failure: Why the state could not be copied; `files` raises it, so that this rank can report it to the others.
    """

    def __init__(self) -> None:
        self.local_keys: tuple[str, ...] = ()
        self.parts: list[PendingSnapshot | Lease] = []
        self.failure: Exception | None = None
        self._leases: list[SnapshotLease] = []

    def check(self) -> None:
        """Raise an error that lies in the state itself, and that would prevent later saves too.

        Raises:
            SnapshotError: The state contains a value that cannot be saved; the path names it.
            CheckpointError: The state is no dict.
        """
        error = self.failure
        is_of_state = isinstance(error, SnapshotError) and error.path is not None
        if error is not None and (is_of_state or isinstance(error, CheckpointError)):
            raise error

    def files(self) -> list[SnapshotLease]:
        """Return the snapshots, by part; the first call completes them, and `release` releases them.

        Raises:
            Exception: Part of the state could not be copied; every call raises the same error.
        """
        try:
            for part in self.parts[len(self._leases) :] if self.failure is None else ():
                self._leases.append(_finished(part) if isinstance(part, PendingSnapshot) else part())
        except Exception as error:
            self.failure = error
        if self.failure is not None:
            raise self.failure
        return self._leases

    def release(self) -> None:
        """Free all memory."""
        for part in self.parts:
            if isinstance(part, PendingSnapshot):
                part.abandon()
        for lease in self._leases:
            lease.release()
        # The error of a save refers to the frames that it passed, and so to this object.
        self.failure = None
        self.parts.clear()
        self._leases.clear()


class StateStager:
    """Copies states in two parts, shared and rank-local. For the training thread.

    Attributes:
        rank_local: Top-level keys of the state whose values are rank-local.
    """

    def __init__(self) -> None:
        self.rank_local: tuple[str, ...] = ()
        self._shared, self._local = (
            Stager(max_snapshots=1, num_threads=default_num_threads(), chunk_bytes=CHUNK_BYTES, is_digested=False)
            for _ in range(2)
        )

    def prefault(self, state: Mapping[str, object]) -> None:
        """Prefault the memory for the shared part of a state in the background."""
        self._shared.prefault(self._split(state)[0])

    def stage(self, step: int, state: State | None, local: State | None, lease: Lease | None = None) -> StagedState:
        """Copy a state; the `StagedState` raises the errors.

        Args:
            step: The committed step.
            state: The state; ``None`` with ``lease``.
            local: More rank-local values.
            lease: Takes the place of the shared part; `StagedState.files` calls it.
        """
        staged = StagedState()
        try:
            shared, own = self._split(_called(state)) if lease is None else ({}, {})
            own.update(_called(local) if local is not None else {})
            staged.parts.append(lease if lease is not None else self._shared.begin(Taking(step=step, state=shared)))
            for key in own:
                # The list of files contains the keys as JSON.
                if not isinstance(key, str) or any("\ud800" <= character <= "\udfff" for character in key):
                    raise CheckpointError(
                        f"expected text without lone surrogates as keys of what a rank has for itself, got {key!r}"
                    )
            if own:
                staged.local_keys = tuple(own)
                staged.parts.append(self._local.begin(Taking(step=step, state=own)))
        except Exception as error:
            staged.failure = error
        return staged

    def close(self) -> None:
        """Free the memory."""
        self._shared.close()
        self._local.close()

    def _split(self, state: Mapping[str, object]) -> tuple[dict[str, object], dict[Any, object]]:
        """Return the shared and the rank-local part of a state."""
        shared = {key: value for key, value in state.items() if key not in self.rank_local}
        return shared, {key: state[key] for key in self.rank_local if key in state}


def _called(state: object) -> Mapping[str, object]:
    value = state() if callable(state) else state
    if not isinstance(value, Mapping):
        raise CheckpointError(f"expected a dict as state, got {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMeans:
    """The resources that all saves of a store share on one rank.

    Attributes:
        agreement: The group's agreement, for the store's thread only.
        collective: The collective write into the store's directory.
        writer: This rank's writer process.
        settings: The store's settings.
        trust: Signs the list of files.
        consolidate: Path of the part of the state that also goes to consolidated files.
        retire_old: Called on the first rank with the step of a complete checkpoint, before any rank learns of it.
    """

    agreement: Agreement
    collective: CollectiveWrite
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
        planned: Done as soon as the ranks have planned the save, or the save has ended.
    """

    def __init__(self, means: SaveMeans, step: int, staged: StagedState, *, overwrite: bool) -> None:
        self.planned: Final[Future[None]] = SafeFuture()
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
                        self._note_plan()
                        collective.compare(self)
                        describe = self.write(directory, plan)
                        collective.commit(step, describe, lambda: means.retire_old(step))
                        return
                except TransportError as error:
                    # The vote decides by type and errno (`coordination.votes`), the same on all ranks.
                    if not means.agreement.may_try_again or attempt == _MAX_ATTEMPTS:
                        raise
                    attempt += 1
                    logger.warning("step %d: writing it failed, attempt %d follows: %s", step, attempt, error)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            self._staged.release()

    def end(self) -> None:
        """Let the writer free the memory of this save, whose outcome the trainer can see."""
        self._note_plan()
        with contextlib.suppress(WriterFailedError):
            self._means.writer.call(Drop(), timeout_s=self._timeout_s)

    def settings(self) -> Mapping[str, object]:
        """See `WriteJob`."""
        self._staged.files()
        return {"step": self._step, "local_keys": self._staged.local_keys, "overwrite": self._overwrite}

    def admit(self, *, is_retry: bool) -> None:
        """See `WriteJob`.

        Raises:
            CheckpointExistsError: A checkpoint of this step exists, and the save may not replace it.
        """
        directory = self._means.collective.directory
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
            [file.descriptor for file in files],
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
        return self._ask(Digest(plan.compared), Bytes).content

    def compare(self, digests: Sequence[bytes]) -> None:
        """See `WriteJob`."""
        self._ask(Compare(tuple(digests)), Done)

    def write(self, directory: Path, plan: RankPlan) -> Callable[[], None]:
        """Write each rank's own file, and the consolidated files that all ranks write together.

        Returns:
            The first rank's remaining work in the commit: the list of files.
        """
        agreement, trust, path = self._means.agreement, self._means.trust, str(directory)
        if plan.files:
            agreement.on_first("create the consolidated files", lambda: self._ask(Create(path), Done))
        more_s = sum(file.num_bytes for file in self._staged.files()) / _LEAST_BYTES_PER_S
        written = agreement.run("write", lambda: self._ask(Write(path, plan), Written, more_s=more_s))
        consolidated: list[bytes] = []
        if plan.files:
            # Several ranks have written these files; one rank digests each as it is on disk.
            names = plan.files[agreement.rank :: agreement.size]
            more_s = MAX_TIMEOUTS * self._timeout_s
            reread = agreement.run(
                "digest the consolidated files", lambda: self._ask(Reread(path, names), Written, more_s=more_s)
            )
            consolidated = agreement.gather("gather their digests", msgspec.msgpack.encode(reread))
        gathered = agreement.gather("gather what was written", msgspec.msgpack.encode(written))

        def describe() -> None:
            body = self._ask(
                Describe(
                    directory=path,
                    step=self._step,
                    local_keys=self._staged.local_keys,
                    written=tuple(gathered),
                    reread=tuple(consolidated),
                    job=trust.job if trust.keys is not None else "",
                ),
                Bytes,
            ).content
            # The keys stay in this process.
            write_small(directory / MANIFEST_NAME, trust.seal(body), is_private=self._means.settings.private)

        return describe

    def _note_plan(self) -> None:
        if not self.planned.done():
            self.planned.set_result(None)

    @property
    def _timeout_s(self) -> float:
        return self._means.settings.timeout.total_seconds()

    def _ask(
        self, request: WriterRequest, expected: type[A], descriptors: Sequence[int] = (), *, more_s: float = 0.0
    ) -> A:
        """Return the answer of the writer, which may take the timeout of the store, and ``more_s``."""
        check, timeout_s = self._means.agreement.check_others, self._timeout_s + more_s
        answer = self._means.writer.call(request, descriptors, timeout_s=timeout_s, check=check)
        assert isinstance(answer, expected), "the answer to it"
        return answer


def _header_of(file: SnapshotLease) -> bytes:
    num_bytes = int.from_bytes(os.pread(file.descriptor, 8, file.start), "little")
    return os.pread(file.descriptor, num_bytes, file.start + 8)


def _finished(pending: PendingSnapshot) -> SnapshotLease:
    snapshot = pending.finish()
    memory = snapshot.memory
    assert isinstance(memory, MemoryFile), "nothing of it is shared"
    return SnapshotLease(
        step=snapshot.step,
        descriptor=memory.descriptor,
        start=memory.start,
        num_bytes=snapshot.total_bytes,
        release=snapshot.close,
    )
