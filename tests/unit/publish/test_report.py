"""Reports of versions, their way to all ranks, and how far engines lag."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from ranks_on_threads import groups_of
from torch.distributed import HashStore

from ft_transport.errors import DeadlineExceededError, PeerProtocolError, RankGoneError
from ft_transport.publish.engines.adapters import adapter_name, older_names, version_in
from ft_transport.publish.report import (
    EngineLag,
    EngineReport,
    EngineState,
    Outcome,
    Policy,
    PublishReport,
    ReportStore,
    Verdict,
    judge,
)


def reports(*outcomes: Outcome, left_out: int = 0) -> list[EngineReport]:
    """The first ``left_out`` of them do not count."""
    return [
        EngineReport(url=f"http://engine-{number}", outcome=outcome, is_counted=number >= left_out)
        for number, outcome in enumerate(outcomes)
    ]


class TestJudge:
    @pytest.mark.parametrize(
        ("outcomes", "verdicts"),
        [
            ((), ("good", "good", "good")),
            (("pending",), ("open", "open", "open")),
            (("confirmed",), ("good", "good", "good")),
            (("late",), ("bad", "bad", "good")),
            (("confirmed", "pending", "pending"), ("open", "open", "open")),
            (("confirmed", "confirmed", "pending"), ("open", "good", "open")),
            (("refused", "pending", "pending"), ("bad", "open", "open")),
            (("refused", "unreachable", "pending"), ("bad", "bad", "open")),
            (("confirmed", "failed", "confirmed"), ("bad", "good", "good")),
            # Half is no quorum.
            (("confirmed", "refused"), ("bad", "bad", "good")),
            (("confirmed", "removed", "removed"), ("good", "good", "good")),
            (("removed", "pending"), ("open", "open", "open")),
            (("removed",), ("good", "good", "good")),
        ],
    )
    def test_as_soon_as_it_is_decided(self, outcomes: tuple[Outcome, ...], verdicts: tuple[Verdict, ...]) -> None:
        policies: tuple[Policy, ...] = ("all", "quorum", "best_effort")
        assert tuple(judge(reports(*outcomes), policy) for policy in policies) == verdicts

    def test_one_that_is_left_out_does_not_count(self) -> None:
        assert judge(reports("refused", "confirmed", left_out=1), "all") == "good"
        assert judge(reports("pending", "confirmed", left_out=1), "all") == "good"
        assert judge(reports("confirmed", "refused", left_out=1), "all") == "bad"

    def test_where_all_are_left_out_all_count(self) -> None:
        assert judge(reports("refused", left_out=1), "all") == "bad"
        assert judge(reports("refused", "confirmed", "late", left_out=3), "quorum") == "bad"
        assert judge(reports("confirmed", left_out=1), "all") == "good"


def test_a_report_survives_the_store_and_says_everything() -> None:
    engine = EngineReport(
        url="http://engine-0",
        outcome="refused",
        seconds=1.25,
        num_attempts=2,
        status=500,
        body="out of memory",
        request="POST http://engine-0/v1/load_lora_adapter",
        version=3,
    )
    report = PublishReport(version=4, engines=(engine, *reports("confirmed")), verdict="bad", is_final=True)
    first, second = (ReportStore(group, timedelta(seconds=5)) for group in groups_of(2))
    first.post(report)
    assert second.wait(4, 5.0, is_final=True) == report
    assert str(report).splitlines() == [
        "version 4: 1 of 2 engines confirmed it",
        "  http://engine-0: refused after 1.25 s and 2 attempts, uses version 3; status 500 of POST "
        "http://engine-0/v1/load_lora_adapter: out of memory",
        "  http://engine-0: confirmed after 0.00 s and 0 attempts, uses an unknown version",
    ]
    assert report.failed() == (engine,)


class TestNames:
    @pytest.mark.parametrize(
        ("path", "version"),
        [
            ("/a/version-7", 7),
            ("/a/version-0/", 0),
            ("version-07", None),
            ("/a/version-7.incomplete", None),
            ("/a/version-7/more", None),
            ("", None),
        ],
    )
    def test_of_directories(self, path: str, version: int | None) -> None:
        assert version_in(path) == version

    def test_of_adapters(self) -> None:
        assert (adapter_name("policy", 3), adapter_name("p-{version}-x", 3)) == ("policy", "p-3-x")
        names = ["p-1-x", "p-3-x", "p-4-x", "p--x", "p-1-y", "q-1-x", "p-x", "base"]
        assert older_names("p-{version}-x", names, 4) == ["p-1-x", "p-3-x"]
        assert older_names("policy", ["policy", "other"], 4) == []


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
    here.beat()
    with pytest.raises(RankGoneError, match=r"rank 0.*version 1, got none for 0.5 s"):
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


def engine(url: str, version: int | None) -> EngineState:
    return EngineState(url=url, version=version, is_counted=True, outcome="confirmed")


def readings_of(lag: EngineLag) -> dict[tuple[str, ...], object]:
    return {(reading.name, *reading.labels): reading.value for reading in lag.readings() if reading.value is not None}


def test_an_engine_lags_from_when_the_first_version_that_it_lacks_was_published() -> None:
    now_s = 100.0
    states = [engine("http://new", 5), engine("http://old", 2), engine("http://none", None)]
    lag = EngineLag(lambda: states, clock=lambda: now_s)
    for version, now_s in ((2, 110.0), (4, 120.0), (5, 150.0)):  # noqa: B007 - the clock reads it
        lag.published(version)
    now_s = 160.0

    shown = readings_of(lag)

    assert shown["published_version",] == 5
    assert shown["engines",] == 3
    for url, version, num_missing, missing_s in (
        ("http://new", 5, 0, 0.0),
        ("http://old", 2, 2, 40.0),
        ("http://none", -1, 3, 50.0),
    ):
        found = [shown[name, url] for name in ("engine_version", "engine_lag_versions", "engine_lag_seconds")]
        assert found == [version, num_missing, missing_s]


def test_of_many_engines_a_hundred_are_told_apart() -> None:
    lag = EngineLag(lambda: [engine(f"http://host-{number}", 1) for number in range(1000)])

    shown = readings_of(lag)

    assert shown["engines",] == 1000
    assert len([key for key in shown if key[0] == "engine_version"]) == 100


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://user:secret@host:80/v1", "http://host:80/v1"),
        ("https://a@b:secret@host", "https://host"),
        ("http://host:80/v1?to=a@b", "http://host:80/v1?to=a@b"),
        ("http://[broken", "http://[broken"),
        ("", ""),
    ],
)
def test_a_password_in_a_url_is_not_readings_of(url: str, shown: str) -> None:
    assert [key[1] for key in readings_of(EngineLag(lambda: [engine(url, 1)])) if key[0] == "engine_version"] == [shown]
