from __future__ import annotations

from datetime import timedelta

import pytest
from ranks_on_threads import groups_of

from ft_transport.publish.engines.adapters import adapter_name, older_names, version_in
from ft_transport.publish.report import (
    EngineReport,
    Outcome,
    Policy,
    PublishReport,
    Verdict,
    judge,
)
from ft_transport.publish.report_store import ReportStore


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
        "  http://engine-0: confirmed after 0.00 s and 0 attempts, version unknown",
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
