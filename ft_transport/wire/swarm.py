"""The sources and receivers of a fetch: blocks of chunks, substitutes of failed receivers, and slow peers.

``wire.swarm_work`` decides with these what the receiver asks for.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ft_transport.wire.fetch import Assignment, SourceIndex, SourceState

_RUNS_PER_RECEIVER: Final = 2
"""Number of runs of chunks that a block is divided into for each possible substitute of its owner."""
_MOST_TAKEN_OVER: Final = 4
"""Maximum chunks, and at most a small part of the missing ones, that a receiver with a complete own block takes
over."""
_LEAST_WAITED_S: Final = 0.5
"""Shorter pauses are normal for a machine, or for a connection that has lost a packet (RFC 6298)."""
_LEAST_WAITED_PART: Final = 4
"""Minimum wait, as one part in this many of the time until the own block was complete."""
_NOTHING_YET: Final = 0.5
"""Assumed number of chunks from a source that has delivered none."""
_LEAST_KNOWN: Final = 2
"""Chunks per source that have to land before rates are known."""
_MUCH_SLOWER: Final = 4.0
"""Another source has to deliver a chunk sooner by this factor to make up for the lost part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
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
        is_given_up: Whether the receiver is not waited for any more; it has no missing chunks then.
        is_slow: Whether the sources would deliver the rest sooner.
    """

    receiver: int
    block: range
    missing: list[range] = field(default_factory=list)
    num_missing: int = 0
    num_left: int = 0
    num_lacking: int = 0
    num_landed: int = 0
    is_given_up: bool = False
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


class Blocks:
    """The chunks of a state, one block for each receiver, and the substitutes of failed or slow receivers.

    Every receiver that notices a failure chooses the same substitute.

    Args:
        ranges: Chunks to fetch, half-open and ascending.
        num_chunks: Number of all chunks.
        swarm: The participants.
        is_ring: Whether all began as a ring.

    Attributes:
        queues: The queue of each receiver, by its number; receivers that are out substitute for no other.
        own: The queue of this receiver.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], *, num_chunks: int, swarm: Swarm, is_ring: bool) -> None:
        number = swarm.num_receivers
        self._starts = [index * num_chunks // number for index in range(number + 1)]
        self.queues = [BlockQueue(index, range(*self._starts[index : index + 2])) for index in range(number)]
        self.own = self.queues[swarm.own]
        self._is_ring = is_ring
        self._chunks_per_run = max(1, num_chunks // number // (_RUNS_PER_RECEIVER * max(1, number - 1)))
        for first, end in ranges:
            for queue, chunks in self.parts(range(first, end)):
                queue.add(chunks)
                queue.num_left += len(chunks)
                queue.num_lacking += len(chunks)
        self._take_over_some()

    def parts(self, chunks: range) -> Iterator[tuple[BlockQueue, range]]:
        """Yield the parts of a run of chunks, with the block of each."""
        while chunks:
            queue = self.owner(chunks.start)
            num_chunks = queue.block.stop - chunks.start
            yield queue, chunks[:num_chunks]
            chunks = chunks[num_chunks:]

    def owner(self, chunk: int) -> BlockQueue:
        """Return the queue of the receiver whose block has a chunk."""
        return self.queues[bisect_right(self._starts, chunk, hi=len(self.queues)) - 1]

    def deal(self, queue: BlockQueue) -> None:
        """Deal each run of chunks that a receiver was to deliver to the next receiver in its line."""
        missing, queue.missing, queue.num_missing = queue.missing, [], 0
        for run in missing:
            for block, chunks in self.parts(run):
                for to, dealt in self._substitutes(block.receiver, chunks):
                    to.add(dealt)
                    queue.num_left -= len(dealt)
                    to.num_left += len(dealt)

    def _take_over_some(self) -> None:
        """Take over a few chunks of another block, if the own one is complete, to measure the rate of the sources."""
        fullest = max(self.queues, key=lambda queue: queue.num_missing)
        if self.own.num_left or not fullest.num_missing:
            return
        num_left = sum(queue.num_left for queue in self.queues)
        chunks = fullest.take(max(1, min(_MOST_TAKEN_OVER, num_left // (4 * len(self.queues)))))
        fullest.num_left -= len(chunks)
        self.own.add(chunks)
        self.own.num_left += len(chunks)

    def _substitutes(self, owner: int, chunks: range) -> Iterator[tuple[BlockQueue, range]]:
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
        number, own = len(self.queues), self.own.receiver
        between = (self.queues[(own - far) % number] for far in range(1, (own - owner) % number))
        return next((queue for queue in between if not queue.is_given_up), self.own)

    def _next_in_line(self, owner: int, run: int) -> BlockQueue:
        number = len(self.queues)
        first = self.queues[(owner + 1 + run % (number - 1)) % number]
        if not first.is_given_up:
            return first
        # Not simply the next receiver, which would get the runs of all failed receivers before it.
        others = [queue for queue in self.queues if queue.receiver != owner and not queue.is_given_up]
        return max(others, key=lambda queue: _mixed(run, queue.receiver), default=self.own)


def _mixed(run: int, receiver: int) -> int:
    """Return a number that varies between runs as if at random, and is the same for all receivers."""
    mixed = (run * 0x9E3779B1 + receiver * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) * 0xC2B2AE3D & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Delivery:
    """The chunks of one relay.

    Attributes:
        num_left: Chunks that it is expected to deliver.
        num_landed: Chunks that it has delivered so far.
    """

    num_left: int
    num_landed: int


class RelayRates:
    """The rates of one receiver's relays, measured over windows of time.

    While a receiver takes its own block, relays and sources share its link, and other receivers may not have begun: the
    chunks that have come by then say little about a relay's speed. Afterwards the relays have the link to themselves,
    and their chunks are compared with what the sources delivered in the time before.
    """

    def __init__(self) -> None:
        self._own_s = 0.0
        self._num_own = 0
        self._since_s = 0.0
        self._then: Mapping[int, Delivery] = {}

    def restart(self) -> None:
        """Begin a new window, because chunks now come from other relays, or from the sources as well."""
        self._then = {}

    def too_slow(self, elapsed_s: float, *, num_from_sources: int, relays: Mapping[int, Delivery]) -> int | None:
        """Return the slowest relay if waiting costs more than the sources would take, by the time of the own block.

        Args:
            elapsed_s: Seconds since the fetch began. The own block is complete.
            num_from_sources: Chunks that have come from sources.
            relays: The relays that are to deliver all missing chunks.
        """
        if not self._num_own:
            self._own_s, self._num_own = elapsed_s, num_from_sources
        if self._then.keys() != relays.keys():
            self._since_s, self._then = elapsed_s, relays
        waited_s = elapsed_s - self._since_s
        if not self._num_own or waited_s < max(_LEAST_WAITED_S, self._own_s / _LEAST_WAITED_PART):
            return None
        landed = {relay: each.num_landed - self._then[relay].num_landed for relay, each in relays.items()}
        num_left, num_landed = sum(each.num_left for each in relays.values()), sum(landed.values())
        # One more chunk is under way.
        from_relays_s = waited_s * num_left / (num_landed + 1)
        from_sources_s = self._own_s * num_left / self._num_own
        if from_relays_s > from_sources_s + self._own_s:
            self.restart()
            return max(relays, key=lambda relay: relays[relay].num_left / (landed[relay] + 1))
        if num_landed:
            # Chunks so far do not excuse a relay that stops from here on.
            self._since_s, self._then = elapsed_s, relays
        return None


def slowest_to_end(
    under_way: Sequence[Assignment[int]], sources: Sequence[SourceState], usable: Sequence[SourceState]
) -> Assignment[int] | None:
    """Return the request whose rest would come much sooner if the best source began it again, if there is one.

    All sources begin at one moment, so the chunks that each has delivered represent its rate, and the elapsed time is
    the unit of time.

    Args:
        under_way: All requests.
        sources: All sources, by their index.
        usable: Sources that may be asked instead.
    """
    if sum(source.num_landed for source in usable) < max(1, _LEAST_KNOWN * len(usable)):
        return None
    best = max(usable, key=lambda source: source.num_landed)

    def left(assignment: Assignment[int]) -> float:
        source = sources[assignment.source]
        return assignment.num_left * source.num_active / max(_NOTHING_YET, source.num_landed)

    slow = [each for each in under_way if sources[each.source] is not best and not each.is_interrupted]
    slowest = max(slow, key=left, default=None)
    if slowest is None:
        return None
    again = slowest.num_left * (best.num_active + 1) / best.num_landed
    return slowest if left(slowest) > _MUCH_SLOWER * again else None
