"""A ring of receivers: each receiver fetches one block from the sources, and all other blocks from its predecessor.

So a receiver has one connection to the sources and one to a relay, whatever the number of receivers, and each
connection uses the full rate of its link. With a connection to every other receiver, each connection would carry little
data in small packets, at many times the cost. A chunk passes through all receivers, so each receiver gets it later than
its predecessor, by the time of one chunk.

If its predecessor fails, a receiver switches to the next receiver upstream, and the ring continues without the failed
one. If its predecessor is too slow, a receiver leaves the ring: it fetches each remaining block from the block's owner.
The receivers behind it may stay in the ring, because it still relays chunks to them. Leaving without need is expensive,
because the links of the ring are full: the receiver, and all receivers behind it, would become slower. To decide, the
receiver compares the chunks from the ring with those from the sources, and with the progress of other receivers. So
each receiver sends, with each chunk, the number of chunks that the furthest receiver has, as far as it knows.
"""

from __future__ import annotations


def has_ring(*, num_receivers: int, num_chunks: int) -> bool:
    """Return whether receivers begin as a ring. All receivers of a state get the same result.

    Receivers with few chunks each do not begin as a ring, because its delay would be too long.
    """
    return num_receivers >= 3 and num_chunks >= 16 * (num_receivers - 1)


class Ring:
    """Decides when this receiver leaves the ring. Used by one thread at a time, except for `report_progress`.

    Args:
        num_chunks: Number of chunks of the state.
        num_own: Number of chunks that this receiver has to fetch from the sources.
        num_relayed: Number of chunks that this receiver has to fetch from its predecessor.
        num_own_requests: Number of this receiver's concurrent requests to sources.

    Attributes:
        num_asked: Number of chunks that were requested from the predecessor and have not landed.
        num_relayed_landed: Number of chunks that have landed from the predecessor.
        has_left: Whether this receiver has left the ring, so that it fetches each block from the block's owner.
        was_cut: Whether a response of the predecessor has ended before all requested chunks.
    """

    def __init__(self, *, num_chunks: int, num_own: int, num_relayed: int, num_own_requests: int) -> None:
        self.num_asked = 0
        self.has_left = False
        self.was_cut = False
        self._num_chunks = num_chunks
        self._num_own = num_own
        self._num_relayed = num_relayed
        self._num_before = 0
        self._num_own_landed = 0
        self.num_relayed_landed = 0
        self._num_own_requests = num_own_requests
        self._num_silent = 0
        # Receivers begin at different times, so a receiver judges its predecessor only after 1/8 of its own chunks.
        # With few own chunks it waits for 1/4 of them, but for at least 2 and at most 8 for each request to a source.
        self._num_settled = max(2 * num_own_requests, min(8 * num_own_requests, num_own // 4), num_own // 8)
        self._furthest = 0
        self._least_behind: int | None = None

    @property
    def is_used(self) -> bool:
        """Whether this receiver requests chunks from its predecessor alone, and from no other relay."""
        return not self.has_left or self.is_left_open

    @property
    def is_left_open(self) -> bool:
        """Whether this receiver has left the ring, but its last request to the predecessor still runs."""
        return self.has_left and self.num_asked > 0

    def joined_again(self, *, num_own: int, num_relayed: int) -> Ring:
        """Return the ring with a new predecessor, without the measurements of the previous predecessor.

        Args:
            num_own: Number of chunks that this receiver still has to fetch from the sources.
            num_relayed: Number of chunks that this receiver still has to fetch from the new predecessor.
        """
        ring = Ring(
            num_chunks=self._num_chunks,
            num_own=num_own,
            num_relayed=num_relayed,
            num_own_requests=self._num_own_requests,
        )
        ring._num_before = self._num_before + self._num_own_landed + self.num_relayed_landed
        ring.report_progress(self._furthest)
        return ring

    @property
    def is_settled(self) -> bool:
        """Whether enough chunks from the sources have landed to judge the predecessor."""
        return self._num_own_landed >= self._num_settled

    def report_progress(self, num_landed: int) -> None:
        """Record that another receiver has received this many chunks. Any thread may call this."""
        self._furthest = max(self._furthest, num_landed)

    def own_landed(self) -> bool:
        """Record a chunk from a source; return whether the receiver leaves the ring now."""
        self._num_own_landed += 1
        self._num_silent += 1
        return self._leaves()

    def relayed_landed(self) -> bool:
        """Record a chunk from the predecessor; return whether the receiver leaves the ring now."""
        self.num_asked -= 1
        self.num_relayed_landed += 1
        self._num_silent = 0
        return self._leaves()

    def _leaves(self) -> bool:
        if self.has_left or not self.num_asked or not self.is_settled:
            return False
        self.has_left = self._is_held_up() or self._is_left_behind()
        return self.has_left

    def _is_held_up(self) -> bool:
        """Return whether the ring delivers nothing, or less than a source while other receivers are ahead.

        The progress of other receivers matters because a source may serve one receiver before all others. Then no
        predecessor has chunks to relay at first.
        """
        # The ring may deliver half as much as a source until 10 own chunks have landed, or if requests share the link.
        is_early = self._num_own_landed < 10 or self._num_own_requests > 1
        least = self.num_relayed_landed * self._num_own_requests * (2 if is_early else 1)
        is_little = least < self._num_own_landed and self._has_brought_less(1)
        is_behind = self._num_behind > self._num_chunks / 16
        return (is_little and is_behind) or self._num_silent >= max(self._num_settled, self._num_own // 2)

    def _has_brought_less(self, by: int) -> bool:
        """Compare which fractions of their chunks the sources and the ring have delivered.

        Returns:
            Whether the sources' fraction exceeds ``by`` times the ring's fraction.
        """
        of_sources, of_ring = self._num_own_landed * self._num_relayed, self.num_relayed_landed * self._num_own
        return of_sources > by * of_ring

    def _is_left_behind(self) -> bool:
        """Return whether other receivers are far ahead and gain, while the ring delivers less than the sources."""
        behind = self._num_behind
        if behind <= self._num_chunks / 8:
            self._least_behind = None
            return False
        # A receiver that was delayed earlier must not leave if its predecessor relays enough now.
        self._least_behind = min(behind, self._least_behind if self._least_behind is not None else behind)
        is_falling = behind - self._least_behind > self._num_chunks / 16
        return is_falling and self._has_brought_less(2)

    @property
    def _num_behind(self) -> int:
        """Number of chunks by which the furthest known receiver is ahead of this one."""
        return self._furthest - self._num_before - self._num_own_landed - self.num_relayed_landed
