"""The `Work` of a fetch of chunks: divides a state among the receivers that fetch it at the same time.

Each receiver owns one block of chunks. The owner fetches its block from the sources, and relays verified chunks. The
other receivers fetch the block from the owner, or from their predecessor if the receivers form a ring (``wire.ring``).
So the sources send each byte only once. Every receiver decides by these rules alone, without messages to the others.

If an owner fails or is too slow, each run of its chunks gets a substitute, the same for all receivers. The substitute
fetches the run from the sources, after its own block, and the others fetch the run from the substitute. So the sources
send the block of a failed owner only about once. Receivers may disagree on which owner is too slow. Even then no two
receivers wait for each other, because the order of substitutes is the same for all. In a ring, the receiver behind a
failed one is the substitute, because it notices the failure first. A receiver without any working relay uses the
sources.

A single receiver fetches the only block from all sources at once, and more from faster sources. With one source,
requests are large at first and small at the end, and an idle worker takes over half of what the slowest connection has
not begun to receive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from ft_transport.errors import FetchFailedError
from ft_transport.wire.chunks import runs_of
from ft_transport.wire.fetch import Assignment, SourceIndex, SourceState
from ft_transport.wire.ring import Ring, has_ring
from ft_transport.wire.routes import MAX_RANGES
from ft_transport.wire.swarm import BlockQueue, Blocks, RelayRates, Swarm, slowest_to_end

MAX_CHUNKS_PER_REQUEST: Final = 64
_MAX_WORKERS: Final = 16
"""Maximum number of concurrent requests of one receiver; most of them wait for a relay most of the time."""
_DRY_ENOUGH: Final = 2
"""A receiver stops waiting for a relay after this many empty responses in a row."""
_HOPELESSLY_DRY: Final = 8
"""If no source is left, the fetch fails after this many empty responses of all relays together."""


class SwarmWork:
    """The `Work` of a fetch of chunks; its units are chunk indices.

    Args:
        ranges: Half-open, ascending ranges of the chunks to fetch.
        num_chunks: Number of chunks of the state.
        swarm: The sources and the receivers.
        num_connections: Maximum number of connections to one source.
        num_in_flight: Number of chunks that fit into the buffers of a connection. A worker takes over at least this
            many chunks of another worker's request, because chunks in the buffers are fetched twice.

    Attributes:
        num_left: Number of chunks that have not landed.
        num_workers: Number of workers that the fetch can use.
    """

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        *,
        num_chunks: int,
        swarm: Swarm,
        num_connections: int,
        num_in_flight: int = 1,
    ) -> None:
        self._swarm = swarm
        self._num_in_flight = num_in_flight
        number = swarm.num_receivers
        own_share = min(num_connections, num_chunks) // number
        self._num_own_requests = max(1, own_share, min(swarm.num_sources, num_connections))
        self.num_workers = min(_MAX_WORKERS, self._num_own_requests + number - 1)
        self._chunks_per_block = max(1, num_chunks // number)
        # With a worker for each relay, a request may last until the relay has its whole block.
        self._is_one_each = self._num_own_requests + number - 1 <= _MAX_WORKERS
        self._most_of_relay = max(1, min(MAX_CHUNKS_PER_REQUEST, self._chunks_per_block // 8))
        is_ring = has_ring(num_receivers=number, num_chunks=num_chunks)
        self._blocks = Blocks(ranges, num_chunks=num_chunks, swarm=swarm, is_ring=is_ring)
        self._own = self._blocks.own
        before, after = self._blocks.queues[: swarm.own], self._blocks.queues[swarm.own + 1 :]
        # In a rotated order, so that each receiver begins with a different relay.
        self._others = [(swarm.relay_of(queue.receiver), queue) for queue in (*after, *before)]
        self._by_source = [*[self._own] * swarm.num_sources, *before, *after]
        self._num_from_sources = 0
        self.num_left = sum(queue.num_left for queue in self._blocks.queues)
        self._in_turn = [(swarm.own + far) % swarm.num_sources for far in range(swarm.num_sources)]
        self._before = swarm.relay_of((swarm.own - 1) % number)
        self._rates = RelayRates()
        self._ring: Ring | None = None
        if is_ring:
            self._ring = Ring(
                num_chunks=num_chunks,
                num_own=self._own.num_left,
                num_relayed=self.num_left - self._own.num_left,
                num_own_requests=self._num_own_requests,
            )
        self._is_only_source = number == swarm.num_sources == 1
        # The overhead of a request is equal to about half a megabyte.
        self._least_per_request = max(1, min(4, self.num_left // (16 * self.num_workers)))

    def report_progress(self, num_landed: int) -> None:
        """Record that another receiver has this many chunks. Any thread may call this."""
        if self._ring is not None:
            self._ring.report_progress(num_landed)

    def take(
        self, sources: Sequence[SourceState], under_way: Collection[Assignment[int]]
    ) -> tuple[SourceIndex, Sequence[int]] | Assignment[int] | None:
        """Return the next request of a worker, or a request to interrupt (``Work.take``)."""
        return self._take(sources, under_way) or self._find_hopeless(sources, under_way)

    def _take(
        self, sources: Sequence[SourceState], under_way: Collection[Assignment[int]]
    ) -> tuple[SourceIndex, Sequence[int]] | None:
        """Return the next request to a source or a relay."""
        ring = self._ring
        if ring is not None and ring.is_used:
            taken = self._take_own(sources, under_way) or self._take_from_ring(sources[self._before])
            if taken is not None or ring.num_asked or self._expects_own(sources):
                return taken
            # The sources have failed. Other receivers may have the missing chunks.
            ring.has_left = True
        taken = self._take_own(sources, under_way) or self._take_relayed(sources)
        if taken is None and self._deal_stalled(sources):
            taken = self._take_own(sources, under_way) or self._take_relayed(sources)
        if taken is None and not under_way:
            taken = self._take_last_resort(sources)
        if taken is None and self._is_only_source:
            taken = self._take_over(under_way)
        return taken

    def time_passed(self, elapsed_s: float, sources: Sequence[SourceState]) -> bool:
        """Stop waiting for a relay, or for the ring, if it is too slow by now (``Work.time_passed``)."""
        has_source = any(not each.is_excluded and not each.num_dry for each in sources[: self._swarm.num_sources])
        if self._own.num_left or not has_source:
            self._rates.restart()
            return False
        ring = self._ring if self._ring is not None and self._ring.num_asked else None
        if ring is not None:
            num_left, num_landed = {self._swarm.own: ring.num_asked}, {self._swarm.own: ring.num_relayed_landed}
        else:
            num_left = {queue.receiver: queue.num_left for _, queue in self._others}
            num_landed = {queue.receiver: queue.num_landed for _, queue in self._others}
        slow = self._rates.too_slow(
            elapsed_s, num_from_sources=self._num_from_sources, num_left=num_left, num_landed=num_landed
        )
        if slow is None:
            return False
        if ring is not None:
            ring.has_left = True
        else:
            self._blocks.queues[slow].is_slow = True
        return True

    def landed(
        self,
        source: SourceIndex,
        unit: int,
        sources: Sequence[SourceState],  # noqa: ARG002
    ) -> bool:
        """Record a chunk that landed; return whether waiting workers have something to do (``Work.landed``)."""
        self.num_left -= 1
        queue, ring = self._by_source[source], self._ring
        owner = queue if unit in queue.block else self._blocks.owner(unit)
        owner.num_lacking -= 1
        if source < self._swarm.num_sources:
            self._num_from_sources += 1
        if ring is not None and self._is_of_ring(source):
            owner.num_left -= 1
            return ring.relayed_landed()
        queue.num_landed += 1
        queue.num_left -= 1
        return ring is not None and queue is self._own and ring.own_landed()

    def put_back(
        self, source: SourceIndex, units: Sequence[int], sources: Sequence[SourceState]
    ) -> FetchFailedError | None:
        """Take back the rest of a request, so that it is requested first (``Work.put_back``).

        If the relay lacked chunks of a block that was assigned to another receiver, these chunks are requested last:
        the relay may not know yet that it must receive the block in that receiver's place.
        """
        queue, state = self._by_source[source], sources[source]
        if self._is_of_ring(source):
            self._ring_has_ended(units, sources)
        else:
            for chunks in runs_of(units):
                if state.num_dry and chunks.start not in queue.block:
                    queue.add_last(chunks)
                else:
                    queue.add(chunks)
        if queue.is_given_up:
            self._blocks.deal(queue)
        if any(not each.is_excluded for each in sources[: self._swarm.num_sources]):
            return None
        # Every relay is empty. The fetch fails only after several empty responses of each relay.
        relays = [each.num_dry for each in sources[self._swarm.num_sources :] if not each.is_excluded]
        if relays and (min(relays) < 3 or sum(relays) < _HOPELESSLY_DRY):
            return None
        names = ", ".join(each.name for each in sources)
        return FetchFailedError(
            f"expected the whole snapshot from {names}, but {self.num_left} chunks are missing", failures=()
        )

    def _find_hopeless(
        self, sources: Sequence[SourceState], under_way: Collection[Assignment[int]]
    ) -> Assignment[int] | None:
        """Return a request to interrupt: one to a relay that was given up, or to a source much slower than others."""
        if self._ring is not None and self._ring.is_left_open:
            return next((each for each in under_way if each.source == self._before and not each.is_interrupted), None)
        if self._own.missing:
            return None
        number = self._swarm.num_sources
        if all(state.is_excluded for state in sources[:number]):
            # Without sources, the chunks would be requested from the same relay again.
            return None
        for each in under_way:
            if each.source >= number and not each.is_interrupted and self._by_source[each.source].is_given_up:
                return each
        usable = [state for state in sources[:number] if not state.is_excluded and not state.num_dry]
        return slowest_to_end([each for each in under_way if each.source < number], sources, usable)

    def _take_own(
        self, sources: Sequence[SourceState], under_way: Collection[Assignment[int]]
    ) -> tuple[SourceIndex, range] | None:
        if not self._own.missing:
            return None
        num_asked = sum(each.source < self._swarm.num_sources for each in under_way)
        if num_asked >= self._num_own_requests and self._swarm.num_receivers > 1:
            return None
        source = self._best_source(sources)
        return None if source is None else (source, self._own.take(self._request_size(source, sources)))

    def _take_over(self, under_way: Collection[Assignment[int]]) -> tuple[SourceIndex, range] | None:
        """Take over half of what the largest running request lacks; ``None`` if buffers may contain that already."""
        slowest = max(under_way, key=lambda each: each.end - each.next, default=None)
        num_taken = (slowest.end - slowest.next - 1) // 2 if slowest is not None else 0
        if slowest is None or num_taken < self._num_in_flight:
            return None
        end = slowest.end
        slowest.end -= num_taken
        return slowest.source, range(slowest.units[slowest.end], slowest.units[end - 1] + 1)

    def _expects_own(self, sources: Sequence[SourceState]) -> bool:
        """Return whether chunks of the own queue are missing, and some source can deliver them."""
        return self._own.num_left > 0 and any(not each.is_excluded for each in sources[: self._swarm.num_sources])

    def _is_of_ring(self, source: SourceIndex) -> bool:
        """Return whether a request to this peer is the ring's request to the predecessor."""
        return self._ring is not None and source == self._before and self._ring.num_asked > 0

    def _take_from_ring(self, before: SourceState) -> tuple[SourceIndex, Sequence[int]] | None:
        """Return one request to the predecessor for all other blocks, in the order in which it receives them."""
        if self._ring is None or self._ring.num_asked or before.num_active:
            return None
        units: list[int] = []
        num_ranges = 0
        number, own = self._swarm.num_receivers, self._swarm.own
        for queue in (self._blocks.queues[(own - far) % number] for far in range(1, number)):
            while queue.missing:
                if not units or units[-1] + 1 != queue.missing[0].start:
                    num_ranges += 1
                if num_ranges > MAX_RANGES:
                    break
                units += queue.take(len(queue.missing[0]))
        self._ring.num_asked = len(units)
        return (self._before, units) if units else None

    def _ring_has_ended(self, units: Sequence[int], sources: Sequence[SourceState]) -> None:
        """Take back chunks that the predecessor did not relay; then stay, switch predecessors, or leave the ring."""
        assert self._ring is not None
        self._ring.num_asked = 0
        for run in runs_of(units):
            for queue, chunks in self._blocks.parts(run):
                queue.add(chunks)
        state = sources[self._before]
        if state.failures:
            self._pass_over(sources)
        elif state.num_dry and not self._ring.is_settled and self._expects_own(sources):
            # The first chunk may take long if the sources are slow or have many clients.
            self._ring.has_left |= state.num_dry >= 6
        elif state.num_dry or state.num_interrupted or self._ring.was_cut:
            self._ring.has_left = True
        else:
            # The predecessor failed, or had no more chunks in time. The next request will show which.
            self._ring.was_cut = True

    def _pass_over(self, sources: Sequence[SourceState]) -> None:
        """Switch to the next receiver upstream, because the predecessor failed; leave the ring if there is none."""
        assert self._ring is not None
        number = self._swarm.num_receivers
        failed = self._swarm.receiver_of(self._before)
        following = (failed - 1) % number
        if following == self._swarm.own or sources[self._swarm.relay_of(following)].has_failed:
            self._ring.has_left = True
            return
        self._before = self._swarm.relay_of(following)
        # This receiver is the substitute for the failed one, and fetches its block from the sources.
        self._blocks.queues[failed].is_given_up = True
        self._blocks.deal(self._blocks.queues[failed])
        self._others = [other for other in self._others if not other[1].is_given_up]
        self._rates.restart()
        self._ring = self._ring.joined_again(num_own=self._own.num_left, num_relayed=self.num_left - self._own.num_left)

    def _take_relayed(self, sources: Sequence[SourceState]) -> tuple[SourceIndex, range] | None:
        """Return a request to the relay with most missing chunks; on a tie, each receiver prefers another relay."""
        best, most = None, 0
        is_dry_left_out = not self._expects_own(sources)
        for relay, queue in self._others:
            if queue.num_missing > most:
                state = sources[relay]
                # With fewer workers than relays, two relays that wait for each other would repeat requests for ever.
                if is_dry_left_out and state.num_dry >= _DRY_ENOUGH:
                    continue
                if not state.num_active and not state.has_failed:
                    best, most = (relay, queue), queue.num_missing
        if best is None:
            return None
        relay, queue = best
        if self._is_one_each:
            return relay, queue.take(MAX_CHUNKS_PER_REQUEST)
        # If some relays have more chunks than others, all receivers begin with these relays. Large requests would keep
        # all receivers there.
        return relay, queue.take(min(self._most_of_relay, 2 * queue.num_landed + 1))

    def _take_last_resort(self, sources: Sequence[SourceState]) -> tuple[SourceIndex, range] | None:
        """Return a request for one chunk to the working source or relay with the fewest empty responses."""
        queue = next((queue for queue in self._blocks.queues if queue.missing), None)
        number = self._swarm.num_sources
        there = [
            index
            for index, state in enumerate(sources)
            if not state.is_excluded and (index < number or state.num_dry < _HOPELESSLY_DRY)
        ]
        if queue is None or not there:
            return None
        asked = SourceIndex(min(there, key=lambda index: (sources[index].num_dry, index)))
        chunks = queue.take(1)
        queue.num_left -= len(chunks)
        self._by_source[asked].num_left += len(chunks)
        return asked, chunks

    def _deal_stalled(self, sources: Sequence[SourceState]) -> bool:
        """Assign chunks of failed relays to substitutes; if the own block is complete, also those of slow relays."""
        is_any = False
        expects_own = self._expects_own(sources)
        for relay, queue in self._others:
            if queue.num_left and not queue.is_given_up:
                state = sources[relay]
                if state.has_failed or (not expects_own and self._is_stalled(queue, state)):
                    queue.is_given_up = is_any = True
                    self._blocks.deal(queue)
        if is_any:
            self._others = [other for other in self._others if not other[1].is_given_up]
        return is_any

    def _is_stalled(self, queue: BlockQueue, relay: SourceState) -> bool:
        """Return whether several responses of a relay were empty, or the relay is much slower than the best relay."""
        if relay.num_dry >= _DRY_ENOUGH or queue.is_slow:
            return True
        if not queue.num_lacking:
            # The relay has delivered its own block. It substitutes for others, and may be waiting itself.
            return False
        # Compare only with relays whose block has landed completely: with fewer chunks, differences are random.
        of_best_relay = max((other.num_landed for _, other in self._others if not other.num_lacking), default=0)
        if of_best_relay > 2 * (queue.num_landed + 1):
            return True
        # If all missing chunks belong to one relay's block, and are many, that relay delays the ring.
        is_alone_behind = self.num_left == queue.num_lacking and queue.num_lacking > len(queue.block) / 8
        return self._ring is not None and is_alone_behind

    def _best_source(self, sources: Sequence[SourceState]) -> SourceIndex | None:
        """Return the least busy working source; on a tie, each receiver prefers another source."""
        usable = [index for index in self._in_turn if not sources[index].is_excluded]
        return SourceIndex(min(usable, key=lambda index: sources[index].load)) if usable else None

    def _request_size(self, source: SourceIndex, sources: Sequence[SourceState]) -> int:
        """Return how many chunks to request from a source: in proportion to its speed, and few while it is unknown."""
        if self._is_only_source:
            share = self._own.num_missing // self._num_own_requests
            return max(self._least_per_request, min(MAX_CHUNKS_PER_REQUEST, share))
        state = sources[source]
        divisor = (self._num_from_sources + 1) * 2 * (state.num_active + 1)
        share = self._own.num_missing * (state.num_landed + 1) // divisor
        most = MAX_CHUNKS_PER_REQUEST
        if self._swarm.num_receivers > 1:
            # A source serves receivers with small requests in turns, but long responses at different rates, and all
            # receivers would wait for the slowest.
            most = min(most, self._chunks_per_block // 32)
        return max(1, min(most, state.num_landed + 1, share))
