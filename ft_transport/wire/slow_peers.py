"""Detects peers that slow a receiver down: a relay by its pace, a source by its rate.

While a receiver takes its own block, relays and sources share its link, and other receivers may not have begun: the
chunks that have come by then say little about a relay's speed. Afterwards the relays have the link to themselves, and
their chunks are compared with what the sources delivered in the time before.

All sources begin at one moment, so the chunks that each has delivered represent its rate, and the elapsed time is the
unit of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ft_transport.wire.fetch import Assignment, SourceState

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


@dataclass(frozen=True, slots=True)
class Delivery:
    """The chunks of one relay.

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
