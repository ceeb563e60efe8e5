from __future__ import annotations

from typing import Any, cast

from ft_transport.http.client.connection import Connection
from ft_transport.http.client.connection_pool import ConnectionPool


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


def kept() -> tuple[ConnectionPool, list[Any]]:
    made: list[Any] = []

    def connect(peer: int) -> Connection:
        made.append(FakeConnection(peer))
        return cast(Connection, made[-1])

    return ConnectionPool([], connect, num_sources=0), made


def test_whoever_asks_a_peer_next_gets_the_connection_that_is_open_to_it() -> None:
    connections, made = kept()
    for peer in (*range(20), *range(20)):
        connections.give_back(peer, connections.take(peer))
    assert [connection.peer for connection in made] == list(range(20))
    assert all(connection.is_open for connection in made)


def test_two_at_one_time_have_connections_of_their_own() -> None:
    connections, made = kept()
    first, second = connections.take(3), connections.take(3)
    assert first is not second
    connections.give_back(3, first)
    assert connections.take(3) is first
    assert len(made) == 2


def test_one_that_was_interrupted_is_not_used_again() -> None:
    connections, made = kept()
    connection = connections.take(0)
    connection.interrupt()
    connections.give_back(0, connection)
    assert not made[0].is_open
    assert connections.take(0) is not connection


def test_of_too_many_the_one_that_has_waited_longest_is_closed() -> None:
    connections, made = kept()
    for peer in range(129):
        connections.give_back(peer, connections.take(peer))
    assert [connection.peer for connection in made if not connection.is_open] == [0]


def test_the_end_closes_those_that_wait_now_and_those_that_come_back() -> None:
    connections, made = kept()
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
