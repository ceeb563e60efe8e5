"""The threads of a fetch around a machine that leaves them nothing to do, and the connections that they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any, cast

import pytest

from ft_transport import DeadlineExceededError, PeerUnreachableError, TransportSettings
from ft_transport.errors import PeerNotReadyError
from ft_transport.http.client import fetch_pool
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_pool import ConnectionPool, FetchPool
from ft_transport.http.client.fetch_settings import FetchSettings, FetchTimeout
from ft_transport.http.peer_address import PeerAddress
from ft_transport.wire.fetch import FetchMachine, Instruction, Request, SourceIndex, Wait, Work, WorkerIndex


def _settings(timeout_s: float, progress_timeout: timedelta | None = None) -> FetchSettings:
    return FetchSettings.of(
        TransportSettings(),
        keys=None,
        certificates=None,
        num_connections=2,
        timeout=FetchTimeout(total=timedelta(seconds=timeout_s), progress=progress_timeout),
    )


_PEER = PeerAddress.from_url("http://127.0.0.1:1/checkpoint/")


class _Work:
    """Gives the units that a test chooses, each as its source and number, and by itself nothing."""

    def __init__(
        self,
        num_units: int,
        take: Callable[[int], tuple[int, int] | None],
        *,
        landed: Callable[[int], object] = lambda _unit: None,
        put_back: Callable[[], object] = lambda: None,
        time_passed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.num_left = num_units
        self._take, self._landed, self._put_back, self._time_passed = take, landed, put_back, time_passed

    def take(self, _sources: object, under_way: Collection[object]) -> tuple[SourceIndex, range] | None:
        found = self._take(len(under_way))
        return (SourceIndex(found[0]), range(found[1], found[1] + 1)) if found is not None else None

    def put_back(self, *_: object) -> None:
        self._put_back()

    def landed(self, _source: object, unit: int, _sources: object) -> bool:
        self.num_left -= 1
        self._landed(unit)
        return False

    def time_passed(self, *_: object) -> bool:
        return self._time_passed()


class _Watched(FetchMachine[int]):
    """Tells when a worker has nothing to do, and when one pauses before a request."""

    def __init__(self, work: Work[int], *, num_sources: int = 1) -> None:
        super().__init__(work, sources=["source"] * num_sources, max_failures=3)
        self.idle = threading.Semaphore(0)
        self.has_pausing = threading.Event()

    def next(self, worker: WorkerIndex) -> Instruction[int]:
        instruction = super().next(worker)
        if isinstance(instruction, Wait):
            self.idle.release()
        elif isinstance(instruction, Request) and instruction.delay_s:
            self.has_pausing.set()
        return instruction

    def is_idle(self) -> bool:
        """Whether one more worker has looked by now, or soon, and has nothing to do."""
        return self.idle.acquire(timeout=10)


class _Wire:
    """Delivers a unit once ``before`` has returned."""

    def __init__(self, before: Callable[[int], object]) -> None:
        self._before = before

    def receive(self, connection: Connection, request: Request[int]) -> Iterator[tuple[int, int]]:
        (unit,) = request.units
        self._before(unit)
        yield unit, 1


def _run(
    machine: FetchMachine[int],
    before: Callable[[int], object],
    settings: FetchSettings,
    *,
    num_workers: int = 2,
    num_peers: int = 1,
    num_sources: int = 1,
) -> None:
    FetchPool(
        [_PEER] * num_peers,
        machine,
        _Wire(before),
        settings,
        num_workers=num_workers,
        num_sources=num_sources,
        step=3,
        total_bytes=10,
    ).run()


@pytest.mark.parametrize("progress_timeout", [None, timedelta(seconds=0.2)])
def test_workers_that_wait_for_each_other_end_with_the_time(progress_timeout: timedelta | None) -> None:
    settings = _settings(60 if progress_timeout else 0.2, progress_timeout)
    began_s = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"0 of 10 bytes"):
        _run(_Watched(_Work(1, lambda _: None)), pytest.fail, settings)
    assert time.monotonic() - began_s < 5


def test_a_fetch_that_ends_with_the_time_says_what_went_wrong_last() -> None:
    def refuse(_unit: int) -> None:
        raise PeerUnreachableError("nobody is there", peer="source:1")

    units = iter([(0, 0)])
    with pytest.raises(DeadlineExceededError, match="the deadline passed; last error: nobody is there") as caught:
        _run(_Watched(_Work(1, lambda _: next(units, None))), refuse, _settings(0.3))
    assert caught.value.peer == "source:1"


def test_a_request_that_ends_does_not_wake_all_who_have_nothing_to_do() -> None:
    """The first unit comes when all others have nothing to do, the second when it is known how many look again."""
    machine = _Watched(_Work(2, lambda num_under_way: (0, 0) if not num_under_way else None))
    looked: list[bool] = []

    def before(_unit: int) -> None:
        if not looked:
            looked.append(all(machine.is_idle() for _ in range(15)))
        else:
            looked.extend((machine.is_idle(), machine.idle.acquire(timeout=0.5)))

    _run(machine, before, _settings(60), num_workers=16)
    assert looked == [True, True, False]


def test_beside_relays_the_time_is_told_at_the_end_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second unit may be taken once the time has been told after the first."""
    # Else it is told now and then alone, and how long the request has taken is not known.
    monkeypatch.setattr(fetch_pool, "_TICK_S", 60.0)
    units, later = [(0, 0)], [(0, 0)]

    def time_passed() -> bool:
        if work.num_left != 1 or not later:
            return False
        units.append(later.pop())
        return True

    work = _Work(2, lambda _: units.pop() if units else None, time_passed=time_passed)
    machine = _Watched(work, num_sources=2)

    def before(_unit: int) -> None:
        assert machine.is_idle()

    _run(machine, before, _settings(5), num_peers=2)


def test_all_who_have_nothing_to_do_are_woken_for_as_many_requests_beside_one_who_pauses() -> None:
    """The source 0 is not ready. Of the source 1 there are two at once, then one, and then three at once.

    Of the last three units each comes only when all have been asked for, or the time is over.
    """
    now = [(0, 0), (1, 1), (1, 2)]
    following = {1: [(1, 3)], 3: [(1, 4), (1, 5), (1, 6)]}
    work = _Work(
        6,
        lambda _: now.pop(0) if now else None,
        landed=lambda unit: now.extend(following.get(unit, [])),
        put_back=lambda: now.insert(0, (0, 0)),
    )
    machine = _Watched(work, num_sources=2)
    all_are_asked = threading.Barrier(3)
    num_alone = 0

    def before(unit: int) -> None:
        nonlocal num_alone
        match unit:
            case 0:
                raise PeerNotReadyError("not yet", retry_after_s=60.0)
            case 1:
                assert machine.is_idle()
                assert machine.is_idle(), "two workers have nothing to do"
            case 3:
                assert machine.is_idle(), "one of them has looked once more, now that unit 1 has come"
            case 2:
                assert machine.has_pausing.wait(10)
            case _:
                try:
                    all_are_asked.wait(5)
                except threading.BrokenBarrierError:
                    num_alone += 1

    _run(machine, before, _settings(60), num_workers=4, num_peers=2, num_sources=2)
    assert num_alone == 0


class FakeConnection:
    """Says what was done to it."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.is_interrupted = False
        self.is_open = True
        self.num_opened = 1
        self.local_address = self.reached = ""

    def interrupt(self) -> None:
        self.is_interrupted = True

    def close(self) -> None:
        self.is_open = False


def _connections() -> tuple[ConnectionPool, list[Any]]:
    made: list[Any] = []

    def connect(peer: int) -> Connection:
        made.append(FakeConnection(peer))
        return cast(Connection, made[-1])

    return ConnectionPool([], connect, num_sources=0), made


def test_whoever_asks_a_peer_next_gets_the_connection_that_is_open_to_it() -> None:
    connections, made = _connections()
    for peer in (*range(20), *range(20)):
        connections.give_back(peer, connections.take(peer))
    assert [connection.peer for connection in made] == list(range(20))
    assert all(connection.is_open for connection in made)


def test_two_at_one_time_have_connections_of_their_own() -> None:
    connections, made = _connections()
    first, second = connections.take(3), connections.take(3)
    assert first is not second
    connections.give_back(3, first)
    assert connections.take(3) is first
    assert len(made) == 2


def test_one_that_was_interrupted_is_not_used_again() -> None:
    connections, made = _connections()
    connection = connections.take(0)
    connection.interrupt()
    connections.give_back(0, connection)
    assert not made[0].is_open
    assert connections.take(0) is not connection


def test_of_too_many_the_one_that_has_waited_longest_is_closed() -> None:
    connections, made = _connections()
    for peer in range(129):
        connections.give_back(peer, connections.take(peer))
    assert [connection.peer for connection in made if not connection.is_open] == [0]


def test_the_end_closes_those_that_wait_now_and_those_that_come_back() -> None:
    connections, made = _connections()
    busy = connections.take(0)
    connections.give_back(1, connections.take(1))
    connections.interrupt()
    assert made[0].is_interrupted
    assert made[0].is_open
    assert not made[1].is_open
    connections.give_back(0, busy)
    assert not made[0].is_open
    forgotten = connections.take(2)
    connections.close()
    assert not cast(FakeConnection, forgotten).is_open
