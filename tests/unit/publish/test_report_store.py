from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from ranks_on_threads import groups_of
from torch.distributed import HashStore

from ft_transport.errors import DeadlineExceededError, PeerProtocolError, RankGoneError
from ft_transport.publish.report import PublishReport
from ft_transport.publish.report_store import ReportStore

SILENCE = timedelta(seconds=10)


def report(version: int, *, is_final: bool = True) -> PublishReport:
    return PublishReport(version=version, engines=(), verdict="good", is_final=is_final)


@pytest.fixture
def store() -> HashStore:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


def stores_on(store: HashStore, silence: timedelta = SILENCE, token: str | None = None) -> list[ReportStore]:
    """That of rank 0, and that of rank 1."""
    return [ReportStore(group, silence) for group in groups_of(2, store, token)]


@pytest.mark.parametrize("token", [None, "right"])
def test_what_is_posted_is_read_by_all(store: HashStore, token: str | None) -> None:
    here, there = stores_on(store, token=token)
    here.post(report(1, is_final=False))
    assert [each.wait(1, 1, is_final=False) for each in (here, there)] == [report(1, is_final=False)] * 2
    here.post(report(1))
    for is_final in (False, True):
        assert [each.wait(1, 1, is_final=is_final) for each in (here, there)] == [report(1)] * 2


def test_whoever_waits_gets_it_when_it_comes(store: HashStore) -> None:
    here, there = stores_on(store)
    found: list[PublishReport] = []
    waiting = threading.Thread(target=lambda: found.append(there.wait(1, 10, is_final=True)))
    waiting.start()
    here.post(report(1, is_final=False))
    here.post(report(1))
    waiting.join(10)
    assert found == [report(1)]


def test_a_wait_has_a_deadline_and_says_what_is_known(store: HashStore) -> None:
    stores = stores_on(store)
    stores[0].post(report(1, is_final=False))
    for each in stores:
        with pytest.raises(DeadlineExceededError, match=r"version 1 within 0.05 s; so far: version 1: 0 of 0"):
            each.wait(1, 0.05, is_final=True)
        with pytest.raises(DeadlineExceededError, match=r"version 2 within 0.05 s$"):
            each.wait(2, 0.05, is_final=True)


def test_a_rank_0_that_is_silent_is_given_up(store: HashStore) -> None:
    here, there = stores_on(store, timedelta(seconds=0.5))
    here.tick()
    with pytest.raises(RankGoneError, match=r"rank 0.*version 1.*has not for 0.5 s"):
        there.wait(1, 60, is_final=True)


def test_a_report_that_no_rank_signed_is_not_believed(store: HashStore) -> None:
    stores_on(store)[0].post(report(1))
    with pytest.raises(PeerProtocolError, match="signed with the job token"):
        stores_on(store, token="right")[1].wait(1, 10, is_final=True)


def test_old_reports_are_forgotten(store: HashStore) -> None:
    first, _ = stores_on(store)
    for version in range(300):
        first.post(report(version))
    kept = [version for version in range(300) if store.check([f"publish/reports/report/{version}/final"])]
    assert kept == list(range(44, 300))
