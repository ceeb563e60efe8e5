"""Receivers in a ring: each takes its own block from the sources, and all else from the one before it.

So a receiver has one connection to the sources and one to a relay, however many they are, and each of them carries
as much as its link can: a connection to each other receiver would carry a small part of it in small packets, and
cost both sides many times the work. A chunk goes all the way round, so the last one is late by a chunk for each
receiver.

A receiver behind a dead one asks the next one before it, so the ring goes on without the dead one. A receiver behind a
slow one gets nothing in time. It leaves the ring then, and asks the owner of each block for that block, until it has
everything; those behind it may stay, for it passes on what it gets. To leave without need is dear: the links of the
ring are full, so who asks all owners gets less, and so do all behind it. A receiver is told with each chunk how many
chunks the furthest receiver has received of which the one before has heard, and compares what comes from the ring with
that and with what comes from the sources.
"""

from __future__ import annotations

from typing import Final

_CHUNKS_PER_RECEIVER: Final = 16
"""With fewer chunks for each receiver a ring is too long for them."""
_LEAST_RECEIVERS: Final = 3
_SETTLED_PART: Final = 8
"""Before one in so many of the own chunks is here nothing is judged: not all begin at the same moment..."""
_FEW_SETTLED_PART: Final = 4
"""...or, where they are few, one in so many..."""
_FEW_SETTLED: Final = (2, 8)
"""...but for each request to a source at least and at most so many."""
_EARLY: Final = 10
"""Of the first own chunks some come before the ring has begun to bring any."""
_LESS_AT_FIRST: Final = 2
"""So the ring may bring less by so much until then, and always where several requests to sources share the link."""
_LITTLE_BEHIND_PART: Final = 16
"""A receiver that brings so little is left only by who lacks this part of all chunks that another one has."""
_SILENT_PART: Final = 2
"""A receiver that brings nothing while one in so many of them come keeps others waiting."""
_BEHIND_PART: Final = 8
"""A receiver that lacks this part of all chunks, one in so many, that another one has, is behind..."""
_FALLING_PART: Final = 16
"""...and falls further behind if it lacks this part of them more by now..."""
_MUCH_LESS: Final = 2
"""...while the part that has come from the ring is smaller by so much than that from the sources."""


def has_ring(*, num_receivers: int, num_chunks: int) -> bool:
    """Whether receivers of so many chunks begin as a ring: the same for all of them."""
    return num_receivers >= _LEAST_RECEIVERS and num_chunks >= _CHUNKS_PER_RECEIVER * (num_receivers - 1)


class Ring:
    """What one receiver knows of the ring. Used by one thread at a time, but for `heard`.

    Args:
        num_chunks: How many chunks there are.
        num_own: How many of these it wants from the sources.
        num_relayed: How many it wants from the one before it.
        num_own_requests: How many requests to sources it makes at one time.

    Attributes:
        num_asked: Chunks that the one before it has been asked for, and that have not come.
        num_relayed_landed: Chunks that have come from it.
        has_left: Whether this receiver asks each for its own block by now.
        was_cut: Whether the one before has ended an answer early.
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
        """Whether the one before is the only relay that is asked."""
        return not self.has_left or self.is_left_open

    @property
    def is_left_open(self) -> bool:
        """Whether something is still to come from the one before, which is not waited for any more."""
        return self.has_left and self.num_asked > 0

    def joined_again(self, *, num_own: int, num_relayed: int) -> Ring:
        """The same ring behind another receiver: what has come by now says nothing of that one.

        Args:
            num_own: How many chunks it wants from the sources now.
            num_relayed: How many it wants from that one.
        """
        ring = Ring(
            num_chunks=self._num_chunks,
            num_own=num_own,
            num_relayed=num_relayed,
            num_own_requests=self._num_own_requests,
        )
        ring._num_before = self._num_before + self._num_own_landed + self.num_relayed_landed
        ring.heard(self._furthest)
        return ring

    @property
    def is_settled(self) -> bool:
        """Whether this receiver has enough chunks of its own block to judge the receiver before it."""
        return self._num_own_landed >= self._num_settled

    def heard(self, num_landed: int) -> None:
        """Another receiver has received so many chunks. Called by any thread."""
        self._furthest = max(self._furthest, num_landed)

    def own_landed(self) -> bool:
        """A chunk has come from a source; says whether the receiver leaves the ring now."""
        self._num_own_landed += 1
        self._num_silent += 1
        return self._leaves()

    def relayed_landed(self) -> bool:
        """A chunk has come from the one before; says whether the receiver leaves the ring now."""
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

        At the beginning a source may serve one receiver before all others: then nobody has anything to pass on yet.
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
        # Whoever the one before has kept waiting for long need not leave, if it passes on enough by now.
        self._least_behind = min(behind, self._least_behind if self._least_behind is not None else behind)
        is_falling = (behind - self._least_behind) * _FALLING_PART > self._num_chunks
        return is_falling and self._has_brought_less(_MUCH_LESS)

    @property
    def _num_behind(self) -> int:
        """How many chunks more the furthest receiver has received that is known of."""
        return self._furthest - self._num_before - self._num_own_landed - self.num_relayed_landed
