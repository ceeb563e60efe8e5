"""Planned reads: every one is delivered once, by its source or by another that holds the same, or the fetch ends."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import num_examples

from ft_transport.errors import FetchFailedError, PeerProtocolError, PeerUnreachableError, TransportError
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.fetch import FetchMachine, Request, SourceState, Stop, Wait, WorkerIndex
from ft_transport.wire.nodes import TensorNode
from ft_transport.wire.read_work import FrameOfReads, RangeRead, ReadWork
from ft_transport.wire.reshard import Read, Wanted
from ft_transport.wire.slices import MAX_REQUEST_BYTES, MAX_SLICES_PER_REQUEST, Box, decode_request, encode_request


def _read(number: int, num_bytes: int, *sources: int, is_whole: bool = False) -> Read:
    wanted = Wanted(
        path=f"w{number}",
        start=0,
        dtype="U8",
        item_bytes=1,
        global_shape=(num_bytes,),
        region=(((0, num_bytes),),),
        sources=sources,
        nodes=(TensorNode(0),) * len(sources),
        layouts=(None if is_whole else 0,) * len(sources),
    )
    return Read(wanted, Box(tuple(range(len(sources))), (num_bytes,), (0,), (0,), (num_bytes,)))


def _machine(reads: list[list[Read]], num_workers: int = 2, max_failures: int = 2) -> FetchMachine[FrameOfReads]:
    names = [f"host:{index}" for index in range(len(reads))]
    return FetchMachine(ReadWork(reads, num_workers=num_workers), sources=names, max_failures=max_failures)


def _fail(machine: FetchMachine[FrameOfReads], worker: int, *, retryable: bool = True) -> None:
    error: TransportError = PeerUnreachableError("gone") if retryable else PeerProtocolError("nonsense")
    machine.request_failed(WorkerIndex(worker), error)


def test_small_reads_share_a_frame_and_frames_a_request() -> None:
    machine = _machine([[_read(number, 1000, 0) for number in range(10)]])
    request = machine.next(WorkerIndex(0))
    assert isinstance(request, Request)
    assert [len(frame) for frame in request.units] == [10]
    assert machine.next(WorkerIndex(1)) == Wait()
    machine.unit_landed(WorkerIndex(0))
    assert machine.stopped == Stop(None)


def test_a_request_stays_within_its_limits() -> None:
    machine = _machine([[_read(number, CHUNK_BYTES, 0) for number in range(200)]], num_workers=1)
    request = machine.next(WorkerIndex(0))
    assert isinstance(request, Request)
    assert sum(read.num_bytes for frame in request.units for read in frame) == MAX_REQUEST_BYTES


def test_another_holder_takes_over_what_a_source_has_not_delivered() -> None:
    reads = [[_read(number, CHUNK_BYTES, 0, 1) for number in range(3)], []]
    machine = _machine(reads, num_workers=1)
    worker = WorkerIndex(0)
    first = machine.next(worker)
    assert isinstance(first, Request)
    assert first.source == 0
    assert len(first.units) == 3
    machine.unit_landed(worker)
    _fail(machine, 0, retryable=False)
    second = machine.next(worker)
    assert isinstance(second, Request)
    assert second.source == 1
    assert [read.path for frame in second.units for read in frame] == ["w1", "w2"]
    for _ in second.units:
        machine.unit_landed(worker)
    assert machine.stopped == Stop(None)


def test_after_a_first_failure_another_is_asked_at_once() -> None:
    machine = _machine([[_read(0, 10, 0, 1), _read(1, 10, 0)], []], num_workers=2, max_failures=3)
    assert machine.next(WorkerIndex(0)).source == 0  # type: ignore[union-attr]
    _fail(machine, 0)
    requests = [machine.next(WorkerIndex(worker)) for worker in (0, 1)]
    by_source = {request.source: request for request in requests if isinstance(request, Request)}
    assert [read.path for frame in by_source[1].units for read in frame] == ["w0"]  # type: ignore[index]
    assert [read.path for frame in by_source[0].units for read in frame] == ["w1"]  # type: ignore[index]
    assert (by_source[1].delay_s, by_source[0].delay_s > 0) == (0.0, True)  # type: ignore[index]


def test_who_has_nothing_to_do_relieves_who_has_much() -> None:
    reads = [_read(number, CHUNK_BYTES, 0, 1) for number in range(64)]
    machine = _machine([reads, []])
    asked = [machine.next(WorkerIndex(worker)) for worker in (0, 1)]
    assert [request.source for request in asked] == [0, 0]  # type: ignore[union-attr]
    for _ in asked[1].units:  # type: ignore[union-attr]
        machine.unit_landed(WorkerIndex(1))
    assert machine.next(WorkerIndex(1)).source == 1  # type: ignore[union-attr]


def test_what_is_not_sharded_comes_from_one_source_as_a_whole() -> None:
    reads = [_read(number, CHUNK_BYTES, 0, 1, is_whole=True) for number in range(2)]
    machine = _machine([reads, []], num_workers=1)
    worker = WorkerIndex(0)
    machine.next(worker)
    machine.unit_landed(worker)
    _fail(machine, 0, retryable=False)
    request = machine.next(worker)
    assert isinstance(request, Request)
    assert request.source == 1
    assert [read.path for frame in request.units for read in frame] == ["w0", "w1"]


def test_what_had_landed_as_a_whole_needs_nobody_to_stand_in() -> None:
    machine = _machine([[_read(0, CHUNK_BYTES, 0, is_whole=True), _read(1, CHUNK_BYTES, 0, 1)], []], num_workers=1)
    worker = WorkerIndex(0)
    machine.next(worker)
    machine.unit_landed(worker)
    _fail(machine, 0, retryable=False)
    request = machine.next(worker)
    assert isinstance(request, Request)
    assert [read.path for frame in request.units for read in frame] == ["w1"]


def test_a_source_is_asked_again_after_a_pause_before_it_is_dropped() -> None:
    machine = _machine([[_read(0, 10, 0)]], max_failures=2)
    worker = WorkerIndex(0)
    assert machine.next(worker).delay_s == 0.0  # type: ignore[union-attr]
    _fail(machine, 0)
    again = machine.next(worker)
    assert isinstance(again, Request)
    assert again.delay_s > 0
    _fail(machine, 0)
    assert machine.stopped is not None
    assert isinstance(machine.stopped.error, FetchFailedError)
    assert "host:0 failed" in str(machine.stopped.error)
    assert "w0" in str(machine.stopped.error)
    assert len(machine.stopped.error.failures) == 2


@given(st.data())
@settings(max_examples=num_examples(1000), deadline=None)
def test_whatever_fails_every_read_is_delivered_once_or_the_fetch_ends(data: st.DataObject) -> None:
    num_sources = data.draw(st.integers(1, 4), "sources")
    reads: list[list[Read]] = [[] for _ in range(num_sources)]
    home: dict[str, int] = {}
    for number in range(data.draw(st.integers(0, 12), "reads")):
        holders = data.draw(st.lists(st.integers(0, num_sources - 1), min_size=1, unique=True), "holders")
        is_whole = data.draw(st.booleans(), "is whole")
        num_bytes = data.draw(st.sampled_from([1, 1000, CHUNK_BYTES]))
        reads[holders[0]].append(_read(number, num_bytes, *holders, is_whole=is_whole))
        if is_whole:
            home[f"w{number}"] = holders[0]
    num_workers = data.draw(st.integers(1, 3), "workers")
    machine = _machine(reads, num_workers)
    delivered: Counter[str] = Counter()
    last: dict[str, int] = {}
    busy: dict[int, list[tuple[Read, ...]]] = {}
    sources: dict[int, int] = {}
    for _ in range(2000):
        if machine.stopped is not None:
            break
        worker = data.draw(st.integers(0, num_workers - 1), "who")
        if worker not in busy:
            instruction = machine.next(WorkerIndex(worker))
            if isinstance(instruction, Wait):
                assert busy, "all workers wait, and nothing is on its way"
            else:
                assert isinstance(instruction, Request)
                busy[worker], sources[worker] = list(instruction.units), instruction.source
                assert all(instruction.source in read.sources for frame in instruction.units for read in frame)
        elif data.draw(st.booleans() | st.just(True), "lands"):
            for read in busy[worker].pop(0):
                delivered[read.wanted.path] += 1
                last[read.wanted.path] = sources[worker]
            machine.unit_landed(WorkerIndex(worker))
            if not busy[worker]:
                del busy[worker]
        else:
            del busy[worker]
            _fail(machine, worker, retryable=data.draw(st.booleans(), "may pass"))
    else:
        pytest.fail("the machine does not come to an end")
    assert all(count == 1 for path, count in delivered.items() if path not in home)
    if machine.stopped.error is None:
        assert len(delivered) == sum(map(len, reads))
        # What one source was to send as a whole, one source has sent last.
        for source in range(num_sources):
            assert len({last[path] for path, first in home.items() if first == source}) <= 1


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 3 * CHUNK_BYTES)), max_size=40))
def test_reads_of_ranges_have_each_byte_once_and_in_order(gaps: list[tuple[int, int]]) -> None:
    ranges: list[tuple[int, int]] = []
    at = 0
    for gap, num_bytes in gaps:
        ranges.append((at + gap, at + gap + num_bytes))
        at += gap + num_bytes
    covered: list[tuple[int, int]] = []
    for read in RangeRead.of(ranges):
        assert 0 < read.num_bytes <= CHUNK_BYTES
        if covered and covered[-1][1] == read.start:
            covered[-1] = (covered[-1][0], read.end)
        else:
            covered.append((read.start, read.end))
    assert covered == ranges


@pytest.mark.parametrize("num_bytes", [1, 5000, CHUNK_BYTES])
def test_a_source_takes_a_request_for_as_many_ranges_as_possible(num_bytes: int) -> None:
    ranges = [(2 * number * num_bytes, (2 * number + 1) * num_bytes) for number in range(2 * MAX_SLICES_PER_REQUEST)]
    work = ReadWork([RangeRead.of(ranges)], num_workers=1)
    taken = work.take([SourceState("host:1")], [])
    assert taken is not None
    frames = tuple(tuple(read.slice() for read in frame if isinstance(read, RangeRead)) for frame in taken[1])
    assert decode_request(encode_request(frames), data_bytes=ranges[-1][1]) == frames
    num_slices = sum(map(len, frames))
    assert max(num_slices / MAX_SLICES_PER_REQUEST, num_slices * num_bytes / MAX_REQUEST_BYTES) > 0.75
