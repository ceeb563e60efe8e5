"""Whom a receiver asks for which chunk: all of them land, the sources send each about once, whoever dies or dawdles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_transport.errors import FetchFailedError, PeerNotReadyError, PeerUnreachableError
from ft_transport.wire.fetch import FetchMachine, Interrupt, Request, Stop, WorkerIndex
from ft_transport.wire.swarm import Swarm
from ft_transport.wire.swarm_work import SwarmWork

_MAX_ROUNDS = 5_000
_LONGEST_WAIT = 40
"""Rounds for which a relay holds a request until it has something."""
_LONGEST_PAUSE = 20
"""Rounds for which it pauses within an answer for the next chunk."""


@dataclass
class _Receiver:
    """One receiver with its workers; a chunk takes as many rounds as its slower side needs."""

    number: int
    machine: FetchMachine[int]
    work: SwarmWork
    fleet: Swarm
    num_workers: int
    landed: dict[int, None] = field(default_factory=dict)
    furthest: int = 0
    requests: dict[WorkerIndex, _Exchange] = field(default_factory=dict)


@dataclass
class _Exchange:
    request: Request[int]
    missing: list[int]
    num_waited: int = 0


class _Job:
    def __init__(
        self, num_chunks: int, num_sources: int, num_receivers: int, *, num_workers: int | None = None
    ) -> None:
        self.num_chunks = num_chunks
        self.num_sent = [0] * num_sources
        self.num_relayed = [0] * num_receivers
        self.dead_sources: set[int] = set()
        self.dead_receivers: set[int] = set()
        self.cut_off: set[int] = set()
        self.slow_sources: dict[int, int] = {}
        self.num_rounds = 0
        names = [f"source{index}" for index in range(num_sources)]
        relays = [f"relay{index}" for index in range(num_receivers - 1)]
        self.receivers = []
        for number in range(num_receivers):
            fleet = Swarm(num_sources=num_sources, num_receivers=num_receivers, own=number)
            work = SwarmWork([(0, num_chunks)], num_chunks=num_chunks, swarm=fleet, num_connections=4)
            machine: FetchMachine[int] = FetchMachine(work, sources=[*names, *relays], max_failures=3)
            self.receivers.append(_Receiver(number, machine, work, fleet, num_workers or work.num_workers))

    def run(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Goes on until all who live are done, or so far."""
        while any(self._is_at_work(receiver) for receiver in self.receivers):
            self.num_rounds += 1
            assert self.num_rounds < _MAX_ROUNDS, "it hangs"
            for receiver in self.receivers:
                if self._is_at_work(receiver):
                    self._go_on(receiver)
            if until():
                return

    def is_half_done(self) -> bool:
        return any(len(receiver.landed) > self.num_chunks // 2 for receiver in self.receivers)

    def _is_at_work(self, receiver: _Receiver) -> bool:
        return receiver.number not in self.dead_receivers and receiver.machine.stopped is None

    def _go_on(self, receiver: _Receiver) -> None:
        for index in range(receiver.num_workers):
            worker = WorkerIndex(index)
            if worker not in receiver.requests:
                instruction = receiver.machine.next(worker)
                if isinstance(instruction, Request):
                    # Its answer begins in the next round.
                    receiver.requests[worker] = _Exchange(instruction, list(instruction.units))
                    continue
                if isinstance(instruction, Interrupt):
                    receiver.machine.request_failed(instruction.worker, PeerUnreachableError("given up"))
                    del receiver.requests[instruction.worker]
                    continue
            if worker in receiver.requests:
                self._move(receiver, worker)

    def _move(self, receiver: _Receiver, worker: WorkerIndex) -> None:
        exchange = receiver.requests[worker]
        machine, request = receiver.machine, exchange.request
        is_begun = len(exchange.missing) < len(request.units)
        if request.source < receiver.fleet.num_sources:
            if request.source in self.dead_sources or receiver.number in self.cut_off:
                machine.request_failed(worker, PeerUnreachableError("dead"))
                del receiver.requests[worker]
                return
            if exchange.num_waited < self.slow_sources.get(request.source, 0):
                exchange.num_waited += 1
                return
            self.num_sent[request.source] += 1
            chunk = exchange.missing[0]
        else:
            relay = self.receivers[receiver.fleet.receiver_of(request.source)]
            if relay.number in self.dead_receivers:
                if is_begun:
                    # It might as well have had no more; the next request tells.
                    machine.request_cut(worker)
                else:
                    machine.request_failed(worker, PeerUnreachableError("dead"))
                del receiver.requests[worker]
                return
            ready = next((chunk for chunk in relay.landed if chunk in exchange.missing), None)
            if ready is None:
                if exchange.num_waited < (_LONGEST_PAUSE if is_begun else _LONGEST_WAIT):
                    exchange.num_waited += 1
                    return
                if is_begun:
                    machine.request_cut(worker)
                else:
                    machine.request_failed(worker, PeerNotReadyError("not yet", retry_after_s=0.0))
                del receiver.requests[worker]
                return
            self.num_relayed[relay.number] += 1
            receiver.furthest = max(receiver.furthest, relay.furthest, len(relay.landed))
            receiver.work.report_progress(receiver.furthest)
            chunk = ready
        assert chunk not in receiver.landed, "nothing is fetched twice"
        receiver.landed[chunk] = None
        machine.unit_landed(worker, chunk)
        exchange.missing.remove(chunk)
        exchange.num_waited = 0
        if not exchange.missing or not machine.has_request(worker):
            del receiver.requests[worker]

    def check(self) -> None:
        for receiver in self.receivers:
            if receiver.number not in self.dead_receivers:
                assert receiver.machine.stopped == Stop(None)
                assert set(receiver.landed) == set(range(self.num_chunks))


@pytest.mark.parametrize("num_receivers", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("num_sources", [1, 4])
def test_each_chunk_leaves_the_sources_once(num_sources: int, num_receivers: int) -> None:
    job = _Job(256, num_sources, num_receivers)
    job.run()
    job.check()
    assert sum(job.num_sent) <= 1.2 * 256
    if num_receivers > 1:
        # Everybody carries about as much as everybody else.
        assert max(job.num_relayed) <= 1.5 * sum(job.num_relayed) / num_receivers


def test_faster_sources_send_more_and_nobody_waits_for_a_slow_one() -> None:
    job = _Job(256, 4, 1)
    job.slow_sources = {2: 20}
    job.run()
    job.check()
    assert job.num_sent[2] < min(job.num_sent[0], job.num_sent[1], job.num_sent[3]) / 4
    even = _Job(256, 3, 1)
    even.run()
    assert job.num_rounds <= 1.3 * even.num_rounds


@pytest.mark.parametrize("dead", [{0}, {3}, {1, 2}, {0, 1, 2, 3, 4, 5, 6}])
def test_dead_receivers_cost_the_sources_about_their_share(dead: set[int]) -> None:
    job = _Job(256, 1, 8)
    job.run(until=job.is_half_done)
    job.dead_receivers = dead
    job.run()
    job.check()
    if len(dead) < 7:
        assert sum(job.num_sent) <= 1.5 * 256


def test_receivers_with_one_worker_do_not_wait_for_each_other_for_ever() -> None:
    job = _Job(30, 1, 6, num_workers=1)
    job.run(until=job.is_half_done)
    job.dead_receivers = {2, 3, 5}
    job.run()
    job.check()


def test_receivers_that_never_come_are_done_without() -> None:
    job = _Job(64, 1, 4)
    job.dead_receivers = {1, 3}
    job.run()
    job.check()


def test_without_sources_the_receivers_finish_with_what_they_have_together() -> None:
    job = _Job(64, 1, 4)
    job.run(until=lambda: len(set().union(*(receiver.landed for receiver in job.receivers))) == 64)
    assert any(receiver.machine.stopped is None for receiver in job.receivers)
    job.dead_sources = {0}
    job.run()
    job.check()


def test_what_nobody_has_ends_the_fetch() -> None:
    job = _Job(64, 1, 2)
    job.run(until=lambda: any(len(receiver.landed) > 4 for receiver in job.receivers))
    job.dead_sources = {0}
    job.run()
    for receiver in job.receivers:
        stopped = receiver.machine.stopped
        assert isinstance(stopped, Stop)
        assert isinstance(stopped.error, FetchFailedError)


@given(
    num_chunks=st.integers(1, 60),
    num_sources=st.integers(1, 3),
    num_receivers=st.integers(1, 6),
    num_workers=st.integers(1, 6),
    data=st.data(),
)
def test_whoever_lives_ends_with_everything(
    num_chunks: int, num_sources: int, num_receivers: int, num_workers: int, data: st.DataObject
) -> None:
    job = _Job(num_chunks, num_sources, num_receivers, num_workers=num_workers)
    numbers = st.integers(0, num_receivers - 1)
    job.slow_sources = data.draw(st.dictionaries(st.integers(0, num_sources - 1), st.integers(0, 9)), "slow")
    if data.draw(st.booleans(), "dead before the start"):
        job.dead_receivers = data.draw(st.sets(numbers, max_size=num_receivers - 1), "dead")
    else:
        job.run(until=job.is_half_done)
        job.dead_receivers = data.draw(st.sets(numbers, max_size=num_receivers - 1), "dead")
        job.dead_sources = data.draw(st.sets(st.integers(0, num_sources - 1), max_size=num_sources - 1), "dead sources")
    job.run()
    job.check()


@given(
    num_chunks=st.integers(1, 60),
    num_receivers=st.integers(2, 6),
    num_workers=st.integers(1, 6),
    is_begun=st.booleans(),
    data=st.data(),
)
def test_who_loses_its_sources_gets_everything_from_the_others(
    num_chunks: int, num_receivers: int, num_workers: int, is_begun: bool, data: st.DataObject
) -> None:
    job = _Job(num_chunks, 1, num_receivers, num_workers=num_workers)
    if is_begun:
        job.run(until=job.is_half_done)
    numbers = st.integers(0, num_receivers - 1)
    job.cut_off = data.draw(st.sets(numbers, min_size=1, max_size=num_receivers - 1), "cut off")
    job.run()
    job.check()


@pytest.mark.parametrize(
    ("num_sources", "num_receivers", "num_workers", "num_own"), [(2, 1, 4, 4), (1, 4, 4, 1), (1, 100, 16, 1)]
)
def test_connections_are_for_the_sources_and_one_for_each_relay(
    num_sources: int, num_receivers: int, num_workers: int, num_own: int
) -> None:
    fleet = Swarm(num_sources=num_sources, num_receivers=num_receivers)
    work = SwarmWork([(0, 100)], num_chunks=100, swarm=fleet, num_connections=4)
    # However many receivers there are, so many threads are enough.
    assert work.num_workers == num_workers
    names = [f"host{index}" for index in range(num_sources + num_receivers - 1)]
    machine: FetchMachine[int] = FetchMachine(work, sources=names, max_failures=3)
    asked = [machine.next(WorkerIndex(worker)) for worker in range(num_workers)]
    assert sum(isinstance(each, Request) and each.source < num_sources for each in asked) == num_own
