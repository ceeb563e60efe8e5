"""Whom receivers ask, on simulated links: when the last one is done, how much leaves the sources, whoever dies."""

from __future__ import annotations

import pytest

from benchmarks.simulated_fleet import Host, Outcome, SimulatedFetch
from ft_transport.wire.fetch import FetchMachine, Request, WorkerIndex
from ft_transport.wire.swarm import Swarm
from ft_transport.wire.swarm_work import SwarmWork

_RATE = 1e8
_CHUNK_S = (4 << 20) / _RATE
_GOOD = Host(rate=_RATE)
_SLOW = Host(rate=_RATE / 10)


def _fetch(num_chunks: int, receivers: list[Host], sources: tuple[Host, ...] = (_GOOD,)) -> Outcome:
    fetch = SimulatedFetch(sources=sources, receivers=receivers, num_chunks=num_chunks, resolution=0.1)
    outcome = fetch.run()
    assert not outcome.errors
    return outcome


def _copies(outcome: Outcome, num_chunks: int) -> float:
    """How often the state has left the sources."""
    return sum(outcome.from_sources_bytes) / (num_chunks << 22)


@pytest.mark.parametrize(("num_chunks", "num_receivers"), [(64, 2), (64, 16), (1000, 4), (1000, 8)])
def test_the_last_receiver_is_done_when_one_alone_would_be(num_chunks: int, num_receivers: int) -> None:
    outcome = _fetch(num_chunks, [_GOOD] * num_receivers)
    # Until the first chunk is there, which all share the source for, nobody has anything to pass on.
    least_s = (num_chunks + num_receivers - 1) * _CHUNK_S
    assert outcome.last_s <= 1.05 * least_s
    assert _copies(outcome, num_chunks) == 1.0
    # Everybody carries about as much as everybody else.
    assert max(outcome.relayed_bytes) <= 1.5 * sum(outcome.relayed_bytes) / num_receivers


@pytest.mark.parametrize("num_receivers", [2, 4])
def test_relays_that_have_all_they_are_asked_for_are_waited_for(num_receivers: int) -> None:
    # Four sources have a receiver's own block there early, for most of its link is theirs.
    outcome = _fetch(1000, [_GOOD] * num_receivers, (_GOOD,) * 4)
    assert outcome.last_s <= 1.02 * 1000 * _CHUNK_S
    assert _copies(outcome, 1000) <= 1.02


def test_more_receivers_than_one_asks_at_once_share_the_relays_evenly() -> None:
    # Some blocks have one chunk more than others: not all are to ask for those first.
    fetch = SimulatedFetch(
        sources=[_GOOD] * 240, receivers=[_GOOD] * 30, num_chunks=356, num_sources_each=8, resolution=0.25
    )
    outcome = fetch.run()
    assert outcome.last_s <= 1.1 * 356 * _CHUNK_S
    assert _copies(outcome, 356) == 1.0


def test_a_slow_receiver_holds_nobody_up() -> None:
    outcome = _fetch(1000, [*[_GOOD] * 7, _SLOW])
    # The slow one's block, an eighth of all, comes last.
    assert max(outcome.end_s[number] for number in range(7)) <= (1 + 1 / 8) * 1000 * _CHUNK_S
    # Others stand in for it, and it takes its block itself.
    assert _copies(outcome, 1000) <= 1.2


@pytest.mark.parametrize(
    ("num_chunks", "num_sources", "slower"), [(64, 1, 20), (64, 4, 4), (1000, 1, 4), (1000, 1, 100), (1000, 4, 20)]
)
def test_of_two_receivers_a_much_slower_one_is_not_waited_for(num_chunks: int, num_sources: int, slower: int) -> None:
    outcome = _fetch(num_chunks, [_GOOD, Host(rate=_RATE / slower)], (_GOOD,) * num_sources)
    # Half a second, or a quarter of the time until its own block is there, shows how slow the other one is.
    assert outcome.end_s[0] <= 1.3 * num_chunks * _CHUNK_S + 0.5
    # The slow one takes its block, and so does the other one.
    assert _copies(outcome, num_chunks) <= 1.5


@pytest.mark.parametrize("late", [0.1, 0.4])
def test_of_two_receivers_one_that_begins_later_is_waited_for(late: float) -> None:
    outcome = _fetch(1000, [_GOOD, Host(rate=_RATE, start_s=late * 1000 * _CHUNK_S)])
    assert outcome.end_s[0] <= 1.25 * 1000 * _CHUNK_S
    assert _copies(outcome, 1000) <= 1.02


def test_a_slow_source_among_four_costs_a_tenth_at_most() -> None:
    with_slow = _fetch(1000, [Host(rate=8 * _RATE)], (_GOOD, _GOOD, _GOOD, _SLOW))
    without = _fetch(1000, [Host(rate=8 * _RATE)], (_GOOD, _GOOD, _GOOD))
    assert with_slow.last_s <= 1.1 * without.last_s
    relayed = _fetch(1000, [_GOOD] * 4, (_GOOD, _GOOD, _GOOD, _SLOW))
    assert relayed.last_s <= 1.1 * _fetch(1000, [_GOOD] * 4, (_GOOD, _GOOD, _GOOD)).last_s
    assert _copies(relayed, 1000) <= 1.1


@pytest.mark.parametrize(("num_dead", "when"), [(1, 0.5), (3, 0.0), (3, 0.5)])
def test_others_stand_in_for_the_dead_and_the_sources_send_all_once(num_dead: int, when: float) -> None:
    dead = Host(rate=_RATE, death_s=when * 1000 * _CHUNK_S)
    outcome = _fetch(1000, [*[_GOOD] * (8 - num_dead), *[dead] * num_dead])
    assert outcome.last_s <= 1.15 * 1000 * _CHUNK_S
    assert _copies(outcome, 1000) <= 1.1


def test_receivers_that_begin_one_after_the_other_take_all_once() -> None:
    outcome = _fetch(1000, [Host(rate=_RATE, start_s=number) for number in range(8)])
    assert outcome.last_s <= 7 + 1.1 * 1000 * _CHUNK_S
    assert _copies(outcome, 1000) <= 1.1


def test_who_begins_when_the_others_are_half_done_costs_them_little() -> None:
    outcome = _fetch(1000, [_GOOD, _GOOD, _GOOD, Host(rate=_RATE, start_s=500 * _CHUNK_S)])
    assert max(outcome.end_s[number] for number in range(3)) <= 1.2 * 1000 * _CHUNK_S
    assert _copies(outcome, 1000) <= 1.25


@pytest.mark.parametrize("num_receivers", [2, 8])
def test_who_lacks_nothing_of_its_own_block_waits_for_no_slow_relay(num_receivers: int) -> None:
    receivers = [Host(rate=_RATE, missing=[(500, 1000)]) for _ in range(num_receivers)]
    receivers[1] = Host(rate=_RATE / 20, missing=[(500, 1000)])
    outcome = _fetch(1000, receivers)
    others_s = max(end_s for number, end_s in outcome.end_s.items() if number != 1)
    # The slow one takes twenty times as long to pass them on.
    assert others_s <= 2 * 500 * _CHUNK_S


def test_those_who_wait_long_for_the_first_chunk_stay_in_the_ring() -> None:
    # It takes 1.7 s, and a relay holds a request for 1 s.
    rate = 2e7
    outcome = _fetch(256, [Host(rate=rate)] * 8, (Host(rate=rate),))
    quick = _fetch(256, [_GOOD] * 8)
    assert outcome.num_requests <= quick.num_requests + 2 * 8
    assert outcome.last_s <= 1.05 * (256 + 7) * (4 << 20) / rate


def test_who_stands_behind_a_dead_one_asks_the_next_one_before_it_for_all() -> None:
    dead = Host(rate=_RATE, death_s=100 * _CHUNK_S)
    outcome = _fetch(1000, [*[_GOOD] * 3, dead, dead, *[_GOOD] * 3])
    intact = _fetch(1000, [_GOOD] * 8)
    # Not every other one for its block.
    assert outcome.num_requests <= intact.num_requests + 4
    assert outcome.last_s <= 1.05 * 1000 * _CHUNK_S
    assert _copies(outcome, 1000) <= 1.02


@pytest.mark.parametrize("num_receivers", [2, 16])
def test_what_nobody_has_ends_the_fetch_in_seconds_however_many_wait_for_it(num_receivers: int) -> None:
    death_s = 100 * _CHUNK_S
    fetch = SimulatedFetch(
        sources=[Host(rate=_RATE, death_s=death_s)],
        receivers=[_GOOD] * num_receivers,
        num_chunks=300,
        resolution=0.1,
    )
    outcome = fetch.run()
    assert len(outcome.errors) == num_receivers
    # Relays hold a request for 1 s.
    assert outcome.last_s <= death_s + 20


def test_without_sources_the_receivers_finish_with_what_they_have_together() -> None:
    source = Host(rate=_RATE, death_s=70 * _CHUNK_S)
    outcome = _fetch(64, [_GOOD] * 16, (source,))
    assert source.death_s < outcome.last_s <= 1.05 * (64 + 15) * _CHUNK_S
    assert len(outcome.end_s) == 16


@pytest.mark.parametrize("when", [0.0, 20 * _CHUNK_S])
def test_who_loses_its_sources_gets_everything_from_the_others(when: float) -> None:
    fetch = SimulatedFetch(
        sources=[_GOOD, Host(rate=_RATE, death_s=when)],
        receivers=[_GOOD] * 3,
        num_chunks=60,
        num_sources_each=1,  # the second receiver knows the second source alone
        resolution=0.1,
    )
    outcome = fetch.run()
    assert not outcome.errors
    assert outcome.end_s.keys() == {0, 1, 2}


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
