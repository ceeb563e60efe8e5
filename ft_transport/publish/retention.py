"""Which versions may be deleted. Pure: the publisher looks at the disk and at the engines."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version on disk.

    Attributes:
        number: Its number.
        is_adapter: Whether it is an adapter. A request may read it for as long as it runs: vLLM up to 0.32 loads an
            adapter that was replaced in place afresh at each step, and any vLLM once it has dropped it from memory.
            Weights are read while they are loaded, and never again.
        written_s: When it was complete, in seconds since the epoch, by the clock of the file system.
    """

    number: int
    is_adapter: bool
    written_s: float


@dataclass(frozen=True, slots=True)
class Retention:
    """How long versions are kept that no engine is known to use.

    Attributes:
        keep: So many of the newest, whatever they are.
        keep_for_s: An adapter is kept for so long after the next version was written.
    """

    keep: int
    keep_for_s: float

    def expired(self, versions: Sequence[StoredVersion], used: Set[int]) -> list[int]:
        """The numbers of those that may be deleted.

        Args:
            versions: What there is, oldest first.
            used: Numbers of those that engines use, or may be about to load.
        """
        expired = []
        # Never the newest, by which the next is known to be newer.
        for version, following in pairwise(versions[: max(0, len(versions) - self.keep + 1)]):
            # The clock is that of the file system, and stands still between versions.
            age_s = versions[-1].written_s - following.written_s
            if version.number not in used and not (version.is_adapter and age_s < self.keep_for_s):
                expired.append(version.number)
        return expired
