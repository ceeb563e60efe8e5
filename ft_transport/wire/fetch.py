"""The fetch machine: decides what each connection does next, without any input or output.

Workers (one connection each) ask ``next`` for an instruction, perform it, and report the result. A fetch consists of
units, which land, or fail, one by one: chunks of a file (``wire.swarm_work``) or frames of planned reads
(``wire.read_work``). The work knows which units are missing and which sources may deliver them. The machine knows the
workers and the sources: it drops sources that keep failing, delays retries, and stops when all units have landed or
none can.

             ┌── request_failed, request_cut: the rest returns ──┐
             ▼                                                   │
    the work's units ── Request ──► assigned to a worker ── unit_landed ──► landed

The machine has no clock. The number of units that each source has delivered since the common start shows its speed; if
that is not enough, the work gets the elapsed time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Literal, NewType, Protocol, TypeAlias, TypeVar

from ft_transport.errors import FetchFailedError, PeerNotReadyError, PeerSilentError, TransportError

WorkerIndex = NewType("WorkerIndex", int)
SourceIndex = NewType("SourceIndex", int)

_FIRST_RETRY_S: Final = 0.05
_LONGEST_RETRY_S: Final = 2.0
_FAILED_ENOUGH: Final = 2
"""Number of failures in a row after which a relay is not waited for."""

Unit = TypeVar("Unit")


@dataclass(frozen=True, slots=True)
class Request(Generic[Unit]):
    """Fetch ``units`` from ``source`` in one request, after waiting ``delay_s`` seconds."""

    source: SourceIndex
    units: Sequence[Unit]
    delay_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing until another worker reports; everything missing is on its way."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """End what ``worker`` receives: its source is so slow that another one delivers the rest sooner."""

    worker: WorkerIndex


@dataclass(frozen=True, slots=True)
class Stop:
    """The fetch is over: complete if ``error`` is ``None``."""

    error: TransportError | None


Instruction: TypeAlias = Request[Unit] | Wait | Interrupt | Stop


@dataclass(slots=True)
class SourceState:
    """The state of one source.

    Attributes:
        name: Its name in messages.
        failures: Failures since the last unit that it delivered.
        num_dry: Empty answers since then.
        pause_s: Pause that it asked for after the last failure or empty answer, in seconds.
        num_active: Requests under way.
        num_landed: Units that it has delivered.
        num_silent: Requests during which it sent nothing for too long.
        num_interrupted: Requests to it that were ended because others were faster.
        is_excluded: Whether it gets no more requests.
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
        """Whether a relay is not waited for any more."""
        return self.is_excluded or self.failures >= _FAILED_ENOUGH or self.num_silent > 0

    @property
    def load(self) -> tuple[int, int, int, int]:
        """A sort key: the lower, the sooner the source delivers."""
        return self.num_interrupted, self.num_dry, self.num_active, self.failures


@dataclass(slots=True)
class Assignment(Generic[Unit]):
    """The request of a worker: ``units[next:end]`` have not landed, but for the ``early`` ones.

    Other workers may take over units at its end, if all land in order.
    """

    source: SourceIndex
    units: Sequence[Unit]
    next: int
    end: int
    is_interrupted: bool = False
    early: set[Unit] = field(default_factory=set)

    @property
    def num_left(self) -> int:
        """Number of units that have not landed."""
        return self.end - self.next - len(self.early)

    def left(self) -> Sequence[Unit]:
        """Return the units that have not landed."""
        rest = self.units[self.next : self.end]
        return [unit for unit in rest if unit not in self.early] if self.early else rest

    def land(self, unit: Unit | None) -> Unit:
        """Note that a unit, by default the next one, has landed; return it."""
        following = self.units[self.next]
        if unit is not None and unit != following:
            self.early.add(unit)
            return unit
        self.next += 1
        while self.early and self.units[self.next] in self.early:
            self.early.remove(self.units[self.next])
            self.next += 1
        return following


@dataclass(frozen=True, slots=True)
class Undeliverable:
    """The reason why no source can deliver something, and its path if it has one."""

    reason: str
    path: str | None = None


MayTake: TypeAlias = Literal["may take"]
"""Workers that wait have something to do now."""


class Work(Protocol[Unit]):
    """The units to fetch. Only its machine calls it, and passes the state of the sources each time."""

    @property
    def num_left(self) -> int:
        """Number of units that have not landed yet."""

    def take(
        self, sources: Sequence[SourceState], under_way: Collection[Assignment[Unit]]
    ) -> tuple[SourceIndex, Sequence[Unit]] | Assignment[Unit] | None:
        """Returns the source and the units of an idle worker's next request.

        Or a request under way that should end and be made elsewhere; ``None`` if the worker has nothing to do.
        """

    def landed(self, source: SourceIndex, unit: Unit, sources: Sequence[SourceState]) -> Undeliverable | MayTake | None:
        """Notes a unit that landed; returns what can never land, or that waiting workers have something to do now."""

    def time_passed(self, elapsed_s: float, sources: Sequence[SourceState]) -> MayTake | None:
        """Notes the seconds since the beginning; returns whether waiting workers have something to do now."""

    def put_back(
        self, source: SourceIndex, units: Sequence[Unit], sources: Sequence[SourceState]
    ) -> Undeliverable | None:
        """Takes back the units that ``source`` failed to deliver; returns what can never land, if anything."""


class FetchMachine(Generic[Unit]):
    """The state of one fetch. Not thread-safe: its shell calls it under a lock.

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
        """Whether nothing was reported since a worker got `Wait`: then all other workers wait, too."""

    @property
    def stopped(self) -> Stop | None:
        """The outcome, once the fetch has stopped."""
        return self._stop

    @property
    def last_failure(self) -> TransportError | None:
        """The newest failure of a request, ``None`` if no request has failed."""
        return self._failures[-1] if self._failures else None

    def has_request(self, worker: WorkerIndex) -> bool:
        """Whether the worker's request still has units; other workers may have taken over all of them."""
        return worker in self._assignments

    def next(self, worker: WorkerIndex) -> Instruction[Unit]:
        """Return the next instruction for ``worker``, which has no request under way."""
        if self._stop is not None:
            return self._stop
        assert worker not in self._assignments, "a worker reports the end of its request before it asks again"
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
        """Note that a unit of the worker's request landed, with the right digest (or unverified).

        Args:
            worker: The worker.
            unit: The unit; by default the next one in the order of the request.

        Returns:
            Whether workers that wait have something to do now.
        """
        if self._stop is not None:
            return True
        self._nothing_to_do = False
        assignment = self._assignments[worker]
        source = assignment.source
        told = self._work.landed(source, assignment.land(unit), self._sources)
        state = self._sources[source]
        state.failures = state.num_dry = 0
        state.pause_s = 0.0
        state.num_landed += 1
        if not assignment.num_left:
            self._release(worker)
        if isinstance(told, Undeliverable):
            self._stop = self._outcome(told)
        elif not self._work.num_left:
            self._stop = Stop(None)
        return self._stop is not None or told is not None

    def time_passed(self, elapsed_s: float) -> bool:
        """Note the time since the beginning, in seconds. Called now and then while workers wait.

        Returns:
            Whether workers that wait have something to do now.
        """
        if self._stop is not None or self._work.time_passed(elapsed_s, self._sources) is None:
            return False
        self._nothing_to_do = False
        return True

    def request_failed(self, worker: WorkerIndex, error: TransportError) -> None:
        """Note that the worker's request failed; its current unit and those behind it did not land."""
        # A failure after the last unit has no consequence.
        if self._stop is not None or worker not in self._assignments:
            return
        assignment = self._release(worker)
        source = self._sources[assignment.source]
        if assignment.is_interrupted:
            # Not a failure: the source is slow, and may be the only one left in the end.
            source.num_interrupted += 1
        elif isinstance(error, PeerNotReadyError):
            source.num_dry += 1
            source.pause_s = error.retry_after_s
        else:
            self._failures.append(error)
            source.failures += 1
            source.num_silent += isinstance(error, PeerSilentError)
            # A snapshot that was replaced (409) does not come back.
            if not error.retryable or error.http_status == 409 or source.failures >= self._max_failures:
                source.is_excluded = True
        self._put_back(assignment)

    def request_cut(self, worker: WorkerIndex) -> None:
        """Note that the answer was complete but shorter than requested: the source has no more yet."""
        if self._stop is None and worker in self._assignments:
            self._put_back(self._release(worker))

    def abort(self, error: TransportError) -> None:
        """End the whole fetch: its deadline passed, or the receiver itself failed."""
        if self._stop is None:
            self._stop = Stop(error)

    def _put_back(self, assignment: Assignment[Unit]) -> None:
        self._nothing_to_do = False
        undeliverable = self._work.put_back(assignment.source, assignment.left(), self._sources)
        if undeliverable is not None:
            self._stop = self._outcome(undeliverable)

    def _release(self, worker: WorkerIndex) -> Assignment[Unit]:
        assignment = self._assignments.pop(worker)
        self._sources[assignment.source].num_active -= 1
        return assignment

    def _outcome(self, undeliverable: Undeliverable) -> Stop:
        # Only the last failures: about as many as it takes to drop every source, twice.
        last = self._failures[-2 * len(self._sources) * self._max_failures :]
        return Stop(FetchFailedError(undeliverable.reason, failures=tuple(last), path=undeliverable.path))


def _retry_delay_s(num_failures: int) -> float:
    """Return the delay before the next request to a source after this many failures in a row, in seconds."""
    return min(_FIRST_RETRY_S * 2 ** (num_failures - 1), _LONGEST_RETRY_S) if num_failures else 0.0
