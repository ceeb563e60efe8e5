"""A collective write: the ranks of a group write one numbered directory, complete for all of them or not there.

Checkpoints and published versions are written by the same agreement. What differs is a `StorageWriter`: who holds the
snapshot (a writer process, or the calling thread), what the files look like, and what makes them final.

```
 snapshot               every rank holds its part, and was told the same as the others
 set up, find           the first rank makes the directory; where all ranks write, all of them see it
 take                   the storage writer gets the snapshot, and says what it is
 headers, plan, divide  who writes what; only where the structure is not that of the last write
 digest, compare        what several ranks hold has to be the same, before anything is written
 write                  the storage writer's own phases
 commit                 what describes the files, fsync, rename, fsync
```
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct

from ft_transport.checkpoint.directory import NumberedDirectory, wait_until_visible
from ft_transport.checkpoint.plan import RankPlan
from ft_transport.checkpoint.settings import compare_settings
from ft_transport.coordination.consensus import Agreement
from ft_transport.coordination.plain_values import from_msgpack
from ft_transport.errors import TransportError
from ft_transport.runtime.regular_files import create_file

logger = logging.getLogger(__name__)

_MARKER_BITS: Final = 63
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0

R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)


class TakenSnapshot(Struct, frozen=True, array_like=True):
    """What a rank's storage writer says of its snapshot.

    Attributes:
        structure: Digest of everything but bytes and values: equal as long as the same plan will do.
        values: Digest of the values that all ranks share.
        holder: Number of the writer that holds it; another one knows no plan.
    """

    structure: int
    values: int
    holder: int


class StorageWriter(Protocol[R_contra]):
    """One rank's part in collective writes. Every method raises what went wrong on this rank."""

    def settings(self, request: R_contra) -> Mapping[str, object]:
        """Makes sure that the snapshot is there, and returns what all ranks have to be told alike."""

    def admit(self, request: R_contra, *, is_retry: bool) -> None:
        """On the first rank: refuses a number that must not be written."""

    def take(self, request: R_contra) -> TakenSnapshot:
        """Takes the snapshot."""

    def header(self) -> bytes:
        """What `plan` needs of this rank's snapshot."""

    def plan(self, request: R_contra, headers: Sequence[bytes]) -> Sequence[RankPlan]:
        """On the first rank: divides the work, by rank."""

    def digest(self, plan: RankPlan) -> bytes:
        """The digests of what other ranks hold as well."""

    def compare(self, digests: Sequence[bytes]) -> None:
        """On the first rank: refuses ranks that hold different bytes of what has to be the same."""

    def write(self, request: R_contra, directory: Path, plan: RankPlan) -> Callable[[], None]:
        """Writes this rank's part, in phases of its own.

        Returns:
            What the first rank still has to do in the commit, before the directory gets its name.
        """

    def committed(self, request: R_contra) -> None:
        """On the first rank: called when the directory is complete, before any rank is told."""


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


class CollectiveWrite(Generic[R]):
    """Writes numbered directories, one after the other. Called on all ranks alike, by one thread.

    Args:
        agreement: Of the group, for this thread alone.
        directory: As this rank sees it. No rank writes where another one says.
        storage: This rank's part.
        visible_s: How long a new directory may take to be seen by all ranks; ``None`` where the first alone writes.
        max_attempts: How often a write is tried, where what went wrong may pass.
    """

    def __init__(
        self,
        *,
        agreement: Agreement,
        directory: NumberedDirectory,
        storage: StorageWriter[R],
        visible_s: float | None,
        max_attempts: int,
    ) -> None:
        self._agreement = agreement
        self._directory = directory
        self._storage = storage
        self._visible_s = visible_s
        self._max_attempts = max_attempts
        self._plan_key: tuple[object, ...] | None = None
        self._assigned = _Assigned(RankPlan(), False)

    def write(self, number: int, request: R, *, on_planned: Callable[[], None] = lambda: None) -> Path:
        """Writes a directory, and returns it when it is complete.

        An attempt that fails with what may pass is begun again from the start, by all ranks.

        Args:
            number: Its number.
            request: For the storage writer.
            on_planned: Called when the ranks know who writes what: a state that can never be written fails before.

        Raises:
            TransportError: It could not be written; the same error on every rank.
        """
        pause_s = _FIRST_PAUSE_S
        attempt = 1
        while True:
            try:
                return self._attempt(number, request, on_planned, is_retry=attempt > 1)
            except BaseException as error:
                # By type and errno, and the same on all ranks: the vote says so.
                may_pass = isinstance(error, TransportError) and self._agreement.may_try_again
                self._plan_key = None
                self._agreement.exchange.reset(self._agreement.sequence)
                self._discard(number)
                if not may_pass or attempt == self._max_attempts:
                    raise
                attempt += 1
                logger.warning(
                    "%s %d: writing it failed, attempt %d follows: %s", self._directory.prefix, number, attempt, error
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _attempt(self, number: int, request: R, on_planned: Callable[[], None], *, is_retry: bool) -> Path:
        agreement, storage = self._agreement, self._storage
        compare_settings(agreement, "snapshot", lambda: storage.settings(request))
        drawn = agreement.value_of_first(
            "set up the directory",
            lambda: self._set_up(number, request, is_retry=is_retry),
            _drawn_decoder,
        )
        directory = self._directory.incomplete(number)
        marker = directory / _marker_name(drawn)
        if self._visible_s is not None:
            agreement.run("find the directory", lambda: self._find(marker))
        taken = agreement.values_of_all(
            "take the snapshot",
            lambda: _Taken(storage.take(request), self._plan_key is not None),
            _taken_decoder,
        )
        self._plan(request, taken)
        on_planned()
        plan = self._assigned.plan
        if self._assigned.is_compared:
            digests = agreement.run("digest", lambda: storage.digest(plan))
            gathered = agreement.gather("gather the digests", digests)
            agreement.run_on_first("compare", lambda: storage.compare(gathered))
        finish = storage.write(request, directory, plan)

        def commit() -> None:
            finish()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(marker)
            self._directory.commit(number)
            storage.committed(request)

        agreement.run_on_first("commit", commit)
        return self._directory.final(number)

    def _set_up(self, number: int, request: R, *, is_retry: bool) -> int:
        """Makes the directory, and in it an empty file by which other ranks know that they see this directory."""
        # What there is of this number at a retry, this write may have made.
        self._storage.admit(request, is_retry=is_retry)
        directory = self._directory.begin(number)
        drawn = secrets.randbits(_MARKER_BITS)
        os.close(create_file(directory / _marker_name(drawn)))
        return drawn

    def _find(self, marker: Path) -> None:
        assert self._visible_s is not None, "all ranks write"
        wait_until_visible(marker, self._visible_s, self._agreement.check_others)

    def _plan(self, request: R, taken: Sequence[_Taken]) -> None:
        """Divides the work, if what the ranks have is not what it was at the last write."""
        key = tuple((each.snapshot.structure, each.snapshot.holder) for each in taken)
        # A rank that was interrupted behind the last vote has forgotten its plan alone.
        is_known = key == self._plan_key and all(each.is_planned for each in taken)
        if is_known and len({each.snapshot.values for each in taken}) == 1:
            return
        header = self._agreement.run("read the headers", self._storage.header)
        headers = self._agreement.gather("gather the headers", header)
        plans = self._agreement.run_on_first("plan", lambda: self._storage.plan(request, headers))
        assigned: list[bytes] | None = None
        if plans is not None:
            is_compared = any(plan.compared for plan in plans)
            assigned = [msgspec.msgpack.encode(_Assigned(plan, is_compared)) for plan in plans]
        self._assigned = from_msgpack(self._agreement.scatter("divide the work", assigned), _assigned_decoder)
        self._plan_key = key

    def _discard(self, number: int) -> None:
        """Gives the room of a failed attempt back; what is left of it does no harm."""
        if self._agreement.is_first:
            try:
                self._directory.discard(number)
            except OSError as error:
                logger.warning(
                    "%s %d: what is left of a failed write could not be removed: %s",
                    self._directory.prefix,
                    number,
                    error,
                )


def _marker_name(drawn: int) -> str:
    return f".set-up-{drawn:016x}"
