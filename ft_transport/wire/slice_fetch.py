"""The machine of a fetch in another layout: which reads go to which source next, and who stands in for one that fails.

Like ``wire.fetch``, which it is to planned reads what that is to chunks: workers ask ``next``, perform the instruction,
and report events. Each read has its source by the plan; if that one is dropped, another holder of the same bytes takes
over what it has not delivered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ft_transport.errors import FetchFailedError, TransportError
from ft_transport.wire.fetch import Aborted, RequestFailed, SourceIndex, Stop, Wait, WorkerIndex, retry_delay_s
from ft_transport.wire.reshard import Read
from ft_transport.wire.slices import FRAME_BYTES, MAX_BLOCKS_PER_FRAME, MAX_REQUEST_BYTES, MAX_SLICES_PER_REQUEST

_LEAST_REQUEST_BYTES: Final = 4 * FRAME_BYTES
_MAX_READS_PER_FRAME: Final = 1 << 10

FrameOfReads: TypeAlias = tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class FetchFrames:
    """Fetch these frames in one request, after waiting ``delay_s`` seconds."""

    source: SourceIndex
    frames: tuple[FrameOfReads, ...]
    delay_s: float


@dataclass(frozen=True, slots=True)
class FrameVerified:
    """The next frame of the worker's request landed, and its digest is right (or was not asked for)."""

    worker: WorkerIndex


SliceInstruction: TypeAlias = FetchFrames | Wait | Stop
SliceEvent: TypeAlias = FrameVerified | RequestFailed | Aborted


@dataclass(slots=True)
class _Source:
    """One source.

    Attributes:
        name: For messages.
        queue: What it is still to be asked for.
        queued_bytes: Size of that.
        whole: Its reads, by their ids, of tensors that are not sharded. They need not be equal everywhere: unless all
            have landed, all of them come from the one source that stands in for it.
        whole_left: The ids of those that have not landed.
        stand_in: That source, once it was dropped.
        num_active: Requests under way.
        failures: Since the last frame that it delivered.
        dropped: Whether it is not asked any more.
    """

    name: str
    queue: deque[FrameOfReads] = field(default_factory=deque)
    queued_bytes: int = 0
    whole: dict[int, Read] = field(default_factory=dict)
    whole_left: set[int] = field(default_factory=set)
    stand_in: int | None = None
    num_active: int = 0
    failures: int = 0
    dropped: bool = False


@dataclass(slots=True)
class _Assignment:
    source: SourceIndex
    frames: deque[FrameOfReads]


class SliceFetchMachine:
    """The state of one fetch. Not thread-safe: its shell calls it under a lock.

    Args:
        reads: By source.
        sources: Names of the sources, for messages.
        num_workers: How many workers will ask.
        max_failures: A source is dropped after this many failures in a row.
    """

    def __init__(
        self, *, reads: Sequence[Iterable[Read]], sources: Sequence[str], num_workers: int, max_failures: int
    ) -> None:
        self._sources = [_Source(name) for name in sources]
        self._num_workers = num_workers
        self._max_failures = max_failures
        self._assignments: dict[WorkerIndex, _Assignment] = {}
        self._failures: list[TransportError] = []
        self._num_left = 0
        for source, planned in zip(self._sources, reads, strict=True):
            self._enqueue(source, planned)
        self._stop: Stop | None = None if self._num_left else Stop(None)

    @property
    def stopped(self) -> Stop | None:
        """The outcome, once there is one."""
        return self._stop

    def next(self, worker: WorkerIndex) -> SliceInstruction:
        """What ``worker``, which has no request under way, does now."""
        if self._stop is not None:
            return self._stop
        assert worker not in self._assignments, "a worker reports the end of its request before it asks again"
        waiting = [index for index, source in enumerate(self._sources) if source.queue]
        if not waiting:
            return Wait()
        chosen = SourceIndex(
            min(waiting, key=lambda index: (self._sources[index].num_active, -self._sources[index].queued_bytes))
        )
        source = self._sources[chosen]
        if source.num_active:
            self._relieve(source)
        frames = self._take(source)
        self._assignments[worker] = _Assignment(chosen, deque(frames))
        source.num_active += 1
        return FetchFrames(chosen, tuple(frames), retry_delay_s(source.failures))

    def receive(self, event: SliceEvent) -> None:
        """Takes note of what happened."""
        if self._stop is not None:
            return
        match event:
            case FrameVerified():
                self._frame_verified(event.worker)
            case RequestFailed():
                self._request_failed(event.worker, event.error)
            case Aborted():
                self._stop = Stop(event.error)

    def _enqueue(self, source: _Source, reads: Iterable[Read]) -> None:
        """Puts reads into frames, each full or the last of them."""
        frame: list[Read] = []
        frame_bytes = num_blocks = 0
        for read in reads:
            num_bytes, num_more = read.num_bytes, read.num_blocks
            is_full = frame_bytes + num_bytes > FRAME_BYTES or num_blocks + num_more > MAX_BLOCKS_PER_FRAME
            if frame and (is_full or len(frame) == _MAX_READS_PER_FRAME):
                source.queue.append(tuple(frame))
                self._num_left += 1
                frame, frame_bytes, num_blocks = [], 0, 0
            frame.append(read)
            if read.is_whole:
                source.whole[id(read)] = read
                source.whole_left.add(id(read))
            frame_bytes += num_bytes
            num_blocks += num_more
            source.queued_bytes += num_bytes
        if frame:
            source.queue.append(tuple(frame))
            self._num_left += 1

    def _take(self, source: _Source) -> list[FrameOfReads]:
        """Much while much is left, little towards the end, so that all workers end together."""
        wanted_bytes = min(MAX_REQUEST_BYTES, max(_LEAST_REQUEST_BYTES, source.queued_bytes // self._num_workers))
        frames: list[FrameOfReads] = []
        num_reads = num_bytes = 0
        while source.queue:
            frame = source.queue[0]
            frame_bytes = _bytes_of(frame)
            is_over = num_bytes + frame_bytes > wanted_bytes or num_reads + len(frame) > MAX_SLICES_PER_REQUEST
            if frames and is_over:
                break
            frames.append(source.queue.popleft())
            num_reads += len(frame)
            num_bytes += frame_bytes
        source.queued_bytes -= num_bytes
        return frames

    def _frame_verified(self, worker: WorkerIndex) -> None:
        assignment = self._assignments[worker]
        source = self._sources[assignment.source]
        frame = assignment.frames.popleft()
        if source.dropped and source.stand_in is not None:
            # It was on its way when another took over: what that has sent may have been overwritten.
            self._hand_over(source, [read for read in frame if read.is_whole])
        source.whole_left.difference_update(map(id, frame))
        self._num_left -= 1
        source.failures = 0
        if not assignment.frames:
            self._release(worker)
        if not self._num_left:
            self._stop = Stop(None)

    def _request_failed(self, worker: WorkerIndex, error: TransportError) -> None:
        if worker not in self._assignments:
            return  # All its frames had landed: what broke behind them costs nothing.
        assignment = self._release(worker)
        source = self._sources[assignment.source]
        source.queue.extendleft(reversed(assignment.frames))
        source.queued_bytes += sum(map(_bytes_of, assignment.frames))
        self._failures.append(error)
        source.failures += 1
        # A snapshot that was replaced (409) does not come back.
        if not error.retryable or error.http_status == 409 or source.failures >= self._max_failures:
            source.dropped = True
        if source.dropped:
            orphans = [read for frame in self._drain(source) for read in frame if not read.is_whole]
            self._hand_over(source, [*orphans, *(source.whole.values() if source.whole_left else ())])
        else:
            self._share_out(source, self._drain(source), lambda other: other.failures < source.failures)

    def _relieve(self, busy: _Source) -> None:
        """Gives half of what a source has yet to be asked for to others that have nothing to do."""
        num_given = len(busy.queue) // 2
        if num_given and any(self._is_idle(other) for other in self._sources):
            given = [busy.queue.pop() for _ in range(num_given)]
            self._num_left -= num_given
            busy.queued_bytes -= sum(map(_bytes_of, given))
            self._share_out(busy, given[::-1], self._is_idle)

    @staticmethod
    def _is_idle(source: _Source) -> bool:
        return not (source.dropped or source.failures or source.num_active or source.queue)

    def _drain(self, source: _Source) -> list[FrameOfReads]:
        frames = list(source.queue)
        self._num_left -= len(frames)
        source.queue.clear()
        source.queued_bytes = 0
        return frames

    def _share_out(self, source: _Source, frames: Sequence[FrameOfReads], is_better: Callable[[_Source], bool]) -> None:
        """Gives what sources that are better have as well to them, and the rest back."""
        own = self._sources.index(source)
        taken: dict[int, list[Read]] = {}
        for frame in frames:
            for read in frame:
                others = [
                    index
                    for index in (() if read.is_whole else read.sources)
                    if not self._sources[index].dropped and is_better(self._sources[index])
                ]
                chosen = min(others, key=lambda index: self._sources[index].queued_bytes, default=own)
                taken.setdefault(chosen, []).append(read)
        for index, reads in taken.items():
            self._enqueue(self._sources[index], reads)

    def _hand_over(self, dropped: _Source, orphans: Sequence[Read]) -> None:
        """Gives what a source has not delivered to others that hold the same."""
        taken: dict[int, list[Read]] = {}
        loads = {index: source.queued_bytes for index, source in enumerate(self._sources)}
        for read in orphans:
            if read.is_whole:
                chosen = self._stand_in(dropped)
                alive = [] if chosen is None else [chosen]
            else:
                alive = [index for index in read.sources if not self._sources[index].dropped]
            if not alive:
                self._stop = Stop(self._outcome(dropped, read))
                return
            chosen = min(alive, key=loads.__getitem__)
            loads[chosen] += read.num_bytes
            taken.setdefault(chosen, []).append(read)
        for index, reads in taken.items():
            self._enqueue(self._sources[index], reads)

    def _stand_in(self, dropped: _Source) -> int | None:
        """The source that has all that is not sharded and that ``dropped`` was to send."""
        if dropped.stand_in is None or self._sources[dropped.stand_in].dropped:
            everywhere = [set(read.sources) for read in dropped.whole.values()]
            common = set.intersection(*everywhere) if everywhere else set()
            alive = [index for index in sorted(common) if not self._sources[index].dropped]
            dropped.stand_in = min(alive, key=lambda index: self._sources[index].failures, default=None)
        return dropped.stand_in

    def _release(self, worker: WorkerIndex) -> _Assignment:
        assignment = self._assignments.pop(worker)
        self._sources[assignment.source].num_active -= 1
        return assignment

    def _outcome(self, dropped: _Source, read: Read) -> TransportError:
        error = FetchFailedError(
            f"expected all parts of the state; {dropped.name} failed, and no other source that answers has its part of "
            f"{read.wanted.path}",
            failures=tuple(self._failures[-2 * len(self._sources) * self._max_failures :]),
        )
        error.path = read.wanted.path
        return error


def _bytes_of(frame: FrameOfReads) -> int:
    return sum(read.num_bytes for read in frame)
