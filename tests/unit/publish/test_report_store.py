from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from ft_transport.coordination.store_channel import DirectStore, StoreChannel
from ft_transport.errors import DeadlineExceededError, RankGoneError
from ft_transport.publish.report import PublishReport
from ft_transport.publish.report_store import ReportStore


def report(version: int, *, is_final: bool = True) -> PublishReport:
    return PublishReport(version=version, engines=(), verdict="good" if is_final else "open", is_final=is_final)


@pytest.fixture
def store() -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


def board_on(store: HashStore, silence_s: float = 10) -> ReportStore:
    return ReportStore(StoreChannel(DirectStore(store)), silence_s)


def test_what_is_posted_is_read_by_all(store: HashStore) -> None:
    here, there = board_on(store), board_on(store)
    here.post(report(1, is_final=False))
    here.post(report(1))
    for each in (here.wait_here, there.wait_there):
        assert each(1, lambda found: found.is_final, 1) == report(1)


def test_whoever_waits_gets_it_when_it_comes(store: HashStore) -> None:
    here, there = board_on(store), board_on(store)
    found: list[PublishReport] = []
    waiting = threading.Thread(target=lambda: found.append(there.wait_there(1, lambda each: each.is_final, 10)))
    waiting.start()
    here.post(report(1, is_final=False))
    here.post(report(1))
    waiting.join(10)
    assert found == [report(1)]


def test_a_wait_has_a_deadline_and_says_what_is_known(store: HashStore) -> None:
    board = board_on(store)
    board.post(report(1, is_final=False))
    for wait in (board.wait_here, board.wait_there):
        with pytest.raises(DeadlineExceededError, match=r"version 1 within 0.05 s; so far: version 1: 0 of 0"):
            wait(1, lambda each: each.is_final, 0.05)
        with pytest.raises(DeadlineExceededError, match=r"version 2 within 0.05 s$"):
            wait(2, lambda each: each.is_final, 0.05)


def test_a_rank_0_that_is_silent_is_given_up(store: HashStore) -> None:
    board_on(store).tick()
    with pytest.raises(RankGoneError, match=r"rank 0.*version 1.*has not for 0.5 s"):
        board_on(store, 0.5).wait_there(1, lambda each: each.is_final, 60)


def test_old_reports_are_forgotten(store: HashStore) -> None:
    board = board_on(store)
    for version in range(300):
        board.post(report(version))
    assert [version for version in range(300) if store.check([f"report/{version}"])] == list(range(44, 300))
