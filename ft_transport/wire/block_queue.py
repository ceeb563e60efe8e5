"""The chunks that a receiver of a fleet expects from another one, or from the sources: see ``wire.fleet_work``."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BlockQueue:
    """Chunks that one receiver is asked for, in this order; this one's own are asked of the sources.

    Attributes:
        receiver: Which one.
        block: Its own ones.
        missing: Those that nobody is asked for at the moment.
        num_missing: How many these are.
        num_left: How many have not landed, with those that are asked for.
        num_lacking: How many of its own ones have not landed, wherever they come from.
        num_landed: How many the receiver has delivered, or the sources of this one's own; the ring's do not count.
        is_out: Whether the receiver is not waited for any more; it has no missing ones then.
        is_slow: Whether the sources would deliver sooner what is left of it.
    """

    receiver: int
    block: range
    missing: list[range] = field(default_factory=list)
    num_missing: int = 0
    num_left: int = 0
    num_lacking: int = 0
    num_landed: int = 0
    is_out: bool = False
    is_slow: bool = False

    def add(self, chunks: range) -> None:
        """In the order in which all fetch: a block's own chunks, and then those that were dealt, by their numbers."""
        insort(self.missing, chunks, key=self._place)
        self.num_missing += len(chunks)

    def add_last(self, chunks: range) -> None:
        """Behind all that is missing."""
        self.missing.append(chunks)
        self.num_missing += len(chunks)

    def take(self, num_chunks: int) -> range:
        """At most so many of what comes next."""
        first = self.missing[0]
        taken = first[:num_chunks]
        if len(taken) < len(first):
            self.missing[0] = first[num_chunks:]
        else:
            del self.missing[0]
        self.num_missing -= len(taken)
        return taken

    def _place(self, chunks: range) -> tuple[bool, int]:
        return chunks.start not in self.block, chunks.start
