"""The fetch machine: what each connection does next, decided without any input or output.

Workers (one connection each) ask ``next`` for an instruction, perform it, and report events with ``receive``. The
machine divides the chunks among them, gives what a failed request left over, and half of what a slow one has before
it, to another connection or source, drops sources that keep failing, and says when all is done or nothing can be.

             ┌──────────── RequestFailed: the rest of the range returns ───────────┐
             ▼                                                                     │
    missing chunks ── FetchChunks ──► assigned to a worker ── ChunkVerified ──► verified
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NewType, TypeAlias

from ft_transport.errors import FetchFailedError, TransportError

WorkerIndex = NewType("WorkerIndex", int)
SourceIndex = NewType("SourceIndex", int)

MAX_CHUNKS_PER_REQUEST: Final = 64
_LEAST_AT_THE_END: Final = 4
"""Chunks of one request when there are many in all; a request costs both sides about as much as half a megabyte."""
_FIRST_RETRY_S: Final = 0.05
_LONGEST_RETRY_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class FetchChunks:
    """Fetch chunks ``first`` to ``end`` (exclusive) in one request, after waiting ``delay_s`` seconds."""

    source: SourceIndex
    first: int
    end: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until another worker reports; everything missing is on its way."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The fetch is over: complete if ``error`` is ``None``."""

    error: TransportError | None


Instruction: TypeAlias = FetchChunks | Wait | Stop


@dataclass(frozen=True, slots=True)
class ChunkVerified:
    """The next chunk of the worker's request landed, and its digest is right (or was not asked for)."""

    worker: WorkerIndex


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The worker's request ended early; the chunk it was at, and those behind it, did not land."""

    worker: WorkerIndex
    error: TransportError


@dataclass(frozen=True, slots=True)
class Aborted:
    """The whole fetch has to end: its deadline passed, or the receiver itself failed."""

    error: TransportError


Event: TypeAlias = ChunkVerified | RequestFailed | Aborted


def retry_delay_s(num_failures: int) -> float:
    """How long to wait before a source is asked again that has failed so often in a row, in seconds."""
    return min(_FIRST_RETRY_S * 2 ** (num_failures - 1), _LONGEST_RETRY_S) if num_failures else 0.0


@dataclass(slots=True)
class _Source:
    """What is known of one source. ``failures`` counts those since the last chunk that it delivered."""

    name: str
    failures: int = 0
    num_active: int = 0
    dropped: bool = False


@dataclass(slots=True)
class _Assignment:
    source: SourceIndex
    next: int
    end: int


class FetchMachine:
    """The state of one fetch. Not thread-safe: its shell calls it under a lock.

    Args:
        ranges: Chunks to fetch, half-open.
        sources: Names of the sources, for messages; all serve the same bytes.
        num_workers: How many workers will ask.
        max_failures: A source is dropped after this many failures in a row.
        num_in_flight: How many chunks the buffers of a connection may hold. They are lost when others take over the
            rest of its request, so fewer are not worth it.
    """

    def __init__(
        self,
        *,
        ranges: Sequence[tuple[int, int]],
        sources: Sequence[str],
        num_workers: int,
        max_failures: int,
        num_in_flight: int,
    ) -> None:
        self._missing = [(first, end) for first, end in ranges if first < end]
        num_chunks = sum(end - first for first, end in self._missing)
        self._num_missing = num_chunks
        self._num_unverified = num_chunks
        self._num_workers = num_workers
        self._least_per_request = max(1, min(_LEAST_AT_THE_END, num_chunks // (16 * num_workers)))
        self._max_failures = max_failures
        self._num_in_flight = num_in_flight
        self._sources = [_Source(name) for name in sources]
        self._assignments: dict[WorkerIndex, _Assignment] = {}
        self._failures: list[TransportError] = []
        self._stop: Stop | None = None if num_chunks else Stop(None)

    @property
    def stopped(self) -> Stop | None:
        """The outcome, once there is one."""
        return self._stop

    def next(self, worker: WorkerIndex) -> Instruction:
        """What ``worker``, which has no request under way, does now."""
        if self._stop is not None:
            return self._stop
        assert worker not in self._assignments, "a worker reports the end of its request before it asks again"
        taken = self._take_missing() or self._take_over()
        if taken is None:
            return Wait()
        first, end = taken
        source = self._choose_source()
        self._assignments[worker] = _Assignment(source, first, end)
        self._sources[source].num_active += 1
        failures = self._sources[source].failures
        return FetchChunks(source, first, end, retry_delay_s(failures))

    def has_request(self, worker: WorkerIndex) -> bool:
        """Whether chunks of the worker's request are still its own; the rest may have been taken over by others."""
        return worker in self._assignments

    def _take_missing(self) -> tuple[int, int] | None:
        """Large ranges while much is left, small ones towards the end."""
        if not self._missing:
            return None
        size = max(self._least_per_request, min(MAX_CHUNKS_PER_REQUEST, self._num_missing // self._num_workers))
        first, end = self._missing[0]
        taken_end = min(end, first + size)
        if taken_end == end:
            del self._missing[0]
        else:
            self._missing[0] = (taken_end, end)
        self._num_missing -= taken_end - first
        return first, taken_end

    def _take_over(self) -> tuple[int, int] | None:
        """Half of what the worker with the longest way to go has not begun, unless that may be on its way already."""
        slowest = max(self._assignments.values(), key=lambda assignment: assignment.end - assignment.next, default=None)
        if slowest is None:
            return None
        num_taken = (slowest.end - slowest.next - 1) // 2
        if num_taken < self._num_in_flight:
            return None
        end = slowest.end
        slowest.end -= num_taken
        return slowest.end, end

    def receive(self, event: Event) -> None:
        """Takes note of what happened."""
        if self._stop is not None:
            return
        match event:
            case ChunkVerified():
                self._chunk_verified(event.worker)
            case RequestFailed():
                self._request_failed(event.worker, event.error)
            case Aborted():
                self._stop = Stop(event.error)

    def _chunk_verified(self, worker: WorkerIndex) -> None:
        assignment = self._assignments[worker]
        assignment.next += 1
        self._num_unverified -= 1
        self._sources[assignment.source].failures = 0
        if assignment.next == assignment.end:
            self._release(worker)
        if not self._num_unverified:
            self._stop = Stop(None)

    def _request_failed(self, worker: WorkerIndex, error: TransportError) -> None:
        if worker not in self._assignments:
            return  # All its chunks had landed: what broke behind them costs nothing.
        assignment = self._release(worker)
        self._missing.insert(0, (assignment.next, assignment.end))
        self._num_missing += assignment.end - assignment.next
        self._failures.append(error)
        source = self._sources[assignment.source]
        source.failures += 1
        if not error.retryable or source.failures >= self._max_failures or not self._can_recover(error):
            source.dropped = True
        if all(candidate.dropped for candidate in self._sources):
            self._stop = Stop(self._outcome())

    def _release(self, worker: WorkerIndex) -> _Assignment:
        assignment = self._assignments.pop(worker)
        self._sources[assignment.source].num_active -= 1
        return assignment

    def _can_recover(self, error: TransportError) -> bool:
        """Whether asking the same source again for the same snapshot can help; not once the snapshot is gone."""
        return error.http_status != 409

    def _choose_source(self) -> SourceIndex:
        """The least busy source that still answers; of equals the one that failed least."""
        usable = [index for index, source in enumerate(self._sources) if not source.dropped]
        return SourceIndex(
            min(usable, key=lambda index: (self._sources[index].num_active, self._sources[index].failures))
        )

    def _outcome(self) -> TransportError:
        return FetchFailedError(
            f"expected the whole snapshot from {', '.join(source.name for source in self._sources)}, "
            f"{self._num_unverified} chunks are missing",
            failures=tuple(self._failures[-2 * len(self._sources) * self._max_failures :]),
        )
