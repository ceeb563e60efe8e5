"""Which receiver stands in for one that has gone, or is too slow: every receiver that sees so chooses the same.

See ``wire.fleet_work``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ft_transport.wire.block_queue import BlockQueue

_RUNS_PER_RECEIVER: Final = 2
"""Into how many runs of chunks a block is divided for each that may stand in for its owner."""


class StandIns:
    """As one receiver sees them.

    Args:
        queues: What is expected of each receiver, by its number; those that are out stand in for nobody.
        own: The number of this one.
        is_ring: Whether all began as a ring.
    """

    def __init__(self, queues: Sequence[BlockQueue], *, own: int, is_ring: bool) -> None:
        self._queues = queues
        self._own = own
        self._is_ring = is_ring
        most_others = max(1, len(queues) - 1)
        chunks_per_block = sum(len(queue.block) for queue in queues) // len(queues)
        self._chunks_per_run = max(1, chunks_per_block // (_RUNS_PER_RECEIVER * most_others))

    def of(self, owner: int, chunks: range) -> Iterator[tuple[BlockQueue, range]]:
        """Those who stand in for the owner of a block, each with its part of some of its chunks.

        This receiver itself where no other is left.
        """
        if self._is_ring:
            yield self._nearest_behind(owner), chunks
            return
        while chunks:
            run = chunks.start // self._chunks_per_run
            num_in_run = (run + 1) * self._chunks_per_run - chunks.start
            yield self._next_in_line(owner, run), chunks[:num_in_run]
            chunks = chunks[num_in_run:]

    def _nearest_behind(self, owner: int) -> BlockQueue:
        """Of those between the owner and this one in the ring."""
        number = len(self._queues)
        between = (self._queues[(self._own - far) % number] for far in range(1, (self._own - owner) % number))
        return next((queue for queue in between if not queue.is_out), self._queues[self._own])

    def _next_in_line(self, owner: int, run: int) -> BlockQueue:
        number = len(self._queues)
        first = self._queues[(owner + 1 + run % (number - 1)) % number]
        if not first.is_out:
            return first
        # Not simply the next one, who would get the runs of all that are out before it.
        others = [queue for queue in self._queues if queue.receiver != owner and not queue.is_out]
        return max(others, key=lambda queue: _mixed(run, queue.receiver), default=self._queues[self._own])


def _mixed(run: int, receiver: int) -> int:
    """Differs from run to run as if at random, and is the same everywhere."""
    mixed = (run * 0x9E3779B1 + receiver * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) * 0xC2B2AE3D & 0xFFFFFFFF
