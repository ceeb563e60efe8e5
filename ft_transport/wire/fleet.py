"""The sources and receivers of a fetch: what one receiver expects of each other one, and which one stands in for it.

``wire.fleet_work`` decides with these what the receiver asks for.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ft_transport.wire.fetch import SourceIndex

_RUNS_PER_RECEIVER: Final = 2
"""Into how many runs of chunks a block is divided for each that may stand in for its owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Who takes part.

    Attributes:
        num_sources: How many sources there are; they have the first indices.
        num_receivers: How many receive the state now, this one too. The others follow the sources, in their order.
        own: The number of this one among them.
    """

    num_sources: int = 1
    num_receivers: int = 1
    own: int = 0

    def relay_of(self, receiver: int) -> SourceIndex:
        """The index of another receiver among those that are asked."""
        return SourceIndex(self.num_sources + receiver - (receiver > self.own))

    def receiver_of(self, relay: SourceIndex) -> int:
        """Which receiver it is that has this index."""
        number = relay - self.num_sources
        return number + (number >= self.own)


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


class StandIns:
    """Which receiver stands in for one that is gone or too slow: every receiver that notices chooses the same.

    Args:
        queues: What is expected of each receiver, by its number; those that are out stand in for nobody.
        own: The number of this one.
        is_ring: Whether all began as a ring.
    """

    def __init__(self, queues: Sequence[BlockQueue], *, own: int, is_ring: bool) -> None:
        self._queues = queues
        self._own = own
        self._is_ring = is_ring
        most_others = max(1, len(queues) - 1)
        chunks_per_block = sum(len(queue.block) for queue in queues) // len(queues)
        self._chunks_per_run = max(1, chunks_per_block // (_RUNS_PER_RECEIVER * most_others))

    def of(self, owner: int, chunks: range) -> Iterator[tuple[BlockQueue, range]]:
        """Those who stand in for the owner of a block, each with its part of some of its chunks.

        This receiver itself where no other is left.
        """
        if self._is_ring:
            yield self._nearest_behind(owner), chunks
            return
        while chunks:
            run = chunks.start // self._chunks_per_run
            num_in_run = (run + 1) * self._chunks_per_run - chunks.start
            yield self._next_in_line(owner, run), chunks[:num_in_run]
            chunks = chunks[num_in_run:]

    def _nearest_behind(self, owner: int) -> BlockQueue:
        """Of those between the owner and this one in the ring."""
        number = len(self._queues)
        between = (self._queues[(self._own - far) % number] for far in range(1, (self._own - owner) % number))
        return next((queue for queue in between if not queue.is_out), self._queues[self._own])

    def _next_in_line(self, owner: int, run: int) -> BlockQueue:
        number = len(self._queues)
        first = self._queues[(owner + 1 + run % (number - 1)) % number]
        if not first.is_out:
            return first
        # Not simply the next one, who would get the runs of all that are out before it.
        others = [queue for queue in self._queues if queue.receiver != owner and not queue.is_out]
        return max(others, key=lambda queue: _mixed(run, queue.receiver), default=self._queues[self._own])


def _mixed(run: int, receiver: int) -> int:
    """Differs from run to run as if at random, and is the same everywhere."""
    mixed = (run * 0x9E3779B1 + receiver * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) * 0xC2B2AE3D & 0xFFFFFFFF
