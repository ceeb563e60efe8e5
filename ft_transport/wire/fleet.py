"""The sources and receivers of a fetch: the chunks expected of each receiver, and the substitutes of failed ones.

``wire.fleet_work`` decides with these what the receiver asks for.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ft_transport.wire.fetch import SourceIndex

_RUNS_PER_RECEIVER: Final = 2
"""Number of runs of chunks that a block is divided into for each possible substitute of its owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The participants of a fetch.

    Attributes:
        num_sources: Number of sources; they have the first indices.
        num_receivers: Number of receivers of the state, this one included. The others follow the sources, in their
            order.
        own: The number of this receiver.
    """

    num_sources: int = 1
    num_receivers: int = 1
    own: int = 0

    def relay_of(self, receiver: int) -> SourceIndex:
        """Return the index of another receiver among the sources and relays."""
        return SourceIndex(self.num_sources + receiver - (receiver > self.own))

    def receiver_of(self, relay: SourceIndex) -> int:
        """Return the number of the receiver with this index."""
        number = relay - self.num_sources
        return number + (number >= self.own)


@dataclass(slots=True, eq=False)
class BlockQueue:
    """Chunks to request from one receiver, in this order; the own ones are requested from the sources.

    Attributes:
        receiver: Number of the receiver.
        block: Chunks of its block.
        missing: Chunks that are in no request at the moment.
        num_missing: Number of these.
        num_left: Chunks that have not landed, requested ones included.
        num_lacking: Chunks of its block that have not landed, wherever they come from.
        num_landed: Chunks that the receiver has delivered, or the sources for the own queue; without those of the ring.
        is_out: Whether the receiver is not waited for any more; it has no missing chunks then.
        is_slow: Whether the sources would deliver the rest sooner.
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
        """Add chunks in the order of fetching: a block's own chunks, then those dealt to it, by number."""
        insort(self.missing, chunks, key=self._place)
        self.num_missing += len(chunks)

    def add_last(self, chunks: range) -> None:
        """Add chunks behind all missing ones."""
        self.missing.append(chunks)
        self.num_missing += len(chunks)

    def take(self, num_chunks: int) -> range:
        """Take the next chunks, at most this many."""
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
    """Chooses the substitute of a failed or slow receiver: every receiver that notices chooses the same.

    Args:
        queues: The queue of each receiver, by its number; receivers that are out substitute for no other.
        own: The number of this receiver.
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
        """Yield the substitutes of a block's owner, each with its part of some of its chunks.

        This receiver itself if no other is left.
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
        """Return the nearest working receiver behind the owner, up to this one, in the ring."""
        number = len(self._queues)
        between = (self._queues[(self._own - far) % number] for far in range(1, (self._own - owner) % number))
        return next((queue for queue in between if not queue.is_out), self._queues[self._own])

    def _next_in_line(self, owner: int, run: int) -> BlockQueue:
        number = len(self._queues)
        first = self._queues[(owner + 1 + run % (number - 1)) % number]
        if not first.is_out:
            return first
        # Not simply the next receiver, which would get the runs of all failed receivers before it.
        others = [queue for queue in self._queues if queue.receiver != owner and not queue.is_out]
        return max(others, key=lambda queue: _mixed(run, queue.receiver), default=self._queues[self._own])


def _mixed(run: int, receiver: int) -> int:
    """Return a number that varies between runs as if at random, and is the same for all receivers."""
    mixed = (run * 0x9E3779B1 + receiver * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) * 0xC2B2AE3D & 0xFFFFFFFF
