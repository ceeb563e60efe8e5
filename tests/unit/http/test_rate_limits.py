"""What strangers may cost, and that whoever proves that it belongs here costs them nothing."""

from __future__ import annotations

import pytest

from ft_transport.http.server.connection_slots import RateLimits, Slot


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


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


def test_many_addresses_together_take_no_more_than_a_few_would(limits: RateLimits, clock: Clock) -> None:
    assert sum(num_admitted(limits, 10, str(number)) for number in range(5000)) == 4 * 512
    clock.now_s += 1
    assert sum(num_admitted(limits, 10, str(number)) for number in range(5000)) == 4 * 50


def test_who_says_what_strangers_do_not_know_gets_in_beside_a_flood_of_its_address(limits: RateLimits) -> None:
    num_admitted(limits, 10_000)
    assert num_admitted(limits, 128, claims=True) == 128


def test_the_ranks_of_a_host_come_back_as_often_as_they_like(limits: RateLimits) -> None:
    for _ in range(100):
        ranks = [slot(claims=True) for _ in range(16 * 8)]
        assert all(limits.admit(each) for each in ranks)
        for each in ranks:
            limits.belongs(each)
            limits.belongs(each)
    # Nobody gets back more than it has paid.
    assert num_admitted(limits, 10_000, claims=True) == 512


def test_an_address_is_known_for_a_while_once_somebody_has_proved_itself_there(
    limits: RateLimits, clock: Clock
) -> None:
    member = slot()
    assert limits.admit(member)
    assert not limits.is_known("a")
    limits.belongs(member)
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
        limits.moved(fetching, 1 << 20)
    assert num_admitted(limits, 10_000) == 512
