"""The threads of a fetch around a machine that leaves them nothing to do, and the connections that they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
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


class _NothingToTake:
    """Work that can never be done, and does not say so."""

    num_left = 1

    def take(self, *_: object) -> None:
        return None

    put_back = take

    def time_passed(self, *_: object) -> bool:
        return False

    landed = time_passed


class _NoWire:
    def receive(self, connection: Connection, request: Request[int]) -> Iterator[tuple[int, int]]:
        raise AssertionError("nothing is asked for")


@pytest.mark.parametrize("progress_timeout", [None, timedelta(seconds=0.2)])
def test_workers_that_wait_for_each_other_end_with_the_time(progress_timeout: timedelta | None) -> None:
    settings = _settings(60 if progress_timeout else 0.2, progress_timeout)
    machine: FetchMachine[int] = FetchMachine(_NothingToTake(), sources=["source"], max_failures=1)
    pool = FetchPool([_PEER], machine, _NoWire(), settings, num_workers=2, num_sources=1, step=3, total_bytes=10)
    began_s = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"0 of 10 bytes"):
        pool.run()
    assert time.monotonic() - began_s < 5


class _AskingOnce(_NothingToTake):
    """Asks the source for its only chunk, and then for nothing any more."""

    def __init__(self) -> None:
        self._asked = False

    def take(self, *_: object) -> tuple[SourceIndex, range] | None:  # type: ignore[override]
        if self._asked:
            return None
        self._asked = True
        return SourceIndex(0), range(1)


class _Refusing:
    def receive(self, connection: Connection, request: Request[int]) -> Iterator[tuple[int, int]]:
        raise PeerUnreachableError("nobody is there", peer="source:1")


def test_a_fetch_that_ends_with_the_time_says_what_went_wrong_last() -> None:
    machine: FetchMachine[int] = FetchMachine(_AskingOnce(), sources=["source"], max_failures=3)
    pool = FetchPool(
        [_PEER], machine, _Refusing(), _settings(0.3), num_workers=2, num_sources=1, step=3, total_bytes=10
    )
    with pytest.raises(DeadlineExceededError, match="the deadline passed; last error: nobody is there") as caught:
        pool.run()
    assert caught.value.peer == "source:1"


class _Watched(FetchMachine[int]):
    """Tells when a worker has nothing to do, and when one pauses before a request."""

    def __init__(self, work: Work[int], *, num_sources: int) -> None:
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


class _OneAfterTheOther(_NothingToTake):
    """Two units in two requests, the second one after the first."""

    def __init__(self) -> None:
        self.num_left = 2

    def take(self, _sources: object, under_way: Collection[object]) -> tuple[SourceIndex, range] | None:  # type: ignore[override]
        return (SourceIndex(0), range(1)) if not under_way else None

    def landed(self, *_: object) -> bool:
        self.num_left -= 1
        return False


class _CountingWhoLooks:
    """The first unit comes when all others have nothing to do, the second when it is known how many look again."""

    def __init__(self, machine: _Watched, *, num_others: int) -> None:
        self._machine = machine
        self._num_others = num_others
        self._is_first = True
        self.has_more_than_one_looked = False

    def receive(self, connection: Connection, request: Request[int]) -> Iterator[tuple[int, int]]:
        idle = self._machine.idle
        if self._is_first:
            self._is_first = False
            assert all(idle.acquire(timeout=10) for _ in range(self._num_others))
        else:
            assert idle.acquire(timeout=10)
            self.has_more_than_one_looked = idle.acquire(timeout=0.5)
        yield 0, 1


def test_a_request_that_ends_does_not_wake_all_who_have_nothing_to_do() -> None:
    num_workers = 16
    machine = _Watched(_OneAfterTheOther(), num_sources=1)
    wire = _CountingWhoLooks(machine, num_others=num_workers - 1)
    FetchPool(
        [_PEER], machine, wire, _settings(60), num_workers=num_workers, num_sources=1, step=3, total_bytes=10
    ).run()
    assert not wire.has_more_than_one_looked


class _WhenOneIsIdle:
    """A unit comes when another worker has looked once more, and has nothing to do."""

    def __init__(self, machine: _Watched) -> None:
        self._machine = machine

    def receive(self, connection: Connection, request: Request[int]) -> Iterator[tuple[int, int]]:
        assert self._machine.idle.acquire(timeout=10)
        yield 0, 1


class _MoreWhenTheTimeIsTold(_NothingToTake):
    """The second unit may be taken once the time has been told after the first."""

    def __init__(self) -> None:
        self.num_left = 2
        self._num_now = 1
        self._is_told = False

    def take(self, *_: object) -> tuple[SourceIndex, range] | None:  # type: ignore[override]
        if not self._num_now:
            return None
        self._num_now -= 1
        return SourceIndex(0), range(1)

    def landed(self, *_: object) -> bool:
        self.num_left -= 1
        return False

    def time_passed(self, *_: object) -> bool:
        if self.num_left != 1 or self._is_told:
            return False
        self._is_told = True
        self._num_now = 1
        return True


def test_beside_relays_the_time_is_told_at_the_end_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else it is told now and then alone, and how long the request has taken is not known.
    monkeypatch.setattr(fetch_pool, "_TICK_S", 60.0)
    machine = _Watched(_MoreWhenTheTimeIsTold(), num_sources=2)
    wire = _WhenOneIsIdle(machine)
    FetchPool([_PEER, _PEER], machine, wire, _settings(5), num_workers=2, num_sources=1, step=3, total_bytes=10).run()


class _MoreAfterTheFirst(_NothingToTake):
    """The source 0 is not ready. Of the source 1 there are two at once, then one, and then three at once."""

    def __init__(self) -> None:
        self.num_left = 6
        self._now = [(0, 0), (1, 1), (1, 2)]

    def take(self, *_: object) -> tuple[SourceIndex, range] | None:  # type: ignore[override]
        if not self._now:
            return None
        source, unit = self._now.pop(0)
        return SourceIndex(source), range(unit, unit + 1)

    def landed(self, _source: object, unit: int, _sources: object) -> bool:  # type: ignore[override]
        self.num_left -= 1
        if unit == 1:
            self._now += [(1, 3)]
        elif unit == 3:
            self._now += [(1, 4), (1, 5), (1, 6)]
        return False

    def put_back(self, *_: object) -> None:
        self._now.insert(0, (0, 0))


class _Together:
    """Of the last three units each comes only when all have been asked for, or the time is over."""

    def __init__(self, machine: _Watched) -> None:
        self._machine = machine
        self._all_are_asked = threading.Barrier(3)
        self.were_asked_together = True

    def receive(self, connection: Connection, request: Request[int]) -> Iterator[tuple[int, int]]:
        (unit,) = request.units
        match unit:
            case 0:
                raise PeerNotReadyError("not yet", retry_after_s=60.0)
            case 1:
                # Two workers have nothing to do.
                assert self._machine.idle.acquire(timeout=10)
                assert self._machine.idle.acquire(timeout=10)
            case 3:
                # One of them has looked once more, now that unit 1 has come.
                assert self._machine.idle.acquire(timeout=10)
            case 2:
                assert self._machine.has_pausing.wait(10)
            case _:
                try:
                    self._all_are_asked.wait(5)
                except threading.BrokenBarrierError:
                    self.were_asked_together = False
        yield unit, 1


def test_all_who_have_nothing_to_do_are_woken_for_as_many_requests_beside_one_who_pauses() -> None:
    machine = _Watched(_MoreAfterTheFirst(), num_sources=2)
    wire = _Together(machine)
    FetchPool([_PEER, _PEER], machine, wire, _settings(60), num_workers=4, num_sources=2, step=3, total_bytes=10).run()
    assert wire.were_asked_together


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
