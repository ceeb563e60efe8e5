"""Peers that are so slow that a receiver does better with other ones: a relay by its pace, a source by its rate.

While a receiver takes its own block, relays and sources share its link, and others may not have begun: how much of each
has come by then says little of how fast a relay is. Afterwards the relays have the link for themselves, and what they
deliver is compared with what the sources have delivered in the time before.

All sources begin at one moment, so the chunks that each has delivered stand for its rate, and the time that has passed
is the unit of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ft_transport.wire.fetch import Assignment, SourceState

_LEAST_WAITED_S: Final = 0.5
"""Shorter pauses are those of a machine, or of a connection that has lost a packet (RFC 6298)."""
_LEAST_WAITED_PART: Final = 4
"""Of the time until the own block was there, one part in so many is waited at least."""
_NOTHING_YET: Final = 0.5
"""What a source that has delivered nothing counts as having delivered."""
_LEAST_KNOWN: Final = 2
"""Chunks for each source that have to land before anything is known of rates."""
_MUCH_SLOWER: Final = 4.0
"""By so much sooner has a chunk to come from another source to make up for the part of it that is lost."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one relay has delivered, and what it has yet to.

    Attributes:
        num_left: Chunks that it is expected to deliver.
        num_landed: Chunks that it has delivered so far.
    """

    num_left: int
    num_landed: int


class RelayPace:
    """The pace of one receiver's relays, measured over windows of time."""

    def __init__(self) -> None:
        self._own_s = 0.0
        self._num_own = 0
        self._since_s = 0.0
        self._then: Mapping[int, Delivery] = {}

    def restart(self) -> None:
        """Begins a new window: chunks come from other relays now, or from the sources as well."""
        self._then = {}

    def too_slow(self, elapsed_s: float, *, num_from_sources: int, relays: Mapping[int, Delivery]) -> int | None:
        """The slowest relay, if waiting costs more than the sources would take, by as much as the own block has taken.

        Args:
            elapsed_s: Since the fetch began. The own block is there.
            num_from_sources: Chunks that have come from sources.
            relays: All that is missing is expected of them.
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
        # One more is under way.
        from_relays_s = waited_s * num_left / (num_landed + 1)
        from_sources_s = self._own_s * num_left / self._num_own
        if from_relays_s > from_sources_s + self._own_s:
            self.restart()
            return max(relays, key=lambda relay: relays[relay].num_left / (landed[relay] + 1))
        if num_landed:
            # What has come by now excuses nobody who stops from here on.
            self._since_s, self._then = elapsed_s, relays
        return None


def slowest_to_end(
    under_way: Sequence[Assignment[int]], sources: Sequence[SourceState], usable: Sequence[SourceState]
) -> Assignment[int] | None:
    """The request whose rest comes much sooner if the best source is asked for it from the beginning, if there is one.

    Args:
        under_way: All requests.
        sources: All sources, by their index.
        usable: Those that might be asked instead.
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
