"""Where the bytes of a range belong: from positions in the data to destinations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """``num_bytes`` at ``offset`` of destination ``slot``."""

    slot: int
    offset: int
    num_bytes: int


class DestinationPlan:
    """Divides byte ranges of the data among destinations that lie one behind the other.

    Args:
        starts: Where each destination begins in the data, ascending; empty destinations must be left out, so that
            the starts are strictly ascending and the first is 0.
        data_bytes: Where the last one ends.
    """

    def __init__(self, starts: Sequence[int], data_bytes: int) -> None:
        self._starts = list(starts)
        self._ends = [*self._starts[1:], data_bytes]

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """The pieces that cover ``[start, end)`` once, in order."""
        slot = bisect_right(self._starts, start) - 1
        while start < end:
            stop = min(end, self._ends[slot])
            yield Piece(slot, start - self._starts[slot], stop - start)
            start = stop
            slot += 1
