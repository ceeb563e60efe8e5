"""A ring of receivers: each takes its own block from the sources, and all else from the receiver before it.

So a receiver has one connection to the sources and one to a relay, however many receivers there are, and each
connection carries as much as its link can: a connection to each other receiver would carry a small part of it in small
packets, and cost both sides many times the work. A chunk goes all the way round, so the last one is late by a chunk for
each receiver.

A receiver behind a dead one asks the next one upstream, so the ring goes on without the dead one. A receiver behind a
slow one gets nothing in time. It then leaves the ring, and asks the owner of each block for that block, until it has
everything; the receivers behind it may stay, because it relays what it gets. Leaving without need is expensive: the
links of the ring are full, so a receiver that asks all owners gets less, and so do all behind it. Each chunk comes with
the number of chunks that the furthest receiver known to the predecessor has received. The receiver compares what comes
from the ring with that number and with what comes from the sources.
"""

from __future__ import annotations

from typing import Final

_CHUNKS_PER_RECEIVER: Final = 16
"""With fewer chunks per receiver the ring would be too long."""
_LEAST_RECEIVERS: Final = 3
_SETTLED_PART: Final = 8
"""Nothing is judged before one in this many of the own chunks is here: receivers begin at different moments..."""
_FEW_SETTLED_PART: Final = 4
"""...or, with few own chunks, one in this many..."""
_FEW_SETTLED: Final = (2, 8)
"""...but at least and at most this many for each request to a source."""
_EARLY: Final = 10
"""Own chunks that may come before the ring begins to deliver."""
_LESS_AT_FIRST: Final = 2
"""Until then, and always if several requests to sources share the link, the ring may deliver less by this factor."""
_LITTLE_BEHIND_PART: Final = 16
"""If the ring delivers this little, a receiver leaves it only if it is behind by one in this many of all chunks."""
_SILENT_PART: Final = 2
"""A predecessor that delivers nothing while one in this many of the own chunks come is too slow."""
_BEHIND_PART: Final = 8
"""A receiver is behind if it lacks one in this many of all chunks that another receiver has..."""
_FALLING_PART: Final = 16
"""...and falls further behind if by now it lacks one in this many of them more..."""
_MUCH_LESS: Final = 2
"""...while the ring has delivered a part of its chunks that is smaller by this factor than that from the sources."""


def has_ring(*, num_receivers: int, num_chunks: int) -> bool:
    """Whether receivers of this many chunks begin as a ring: the same for all of them."""
    return num_receivers >= _LEAST_RECEIVERS and num_chunks >= _CHUNKS_PER_RECEIVER * (num_receivers - 1)


class Ring:
    """The ring as one receiver sees it. Used by one thread at a time, except for `report_progress`.

    Args:
        num_chunks: Number of all chunks.
        num_own: Number of chunks that it wants from the sources.
        num_relayed: Number of chunks that it wants from its predecessor.
        num_own_requests: Number of its concurrent requests to sources.

    Attributes:
        num_asked: Chunks that were requested from the predecessor and have not come.
        num_relayed_landed: Chunks that have come from it.
        has_left: Whether this receiver asks each owner for its own block by now.
        was_cut: Whether the predecessor has ended an answer early.
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
        least, most = (number * num_own_requests for number in _FEW_SETTLED)
        self._num_settled = max(least, min(most, num_own // _FEW_SETTLED_PART), num_own // _SETTLED_PART)
        self._furthest = 0
        self._least_behind: int | None = None

    @property
    def is_used(self) -> bool:
        """Whether the predecessor is the only relay that is asked."""
        return not self.has_left or self.is_left_open

    @property
    def is_left_open(self) -> bool:
        """Whether chunks are still to come from the predecessor, which is not waited for any more."""
        return self.has_left and self.num_asked > 0

    def joined_again(self, *, num_own: int, num_relayed: int) -> Ring:
        """Return the same ring behind another predecessor, without the earlier one's measurements.

        Args:
            num_own: Number of chunks that it wants from the sources now.
            num_relayed: Number of chunks that it wants from the new predecessor.
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
        """Whether this receiver has enough chunks of its own block to judge the receiver before it."""
        return self._num_own_landed >= self._num_settled

    def report_progress(self, num_landed: int) -> None:
        """Note that another receiver has received this many chunks. Called by any thread."""
        self._furthest = max(self._furthest, num_landed)

    def own_landed(self) -> bool:
        """Note a chunk from a source; return whether the receiver leaves the ring now."""
        self._num_own_landed += 1
        self._num_silent += 1
        return self._leaves()

    def relayed_landed(self) -> bool:
        """Note a chunk from the predecessor; return whether the receiver leaves the ring now."""
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
        """Whether the ring delivers nothing, or less than one request to a source while other receivers have more.

        At the beginning a source may serve one receiver before all others: then no predecessor has anything to relay
        yet.
        """
        is_early = self._num_own_landed < _EARLY or self._num_own_requests > 1
        least = self.num_relayed_landed * self._num_own_requests * (_LESS_AT_FIRST if is_early else 1)
        is_little = least < self._num_own_landed and self._has_brought_less(1)
        is_behind = self._num_behind * _LITTLE_BEHIND_PART > self._num_chunks
        return (is_little and is_behind) or self._num_silent >= max(self._num_settled, self._num_own // _SILENT_PART)

    def _has_brought_less(self, by: int) -> bool:
        of_sources, of_ring = self._num_own_landed * self._num_relayed, self.num_relayed_landed * self._num_own
        return of_sources > by * of_ring

    def _is_left_behind(self) -> bool:
        behind = self._num_behind
        if behind * _BEHIND_PART <= self._num_chunks:
            self._least_behind = None
            return False
        # A receiver that was held up for long need not leave if the predecessor relays enough by now.
        self._least_behind = min(behind, self._least_behind if self._least_behind is not None else behind)
        is_falling = (behind - self._least_behind) * _FALLING_PART > self._num_chunks
        return is_falling and self._has_brought_less(_MUCH_LESS)

    @property
    def _num_behind(self) -> int:
        """Number of chunks that the furthest known receiver is ahead."""
        return self._furthest - self._num_before - self._num_own_landed - self.num_relayed_landed
