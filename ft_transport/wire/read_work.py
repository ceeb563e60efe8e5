"""The `Work` of a fetch into another layout: planned reads, and substitutes for sources that fail.

The plan (``wire.reshard``) assigns each read to a source. If a source is excluded, other sources with the same bytes
get its undelivered reads. An idle source takes over reads of a busy source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, TypeAlias

from ft_transport.errors import FetchFailedError
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.fetch import Assignment, SourceIndex, SourceState
from ft_transport.wire.reshard import Read
from ft_transport.wire.slices import MAX_BLOCKS_PER_FRAME, MAX_REQUEST_BYTES, MAX_SLICES_PER_REQUEST, Slice

_LEAST_REQUEST_BYTES: Final = 4 * CHUNK_BYTES
_MAX_READS_PER_FRAME: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A byte range of the data that fits into a frame, for fetches that have only one source."""

    start: int
    end: int
    num_blocks: ClassVar = 1
    is_whole: ClassVar = False
    sources: ClassVar = (0,)

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> list[RangeRead]:
        """Divide half-open ranges into reads that fit into a frame."""
        return [cls(at, min(at + CHUNK_BYTES, end)) for start, end in ranges for at in range(start, end, CHUNK_BYTES)]

    @property
    def path(self) -> str:
        """The range as text, for errors."""
        return f"bytes {self.start} to {self.end} of the data"

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start

    def slice(self, _source: int = 0) -> Slice:
        """Return the range as a slice, which is the same at the source and at the receiver."""
        return Slice(self.start, self.num_bytes)


AnyRead: TypeAlias = Read | RangeRead
FrameOfReads: TypeAlias = tuple[AnyRead, ...]


@dataclass(slots=True)
class _Queue:
    """The reads that are assigned to one source.

    Attributes:
        frames: Frames that are not requested yet.
        num_bytes: Total size of ``frames``.
        whole: All reads of unsharded tensors, by ``id()`` of the read. The values of these tensors may differ between
            sources. So if the source fails before all of them have landed, one substitute must deliver all of them.
        whole_left: Keys of ``whole`` whose reads have not landed.
        stand_in: The substitute for the reads in ``whole``; ``None`` until the source is excluded.
    """

    frames: deque[FrameOfReads] = field(default_factory=deque)
    num_bytes: int = 0
    whole: dict[int, AnyRead] = field(default_factory=dict)
    whole_left: set[int] = field(default_factory=set)
    stand_in: int | None = None


class ReadWork:
    """Planned reads, grouped into frames: the `Work` of a fetch into another layout.

    Args:
        reads: The planned reads of each source.
        num_workers: Number of workers of the fetch.
    """

    def __init__(self, reads: Sequence[Iterable[AnyRead]], *, num_workers: int) -> None:
        self.num_left = 0
        self._num_workers = num_workers
        self._queues = [_Queue() for _ in reads]
        for index, planned in enumerate(reads):
            self._enqueue(index, planned)

    def take(
        self,
        sources: Sequence[SourceState],
        under_way: Collection[Assignment[FrameOfReads]],  # noqa: ARG002
    ) -> tuple[SourceIndex, tuple[FrameOfReads, ...]] | None:
        """Return the next frames of the least busy source; on a tie, of the source with the most bytes left."""
        waiting = [index for index, queue in enumerate(self._queues) if queue.frames]
        if not waiting:
            return None
        chosen = min(waiting, key=lambda index: (sources[index].num_active, -self._queues[index].num_bytes))
        if sources[chosen].num_active:
            self._relieve(chosen, sources)
        return SourceIndex(chosen), self._take_frames(self._queues[chosen])

    def landed(
        self, source: SourceIndex, unit: FrameOfReads, sources: Sequence[SourceState]
    ) -> FetchFailedError | bool:
        """Record that a frame landed. If its source has a substitute by now, request the unsharded reads again."""
        queue = self._queues[source]
        error: FetchFailedError | None = None
        if sources[source].is_excluded and queue.stand_in is not None:
            # The frame may have overwritten data that the substitute has delivered.
            error = self._hand_over(source, [read for read in unit if read.is_whole], sources)
        if queue.whole_left:
            queue.whole_left.difference_update(map(id, unit))
        self.num_left -= 1
        return False if error is None else error

    def put_back(
        self, source: SourceIndex, units: Sequence[FrameOfReads], sources: Sequence[SourceState]
    ) -> FetchFailedError | None:
        """Take back frames that a source did not deliver, and assign their reads to sources again.

        If the source is excluded, other sources get all its reads. Otherwise it keeps its reads, except those that a
        source with fewer failures can deliver as well.
        """
        queue = self._queues[source]
        frames = [*units, *queue.frames]
        self.num_left -= len(frames)
        queue.frames.clear()
        queue.num_bytes = 0
        if sources[source].is_excluded:
            orphans = [read for frame in frames for read in frame if not read.is_whole]
            return self._hand_over(source, [*orphans, *(queue.whole.values() if queue.whole_left else ())], sources)
        failures = sources[source].failures
        self._share_out(source, frames, sources, lambda other: sources[other].failures < failures)
        return None

    def time_passed(self, elapsed_s: float, sources: Sequence[SourceState]) -> bool:
        """Return ``False``: the choice of sources does not depend on the time."""
        del elapsed_s, sources
        return False

    def _enqueue(self, index: int, reads: Iterable[AnyRead]) -> None:
        """Group reads into full frames, and append the frames to the queue of a source."""
        queue = self._queues[index]
        num_before = len(queue.frames)
        frame: list[AnyRead] = []
        frame_bytes = num_blocks = 0
        for read in reads:
            num_bytes, num_more = read.num_bytes, read.num_blocks
            is_full = frame_bytes + num_bytes > CHUNK_BYTES or num_blocks + num_more > MAX_BLOCKS_PER_FRAME
            if frame and (is_full or len(frame) == _MAX_READS_PER_FRAME):
                queue.frames.append(tuple(frame))
                frame, frame_bytes, num_blocks = [], 0, 0
            frame.append(read)
            if read.is_whole:
                queue.whole[id(read)] = read
                queue.whole_left.add(id(read))
            frame_bytes += num_bytes
            num_blocks += num_more
            queue.num_bytes += num_bytes
        if frame:
            queue.frames.append(tuple(frame))
        self.num_left += len(queue.frames) - num_before

    def _take_frames(self, queue: _Queue) -> tuple[FrameOfReads, ...]:
        """Take the frames of a request: many while many are left, few at the end, so that all workers end together."""
        wanted_bytes = min(MAX_REQUEST_BYTES, max(_LEAST_REQUEST_BYTES, queue.num_bytes // self._num_workers))
        frames: list[FrameOfReads] = []
        num_reads = num_bytes = 0
        while queue.frames:
            frame = queue.frames[0]
            frame_bytes = _bytes_of(frame)
            is_over = num_bytes + frame_bytes > wanted_bytes or num_reads + len(frame) > MAX_SLICES_PER_REQUEST
            if frames and is_over:
                break
            frames.append(queue.frames.popleft())
            num_reads += len(frame)
            num_bytes += frame_bytes
        queue.num_bytes -= num_bytes
        return tuple(frames)

    def _relieve(self, busy: int, sources: Sequence[SourceState]) -> None:
        """Assign half of a busy source's unrequested reads to idle sources that have the same bytes."""

        def is_idle(index: int) -> bool:
            source = sources[index]
            return not (source.is_excluded or source.failures or source.num_active or self._queues[index].frames)

        queue = self._queues[busy]
        num_given = len(queue.frames) // 2
        if num_given and any(map(is_idle, range(len(sources)))):
            given = [queue.frames.pop() for _ in range(num_given)]
            self.num_left -= num_given
            queue.num_bytes -= sum(map(_bytes_of, given))
            self._share_out(busy, given[::-1], sources, is_idle)

    def _share_out(
        self,
        own: int,
        frames: Iterable[FrameOfReads],
        sources: Sequence[SourceState],
        is_better: Callable[[int], bool],
    ) -> None:
        """Assign each read of the frames to a better source that has the same bytes, or to ``own`` if there is none."""
        taken: dict[int, list[AnyRead]] = {}
        for frame in frames:
            for read in frame:
                candidates = () if read.is_whole else read.sources
                others = [index for index in candidates if not sources[index].is_excluded and is_better(index)]
                chosen = min(others, key=lambda index: self._queues[index].num_bytes, default=own)
                taken.setdefault(chosen, []).append(read)
        for index, reads in taken.items():
            self._enqueue(index, reads)

    def _hand_over(
        self, excluded: int, orphans: Sequence[AnyRead], sources: Sequence[SourceState]
    ) -> FetchFailedError | None:
        """Assign the undelivered reads of an excluded source to other sources that have the same bytes."""
        taken: dict[int, list[AnyRead]] = {}
        loads = {index: queue.num_bytes for index, queue in enumerate(self._queues)}
        for read in orphans:
            if read.is_whole:
                stand_in = self._stand_in(excluded, sources)
                alive = [] if stand_in is None else [stand_in]
            else:
                alive = [index for index in read.sources if not sources[index].is_excluded]
            if not alive:
                return FetchFailedError(
                    f"expected all parts of the state; {sources[excluded].name} failed, and no other source that "
                    f"answers has its part of {read.path}",
                    failures=(),
                    path=read.path,
                )
            chosen = min(alive, key=loads.__getitem__)
            loads[chosen] += read.num_bytes
            taken.setdefault(chosen, []).append(read)
        for index, reads in taken.items():
            self._enqueue(index, reads)
        return None

    def _stand_in(self, excluded: int, sources: Sequence[SourceState]) -> int | None:
        """Return a working source that has all unsharded tensors that ``excluded`` was to deliver, if there is one."""
        queue = self._queues[excluded]
        if queue.stand_in is None or sources[queue.stand_in].is_excluded:
            everywhere = [set(read.sources) for read in queue.whole.values()]
            common = set.intersection(*everywhere) if everywhere else set()
            alive = [index for index in sorted(common) if not sources[index].is_excluded]
            queue.stand_in = min(alive, key=lambda index: sources[index].failures, default=None)
        return queue.stand_in


def _bytes_of(frame: FrameOfReads) -> int:
    return sum(read.num_bytes for read in frame)
