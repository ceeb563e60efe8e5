"""A relay is given up when the sources would deliver the rest sooner, and not before."""

from __future__ import annotations

import pytest

from ft_transport.errors import PeerUnreachableError
from ft_transport.wire.fetch import FetchMachine, Interrupt, Request, Wait, WorkerIndex
from ft_transport.wire.swarm import RelayRates, Swarm
from ft_transport.wire.swarm_work import SwarmWork


def _looked(
    pace: RelayRates, elapsed_s: float, *num_left: int, of: int = 100, num_from_sources: int = 100
) -> int | None:
    """Which relay is too slow, where so many chunks are left of each."""
    landed = {number: of - left for number, left in enumerate(num_left)}
    return pace.too_slow(
        elapsed_s, num_from_sources=num_from_sources, num_left=dict(enumerate(num_left)), num_landed=landed
    )


def _is_too_slow(elapsed_s: float, num_left: int, *, num_from_sources: int = 100) -> bool:
    """100 chunks came from the sources in 2 s; then it was looked, and is again."""
    pace = RelayRates()
    assert _looked(pace, 2.0, 100, num_from_sources=num_from_sources) is None
    return _looked(pace, elapsed_s, num_left, num_from_sources=num_from_sources) is not None


@pytest.mark.parametrize(
    ("elapsed_s", "num_left", "num_from_sources", "expected"),
    [
        (2.5, 75, 100, False),
        (3.9, 5, 100, False),
        (3.0, 75, 100, False),  # half as fast, and the wait is short
        *((3.0, num_left, 100, True) for num_left in (100, 99, 95)),
        (2.4, 100, 100, False),  # a pause
        (60.0, 100, 0, False),  # no sources to compare with
    ],
)
def test_a_relay_is_slow_that_takes_much_longer_than_the_sources(
    elapsed_s: float, num_left: int, num_from_sources: int, expected: bool
) -> None:
    assert _is_too_slow(elapsed_s, num_left, num_from_sources=num_from_sources) is expected


def test_the_longer_it_took_before_the_longer_is_waited() -> None:
    pace = RelayRates()
    assert _looked(pace, 40.0, 100) is None
    assert _looked(pace, 49.0, 100) is None
    assert _looked(pace, 51.0, 100) == 0


@pytest.mark.parametrize("num_left", [50, 16, 4, 1])
def test_what_has_come_excuses_nobody_who_stops_then(num_left: int) -> None:
    pace = RelayRates()
    assert _looked(pace, 2.0, 100) is None
    assert _looked(pace, 2.6, num_left) is None
    # No longer than the own block has taken, and the sources take for that.
    assert _looked(pace, 5.0, num_left) == 0


def test_who_follows_is_judged_by_itself() -> None:
    pace = RelayRates()
    assert _looked(pace, 2.0, 100) is None
    pace.restart()
    assert _looked(pace, 3.0, 100) is None
    assert _looked(pace, 4.0, 100) == 0


def test_of_several_the_one_is_slow_that_brings_nothing_now() -> None:
    pace = RelayRates()
    # The second one has brought more so far.
    assert _looked(pace, 2.0, 90, 30) is None
    assert _looked(pace, 3.0, 60, 30) is None
    assert _looked(pace, 4.0, 30, 30) is None
    assert _looked(pace, 5.0, 0, 30) is None
    assert _looked(pace, 8.0, 0, 30) == 1


@pytest.mark.parametrize("num_receivers", [2, 4])
def test_a_relay_that_stops_when_the_own_block_is_there_is_given_up(num_receivers: int) -> None:
    """In a ring as without one."""
    machine, idle, of_relay = _with_its_own_block(num_receivers)
    assert isinstance(machine.next(idle), Wait)
    assert not machine.time_passed(1.0)
    assert not machine.time_passed(1.4)
    assert machine.time_passed(2.5)
    assert machine.next(idle) == Interrupt(of_relay)


def test_where_the_sources_have_gone_a_slow_relay_is_waited_for() -> None:
    machine, _, of_relay = _with_its_own_block(2, source_goes=True)
    assert not machine.time_passed(1.0)
    assert not machine.time_passed(60.0)
    assert machine.has_request(of_relay)


def _with_its_own_block(
    num_receivers: int, *, source_goes: bool = False
) -> tuple[FetchMachine[int], WorkerIndex, WorkerIndex]:
    """A receiver that has taken its block of 64 chunks, while a relay kept up; one worker is idle, one at the relay."""
    fleet = Swarm(num_sources=1, num_receivers=num_receivers, own=0)
    work = SwarmWork([(0, 64)], num_chunks=64, swarm=fleet, num_connections=1)
    names = ["source", *(f"relay {number}" for number in range(1, num_receivers))]
    machine: FetchMachine[int] = FetchMachine(work, sources=names, max_failures=1)
    own, relay = WorkerIndex(0), WorkerIndex(1)
    request, relayed = machine.next(own), machine.next(relay)
    assert isinstance(request, Request)
    assert isinstance(relayed, Request)
    coming = list(relayed.units)
    while isinstance(request, Request):
        assert request.source == 0
        if source_goes and len(coming) < len(relayed.units) / 2:
            machine.request_failed(own, PeerUnreachableError("it has gone"))
            break
        for unit in request.units:
            machine.unit_landed(own, unit)
            for _ in range(num_receivers - 1 if len(coming) > num_receivers else 0):
                machine.unit_landed(relay, coming.pop(0))
        request = machine.next(own)
    return machine, own, relay
