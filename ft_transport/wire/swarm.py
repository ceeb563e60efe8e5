"""The blocks of receivers, substitutes for failed receivers, and detection of slow peers, for ``wire.swarm_work``."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ft_transport.wire.fetch import Assignment, SourceIndex, SourceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """The participants of a fetch. `SourceIndex` numbers the sources first, and then the other receivers as relays.

    Attributes:
        num_sources: Number of sources.
        num_receivers: Number of receivers of the state, including this one.
        own: Index of this receiver among all receivers.
    """

    num_sources: int = 1
    num_receivers: int = 1
    own: int = 0

    def relay_of(self, receiver: int) -> SourceIndex:
        """Return the source index of another receiver, which serves as a relay."""
        return SourceIndex(self.num_sources + receiver - (receiver > self.own))

    def receiver_of(self, relay: SourceIndex) -> int:
        """Return the index, among all receivers, of the receiver that is this relay."""
        number = relay - self.num_sources
        return number + (number >= self.own)


@dataclass(slots=True, eq=False)
class BlockQueue:
    """The chunks to fetch from one receiver; those in this receiver's own queue are fetched from the sources.

    Attributes:
        receiver: Index of the receiver.
        block: The chunks of the receiver's block.
        missing: Chunks that have not landed and are not requested at the moment, in the order of requesting.
        num_missing: Number of chunks in ``missing``.
        num_left: Number of chunks of this queue that have not landed, including requested ones.
        num_lacking: Number of chunks of ``block`` that have not landed, whichever peer is to deliver them.
        num_landed: Number of chunks that have landed through this queue, except chunks from the ring.
        is_given_up: Whether this receiver has stopped waiting for the queue's receiver. ``missing`` is empty then.
        is_slow: Whether the sources would deliver the rest sooner than the queue's receiver.
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
        """Add missing chunks, ordered by index; chunks of ``block`` come before chunks of other blocks."""
        insort(self.missing, chunks, key=self._place)
        self.num_missing += len(chunks)

    def add_last(self, chunks: range) -> None:
        """Add missing chunks that are to be requested last."""
        self.missing.append(chunks)
        self.num_missing += len(chunks)

    def take(self, num_chunks: int) -> range:
        """Remove and return the next missing chunks, at most ``num_chunks`` and all consecutive."""
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
    """The chunks of a state, divided into one block for each receiver, and the substitutes of failed receivers.

    The choice of a substitute is deterministic, so every receiver that notices a failure chooses the same substitute.

    Args:
        ranges: Half-open, ascending ranges of the chunks that this receiver has to fetch.
        num_chunks: Number of chunks of the state.
        swarm: The participants.
        is_ring: Whether the receivers began as a ring.

    Attributes:
        queues: The queue of each receiver, in the order of their indices.
        own: The queue of this receiver.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], *, num_chunks: int, swarm: Swarm, is_ring: bool) -> None:
        number = swarm.num_receivers
        self._starts = [index * num_chunks // number for index in range(number + 1)]
        self.queues = [BlockQueue(index, range(*self._starts[index : index + 2])) for index in range(number)]
        self.own = self.queues[swarm.own]
        self._is_ring = is_ring
        # Two runs for each receiver that may substitute for the owner of a block.
        self._chunks_per_run = max(1, num_chunks // number // (2 * max(1, number - 1)))
        for first, end in ranges:
            for queue, chunks in self.parts(range(first, end)):
                queue.add(chunks)
                queue.num_left += len(chunks)
                queue.num_lacking += len(chunks)
        self._take_over_some()

    def parts(self, chunks: range) -> Iterator[tuple[BlockQueue, range]]:
        """Divide consecutive chunks by block; yield the queue of each block's owner with the block's chunks."""
        while chunks:
            queue = self.owner(chunks.start)
            num_chunks = queue.block.stop - chunks.start
            yield queue, chunks[:num_chunks]
            chunks = chunks[num_chunks:]

    def owner(self, chunk: int) -> BlockQueue:
        """Return the queue of the receiver whose block contains ``chunk``."""
        return self.queues[bisect_right(self._starts, chunk, hi=len(self.queues)) - 1]

    def deal(self, queue: BlockQueue) -> None:
        """Assign the queued chunks that a receiver still lacks to substitutes of that receiver."""
        missing, queue.missing, queue.num_missing = queue.missing, [], 0
        for run in missing:
            for block, chunks in self.parts(run):
                for to, dealt in self._substitutes(block.receiver, chunks):
                    to.add(dealt)
                    queue.num_left -= len(dealt)
                    to.num_left += len(dealt)

    def _take_over_some(self) -> None:
        """Take over a few chunks of another block if the own block is complete, to measure the rate of the sources."""
        fullest = max(self.queues, key=lambda queue: queue.num_missing)
        if self.own.num_left or not fullest.num_missing:
            return
        num_left = sum(queue.num_left for queue in self.queues)
        chunks = fullest.take(max(1, min(4, num_left // (4 * len(self.queues)))))
        fullest.num_left -= len(chunks)
        self.own.add(chunks)
        self.own.num_left += len(chunks)

    def _substitutes(self, owner: int, chunks: range) -> Iterator[tuple[BlockQueue, range]]:
        """Divide chunks of a block among substitutes of the block's owner; this receiver itself is the last resort."""
        if self._is_ring:
            yield self._nearest_behind(owner), chunks
            return
        while chunks:
            run = chunks.start // self._chunks_per_run
            num_in_run = (run + 1) * self._chunks_per_run - chunks.start
            yield self._next_in_line(owner, run), chunks[:num_in_run]
            chunks = chunks[num_in_run:]

    def _nearest_behind(self, owner: int) -> BlockQueue:
        """Return the first working receiver upstream of this one, before the failed owner; this one if none works."""
        number, own = len(self.queues), self.own.receiver
        between = (self.queues[(own - far) % number] for far in range(1, (own - owner) % number))
        return next((queue for queue in between if not queue.is_given_up), self.own)

    def _next_in_line(self, owner: int, run: int) -> BlockQueue:
        number = len(self.queues)
        first = self.queues[(owner + 1 + run % (number - 1)) % number]
        if not first.is_given_up:
            return first
        # Not the next receiver in order, which would get the runs of all failed receivers before it.
        others = [queue for queue in self.queues if queue.receiver != owner and not queue.is_given_up]
        return max(others, key=lambda queue: _mixed(run, queue.receiver), default=self.own)


def _mixed(run: int, receiver: int) -> int:
    """Return a hash of a run of chunks and a receiver, so that different runs get different substitutes."""
    mixed = (run * 0x9E3779B1 + receiver * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) * 0xC2B2AE3D & 0xFFFFFFFF


class RelayRates:
    """Finds relays that are slower than the sources, by counting chunks in windows of time.

    While a receiver fetches its own block, sources and relays share its link, and other receivers may not have begun,
    so the chunks of that time do not show a relay's speed. After that, only relays use the link. Then the receiver
    compares the relays' rate with the rate at which the sources had delivered its own block.
    """

    def __init__(self) -> None:
        self._own_s = 0.0
        self._num_own = 0
        self._since_s = 0.0
        self._landed_then: Mapping[int, int] = {}

    def restart(self) -> None:
        """Begin a new window, because other peers deliver chunks from now on."""
        self._landed_then = {}

    def too_slow(
        self, elapsed_s: float, *, num_from_sources: int, num_left: Mapping[int, int], num_landed: Mapping[int, int]
    ) -> int | None:
        """Return the slowest relay if the sources would deliver the missing chunks much sooner; ``None`` otherwise.

        "Much sooner" means: sooner by more than the time that this receiver's own block took. Call this only when that
        block is complete.

        Args:
            elapsed_s: Seconds since the fetch began.
            num_from_sources: Number of chunks that the sources have delivered.
            num_left: Number of chunks that each relay still has to deliver. The relays have to deliver all missing
                chunks.
            num_landed: Number of chunks that each relay has delivered. The keys are those of ``num_left``.

        Returns:
            The key of the relay.
        """
        if not self._num_own:
            self._own_s, self._num_own = elapsed_s, num_from_sources
        if self._landed_then.keys() != num_landed.keys():
            self._since_s, self._landed_then = elapsed_s, num_landed
        waited_s = elapsed_s - self._since_s
        # A busy machine, or a connection that has lost a packet (RFC 6298), may pause for half a second.
        if not self._num_own or waited_s < max(0.5, self._own_s / 4):
            return None
        landed = {relay: number - self._landed_then[relay] for relay, number in num_landed.items()}
        total_left, total_landed = sum(num_left.values()), sum(landed.values())
        # One more chunk is under way.
        from_relays_s = waited_s * total_left / (total_landed + 1)
        from_sources_s = self._own_s * total_left / self._num_own
        if from_relays_s > from_sources_s + self._own_s:
            self.restart()
            return max(num_left, key=lambda relay: num_left[relay] / (landed[relay] + 1))
        if total_landed:
            # A new window: a relay that stops later must not benefit from the chunks of this window.
            self._since_s, self._landed_then = elapsed_s, num_landed
        return None


def slowest_to_end(
    under_way: Sequence[Assignment[int]], sources: Sequence[SourceState], usable: Sequence[SourceState]
) -> Assignment[int] | None:
    """Return the slowest request if the best source would deliver the rest of it much sooner; ``None`` otherwise.

    All sources begin at the same time, so the number of chunks that a source has delivered is proportional to its rate.

    Args:
        under_way: The running requests to sources.
        sources: The state of each source.
        usable: The states of the sources that could take over a request.
    """
    # Two chunks for each source: with fewer, differences between sources are random.
    if sum(source.num_landed for source in usable) < max(1, 2 * len(usable)):
        return None
    best = max(usable, key=lambda source: source.num_landed)

    def left(assignment: Assignment[int]) -> float:
        source = sources[assignment.source]
        return assignment.num_left * source.num_active / max(0.5, source.num_landed)

    slow = [each for each in under_way if sources[each.source] is not best and not each.is_interrupted]
    slowest = max(slow, key=left, default=None)
    if slowest is None:
        return None
    again = slowest.num_left * (best.num_active + 1) / best.num_landed
    # Interrupting a request loses parts of chunks, so the other source must be much faster.
    return slowest if left(slowest) > 4.0 * again else None
