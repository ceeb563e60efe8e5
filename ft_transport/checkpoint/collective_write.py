"""The phases in which the ranks of a group write one numbered checkpoint together. It appears complete or not at all.

All ranks run each phase together. Saves (``SaveJob``) and exports of published versions (``ExportJob``) use the same
phases. Both classes are a `WriteJob`, which defines where the snapshot is (in a writer process or in this process) and
which files are written. Their methods ``run`` call the phases in this order:

```
 stage     every rank completes its part of the snapshot; the ranks compare their settings
 agree     the first rank begins an attempt; all ranks that write wait until they see its directory; the ranks divide
           the work, unless the last write had the same structure
 compare   ranks with the same item compare its bytes, before anything is written
 write     the job writes its data files; each job has its own phases for this
 commit    the first rank writes the remaining files, and makes the checkpoint visible (``CheckpointRoot.commit``)
```
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import msgspec
from msgspec import Struct

from ft_transport.checkpoint.plan import RankPlan
from ft_transport.checkpoint.roots import CheckpointRoot, draw_attempt
from ft_transport.checkpoint.settings import compare_settings
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import decode_message
from ft_transport.errors import TransportError

logger = logging.getLogger(__name__)

_DISCARD_S: Final = 300.0


class TakenSnapshot(Struct, frozen=True, array_like=True):
    """Digests of one rank's snapshot, by which the ranks decide whether the plan of the last write is still valid.

    Attributes:
        structure: Digest of names, shapes and positions, but not of bytes and values.
        values: Digest of the values in the shared part.
        holder: Ordinal of the writer process that has the snapshot. If it differs from the ordinal at the last write,
            the process was restarted and has lost the plan. An export puts the kind of its content here.
    """

    structure: int
    values: int
    holder: int


class WriteJob(Protocol):
    """One rank's part in one collective write. Methods raise this rank's errors; the caller sends them to all ranks."""

    def settings(self) -> Mapping[str, object]:
        """Completes the snapshot, and returns the settings that must be equal on all ranks."""

    def admit(self, *, is_retry: bool) -> None:
        """Raises an error if the number must not be written. Called on the first rank only."""

    def take(self) -> TakenSnapshot:
        """Gives the snapshot to the code that will write it, and returns its digests."""

    def header(self) -> bytes:
        """Returns the encoded headers of this rank's snapshot, for `plan`."""

    def plan(self, headers: Sequence[bytes]) -> Sequence[RankPlan]:
        """Divides the work among the ranks, and returns the plan of each. Called on the first rank only."""

    def digest(self, plan: RankPlan) -> bytes:
        """Returns the digests of the items that other ranks also have."""

    def compare(self, digests: Sequence[bytes]) -> None:
        """Raises an error if an item differs between the ranks that have it. Called on the first rank only."""


_drawn_decoder: Final = msgspec.msgpack.Decoder(int)
_taken_decoder: Final = msgspec.msgpack.Decoder(tuple[TakenSnapshot, bool])
"""Decodes the digests of a rank's snapshot, and whether the rank still has the plan of the last write."""
_assigned_decoder: Final = msgspec.msgpack.Decoder(tuple[RankPlan, bool])
"""Decodes the plan of a rank, and whether any rank has items to compare."""


class CollectiveWrite:
    """Runs the phases of collective writes, one write after the other.

    All ranks call the same methods in the same order, each rank on one thread. If a phase fails on one rank, all ranks
    raise the same `TransportError`.

    Args:
        agreement: The group's agreement. No other thread may use it.
        root: The root of the checkpoints. The path of a directory may differ between ranks.
        all_write: Whether all ranks write files, and so must see the directory. Otherwise only the first rank writes.

    Attributes:
        root: The root of the checkpoints.
    """

    def __init__(self, agreement: Agreement, root: CheckpointRoot, *, all_write: bool) -> None:
        self._agreement = agreement
        self.root = root
        self._all_write = all_write
        self._attempt = 0
        self._plan_key: tuple[object, ...] | None = None
        self._rank_plan, self._is_compared = RankPlan(), False

    @contextlib.contextmanager
    def attempt(self, number: int) -> Iterator[None]:
        """Clean up if the write in the ``with`` block fails: delete its files, and forget the plan."""
        try:
            yield
        except BaseException:
            self._plan_key = None
            self._agreement.reconnect()
            if self._agreement.is_first:
                try:
                    self._agreement.showing_life(lambda: self.root.discard(number), _DISCARD_S)
                except (OSError, TransportError) as error:  # leftovers do no harm
                    logger.warning(
                        "%s, %d: the files of a failed write could not be deleted: %s", self.root.name, number, error
                    )
            raise

    def stage(self, job: WriteJob) -> None:
        """Complete the snapshot on every rank, and check that the settings are equal on all ranks."""
        compare_settings(self._agreement, "snapshot", job.settings)

    def agree(self, number: int, job: WriteJob, *, is_retry: bool = False) -> tuple[str, RankPlan]:
        """Begin an attempt, and divide the work among the ranks. Raises an error if the state cannot be written.

        Returns:
            The location of the incomplete checkpoint, and this rank's plan.
        """
        agreement = self._agreement
        self._attempt = agreement.value_of_first(
            "set up the directory", lambda: self._set_up(number, job, is_retry=is_retry), _drawn_decoder
        )
        location = self.root.attempt(number, self._attempt)
        if self._all_write:
            agreement.run(
                "find the directory", lambda: self.root.wait_for(number, self._attempt, agreement.check_others)
            )
        taken = agreement.values_of_all(
            "take the snapshot", lambda: (job.take(), self._plan_key is not None), _taken_decoder
        )
        self._plan(job, taken)
        return location, self._rank_plan

    def compare(self, job: WriteJob) -> None:
        """Raise an error if an item differs between the ranks that have it."""
        agreement = self._agreement
        if self._is_compared:
            digests = agreement.run("digest", lambda: job.digest(self._rank_plan))
            gathered = agreement.gather("gather the digests", digests)
            agreement.on_first("compare", lambda: job.compare(gathered))

    def commit(
        self, number: int, finish: Callable[[], bytes | None], committed: Callable[[], None] = lambda: None
    ) -> str:
        """Make the checkpoint visible, and return its location.

        Args:
            number: Number of the checkpoint.
            finish: Called on the first rank before the commit: writes the remaining files, and returns the content of
                the list of files; ``None`` if the root has no lists.
            committed: Called on the first rank after the commit, before this method returns on any rank.
        """

        def commit() -> None:
            self.root.commit(number, self._attempt, finish())
            committed()

        self._agreement.on_first("commit", commit)
        return self.root.final(number, self._attempt)

    def _set_up(self, number: int, job: WriteJob, *, is_retry: bool) -> int:
        """Begin an attempt with a random number, and return this number."""
        # Before a retry, this write may itself have made a checkpoint of this number.
        job.admit(is_retry=is_retry)
        drawn = draw_attempt()
        self.root.begin(number, drawn)
        return drawn

    def _plan(self, job: WriteJob, taken: Sequence[tuple[TakenSnapshot, bool]]) -> None:
        """Divide the work among the ranks, unless the plan of the last write is still valid."""
        key = tuple((snapshot.structure, snapshot.holder) for snapshot, _ in taken)
        # A rank that was interrupted after the last vote has no plan, while the other ranks have theirs.
        is_known = key == self._plan_key and all(is_planned for _, is_planned in taken)
        if is_known and len({snapshot.values for snapshot, _ in taken}) == 1:
            return
        agreement = self._agreement
        header = agreement.run("read the headers", job.header)
        headers = agreement.gather("gather the headers", header)
        plans = agreement.on_first("plan", lambda: job.plan(headers))
        assigned: list[bytes] | None = None
        if plans is not None:
            is_compared = any(plan.compared for plan in plans)
            assigned = [msgspec.msgpack.encode((plan, is_compared)) for plan in plans]
        scattered = agreement.scatter("divide the work", assigned)
        self._rank_plan, self._is_compared = decode_message(scattered, _assigned_decoder)
        self._plan_key = key
