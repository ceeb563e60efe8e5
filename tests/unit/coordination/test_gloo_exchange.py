"""Data between ranks, and what becomes of it when one of them fails; real gloo, on threads over a store in memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
from ranks_on_threads import groups_of, run_ranks

from ft_transport.coordination.gloo_exchange import GlooExchange
from ft_transport.coordination.ranks import RankGroup
from ft_transport.errors import PeerProtocolError, RankGoneError

T = TypeVar("T")

LONG = timedelta(seconds=30)
BRIEF = timedelta(seconds=0.5)
AT_ONCE_S = 10.0
NUM_RANKS = 3

pytestmark = pytest.mark.usefixtures("one_rank_group")


@pytest.fixture
def exchanges() -> Iterator[list[GlooExchange]]:
    exchanges = [GlooExchange(group, "test", LONG) for group in groups_of(NUM_RANKS)]
    yield exchanges
    for each in exchanges:
        each.close()


def on_all(exchanges: list[GlooExchange], act: Callable[[GlooExchange], T]) -> list[T]:
    return run_ranks(*(lambda each=each: act(each) for each in exchanges))  # type: ignore[misc]


def test_the_first_rank_gathers_what_each_has(exchanges: list[GlooExchange]) -> None:
    gathered = on_all(exchanges, lambda each: each.gather(b"x" * each.rank))
    assert gathered == [[b"", b"x", b"xx"], None, None]


def test_each_rank_gets_what_the_first_has_for_it(exchanges: list[GlooExchange]) -> None:
    parts = [b"zero", b"", b"two"]
    assert on_all(exchanges, lambda each: each.scatter(parts if each.rank == 0 else None)) == parts
    assert on_all(exchanges, lambda each: each.broadcast(b"all" if each.rank == 0 else None)) == [b"all"] * NUM_RANKS


def test_all_ranks_have_what_each_has(exchanges: list[GlooExchange]) -> None:
    def act(each: GlooExchange) -> list[int]:
        work, later = each.begin_all_gather(torch.tensor([10 * each.rank]))
        each.wait(work)
        now = each.all_gather(torch.tensor([each.rank]))
        return [int(tensor) for tensor in (*later, *now)]

    assert on_all(exchanges, act) == [[0, 10, 20, 0, 1, 2]] * NUM_RANKS


def test_a_rank_alone_needs_no_other() -> None:
    exchange = GlooExchange(RankGroup(), "test", LONG)
    assert exchange.gather(b"x") == [b"x"]
    assert exchange.scatter([b"x"]) == b"x"
    assert exchange.broadcast(b"x") == b"x"


def test_a_rank_that_fails_ends_the_others_waits_and_the_next_group_works(exchanges: list[GlooExchange]) -> None:
    def act(each: GlooExchange) -> list[bytes] | None:
        def gather() -> list[bytes] | None:
            if each.rank == 1:
                raise ValueError("for the test")
            return each.gather(b"x")

        with pytest.raises(ValueError if each.rank == 1 else RankGoneError):
            each.ending_on_failure(gather)()
        each.reset(1)
        return each.gather(b"again")

    began_s = time.monotonic()
    assert on_all(exchanges, act)[0] == [b"again"] * NUM_RANKS
    assert time.monotonic() - began_s < AT_ONCE_S


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout() -> None:
    first = GlooExchange(groups_of(2)[0], "test", BRIEF)
    began_s = time.monotonic()
    with pytest.raises(RankGoneError, match=r"expected all 2 ranks to connect within 0:00:00\.5"):
        first.gather(b"x")
    assert time.monotonic() - began_s < AT_ONCE_S


@pytest.mark.parametrize("length", [2**62, -1])
def test_a_length_that_cannot_be_is_not_believed(exchanges: list[GlooExchange], length: int) -> None:
    def act(each: GlooExchange) -> None:
        if each.rank == 1:  # announces what it does not have, in place of `gather`
            each.all_gather(torch.tensor([length]))
        else:
            with pytest.raises(PeerProtocolError, match=f"bytes, got {length}") if not each.rank else nullcontext():
                each.gather(b"")

    on_all(exchanges, act)


def test_what_is_announced_takes_memory_only_as_it_comes(exchanges: list[GlooExchange]) -> None:
    peaks = []

    def act(each: GlooExchange) -> None:
        if each.rank == 1:
            each.all_gather(torch.tensor([4 << 30]))
            each.send(b"x" * 1000, 0)
            each.close()
        elif each.rank == 2:
            each.gather(b"")
        else:
            tracemalloc.start()
            with pytest.raises(RankGoneError):
                each.gather(b"")
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    on_all(exchanges, act)
    assert peaks[0] < 128 << 20
