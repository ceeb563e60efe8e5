"""What a checkpoint adds to the phases of a collective write: a writer process that holds, digests and writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from ft_transport.checkpoint.collective_write import TakenSnapshot
from ft_transport.checkpoint.digested_file import write_small
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.manifest import MANIFEST_NAME
from ft_transport.checkpoint.plan import RankPlan
from ft_transport.checkpoint.signing import Trust
from ft_transport.checkpoint.staging import StagedState
from ft_transport.checkpoint.writer_messages import (
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
    WriterRequest,
    Written,
    encode_written,
)
from ft_transport.checkpoint.writer_process import WriterProcess
from ft_transport.coordination.consensus import Agreement
from ft_transport.coordination.plain_values import from_msgpack
from ft_transport.errors import CheckpointExistsError, WriterFailedError
from ft_transport.transfer.server import SnapshotLease

A = TypeVar("A", bound=WriterAnswer)

MAX_TIMEOUTS: Final = 10
"""Rereading what was written, or deleting old checkpoints, may take this many times ``timeout``."""
_LEAST_BYTES_PER_S: Final = 1 << 20
"""A disk that takes less is taken for one that hangs."""

_header_decoder: Final = msgspec.msgpack.Decoder(tuple[bytes, ...])


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What is to be saved.

    Attributes:
        step: The committed step.
        staged: The state of this rank; released by the caller.
        overwrite: Whether a checkpoint of this step may be replaced.
    """

    step: int
    staged: StagedState
    overwrite: bool


class CheckpointStorage:
    """The `StorageWriter` of checkpoints: asks this rank's writer process. Used by one thread.

    Args:
        agreement: Of the group, for this thread alone.
        directory: Used on the first rank alone.
        writer: This rank's writer process.
        timeout_s: For the writer's answers; for files, as long again as they take at 1 MiB/s.
        consolidate: Path of the part of the state that also goes to consolidated files.
        trust: Signs the list of files.
        is_private: Whether nobody but its owner may read that; else the umask says who may.
        after_commit: Called on the first rank with the step of a checkpoint that is complete, before any rank is told.
    """

    def __init__(
        self,
        *,
        agreement: Agreement,
        directory: NumberedDirectory,
        writer: WriterProcess,
        timeout_s: float,
        consolidate: str | None,
        trust: Trust,
        is_private: bool,
        after_commit: Callable[[int], None],
    ) -> None:
        self._agreement = agreement
        self._directory = directory
        self._writer = writer
        self._timeout_s = timeout_s
        self._consolidate = consolidate
        self._trust = trust
        self._is_private = is_private
        self._after_commit = after_commit
        self._files: Sequence[SnapshotLease] = ()

    def start_writer(self) -> None:
        """Makes sure that there is a writer.

        Raises:
            WriterFailedError: None could be started.
        """
        if not self._writer.is_alive():
            self._writer.start(self._timeout_s)

    def drop(self) -> None:
        """Lets the writer give back the memory of the last save."""
        with contextlib.suppress(WriterFailedError):
            self._ask(Drop(), Done)

    def settings(self, request: SaveRequest) -> Mapping[str, object]:
        """See `StorageWriter`."""
        request.staged.files()
        return {"step": request.step, "local_keys": request.staged.local_keys, "overwrite": request.overwrite}

    def admit(self, request: SaveRequest, *, is_retry: bool) -> None:
        """See `StorageWriter`.

        Raises:
            CheckpointExistsError: There is one of this step, and it may not be replaced.
        """
        self._directory.refuse_foreign(request.step)
        if not (request.overwrite or is_retry) and self._directory.find(request.step) is not None:
            raise CheckpointExistsError(
                f"expected no checkpoint of this step in {self._directory.root}, there is one; overwrite=True "
                "replaces it",
                step=request.step,
            )

    def take(self, request: SaveRequest) -> TakenSnapshot:
        """See `StorageWriter`."""
        self.start_writer()
        files = self._files = request.staged.files()
        taken = self._ask(
            Take(
                rank=self._agreement.rank,
                starts=tuple(file.start for file in files),
                num_bytes=tuple(file.num_bytes for file in files),
                hash_name=self._trust.hash_name,
            ),
            Taken,
            descriptors=[file.descriptor for file in files],
        )
        return TakenSnapshot(taken.structure, taken.values, self._writer.number)

    def header(self) -> bytes:
        """See `StorageWriter`: of each part of the snapshot, from the memory that the writer has mapped as well."""
        return msgspec.msgpack.encode([_header_of(file) for file in self._files])

    def plan(self, request: SaveRequest, headers: Sequence[bytes]) -> Sequence[RankPlan]:
        """See `StorageWriter`."""
        del request
        by_rank = tuple(from_msgpack(each, _header_decoder) for each in headers)
        return self._ask(Plan(by_rank, self._consolidate), RankPlans).plans

    def digest(self, plan: RankPlan) -> bytes:
        """See `StorageWriter`."""
        (digests,) = self._ask(Digest(plan.compared), Bytes, check=self._agreement.check_others).parts
        return digests

    def compare(self, digests: Sequence[bytes]) -> None:
        """See `StorageWriter`."""
        self._ask(Compare(tuple(digests)), Done)

    def write(self, request: SaveRequest, directory: Path, plan: RankPlan) -> Callable[[], None]:
        """See `StorageWriter`: a file of each rank, and of all ranks together the consolidated ones."""
        agreement = self._agreement
        created: Written | None = None
        if plan.files:
            created = agreement.run_on_first(
                "create the consolidated files", lambda: self._ask(Create(str(directory)), Written)
            )
        num_bytes = sum(file.num_bytes for file in request.staged.files())
        written = agreement.run(
            "write",
            lambda: self._ask(
                Write(str(directory), plan),
                Written,
                check=agreement.check_others,
                timeout_s=self._timeout_s + num_bytes / _LEAST_BYTES_PER_S,
            ),
        )
        consolidated: list[bytes] = []
        if plan.files:
            # Several ranks have written them: each is digested as it is, by one rank.
            reread = agreement.run(
                "digest the consolidated files",
                lambda: self._ask(
                    Reread(str(directory), plan.files[agreement.rank :: agreement.size]),
                    Written,
                    check=agreement.check_others,
                    timeout_s=MAX_TIMEOUTS * self._timeout_s,
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
                    step=request.step,
                    local_keys=request.staged.local_keys,
                    written=tuple(gathered),
                    reread=tuple(consolidated),
                    job=self._trust.job if self._trust.keys is not None else "",
                ),
                Bytes,
            ).parts
            # The keys stay in this process.
            write_small(directory / MANIFEST_NAME, self._trust.seal(body), is_private=self._is_private)

        return describe

    def committed(self, request: SaveRequest) -> None:
        """See `StorageWriter`."""
        self._after_commit(request.step)

    def _ask(
        self,
        request: WriterRequest,
        expected: type[A],
        *,
        descriptors: Sequence[int] = (),
        check: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
    ) -> A:
        answer = self._writer.call(
            request, descriptors, timeout_s=self._timeout_s if timeout_s is None else timeout_s, check=check
        )
        assert isinstance(answer, expected), "the answer to it"
        return answer


def _header_of(file: SnapshotLease) -> bytes:
    num_bytes = int.from_bytes(os.pread(file.descriptor, 8, file.start), "little")
    return os.pread(file.descriptor, num_bytes, file.start + 8)
