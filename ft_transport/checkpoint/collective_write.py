"""A collective write: the ranks of a group write one numbered directory, complete for all of them or not there.

Checkpoints and published versions are written by the same steps, each of which all ranks make together. A job
(`WriteJob`) says what differs: where the snapshot lies (in a writer process, or with the calling thread), the form of
the files, and what makes them final. ``SaveJob.run`` and ``Exporter.run`` show the order:

```
 stage     every rank has its part of the snapshot, and all ranks write the same
 agree     the first rank makes the directory, and all ranks that write see it; the job takes the snapshot; the ranks
           divide the work, only where the structure is not that of the last write
 compare   what several ranks hold has to be the same, before anything is written
 write     the job's own phases
 commit    what describes the files, fsync, rename, fsync
```
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from ft_transport.checkpoint.directory import NumberedDirectory, wait_until_visible
from ft_transport.checkpoint.plan import RankPlan
from ft_transport.checkpoint.settings import compare_settings
from ft_transport.coordination.consensus import Agreement
from ft_transport.coordination.plain_values import from_msgpack
from ft_transport.runtime.regular_files import create_file

logger = logging.getLogger(__name__)

_MARKER_BITS: Final = 63


class TakenSnapshot(Struct, frozen=True, array_like=True):
    """What a rank says of its snapshot.

    Attributes:
        structure: Digest of everything but bytes and values: equal as long as the same plan will do.
        values: Digest of the values that all ranks share.
        holder: Number of the writer that holds it; another one knows no plan.
    """

    structure: int
    values: int
    holder: int


class WriteJob(Protocol):
    """One rank's part in one collective write. Every method raises what went wrong on this rank."""

    def settings(self) -> Mapping[str, object]:
        """Completes the snapshot, and returns what has to be the same on all ranks."""

    def admit(self, *, is_retry: bool) -> None:
        """On the first rank: refuses a number that must not be written."""

    def take(self) -> TakenSnapshot:
        """Takes the snapshot."""

    def header(self) -> bytes:
        """What `plan` needs of this rank's snapshot."""

    def plan(self, headers: Sequence[bytes]) -> Sequence[RankPlan]:
        """On the first rank: divides the work, by rank."""

    def digest(self, plan: RankPlan) -> bytes:
        """The digests of what other ranks hold as well."""

    def compare(self, digests: Sequence[bytes]) -> None:
        """On the first rank: refuses ranks that hold different bytes of what has to be the same."""


class _Taken(Struct, frozen=True, array_like=True):
    """A rank's snapshot, and whether the rank knows the plan of the last write."""

    snapshot: TakenSnapshot
    is_planned: bool


class _Assigned(Struct, frozen=True, array_like=True):
    """A rank's plan, and whether any rank has something to compare."""

    plan: RankPlan
    is_compared: bool


_drawn_decoder: Final = msgspec.msgpack.Decoder(int)
_taken_decoder: Final = msgspec.msgpack.Decoder(_Taken)
_assigned_decoder: Final = msgspec.msgpack.Decoder(_Assigned)


class CollectiveWrite:
    """Writes numbered directories, one after the other. Called on all ranks alike, by one thread.

    Every step raises the same `TransportError` on every rank.

    Args:
        agreement: Of the group, for this thread alone.
        directory: As this rank sees it. No rank writes where another one says.
        visible_s: How long a new directory may take to be seen by all ranks; ``None`` where the first alone writes.
    """

    def __init__(self, agreement: Agreement, directory: NumberedDirectory, *, visible_s: float | None) -> None:
        self._agreement = agreement
        self._directory = directory
        self._visible_s = visible_s
        self._marker = Path()
        self._plan_key: tuple[object, ...] | None = None
        self._assigned = _Assigned(RankPlan(), False)

    @contextlib.contextmanager
    def attempt(self, number: int) -> Iterator[None]:
        """An attempt to write a directory: one that fails leaves nothing, and the next one begins from the start."""
        try:
            yield
        except BaseException:
            self._plan_key = None
            self._agreement.reconnect()
            if self._agreement.is_first:
                try:
                    self._directory.discard(number)
                except OSError as error:  # what is left does no harm
                    logger.warning(
                        "%s %d: what is left of a failed write could not be removed: %s",
                        self._directory.prefix,
                        number,
                        error,
                    )
            raise

    def stage(self, job: WriteJob) -> None:
        """Every rank completes its part of the snapshot, and all ranks compare what they write."""
        compare_settings(self._agreement, "snapshot", job.settings)

    def agree(self, number: int, job: WriteJob, *, is_retry: bool = False) -> tuple[Path, RankPlan]:
        """Sets up the directory, and divides the work. A state that can never be written fails here.

        Returns:
            The incomplete directory, and this rank's part.
        """
        agreement = self._agreement
        drawn = agreement.value_of_first(
            "set up the directory", lambda: self._set_up(number, job, is_retry=is_retry), _drawn_decoder
        )
        directory = self._directory.incomplete(number)
        self._marker = directory / _marker_name(drawn)
        if self._visible_s is not None:
            agreement.run("find the directory", self._find)
        taken = agreement.values_of_all(
            "take the snapshot", lambda: _Taken(job.take(), self._plan_key is not None), _taken_decoder
        )
        self._plan(job, taken)
        return directory, self._assigned.plan

    def compare(self, job: WriteJob) -> None:
        """Refuses ranks that hold different bytes of what has to be the same."""
        agreement, plan = self._agreement, self._assigned.plan
        if self._assigned.is_compared:
            digests = agreement.run("digest", lambda: job.digest(plan))
            gathered = agreement.gather("gather the digests", digests)
            agreement.on_first("compare", lambda: job.compare(gathered))

    def commit(self, number: int, finish: Callable[[], None], committed: Callable[[], None] = lambda: None) -> Path:
        """Gives the directory its name, and returns it.

        Args:
            number: Its number.
            finish: Called on the first rank before that.
            committed: Called on the first rank when the directory is complete, before any rank learns of it.
        """

        def commit() -> None:
            finish()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._marker)
            self._directory.commit(number)
            committed()

        self._agreement.on_first("commit", commit)
        return self._directory.final(number)

    def _set_up(self, number: int, job: WriteJob, *, is_retry: bool) -> int:
        """Makes the directory, and in it an empty file by which other ranks know that they see this directory."""
        # What there is of this number at a retry, this write may have made.
        job.admit(is_retry=is_retry)
        directory = self._directory.begin(number)
        drawn = secrets.randbits(_MARKER_BITS)
        os.close(create_file(directory / _marker_name(drawn)))
        return drawn

    def _find(self) -> None:
        assert self._visible_s is not None, "all ranks write"
        wait_until_visible(self._marker, self._visible_s, self._agreement.check_others)

    def _plan(self, job: WriteJob, taken: Sequence[_Taken]) -> None:
        """Divides the work, if what the ranks have is not what it was at the last write."""
        key = tuple((each.snapshot.structure, each.snapshot.holder) for each in taken)
        # A rank that was interrupted behind the last vote has forgotten its plan alone.
        is_known = key == self._plan_key and all(each.is_planned for each in taken)
        if is_known and len({each.snapshot.values for each in taken}) == 1:
            return
        agreement = self._agreement
        header = agreement.run("read the headers", job.header)
        headers = agreement.gather("gather the headers", header)
        plans = agreement.on_first("plan", lambda: job.plan(headers))
        assigned: list[bytes] | None = None
        if plans is not None:
            is_compared = any(plan.compared for plan in plans)
            assigned = [msgspec.msgpack.encode(_Assigned(plan, is_compared)) for plan in plans]
        self._assigned = from_msgpack(agreement.scatter("divide the work", assigned), _assigned_decoder)
        self._plan_key = key


def _marker_name(drawn: int) -> str:
    return f".set-up-{drawn:016x}"
