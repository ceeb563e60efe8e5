"""Which connections get a slot or lose it, and what unauthenticated clients may cost."""

from __future__ import annotations

import resource
from contextlib import ExitStack

import pytest
from clocks import Clock

from ft_transport.http.peer_address import client_of
from ft_transport.http.server.connection_slots import NEWCOMER_S, ConnectionSlots, RateLimits, Slot
from ft_transport.http.server.listener import max_connections


class Door:
    """Lets connections in and out, as a listener does."""

    def __init__(self, max_connections: int) -> None:
        self.clock = Clock()
        self.slots = ConnectionSlots(max_connections, self.clock)
        self.ended: list[Slot] = []

    def enter(self, address: str = "a") -> Slot | None:
        if not self.slots.make_room() and not self.slots.make_room():
            return None
        slot = self.slots.enter(address)
        if slot is not None:
            entered = slot
            slot.end = lambda: self.end(entered)
        assert self.slots.num_open <= self.slots.max_connections
        return slot

    def end(self, slot: Slot) -> None:
        self.ended.append(slot)
        self.slots.leave(slot)

    def authenticated(self, address: str = "a") -> Slot:
        slot = self.enter(address)
        assert slot is not None
        with self.slots.serving(slot):
            self.slots.authenticated(slot)
        return slot


def test_a_crowd_of_newcomers_takes_a_part_of_the_places_and_its_oldest_go_first() -> None:
    door = Door(16)
    peer = door.authenticated()
    crowd = [door.enter() for _ in range(1000)]
    assert door.slots.num_open == 1 + 16 // 4
    assert door.ended == crowd[: -16 // 4]
    assert peer not in door.ended


def test_crowds_of_many_addresses_leave_places_to_those_who_belong_here() -> None:
    door = Door(16)
    peers = [door.authenticated(str(number)) for number in range(8)]
    for number in range(1000):
        door.enter(f"other {number}")
    assert door.slots.num_open == 16
    assert not set(peers) & set(door.ended)
    # Nor does a crowd of few drive out who comes alone.
    door = Door(64)
    alone = door.enter("alone")
    for _ in range(1000):
        door.enter("crowd 1")
        door.enter("crowd 2")
    assert alone not in door.ended


def test_who_has_asked_outlasts_those_who_are_silent() -> None:
    door = Door(64)
    asking = door.enter()
    assert asking is not None
    door.slots.note_request(asking)
    door.slots.note_request(asking)
    for _ in range(1000):
        door.enter()
    assert asking not in door.ended
    with door.slots.serving(asking):
        pass  # Answered, and not authenticated: a stranger like any other.
    for _ in range(1000):
        door.enter()
    assert asking in door.ended


def test_where_all_have_asked_the_longest_idle_makes_room() -> None:
    door = Door(16)
    idle = [door.authenticated(str(number % 2)) for number in range(16)]
    late = door.enter("late")
    assert late is not None
    assert len(door.ended) == 1
    assert door.ended[0] in idle[:2]
    # The newcomer goes on to ask: the next one is not at its cost.
    assert door.enter("later") is not None
    assert late not in door.ended


def test_who_is_being_served_is_not_told_to_go() -> None:
    door = Door(4)
    slots = [door.authenticated(str(number)) for number in range(4)]
    with ExitStack() as stack:
        for slot in slots:
            stack.enter_context(door.slots.serving(slot))
        assert door.enter("late") is None
        assert door.slots.is_full
        assert door.ended == []
        with door.slots.waiting(slots[1]):
            assert door.enter("late") is not None
        assert door.ended == [slots[1]]


def test_one_address_never_takes_all_places() -> None:
    door = Door(16)
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(door.slots.serving(door.authenticated("a")))
        assert door.enter("a") is None
        assert not door.slots.is_full
        assert door.enter("b") is not None


def test_newcomers_go_after_seconds_and_peers_stay() -> None:
    door = Door(16)
    peer, early = door.authenticated(), door.enter()
    door.clock.now_s += NEWCOMER_S / 2
    late = door.enter()
    assert door.slots.has_newcomers
    door.clock.now_s += NEWCOMER_S / 2
    door.slots.end_overdue()
    assert door.ended == [early]
    assert late is not None
    door.slots.leave(late)
    door.slots.leave(late)
    assert not door.slots.has_newcomers
    assert door.slots.num_open == 1
    assert peer not in door.ended


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::1"),
        ("::1", "::1"),
        ("", ""),
    ],
)
def test_a_host_counts_once_whatever_addresses_it_uses(host: str, client: str) -> None:
    assert client_of(host) == client


def test_the_bound_follows_the_limit_on_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        # Each takes two while a body is sent.
        assert 2 * max_connections() == 1024 // 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limits(clock: Clock) -> RateLimits:
    return RateLimits(clock)


def slot(address: str = "a", *, claims: bool = False) -> Slot:
    return Slot(address, 0.0, claims=claims)


def num_admitted(limits: RateLimits, count: int, address: str = "a", *, claims: bool = False) -> int:
    return sum(limits.admit(slot(address, claims=claims)) for _ in range(count))


def test_an_address_has_a_burst_and_then_so_many_a_second(limits: RateLimits, clock: Clock) -> None:
    assert num_admitted(limits, 10_000) == 512
    clock.now_s += 1
    assert num_admitted(limits, 10_000) == 50
    clock.now_s += 3600
    assert num_admitted(limits, 10_000) == 512


def test_one_address_takes_nothing_from_another(limits: RateLimits) -> None:
    num_admitted(limits, 10_000, "flood")
    assert num_admitted(limits, 128, "peer") == 128
    # Beside a flood of its own address who says what strangers do not know gets in.
    assert num_admitted(limits, 128, "flood", claims=True) == 128


def test_many_addresses_together_take_no_more_than_a_few_would(limits: RateLimits, clock: Clock) -> None:
    assert sum(num_admitted(limits, 10, str(number)) for number in range(5000)) == 4 * 512
    clock.now_s += 1
    assert sum(num_admitted(limits, 10, str(number)) for number in range(5000)) == 4 * 50


def test_the_ranks_of_a_host_come_back_as_often_as_they_like(limits: RateLimits) -> None:
    for _ in range(100):
        ranks = [slot(claims=True) for _ in range(16 * 8)]
        assert all(limits.admit(each) for each in ranks)
        for each in ranks:
            limits.refund_member(each)
            limits.refund_member(each)
    # Nobody gets back more than it has paid.
    assert num_admitted(limits, 10_000, claims=True) == 512


def test_an_address_is_known_for_a_while_once_somebody_has_proved_itself_there(
    limits: RateLimits, clock: Clock
) -> None:
    member = slot()
    assert limits.admit(member)
    assert not limits.is_known("a")
    limits.refund_member(member)
    assert limits.is_known("a")
    assert not limits.is_known("b")
    clock.now_s += 601
    assert not limits.is_known("a")


def test_requests_that_move_nothing_wait_for_their_turn(limits: RateLimits, clock: Clock) -> None:
    asking = slot()
    waits_s = [limits.turn_after_s(asking) for _ in range(8 + 512 + 300)]
    assert waits_s[: 8 + 512] == [0.0] * (8 + 512)
    assert waits_s[-1] == pytest.approx(1.0)
    assert limits.turn_after_s(slot()) == 0.0, "a new connection has its free ones"
    clock.now_s += 1
    assert limits.turn_after_s(asking) == pytest.approx(1 / 300)


def test_requests_that_move_data_never_wait(limits: RateLimits) -> None:
    fetching = slot()
    assert limits.admit(fetching)
    for _ in range(10_000):
        assert limits.turn_after_s(fetching) == 0.0
        limits.refund_transfer(fetching, 1 << 20)
    assert num_admitted(limits, 10_000) == 512
