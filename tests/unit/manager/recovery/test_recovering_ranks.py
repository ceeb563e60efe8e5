"""Ranks that recover together end at one step, or know why not; on threads over a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from ranks_on_threads import groups_of, run_ranks

from ft_transport import FetchFailedError, PeerUnreachableError
from ft_transport.coordination.agreement import Agreement
from ft_transport.errors import RankGoneError
from manager.recovery.rank_agreement import agree_on_step, recover_on_all_ranks

T = TypeVar("T")

LONG = timedelta(seconds=30)
BRIEF = timedelta(milliseconds=200)


class Transport:
    """Stands in for ``HTTPTransport``: knows a step, or why there is none."""

    def __init__(self, outcome: int | Exception) -> None:
        self.outcome = outcome
        self.asked: list[list[str]] = []

    def common_step(self, sources: Sequence[str], **timeouts: Any) -> int:
        self.asked.append(list(sources))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def on_all(num_ranks: int, act: Callable[[Agreement], T], timeout: timedelta = LONG) -> list[T]:
    ranks = [Agreement(group, "recover", timeout) for group in groups_of(num_ranks)]
    return run_ranks(*(lambda each=each: act(each) for each in ranks))  # type: ignore[misc]


def agree(ranks: Agreement, transport: Transport) -> int:
    addresses = ["http://a", f"http://{ranks.rank}"]
    return agree_on_step(ranks, transport, addresses, timeout=LONG)  # type: ignore[arg-type]


def test_the_first_rank_asks_all_sources_and_every_rank_has_the_step() -> None:
    transport = Transport(7)
    assert on_all(3, lambda ranks: agree(ranks, transport)) == [7, 7, 7]
    assert transport.asked == [["http://a", "http://0", "http://1", "http://2"]]


def test_what_the_first_rank_could_not_get_is_the_same_error_on_all() -> None:
    failure = PeerUnreachableError("expected an answer, got none", peer="host:1")
    transport = Transport(FetchFailedError("expected a source", failures=(failure,), step="latest"))

    def act(ranks: Agreement) -> tuple[str, str]:
        with pytest.raises(FetchFailedError) as caught:
            agree(ranks, transport)
        assert [type(each) for each in caught.value.failures] == [PeerUnreachableError]
        return str(caught.value), caught.value.failures[0].peer or ""

    outcomes = on_all(3, act)
    assert outcomes == [(str(transport.outcome), "host:1")] * 3


def test_each_rank_hears_what_went_wrong_on_the_others() -> None:
    def act(ranks: Agreement) -> tuple[int, list[str]]:
        if ranks.rank == 1:
            with pytest.raises(ValueError, match="too little"):
                recover_on_all_ranks(ranks, lambda: int("too little"), timeout=LONG)
            return 0, []
        return recover_on_all_ranks(ranks, lambda: ranks.rank, timeout=LONG)

    outcomes = on_all(3, act)
    assert [found for found, _ in outcomes] == [0, 0, 2]
    for _, failures in (outcomes[0], outcomes[2]):
        assert failures == ["rank 1: ValueError: invalid literal for int() with base 10: 'too little'"]


def test_a_rank_that_receives_for_longer_than_the_timeout_is_waited_for() -> None:
    release = threading.Event()
    timer = threading.Timer(1.5 * BRIEF.total_seconds(), release.set)
    timer.start()
    outcomes = on_all(
        2,
        lambda ranks: recover_on_all_ranks(ranks, lambda: ranks.rank == 0 or release.wait(60), timeout=BRIEF),
        BRIEF,
    )
    timer.join()
    assert outcomes == [(True, [])] * 2


def test_a_rank_that_dies_meanwhile_is_a_failure_that_is_named() -> None:
    def act(ranks: Agreement) -> tuple[int, list[str]]:
        return recover_on_all_ranks(ranks, lambda: 3, timeout=BRIEF) if ranks.rank != 1 else (0, [])

    outcomes = on_all(3, act, BRIEF)
    for step, failures in (outcomes[0], outcomes[2]):
        assert step == 3
        assert "got nothing from rank 1: dead, stuck, or elsewhere" in failures[0]


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_timeout() -> None:
    first, _ = [Agreement(group, "recover", BRIEF) for group in groups_of(2)]
    with pytest.raises(RankGoneError, match="got nothing from rank 1"):
        agree(first, Transport(7))
