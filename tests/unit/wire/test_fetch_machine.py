"""The fetch machine: every chunk is fetched once, whatever fails; nobody waits for what will not come."""

from __future__ import annotations

from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import num_examples

from ft_transport.errors import (
    DeadlineExceededError,
    FetchFailedError,
    IntegrityError,
    PeerAuthenticationError,
    PeerUnreachableError,
    SnapshotReplacedError,
    TransportError,
)
from ft_transport.wire.fetch import FetchMachine, Interrupt, Request, Stop, Wait, WorkerIndex
from ft_transport.wire.swarm import Swarm
from ft_transport.wire.swarm_work import MAX_CHUNKS_PER_REQUEST, SwarmWork

Verified: TypeAlias = list[int]


def _machine(
    num_chunks: int, sources: int = 1, workers: int = 1, max_failures: int = 3, num_in_flight: int = 1
) -> FetchMachine[int]:
    work = SwarmWork(
        [(0, num_chunks)],
        num_chunks=num_chunks,
        swarm=Swarm(num_sources=sources),
        num_connections=workers,
        num_in_flight=num_in_flight,
    )
    names = [f"host{index}:1" for index in range(sources)]
    return FetchMachine(work, sources=names, max_failures=max_failures)


def _lost(source: int = 0) -> PeerUnreachableError:
    return PeerUnreachableError("the connection broke", peer=f"host{source}:1")


def _damaged(chunk: int) -> IntegrityError:
    return IntegrityError("damaged", chunk=chunk, expected=1, actual=2, peer="host0:1", step=1)


def _fetch(machine: FetchMachine[int], worker: int = 0) -> Request[int]:
    instruction = machine.next(WorkerIndex(worker))
    assert isinstance(instruction, Request)
    return instruction


def _verify(machine: FetchMachine[int], worker: int, request: Request[int]) -> None:
    for _ in request.units:
        machine.unit_landed(WorkerIndex(worker))


def _fail(machine: FetchMachine[int], worker: int, error: TransportError) -> None:
    machine.request_failed(WorkerIndex(worker), error)


@pytest.mark.parametrize(("num_chunks", "workers"), [(0, 1), (1, 4), (16, 1), (17, 2), (33, 4), (257, 1), (257, 4)])
def test_every_chunk_is_assigned_exactly_once(num_chunks: int, workers: int) -> None:
    machine = _machine(num_chunks, workers=workers)
    chunks: list[int] = []
    sizes = [0] * (not num_chunks)
    while machine.stopped is None:
        for worker in range(workers):
            instruction = machine.next(WorkerIndex(worker))
            if isinstance(instruction, Request):
                assert instruction.delay_s == 0
                chunks += instruction.units
                sizes.append(len(instruction.units))
                _verify(machine, worker, instruction)
    assert sorted(chunks) == list(range(num_chunks))
    assert machine.next(WorkerIndex(0)) == machine.stopped == Stop(None)
    assert max(sizes) <= MAX_CHUNKS_PER_REQUEST
    # Large requests first, small ones at the end, so that no worker is left with a long one.
    assert sizes == sorted(sizes, reverse=True)
    assert workers == 1 or sizes[-1] <= 4


def test_a_worker_waits_while_another_has_the_last_chunks() -> None:
    machine = _machine(2, workers=3)
    first, second = _fetch(machine, 0), _fetch(machine, 1)
    assert machine.next(WorkerIndex(2)) == Wait()
    _fail(machine, 1, _lost())
    # What failed is there for whoever asks first.
    assert (_fetch(machine, 2).units[0], _fetch_range(second)) == (second.units[0], (1, 2))
    _verify(machine, 0, first)
    assert machine.next(WorkerIndex(0)) == Wait()
    _verify(machine, 2, second)
    assert machine.next(WorkerIndex(0)) == Stop(None)


def _fetch_range(request: Request[int]) -> tuple[int, int]:
    return request.units[0], request.units[-1] + 1


def _fetch_all_but_the_first(machine: FetchMachine[int], num_chunks: int) -> Request[int]:
    """Worker 0 gets a request and receives nothing, worker 1 fetches all that was never assigned."""
    slow = _fetch(machine, 0)
    request = slow
    while request.units[-1] + 1 < num_chunks:
        request = _fetch(machine, 1)
        _verify(machine, 1, request)
    return slow


def test_an_idle_worker_takes_over_half_of_what_a_slow_one_has_not_begun() -> None:
    machine = _machine(20, workers=2)
    assert _fetch_range(_fetch_all_but_the_first(machine, 20)) == (0, 10)
    machine.unit_landed(WorkerIndex(0))
    # Chunk 1 is on its way to the slow one.
    assert _fetch_range(_fetch(machine, 1)) == (6, 10)
    for _ in range(1, 6):
        assert machine.has_request(WorkerIndex(0))
        machine.unit_landed(WorkerIndex(0))
    assert not machine.has_request(WorkerIndex(0))
    assert machine.has_request(WorkerIndex(1))


def test_little_is_left_to_the_one_that_has_it() -> None:
    machine = _machine(128, workers=2, num_in_flight=4)
    slow = _fetch_all_but_the_first(machine, 128)
    for _ in range(len(slow.units) - 8):
        machine.unit_landed(WorkerIndex(0))
    assert machine.next(WorkerIndex(1)) == Wait()


def test_retries_come_later_and_later_but_not_without_end() -> None:
    machine = _machine(1, max_failures=12)
    delays = []
    for _ in range(11):
        delays.append(_fetch(machine).delay_s)
        _fail(machine, 0, _lost())
    assert delays[0] == 0
    assert delays == sorted(delays)
    assert delays[1] < delays[2] < delays[3]
    assert delays[-1] == delays[-2] <= 2


def test_progress_makes_a_source_trusted_again() -> None:
    machine = _machine(100, max_failures=2)
    for _ in range(30):
        assert _fetch(machine).delay_s <= 0.05
        machine.unit_landed(WorkerIndex(0))
        _fail(machine, 0, _lost())
    assert machine.stopped is None


def test_when_all_sources_fail_the_error_names_them_and_every_failure() -> None:
    machine = _machine(3, sources=2, max_failures=2)
    for _ in range(4):
        source = _fetch(machine).source
        _fail(machine, 0, _lost(source))
    assert machine.stopped is not None
    error = machine.stopped.error
    assert isinstance(error, FetchFailedError)
    assert len(error.failures) == 4
    assert {failure.peer for failure in error.failures} == {"host0:1", "host1:1"}
    text = str(error)
    assert "host0:1, host1:1" in text
    assert "3 chunks are missing" in text
    assert "failure 4: the connection broke" in text
    assert machine.next(WorkerIndex(0)) is machine.stopped


def test_of_very_many_failures_the_last_are_kept() -> None:
    machine = _machine(1000, max_failures=2)
    for number in range(200):
        _fetch(machine)
        machine.unit_landed(WorkerIndex(0))
        _fail(machine, 0, PeerUnreachableError(f"number {number}"))
    _fetch(machine)
    _fail(machine, 0, PeerUnreachableError("the last"))
    assert machine.stopped is not None
    assert isinstance(machine.stopped.error, FetchFailedError)
    assert len(machine.stopped.error.failures) <= 10
    assert machine.stopped.error.failures[-1].message == "the last"


def test_a_damaged_chunk_comes_from_elsewhere_the_next_time() -> None:
    machine = _machine(4, sources=2)
    damaged = _fetch(machine)
    _fail(machine, 0, _damaged(damaged.units[0]))
    again = _fetch(machine)
    assert again.units[0] == damaged.units[0]
    assert again.source != damaged.source


def test_a_source_that_always_damages_one_chunk_ends_the_fetch() -> None:
    machine = _machine(30, workers=2, max_failures=3)
    while machine.stopped is None:
        for worker in range(2):
            instruction = machine.next(WorkerIndex(worker))
            if not isinstance(instruction, Request):
                continue
            for chunk in instruction.units:
                if chunk == 7:
                    _fail(machine, worker, _damaged(7))
                    break
                machine.unit_landed(WorkerIndex(worker))
    assert isinstance(machine.stopped.error, FetchFailedError)
    assert all(isinstance(failure, IntegrityError) for failure in machine.stopped.error.failures)


def test_a_failure_behind_the_last_chunk_of_a_request_costs_nothing() -> None:
    machine = _machine(2, workers=2, max_failures=1)
    _verify(machine, 0, _fetch(machine))
    _fail(machine, 0, _lost())
    _verify(machine, 0, _fetch(machine))
    assert machine.stopped == Stop(None)


@pytest.mark.parametrize(
    "error", [PeerAuthenticationError("refused"), SnapshotReplacedError("gone")], ids=lambda error: type(error).__name__
)
def test_a_source_that_cannot_recover_is_asked_once(error: TransportError) -> None:
    machine = _machine(4, sources=2, workers=4, max_failures=9)
    bad = _fetch(machine).source
    _fail(machine, 0, error)
    for _ in range(3):
        request = _fetch(machine)
        assert request.source != bad
        _verify(machine, 0, request)
    alone = _machine(4, max_failures=9)
    _fetch(alone)
    _fail(alone, 0, error)
    assert alone.stopped is not None
    assert isinstance(alone.stopped.error, FetchFailedError)
    assert alone.stopped.error.failures == (error,)


def test_abort_stops_every_worker_with_its_error() -> None:
    machine = _machine(100, workers=2)
    request = _fetch(machine, 0)
    error = DeadlineExceededError("too late")
    machine.abort(error)
    machine.abort(TransportError("a second one"))
    _verify(machine, 0, request)
    _fail(machine, 0, _lost())
    assert machine.next(WorkerIndex(0)) == Stop(error)
    assert machine.next(WorkerIndex(1)) == Stop(error)


class _Model:
    """Plays the workers of a fetch and keeps count of who holds and who verified what."""

    def __init__(self, num_chunks: int, sources: int, workers: int, max_failures: int) -> None:
        self.machine = _machine(num_chunks, sources, workers, max_failures)
        self.num_chunks = num_chunks
        self.verified: Verified = []
        self.held: dict[int, list[int]] = {worker: [] for worker in range(workers)}

    def ask(self, worker: int) -> None:
        instruction = self.machine.next(WorkerIndex(worker))
        match instruction:
            case Request():
                chunks = list(instruction.units)
                assert chunks
                for other, held in self.held.items():
                    rest = [chunk for chunk in held if chunk not in chunks]
                    assert rest == held[: len(rest)], "a chunk was taken from the middle"
                    assert bool(rest) == bool(held), "a chunk that is on its way was taken over"
                    self.held[other] = rest
                assert not set(self.verified) & set(chunks), "a verified chunk is fetched again"
                self.held[worker] = chunks
            case Wait():
                assert any(self.held.values()), "a worker waits for nobody"
            case Interrupt():
                self.fail(instruction.worker, _lost())
            case Stop():
                assert instruction == self.machine.stopped

    def verify(self, worker: int) -> None:
        self.verified.append(self.held[worker].pop(0))
        self.machine.unit_landed(WorkerIndex(worker))
        assert self.machine.has_request(WorkerIndex(worker)) == bool(self.held[worker])

    def fail(self, worker: int, error: TransportError) -> None:
        self.held[worker] = []
        _fail(self.machine, worker, error)


@given(
    st.integers(0, 60),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["verify"] * 5 + ["lost", "refused", "replaced"])), max_size=150
    ),
)
@settings(max_examples=num_examples(1000))
def test_any_course_of_events_ends_whole_or_with_an_error(
    num_chunks: int, sources: int, workers: int, max_failures: int, events: list[tuple[int, str]]
) -> None:
    model = _Model(num_chunks, sources, workers, max_failures)
    for number, event in events:
        worker = number % workers
        if not model.held[worker]:
            model.ask(worker)
        if model.machine.stopped is not None or not model.held[worker]:
            continue
        match event:
            case "verify":
                model.verify(worker)
            case "lost":
                model.fail(worker, _lost())
            case "refused":
                model.fail(worker, PeerAuthenticationError("refused"))
            case "replaced":
                model.fail(worker, SnapshotReplacedError("gone"))
    # From here on all goes well: then it ends, and soon.
    for _ in range(2 * num_chunks + 1):
        for worker in range(workers):
            if model.machine.stopped is None and not model.held[worker]:
                model.ask(worker)
            if model.machine.stopped is None and model.held[worker]:
                model.verify(worker)
    stopped = model.machine.stopped
    assert stopped is not None
    assert len(set(model.verified)) == len(model.verified)
    if stopped.error is None:
        assert sorted(model.verified) == list(range(num_chunks))
    else:
        assert isinstance(stopped.error, FetchFailedError)
        assert len(model.verified) < num_chunks


def test_a_source_whose_request_has_ended_is_the_least_busy_again() -> None:
    machine = _machine(640, sources=2, workers=2)
    assert _fetch(machine, 0).source == 0
    second = _fetch(machine, 1)
    assert second.source == 1
    _verify(machine, 1, second)
    assert _fetch(machine, 1).source == 1


def test_an_idle_source_that_failed_once_is_asked_before_a_busy_one() -> None:
    machine = _machine(640, sources=2, workers=3)
    assert _fetch(machine, 0).source == 0
    assert _fetch(machine, 1).source == 1
    _fail(machine, 0, _lost(0))
    assert _fetch(machine, 0).source == 0
    _fail(machine, 0, _lost(0))
    assert _fetch(machine, 2).source == 0
