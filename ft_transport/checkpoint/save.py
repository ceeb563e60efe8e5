"""One save, phase by phase, on the thread of its own that each rank has for that.

Every phase ends in a vote (``coordination.consensus``). An exchange of data between ranks is a phase of its own, which
begins only after all have got there. An attempt that fails with what may pass is begun again from the start, by all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from ft_transport.checkpoint.directory import CheckpointDirectory
from ft_transport.checkpoint.save_plan import RankPlan
from ft_transport.checkpoint.writer_messages import (
    Answer,
    Bytes,
    Compare,
    Create,
    Describe,
    Digest,
    Drop,
    Headers,
    Plan,
    RankPlans,
    Request,
    Reread,
    Take,
    Taken,
    Write,
    Written,
    encode_written,
)
from ft_transport.checkpoint.writer_process import WriterProcess
from ft_transport.coordination.consensus import Agreement
from ft_transport.coordination.exchange import Exchange
from ft_transport.errors import CheckpointError, TransportError, WriterFailedError

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_LOOK_S: Final = 0.02
_MAX_TIMEOUTS: Final = 10
_LEAST_BYTES_PER_S: Final = 1 << 20
"""A disk that takes less is taken for one that hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """A snapshot as the writer needs it: ``num_bytes`` of a memory file, from ``start`` on, are a safetensors file."""

    descriptor: int
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What is to be saved.

    Attributes:
        step: The committed step.
        snapshots: By part; an error if this rank could not take them.
        local_keys: Top-level keys of the state whose values each rank has for itself.
        overwrite: Whether a checkpoint of this step may be replaced.
    """

    step: int
    snapshots: Sequence[SnapshotFile] | Exception
    local_keys: tuple[str, ...]
    overwrite: bool


class _Common(Struct, frozen=True, array_like=True):
    """What all ranks have to say alike."""

    step: int
    local_keys: tuple[str, ...]
    overwrite: bool


class _Place(Struct, frozen=True, array_like=True):
    """Where to write, and the name of a file there by which it is known."""

    directory: str
    marker: str


class _HeldSnapshot(Struct, frozen=True, array_like=True):
    """What a rank's writer said of its snapshots, and which of the rank's writers it was."""

    structure: int
    values: int
    writer: int


class _Assigned(Struct, frozen=True, array_like=True):
    """A rank's share, and whether any rank has something to compare."""

    share: RankPlan
    is_compared: bool


class Saver:
    """Saves for one rank of a group. Used by one thread.

    Args:
        agreement: Of the group, for this thread alone.
        exchange: Of the group, for this thread alone.
        directory: Used on the first rank alone.
        writer: This rank's writer process.
        timeout_s: For the writer's answers; for files, as long again as they take at 1 MiB/s.
        visible_s: How long a directory may take to be seen by all ranks.
        max_attempts: How often a save is tried.
        after_commit: Called on the first rank with the step of a checkpoint that is complete, before any rank is told.
        consolidated: Path of the part of the state that also goes to consolidated files.
    """

    def __init__(
        self,
        *,
        agreement: Agreement,
        exchange: Exchange,
        directory: CheckpointDirectory,
        writer: WriterProcess,
        timeout_s: float,
        visible_s: float,
        max_attempts: int,
        after_commit: Callable[[int], None],
        consolidated: str | None = None,
    ) -> None:
        self._agreement = agreement
        self._exchange = exchange
        self._directory = directory
        self._writer = writer
        self._timeout_s = timeout_s
        self._visible_s = visible_s
        self._max_attempts = max_attempts
        self._after_commit = after_commit
        self._consolidated = consolidated
        self._plan_key: tuple[object, ...] | None = None
        self._assigned = _Assigned(RankPlan(), False)

    def save(self, request: SaveRequest) -> None:
        """Saves; returns when the checkpoint is complete.

        Raises:
            TransportError: It could not be saved; the same error on every rank.
        """
        agreement = self._agreement
        agreement.step = request.step
        pause_s = _FIRST_PAUSE_S
        for attempt in range(1, self._max_attempts + 1):
            try:
                self._attempt(request)
                return
            except TransportError as error:
                may_try_again = agreement.may_try_again and attempt < self._max_attempts
                self._plan_key = None
                self._exchange.reset(agreement.sequence)
                self._clean_up(request.step)
                if not may_try_again:
                    raise
                logger.warning("step %d: saving it failed, attempt %d follows: %s", request.step, attempt + 1, error)
                # What there is of this step now, this save may have made.
                request = dataclasses.replace(request, overwrite=True)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def showing_life(self, action: Callable[[], None]) -> None:
        """Runs ``action`` on this rank; the others are shown that it is alive."""
        self._agreement.showing_life(action, _MAX_TIMEOUTS * self._timeout_s)

    def let_go(self) -> None:
        """Lets the writer give back the memory of the last save."""
        with contextlib.suppress(WriterFailedError):
            self._ask(Drop())

    def start_writer(self) -> None:
        """Makes sure that there is a writer.

        Raises:
            WriterFailedError: None could be started.
        """
        if not self._writer.is_alive():
            self._writer.start(self._timeout_s)

    def _attempt(self, request: SaveRequest) -> None:
        run_on_all_ranks = self._agreement.run_on_all_ranks
        self._check_common(request)
        place = msgspec.msgpack.decode(
            self._agreement.on_first("set up the directory", lambda: self._set_up(request)), type=_Place
        )
        directory = Path(place.directory)
        run_on_all_ranks("find the directory", lambda: self._find(directory, place.marker))
        taken = run_on_all_ranks("hand the snapshot to the writer", lambda: self._hand_over(request))
        self._plan([msgspec.msgpack.decode(each, type=_HeldSnapshot) for each in taken])
        if self._assigned.is_compared:
            self._compare()
        written = b""

        def write() -> None:
            nonlocal written
            written = self._write(request, directory)

        created = b""

        def create() -> None:
            nonlocal created
            files = self._ask(Create(place.directory))
            assert isinstance(files, Written), "the answer to it"
            created = encode_written(files)

        if self._assigned.share.files:
            self._agreement.on_first("create the consolidated files", create)
        run_on_all_ranks("write", write)
        reread = self._reread(directory) if self._assigned.share.files else []
        gathered: list[bytes] | None = None

        def gather() -> None:
            nonlocal gathered
            gathered = self._exchange.gather(written)

        run_on_all_ranks("gather what was written", self._exchange.ending_on_failure(gather))
        self._agreement.on_first(
            "commit", lambda: self._commit(request, place, gathered or [], [created, *reread] if created else [])
        )

    def _check_common(self, request: SaveRequest) -> None:
        """All have a snapshot, and mean the same."""

        def say() -> bytes:
            if isinstance(request.snapshots, Exception):
                raise request.snapshots
            return msgspec.msgpack.encode(_Common(request.step, request.local_keys, request.overwrite))

        said = [
            msgspec.msgpack.decode(each, type=_Common) for each in self._agreement.run_on_all_ranks("snapshot", say)
        ]
        for rank, each in enumerate(said):
            if each != said[0]:
                # The same on all ranks, since all have heard the same.
                first, other = ({name: getattr(one, name) for name in one.__struct_fields__} for one in (said[0], each))
                raise CheckpointError(
                    f"expected all ranks to save the same, got {first} on rank 0, {other} on rank {rank}"
                )

    def _set_up(self, request: SaveRequest) -> bytes:
        marker = f".set-up-{secrets.token_hex(8)}"
        directory = self._directory.begin(request.step, marker, overwrite=request.overwrite)
        return msgspec.msgpack.encode(_Place(str(directory), marker))

    def _find(self, directory: Path, marker: str) -> None:
        """A shared file system may take a moment to show what another host has made."""
        deadline_s = time.monotonic() + self._visible_s
        while not (directory / marker).exists():
            if time.monotonic() > deadline_s:
                raise FileNotFoundError(
                    errno.ENOENT,
                    "the directory that rank 0 has made is not visible here; a checkpoint needs a file system that all "
                    "ranks share",
                    str(directory),
                )
            # Its parent's listing may be a remembered one.
            with contextlib.suppress(OSError):
                os.listdir(directory.parent)
            self._agreement.check_others()
            time.sleep(_LOOK_S)

    def _hand_over(self, request: SaveRequest) -> bytes:
        assert not isinstance(request.snapshots, Exception), "all have voted for having them"
        self.start_writer()
        taken = self._ask(
            Take(
                rank=self._agreement.rank,
                starts=tuple(snapshot.start for snapshot in request.snapshots),
                num_bytes=tuple(snapshot.num_bytes for snapshot in request.snapshots),
            ),
            [snapshot.descriptor for snapshot in request.snapshots],
        )
        assert isinstance(taken, Taken), "the answer to it"
        return msgspec.msgpack.encode(_HeldSnapshot(taken.structure, taken.values, self._writer.number))

    def _plan(self, held: Sequence[_HeldSnapshot]) -> None:
        """Divides the work, if what the ranks have is not what it was at the last save."""
        key = tuple((each.structure, each.writer) for each in held)
        if key == self._plan_key and len({each.values for each in held}) == 1:
            return
        run_on_all_ranks = self._agreement.run_on_all_ranks
        headers = b""
        gathered: list[bytes] | None = None
        shares: list[bytes] | None = None
        assigned = b""

        def read_headers() -> None:
            nonlocal headers
            answer = self._ask(Headers())
            assert isinstance(answer, Bytes), "the answer to it"
            headers = msgspec.msgpack.encode(answer.parts)

        def gather() -> None:
            nonlocal gathered
            gathered = self._exchange.gather(headers)

        def plan() -> None:
            nonlocal shares
            of_ranks = [msgspec.msgpack.decode(each, type=tuple[bytes, ...]) for each in gathered or []]
            answer = self._ask(Plan(tuple(of_ranks), self._consolidated))
            assert isinstance(answer, RankPlans), "the answer to it"
            is_compared = any(share.compared for share in answer.shares)
            shares = [msgspec.msgpack.encode(_Assigned(share, is_compared)) for share in answer.shares]

        def scatter() -> None:
            nonlocal assigned
            assigned = self._exchange.scatter(shares)

        run_on_all_ranks("read the headers", read_headers)
        run_on_all_ranks("gather the headers", self._exchange.ending_on_failure(gather))
        self._agreement.on_first("plan", plan)
        run_on_all_ranks("divide the work", self._exchange.ending_on_failure(scatter))
        self._assigned = msgspec.msgpack.decode(assigned, type=_Assigned)
        self._plan_key = key

    def _reread(self, directory: Path) -> list[bytes]:
        """Files that several ranks have written are digested as they are, each by one rank."""
        own = b""
        gathered: list[bytes] | None = None
        agreement = self._agreement

        def digest() -> None:
            nonlocal own
            names = self._assigned.share.files[agreement.rank :: agreement.size]
            answer = self._ask(
                Reread(str(directory), names),
                check=agreement.check_others,
                timeout_s=_MAX_TIMEOUTS * self._timeout_s,
            )
            assert isinstance(answer, Written), "the answer to it"
            own = encode_written(answer)

        def gather() -> None:
            nonlocal gathered
            gathered = self._exchange.gather(own)

        agreement.run_on_all_ranks("digest the consolidated files", digest)
        agreement.run_on_all_ranks("gather their digests", self._exchange.ending_on_failure(gather))
        return gathered or []

    def _compare(self) -> None:
        """What several ranks have must be the same."""
        digests = b""
        gathered: list[bytes] | None = None

        def digest() -> None:
            nonlocal digests
            answer = self._ask(Digest(self._assigned.share.compared), check=self._agreement.check_others)
            assert isinstance(answer, Bytes), "the answer to it"
            (digests,) = answer.parts

        def gather() -> None:
            nonlocal gathered
            gathered = self._exchange.gather(digests)

        self._agreement.run_on_all_ranks("digest", digest)
        self._agreement.run_on_all_ranks("gather the digests", self._exchange.ending_on_failure(gather))
        self._agreement.on_first("compare", lambda: self._compare_all(gathered or []))

    def _compare_all(self, digests: Sequence[bytes]) -> None:
        self._ask(Compare(tuple(digests)))

    def _write(self, request: SaveRequest, directory: Path) -> bytes:
        assert not isinstance(request.snapshots, Exception), "all have voted for having them"
        num_bytes = sum(snapshot.num_bytes for snapshot in request.snapshots)
        written = self._ask(
            Write(str(directory), self._assigned.share),
            check=self._agreement.check_others,
            timeout_s=self._timeout_s + num_bytes / _LEAST_BYTES_PER_S,
        )
        assert isinstance(written, Written), "the answer to it"
        return encode_written(written)

    def _commit(self, request: SaveRequest, place: _Place, written: Sequence[bytes], reread: Sequence[bytes]) -> None:
        self._ask(
            Describe(
                directory=place.directory,
                step=request.step,
                local_keys=request.local_keys,
                written=tuple(written),
                reread=tuple(reread),
            )
        )
        self._directory.commit(request.step, place.marker)
        self._after_commit(request.step)

    def _clean_up(self, step: int) -> None:
        """What was written of a failed attempt is in nobody's way, but takes room."""
        if self._agreement.is_first:
            try:
                self._directory.discard(step)
            except OSError as error:
                logger.warning("step %d: what is left of a failed save could not be removed: %s", step, error)

    def _ask(
        self,
        request: Request,
        descriptors: Sequence[int] = (),
        *,
        check: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
    ) -> Answer:
        return self._writer.call(
            request, descriptors, timeout_s=self._timeout_s if timeout_s is None else timeout_s, check=check
        )
