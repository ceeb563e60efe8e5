"""What strangers may cost, and that whoever proves that it belongs here costs them nothing."""

from __future__ import annotations

import pytest

from ft_transport.http.admission import Place
from ft_transport.http.strangers import Strangers


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def strangers(clock: Clock) -> Strangers:
    return Strangers(clock)


def place(address: str = "a", *, claims: bool = False) -> Place:
    return Place(address, 0.0, lambda: None, claims=claims)


def num_admitted(strangers: Strangers, count: int, address: str = "a", *, claims: bool = False) -> int:
    return sum(strangers.admit(place(address, claims=claims)) for _ in range(count))


def test_an_address_has_a_burst_and_then_so_many_a_second(strangers: Strangers, clock: Clock) -> None:
    assert num_admitted(strangers, 10_000) == 512
    clock.now_s += 1
    assert num_admitted(strangers, 10_000) == 50
    clock.now_s += 3600
    assert num_admitted(strangers, 10_000) == 512


def test_one_address_takes_nothing_from_another(strangers: Strangers) -> None:
    num_admitted(strangers, 10_000, "flood")
    assert num_admitted(strangers, 128, "peer") == 128


def test_many_addresses_together_take_no_more_than_a_few_would(strangers: Strangers, clock: Clock) -> None:
    assert sum(num_admitted(strangers, 10, str(number)) for number in range(5000)) == 4 * 512
    clock.now_s += 1
    assert sum(num_admitted(strangers, 10, str(number)) for number in range(5000)) == 4 * 50


def test_who_says_what_strangers_do_not_know_gets_in_beside_a_flood_of_its_address(strangers: Strangers) -> None:
    num_admitted(strangers, 10_000)
    assert num_admitted(strangers, 128, claims=True) == 128


def test_the_ranks_of_a_host_come_back_as_often_as_they_like(strangers: Strangers) -> None:
    for _ in range(100):
        ranks = [place(claims=True) for _ in range(16 * 8)]
        assert all(strangers.admit(each) for each in ranks)
        for each in ranks:
            strangers.belongs(each)
            strangers.belongs(each)
    # Nobody gets back more than it has paid.
    assert num_admitted(strangers, 10_000, claims=True) == 512


def test_an_address_is_known_for_a_while_once_somebody_has_proved_itself_there(
    strangers: Strangers, clock: Clock
) -> None:
    member = place()
    assert strangers.admit(member)
    assert not strangers.is_known("a")
    strangers.belongs(member)
    assert strangers.is_known("a")
    assert not strangers.is_known("b")
    clock.now_s += 601
    assert not strangers.is_known("a")


def test_requests_that_move_nothing_wait_for_their_turn(strangers: Strangers, clock: Clock) -> None:
    asking = place()
    waits_s = [strangers.turn_after_s(asking) for _ in range(8 + 512 + 300)]
    assert waits_s[: 8 + 512] == [0.0] * (8 + 512)
    assert waits_s[-1] == pytest.approx(1.0)
    assert strangers.turn_after_s(place()) == 0.0, "a new connection has its free ones"
    clock.now_s += 1
    assert strangers.turn_after_s(asking) == pytest.approx(1 / 300)


def test_requests_that_move_data_never_wait(strangers: Strangers) -> None:
    fetching = place()
    assert strangers.admit(fetching)
    for _ in range(10_000):
        assert strangers.turn_after_s(fetching) == 0.0
        strangers.moved(fetching, 1 << 20)
    assert num_admitted(strangers, 10_000) == 512
