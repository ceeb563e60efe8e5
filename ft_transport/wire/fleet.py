"""The sources and the receivers of a fetch."""

from __future__ import annotations

from dataclasses import dataclass

from ft_transport.wire.fetch import SourceIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Who takes part.

    Attributes:
        num_sources: How many sources there are; they have the first indices.
        num_receivers: How many receive the state now, this one too. The others follow the sources, in their order.
        own: The number of this one among them.
    """

    num_sources: int = 1
    num_receivers: int = 1
    own: int = 0

    def relay_of(self, receiver: int) -> SourceIndex:
        """The index of another receiver among those that are asked."""
        return SourceIndex(self.num_sources + receiver - (receiver > self.own))

    def receiver_of(self, relay: SourceIndex) -> int:
        """Which receiver it is that has this index."""
        number = relay - self.num_sources
        return number + (number >= self.own)
