"""The chunks of a file from one source, or from several that are as good as each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from ft_transport.wire.fetch import Assignment, SourceIndex, SourceState, Undeliverable

MAX_CHUNKS_PER_REQUEST: Final = 64
_LEAST_AT_THE_END: Final = 4
"""Chunks of one request when there are many in all; a request costs both sides about as much as half a megabyte."""


class ChunkWork:
    """Chunks by number, for ``wire.fetch``; a request is for a ``range`` of them.

    Args:
        ranges: Chunks to fetch, half-open.
        num_workers: How many workers will ask.
        num_in_flight: How many chunks the buffers of a connection may hold. They are lost when others take over the
            rest of its request, so fewer are not worth it.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], *, num_workers: int, num_in_flight: int) -> None:
        self._missing = [range(first, end) for first, end in ranges if first < end]
        self._num_missing = self.num_left = sum(map(len, self._missing))
        self._num_workers = num_workers
        self._least_per_request = max(1, min(_LEAST_AT_THE_END, self.num_left // (16 * num_workers)))
        self._num_in_flight = num_in_flight

    def take(
        self, sources: Sequence[SourceState], under_way: Collection[Assignment[int]]
    ) -> tuple[SourceIndex, range] | None:
        """Chunks that nobody has been asked for, or else a part of what was asked of a slow source."""
        chunks = self._take_missing() or self._take_over(under_way)
        if chunks is None:
            return None
        # The least busy source that still answers; of equals the one that failed least.
        usable = [index for index, source in enumerate(sources) if not source.dropped]
        chosen = min(usable, key=lambda index: (sources[index].num_active, sources[index].failures))
        return SourceIndex(chosen), chunks

    def landed(self, source: SourceIndex, unit: int, sources: Sequence[SourceState]) -> None:  # noqa: ARG002
        """A chunk is a chunk, whichever it is and wherever it came from."""
        self.num_left -= 1

    def put_back(
        self,
        source: SourceIndex,  # noqa: ARG002
        units: Sequence[int],
        sources: Sequence[SourceState],
    ) -> Undeliverable | None:
        """The rest of a failed request comes next; any source may deliver it."""
        self._missing.insert(0, range(units[0], units[-1] + 1))
        self._num_missing += len(units)
        if not all(source.dropped for source in sources):
            return None
        names = ", ".join(source.name for source in sources)
        return Undeliverable(f"expected the whole snapshot from {names}, {self.num_left} chunks are missing")

    def time_passed(
        self,
        elapsed_s: float,
        sources: Sequence[SourceState],
    ) -> None:
        """Time changes nothing here: every source has everything, and a slow one does less."""

    def find_hopeless(
        self,
        sources: Sequence[SourceState],
        under_way: Collection[Assignment[int]],
    ) -> None:
        """A slow request is halved by `take`, and never ended."""

    def _take_missing(self) -> range | None:
        """Large ranges while much is left, small ones towards the end."""
        if not self._missing:
            return None
        size = max(self._least_per_request, min(MAX_CHUNKS_PER_REQUEST, self._num_missing // self._num_workers))
        taken, rest = self._missing[0][:size], self._missing[0][size:]
        if rest:
            self._missing[0] = rest
        else:
            del self._missing[0]
        self._num_missing -= len(taken)
        return taken

    def _take_over(self, under_way: Collection[Assignment[int]]) -> range | None:
        """Half of what the worker with the longest way to go has not begun, unless that may be on its way already."""
        slowest = max(under_way, key=lambda assignment: assignment.end - assignment.next, default=None)
        if slowest is None:
            return None
        num_taken = (slowest.end - slowest.next - 1) // 2
        if num_taken < self._num_in_flight:
            return None
        end = slowest.end
        slowest.end -= num_taken
        return range(slowest.units[slowest.end], slowest.units[end - 1] + 1)
