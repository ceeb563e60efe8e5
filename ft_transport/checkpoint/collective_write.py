"""A collective write: the ranks of a group write one numbered directory, complete for all of them or not there.

Checkpoints and published versions use the same steps, each of which all ranks run together. A job (`WriteJob`) defines
the differences: the place of the snapshot (in a writer process, or with the calling thread), the form of the files, and
the steps that make them final. ``SaveJob.run`` and ``ExportJob.run`` show the order:

```
 stage     every rank completes its part of the snapshot, and the ranks compare their settings
 agree     the first rank creates the directory, and all ranks that write see it; the job takes the snapshot; the ranks
           divide the work, only if the structure differs from that of the last write
 compare   ranks that hold the same item compare its bytes, before anything is written
 write     the job's own phases
 commit    the files that describe the others, fsync, rename, fsync
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
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import from_msgpack
from ft_transport.runtime.regular_files import create_file

logger = logging.getLogger(__name__)

_MARKER_BITS: Final = 63


class TakenSnapshot(Struct, frozen=True, array_like=True):
    """The description of one rank's snapshot.

    Attributes:
        structure: Digest of everything but bytes and values; the plan stays valid as long as it is equal.
        values: Digest of the values that all ranks share.
        holder: Number of the writer that holds the snapshot; a new writer knows no plan.
    """

    structure: int
    values: int
    holder: int


class WriteJob(Protocol):
    """One rank's part in one collective write. Every method raises this rank's own error."""

    def settings(self) -> Mapping[str, object]:
        """Completes the snapshot, and returns the settings that have to be the same on all ranks."""

    def admit(self, *, is_retry: bool) -> None:
        """Refuses, on the first rank, a number that must not be written."""

    def take(self) -> TakenSnapshot:
        """Takes the snapshot."""

    def header(self) -> bytes:
        """Returns the header of this rank's snapshot, for `plan`."""

    def plan(self, headers: Sequence[bytes]) -> Sequence[RankPlan]:
        """Divides the work, on the first rank; returns the plans by rank."""

    def digest(self, plan: RankPlan) -> bytes:
        """Returns the digests of items that other ranks hold as well."""

    def compare(self, digests: Sequence[bytes]) -> None:
        """Refuses, on the first rank, ranks that hold different bytes of an item that has to be the same."""


class _Taken(Struct, frozen=True, array_like=True):
    """A rank's snapshot, and whether the rank knows the plan of the last write."""

    snapshot: TakenSnapshot
    is_planned: bool


class _Assigned(Struct, frozen=True, array_like=True):
    """A rank's plan, and whether any rank has items to compare."""

    plan: RankPlan
    is_compared: bool


_drawn_decoder: Final = msgspec.msgpack.Decoder(int)
_taken_decoder: Final = msgspec.msgpack.Decoder(_Taken)
_assigned_decoder: Final = msgspec.msgpack.Decoder(_Assigned)


class CollectiveWrite:
    """Writes numbered directories, one after the other. Called on all ranks alike, by one thread.

    Every step raises the same `TransportError` on every rank.

    Args:
        agreement: The group's agreement, for this thread only.
        directory: As this rank sees it. No rank writes to a path that another rank names.
        all_write: Whether all ranks write to the directory, and have to see it; else only the first one does.

    Attributes:
        directory: See the argument.
    """

    def __init__(self, agreement: Agreement, directory: NumberedDirectory, *, all_write: bool) -> None:
        self._agreement = agreement
        self.directory = directory
        self._all_write = all_write
        self._marker = Path()
        self._plan_key: tuple[object, ...] | None = None
        self._assigned = _Assigned(RankPlan(), False)

    @contextlib.contextmanager
    def attempt(self, number: int) -> Iterator[None]:
        """Attempt to write a directory: a failed attempt leaves nothing, and the next one starts from the beginning."""
        try:
            yield
        except BaseException:
            self._plan_key = None
            self._agreement.reconnect()
            if self._agreement.is_first:
                try:
                    self.directory.discard(number)
                except OSError as error:  # leftovers do no harm
                    logger.warning(
                        "%s %d: what is left of a failed write could not be removed: %s",
                        self.directory.prefix,
                        number,
                        error,
                    )
            raise

    def stage(self, job: WriteJob) -> None:
        """Let every rank complete its part of the snapshot, and compare the settings of all ranks."""
        compare_settings(self._agreement, "snapshot", job.settings)

    def agree(self, number: int, job: WriteJob, *, is_retry: bool = False) -> tuple[Path, RankPlan]:
        """Set up the directory, and divide the work. A state that can never be written fails here.

        Returns:
            The incomplete directory, and this rank's part.
        """
        agreement = self._agreement
        drawn = agreement.value_of_first(
            "set up the directory", lambda: self._set_up(number, job, is_retry=is_retry), _drawn_decoder
        )
        directory = self.directory.incomplete(number)
        self._marker = directory / _marker_name(drawn)
        if self._all_write:
            agreement.run("find the directory", lambda: wait_until_visible(self._marker, agreement.check_others))
        taken = agreement.values_of_all(
            "take the snapshot", lambda: _Taken(job.take(), self._plan_key is not None), _taken_decoder
        )
        self._plan(job, taken)
        return directory, self._assigned.plan

    def compare(self, job: WriteJob) -> None:
        """Refuse ranks that hold different bytes of an item that has to be the same."""
        agreement, plan = self._agreement, self._assigned.plan
        if self._assigned.is_compared:
            digests = agreement.run("digest", lambda: job.digest(plan))
            gathered = agreement.gather("gather the digests", digests)
            agreement.on_first("compare", lambda: job.compare(gathered))

    def commit(self, number: int, finish: Callable[[], None], committed: Callable[[], None] = lambda: None) -> Path:
        """Rename the directory to its final name, and return its path.

        Args:
            number: Number of the directory.
            finish: Called on the first rank before the rename.
            committed: Called on the first rank when the directory is complete, before any rank learns of it.
        """

        def commit() -> None:
            finish()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._marker)
            self.directory.commit(number)
            committed()

        self._agreement.on_first("commit", commit)
        return self.directory.final(number)

    def _set_up(self, number: int, job: WriteJob, *, is_retry: bool) -> int:
        """Create the directory, and in it an empty file that shows other ranks that they see this directory."""
        # At a retry, a directory of this number may be this write's own.
        job.admit(is_retry=is_retry)
        directory = self.directory.begin(number)
        drawn = secrets.randbits(_MARKER_BITS)
        os.close(create_file(directory / _marker_name(drawn)))
        return drawn

    def _plan(self, job: WriteJob, taken: Sequence[_Taken]) -> None:
        """Divide the work, if the ranks' structure differs from that of the last write."""
        key = tuple((each.snapshot.structure, each.snapshot.holder) for each in taken)
        # A rank that was interrupted after the last vote has forgotten its plan, while the others have theirs.
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
