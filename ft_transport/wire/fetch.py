"""The `FetchMachine` decides what each connection of a fetch does next. It does no input or output itself.

A worker has one connection. It calls ``next`` for an instruction, carries the instruction out, and reports the result.
A fetch consists of units, which arrive one by one: chunks of a file (``wire.swarm_work``) or frames of planned reads
(``wire.read_work``). A unit has landed when it has arrived and was verified.

The `Work` object tracks which units are missing and which sources may deliver them. The machine tracks workers and
sources: it excludes sources that keep failing, and delays retries. It stops when all units have landed, or when some
unit cannot be delivered by any source.

             ┌── request_failed, request_cut: the rest returns ──┐
             ▼                                                   │
    the work's units ── Request ──► assigned to a worker ── unit_landed ──► landed

The machine has no clock. All sources start at the same time, so the numbers of units that they have delivered show
their speeds. A `Work` object that needs the elapsed time as well receives it in `Work.time_passed`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NewType, Protocol, TypeAlias, TypeVar

from ft_transport.errors import FetchFailedError, PeerNotReadyError, PeerSilentError, TransportError

WorkerIndex = NewType("WorkerIndex", int)
SourceIndex = NewType("SourceIndex", int)

_FIRST_RETRY_S: Final = 0.05
_LONGEST_RETRY_S: Final = 2.0
_FAILED_ENOUGH: Final = 2
"""Number of failures in a row after which a receiver does not wait for a relay any more."""

Unit = TypeVar("Unit")


@dataclass(frozen=True, slots=True)
class Request(Generic[Unit]):
    """Instruction: wait ``delay_s`` seconds, then fetch ``units`` from ``source`` in one request."""

    source: SourceIndex
    units: Sequence[Unit]
    delay_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Instruction: do nothing until another worker reports, because all missing units are requested already."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Instruction: interrupt the request of ``worker``; another source will deliver its missing units sooner."""

    worker: WorkerIndex


@dataclass(frozen=True, slots=True)
class Stop:
    """Instruction: stop, because the fetch has ended; ``error`` is ``None`` if it is complete."""

    error: TransportError | None


Instruction: TypeAlias = Request[Unit] | Wait | Interrupt | Stop


@dataclass(slots=True)
class SourceState:
    """The state of one source or relay.

    Attributes:
        name: Name of the source in messages.
        failures: Number of failed requests since the source last delivered a unit.
        num_dry: Number of responses without a unit since the source last delivered a unit.
        pause_s: Seconds that the source asked the receiver to wait before the next request.
        num_active: Number of running requests.
        num_landed: Number of units that the source has delivered.
        num_silent: Number of requests that failed because the source sent nothing for too long.
        num_interrupted: Number of requests that were interrupted because other sources were faster.
        is_excluded: Whether the source gets no more requests.
    """

    name: str
    failures: int = 0
    num_dry: int = 0
    pause_s: float = 0.0
    num_active: int = 0
    num_landed: int = 0
    num_silent: int = 0
    num_interrupted: int = 0
    is_excluded: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether a relay is not worth waiting for: it is excluded, failed repeatedly, or was silent for too long."""
        return self.is_excluded or self.failures >= _FAILED_ENOUGH or self.num_silent > 0

    @property
    def load(self) -> tuple[int, int, int, int]:
        """A sort key: a source with a lower value will probably deliver sooner."""
        return self.num_interrupted, self.num_dry, self.num_active, self.failures


@dataclass(slots=True)
class Assignment(Generic[Unit]):
    """A running request of a worker: ``units[next:end]`` have not landed, except those in ``early``.

    If all units land in order, another worker may take over the last units by lowering ``end``.
    """

    source: SourceIndex
    units: Sequence[Unit]
    next: int
    end: int
    is_interrupted: bool = False
    early: set[Unit] = field(default_factory=set)

    @property
    def num_left(self) -> int:
        """Number of units of the request that have not landed."""
        return self.end - self.next - len(self.early)

    def left(self) -> Sequence[Unit]:
        """Return the units of the request that have not landed."""
        rest = self.units[self.next : self.end]
        return [unit for unit in rest if unit not in self.early] if self.early else rest

    def land(self, unit: Unit | None) -> Unit:
        """Record that a unit has landed (the next one in order unless one is given), and return it."""
        following = self.units[self.next]
        if unit is not None and unit != following:
            self.early.add(unit)
            return unit
        self.next += 1
        while self.early and self.units[self.next] in self.early:
            self.early.remove(self.units[self.next])
            self.next += 1
        return following


class Work(Protocol[Unit]):
    """The units to fetch, and the choice of their sources. Only the `FetchMachine` calls these methods."""

    @property
    def num_left(self) -> int:
        """Number of units that have not landed yet."""

    def take(
        self, sources: Sequence[SourceState], under_way: Collection[Assignment[Unit]]
    ) -> tuple[SourceIndex, Sequence[Unit]] | Assignment[Unit] | None:
        """Chooses the next request of an idle worker.

        Args:
            sources: The state of each source.
            under_way: The running requests.

        Returns:
            The source and the units to request; or a running request to interrupt, because other sources are faster; or
            ``None`` if the worker has nothing to do.
        """

    def landed(self, source: SourceIndex, unit: Unit, sources: Sequence[SourceState]) -> FetchFailedError | bool:
        """Records that a unit from ``source`` landed.

        Returns:
            Whether waiting workers have something to do now; an error if some other unit cannot be delivered any more.
        """

    def time_passed(self, elapsed_s: float, sources: Sequence[SourceState]) -> bool:
        """Receives the seconds since the start of the fetch; returns whether waiting workers have something to do."""

    def put_back(
        self, source: SourceIndex, units: Sequence[Unit], sources: Sequence[SourceState]
    ) -> FetchFailedError | None:
        """Takes back units that ``source`` did not deliver; returns an error if no source can deliver them any more."""


class FetchMachine(Generic[Unit]):
    """Decides the next instruction of each worker of a fetch. Not thread-safe: callers hold a lock.

    Args:
        work: The units to fetch.
        sources: Names of the sources, for messages.
        max_failures: Number of failures in a row after which a source is excluded.
    """

    def __init__(self, work: Work[Unit], *, sources: Sequence[str], max_failures: int) -> None:
        self._work = work
        self._max_failures = max_failures
        self._sources = [SourceState(name) for name in sources]
        self._assignments: dict[WorkerIndex, Assignment[Unit]] = {}
        self._failures: list[TransportError] = []
        self._stop: Stop | None = None if work.num_left else Stop(None)
        self._nothing_to_do = False
        """Whether nothing has changed since a worker got `Wait`, so that all other workers would get `Wait` as well."""

    @property
    def stopped(self) -> Stop | None:
        """The outcome of the fetch; ``None`` until the fetch has ended."""
        return self._stop

    @property
    def last_failure(self) -> TransportError | None:
        """The error of the last failed request; ``None`` if no request has failed."""
        return self._failures[-1] if self._failures else None

    def has_request(self, worker: WorkerIndex) -> bool:
        """Return whether the worker has a running request with a unit that has not landed."""
        return worker in self._assignments

    def next(self, worker: WorkerIndex) -> Instruction[Unit]:
        """Return the next instruction for a worker without a running request."""
        if self._stop is not None:
            return self._stop
        assert worker not in self._assignments, "a worker must report the end of its request before it calls next()"
        taken = None if self._nothing_to_do else self._work.take(self._sources, self._assignments.values())
        if taken is None:
            self._nothing_to_do = True
            return Wait()
        if isinstance(taken, Assignment):
            taken.is_interrupted = True
            return Interrupt(next(worker for worker, each in self._assignments.items() if each is taken))
        source, units = taken
        self._assignments[worker] = Assignment(source, units, 0, len(units))
        state = self._sources[source]
        state.num_active += 1
        return Request(source, units, max(_retry_delay_s(state.failures), state.pause_s))

    def unit_landed(self, worker: WorkerIndex, unit: Unit | None = None) -> bool:
        """Record that a unit of the worker's request landed.

        Args:
            worker: The worker.
            unit: The unit; ``None`` for the next unit of the request.

        Returns:
            Whether waiting workers have something to do now.
        """
        if self._stop is not None:
            return True
        self._nothing_to_do = False
        assignment = self._assignments[worker]
        source = assignment.source
        effect = self._work.landed(source, assignment.land(unit), self._sources)
        state = self._sources[source]
        state.failures = state.num_dry = 0
        state.pause_s = 0.0
        state.num_landed += 1
        if not assignment.num_left:
            self._release(worker)
        if isinstance(effect, FetchFailedError):
            self._fail(effect)
        elif not self._work.num_left:
            self._stop = Stop(None)
        return self._stop is not None or bool(effect)

    def time_passed(self, elapsed_s: float) -> bool:
        """Pass the seconds since the start of the fetch to the work. Call this repeatedly while workers wait.

        Returns:
            Whether waiting workers have something to do now.
        """
        if self._stop is not None or not self._work.time_passed(elapsed_s, self._sources):
            return False
        self._nothing_to_do = False
        return True

    def request_failed(self, worker: WorkerIndex, error: TransportError) -> None:
        """Record that the worker's request failed, so that its missing units are requested again."""
        # A failure after the last unit does not matter.
        if self._stop is not None or worker not in self._assignments:
            return
        assignment = self._release(worker)
        source = self._sources[assignment.source]
        if assignment.is_interrupted:
            # Does not count as a failure: the source is only slow, and all other sources may fail later.
            source.num_interrupted += 1
        elif isinstance(error, PeerNotReadyError):
            source.num_dry += 1
            source.pause_s = error.retry_after_s
        else:
            self._failures.append(error)
            source.failures += 1
            source.num_silent += isinstance(error, PeerSilentError)
            # Status 409: the source has replaced the snapshot, and will not serve it again.
            if not error.retryable or error.http_status == 409 or source.failures >= self._max_failures:
                source.is_excluded = True
        self._put_back(assignment)

    def request_cut(self, worker: WorkerIndex) -> None:
        """Record that a relay's response ended early, because the relay does not have the remaining units yet."""
        if self._stop is None and worker in self._assignments:
            self._put_back(self._release(worker))

    def abort(self, error: TransportError) -> None:
        """End the whole fetch with an error: its deadline has passed, or the receiver itself failed."""
        if self._stop is None:
            self._stop = Stop(error)

    def _put_back(self, assignment: Assignment[Unit]) -> None:
        self._nothing_to_do = False
        error = self._work.put_back(assignment.source, assignment.left(), self._sources)
        if error is not None:
            self._fail(error)

    def _release(self, worker: WorkerIndex) -> Assignment[Unit]:
        assignment = self._assignments.pop(worker)
        self._sources[assignment.source].num_active -= 1
        return assignment

    def _fail(self, error: FetchFailedError) -> None:
        # Only the last failures: twice as many as are needed to exclude every source.
        error.failures = tuple(self._failures[-2 * len(self._sources) * self._max_failures :])
        self._stop = Stop(error)


def _retry_delay_s(num_failures: int) -> float:
    """Return the delay before the next request to a source after this many failures in a row, in seconds."""
    return min(_FIRST_RETRY_S * 2 ** (num_failures - 1), _LONGEST_RETRY_S) if num_failures else 0.0
