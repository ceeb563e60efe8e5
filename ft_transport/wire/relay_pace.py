"""Relays are judged by their pace: would the sources deliver sooner what is still to come?

While a receiver takes its own block, relays and sources share its link, and others may not have begun: how much of each
has come by then says little of how fast a relay is. Afterwards the relays have the link for themselves, and what they
deliver is compared with what the sources have delivered in the time before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_LEAST_WAITED_S: Final = 0.5
"""Shorter pauses are those of a machine, or of a connection that has lost a packet (RFC 6298)."""
_LEAST_WAITED_PART: Final = 4
"""Of the time until the own block was there, one part in so many is waited at least."""


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
    """The pace of one receiver's relays, measured over windows of time. Belongs to ``wire.fleet_work``."""

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
