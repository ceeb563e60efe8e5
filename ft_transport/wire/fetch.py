"""The fetch machine: what each connection does next, decided without any input or output.

Workers (one connection each) ask ``next`` for an instruction, perform it, and report what came of it. What is
fetched consists of units, which land, or fail, one by one: chunks of a file (``wire.fleet_work``) or frames of planned
reads (``wire.read_work``). The work knows which units are missing and who may deliver them. The machine knows the
workers and the sources: it drops sources that keep failing, lets others pause before they are asked again, and says
when all is done or nothing can be.

             ┌── request_failed, request_cut: the rest returns ──┐
             ▼                                                   │
    the work's units ── Request ──► assigned to a worker ── unit_landed ──► landed

The machine has no clock. How fast a source is shows in how many units it has delivered since all of them began; where
that does not tell, the work is told how much time has passed.
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

Unit = TypeVar("Unit")


@dataclass(frozen=True, slots=True)
class Request(Generic[Unit]):
    """Fetch ``units`` from ``source`` in one request, after waiting ``delay_s`` seconds."""

    source: SourceIndex
    units: Sequence[Unit]
    delay_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until another worker reports; everything missing is on its way."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """End what ``worker`` receives: its source is so slow that what is left of it comes sooner from another one."""

    worker: WorkerIndex


@dataclass(frozen=True, slots=True)
class Stop:
    """The fetch is over: complete if ``error`` is ``None``."""

    error: TransportError | None


Instruction: TypeAlias = Request[Unit] | Wait | Interrupt | Stop


@dataclass(slots=True)
class SourceState:
    """What is known of one source.

    Attributes:
        name: For messages.
        failures: Those since the last unit that it delivered.
        num_dry: Requests since then to which it had nothing yet.
        pause_s: How long it wants to be left alone after the last one of these, in seconds.
        num_active: Requests under way.
        num_landed: Units that it has delivered.
        num_silent: Requests in which nothing came from it for too long.
        num_interrupted: Requests to it that were ended because others were faster.
        dropped: Whether it is not asked any more.
    """

    name: str
    failures: int = 0
    num_dry: int = 0
    pause_s: float = 0.0
    num_active: int = 0
    num_landed: int = 0
    num_silent: int = 0
    num_interrupted: int = 0
    dropped: bool = False


@dataclass(slots=True)
class Assignment(Generic[Unit]):
    """The request that a worker is at: ``units[next:end]`` have not landed, but for those that came ``early``.

    Others may take over units at its end, where all land in order.
    """

    source: SourceIndex
    units: Sequence[Unit]
    next: int
    end: int
    is_interrupted: bool = False
    early: set[Unit] = field(default_factory=set)

    @property
    def num_left(self) -> int:
        """How many units have not landed."""
        return self.end - self.next - len(self.early)

    def left(self) -> Sequence[Unit]:
        """Those that have not landed."""
        rest = self.units[self.next : self.end]
        return [unit for unit in rest if unit not in self.early] if self.early else rest

    def land(self, unit: Unit | None) -> Unit:
        """Takes note of one that landed, the next one if none is named; returns it."""
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
    """Why no source can deliver something, and its path where it has one."""

    reason: str
    path: str | None = None


MayTake: TypeAlias = Literal["may take"]
"""Workers that wait have something to do now."""


class Work(Protocol[Unit]):
    """What is to be fetched. Only its machine calls it, and hands it what is known of the sources each time."""

    @property
    def num_left(self) -> int:
        """How many units have not landed yet."""

    def take(
        self, sources: Sequence[SourceState], under_way: Collection[Assignment[Unit]]
    ) -> tuple[SourceIndex, Sequence[Unit]] | Assignment[Unit] | None:
        """The next request of an idle worker: whom it asks, and for what.

        Or a request under way that is better ended, and made elsewhere; ``None`` if the worker has nothing to do.
        """

    def landed(self, source: SourceIndex, unit: Unit, sources: Sequence[SourceState]) -> Undeliverable | MayTake | None:
        """Takes note of a unit that landed; says what can never land, or that others may take something now."""

    def time_passed(self, elapsed_s: float, sources: Sequence[SourceState]) -> MayTake | None:
        """Takes note of the time since the beginning, in seconds; says that others may take something now."""

    def put_back(
        self, source: SourceIndex, units: Sequence[Unit], sources: Sequence[SourceState]
    ) -> Undeliverable | None:
        """Takes back what ``source`` has failed to deliver; says what can never land, if anything."""


class FetchMachine(Generic[Unit]):
    """The state of one fetch. Not thread-safe: its shell calls it under a lock.

    Args:
        work: What to fetch.
        sources: Names of the sources, for messages.
        max_failures: A source is dropped after this many failures in a row.
    """

    def __init__(self, work: Work[Unit], *, sources: Sequence[str], max_failures: int) -> None:
        self._work = work
        self._max_failures = max_failures
        self._sources = [SourceState(name) for name in sources]
        self._assignments: dict[WorkerIndex, Assignment[Unit]] = {}
        self._failures: list[TransportError] = []
        self._stop: Stop | None = None if work.num_left else Stop(None)
        self._nothing_to_do = False
        """Whether nothing has been reported since a worker was told to wait: then all others wait, too."""

    @property
    def stopped(self) -> Stop | None:
        """The outcome, once there is one."""
        return self._stop

    @property
    def last_failure(self) -> TransportError | None:
        """The newest failure of a request, ``None`` if no request has failed."""
        return self._failures[-1] if self._failures else None

    def has_request(self, worker: WorkerIndex) -> bool:
        """Whether units of the worker's request are still its own; the rest may have been taken over by others."""
        return worker in self._assignments

    def next(self, worker: WorkerIndex) -> Instruction[Unit]:
        """What ``worker``, which has no request under way, does now."""
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
        """A unit of the worker's request landed, and its digest is right (or was not asked for).

        Args:
            worker: Whose request.
            unit: Which one; the next one in the order of the request by default.

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
        """Takes note of the time since the beginning, in seconds. Called now and then while workers wait.

        Returns:
            Whether workers that wait have something to do now.
        """
        if self._stop is not None or self._work.time_passed(elapsed_s, self._sources) is None:
            return False
        self._nothing_to_do = False
        return True

    def request_failed(self, worker: WorkerIndex, error: TransportError) -> None:
        """The worker's request ended early; the unit it was at, and those behind it, did not land."""
        # Where all its units had landed, what broke behind them costs nothing.
        if self._stop is not None or worker not in self._assignments:
            return
        assignment = self._release(worker)
        source = self._sources[assignment.source]
        if assignment.is_interrupted:
            # No failure: it is slow, and may be all that is left in the end.
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
                source.dropped = True
        self._put_back(assignment)

    def request_cut(self, worker: WorkerIndex) -> None:
        """The answer to the worker's request was whole, and shorter than asked for: its source has no more yet."""
        if self._stop is None and worker in self._assignments:
            self._put_back(self._release(worker))

    def abort(self, error: TransportError) -> None:
        """The whole fetch has to end: its deadline passed, or the receiver itself failed."""
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
        # Of very many failures the last ones: about as many as it takes to drop every source, twice.
        last = self._failures[-2 * len(self._sources) * self._max_failures :]
        return Stop(FetchFailedError(undeliverable.reason, failures=tuple(last), path=undeliverable.path))


def _retry_delay_s(num_failures: int) -> float:
    """How long to wait before a source is asked again that has failed so often in a row, in seconds."""
    return min(_FIRST_RETRY_S * 2 ** (num_failures - 1), _LONGEST_RETRY_S) if num_failures else 0.0
