"""Which of several sources is so slow that its request is better ended and made elsewhere.

All sources begin at one moment, so the chunks that each has delivered stand for its rate, and the time that has passed
is the unit of time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from ft_transport.wire.fetch import Assignment, SourceState

_NOTHING_YET: Final = 0.5
"""What a source that has delivered nothing counts as having delivered."""
_LEAST_KNOWN: Final = 2
"""Chunks for each source that have to land before anything is known of rates."""
_MUCH_SLOWER: Final = 4.0
"""By so much sooner has a chunk to come from another source to make up for the part of it that is lost."""


_num_landed: Final[Callable[[SourceState], int]] = attrgetter("num_landed")


def _landed(source: SourceState) -> float:
    return max(_NOTHING_YET, source.num_landed)


def slowest_to_end(
    under_way: Sequence[Assignment[int]], sources: Sequence[SourceState], usable: Sequence[SourceState]
) -> Assignment[int] | None:
    """The request whose rest comes much sooner if the best source is asked for it from the beginning, if there is one.

    Args:
        under_way: All requests.
        sources: All sources, by their index.
        usable: Those that might be asked instead.
    """
    if sum(map(_num_landed, usable)) < max(1, _LEAST_KNOWN * len(usable)):
        return None
    best = max(usable, key=_num_landed)

    def left(assignment: Assignment[int]) -> float:
        source = sources[assignment.source]
        return assignment.num_left * source.num_active / _landed(source)

    slow = [each for each in under_way if sources[each.source] is not best and not each.is_interrupted]
    slowest = max(slow, key=left, default=None)
    if slowest is None:
        return None
    again = slowest.num_left * (best.num_active + 1) / _landed(best)
    return slowest if left(slowest) > _MUCH_SLOWER * again else None
