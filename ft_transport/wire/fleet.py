"""Who takes part in a fetch by several receivers at once, and how much each does at one time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ft_transport.wire.fetch import SourceIndex

MAX_WORKERS: Final = 16
"""Requests of one receiver at one time; most of them wait for a relay most of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsAtOnce:
    """How much a receiver does at one time.

    Attributes:
        num_own: Requests to sources.
        num_workers: All requests, those to relays too.
    """

    num_own: int
    num_workers: int


def requests_at_once(*, num_sources: int, num_receivers: int, num_connections: int, num_chunks: int) -> RequestsAtOnce:
    """What a receiver does at one time that may have ``num_connections`` to a source, and is one of so many."""
    num_useful = max(1, min(num_connections, num_chunks))
    num_own = max(1, num_useful // num_receivers, min(num_sources, num_connections))
    return RequestsAtOnce(num_own=num_own, num_workers=min(MAX_WORKERS, num_own + num_receivers - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Who takes part.

    Attributes:
        num_sources: How many sources there are; they have the first indices.
        num_receivers: How many receive the state now, this one too. The others follow the sources, in their order.
        own: The number of this one among them.
    """

    num_sources: int
    num_receivers: int
    own: int

    def relay_of(self, receiver: int) -> SourceIndex:
        """The index of another receiver among those that are asked."""
        return SourceIndex(self.num_sources + receiver - (receiver > self.own))

    def receiver_of(self, relay: SourceIndex) -> int:
        """Which receiver it is that has this index."""
        number = relay - self.num_sources
        return number + (number >= self.own)
