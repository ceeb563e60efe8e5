from __future__ import annotations

import argparse
import sys

import pytest

from benchmarks import clone, fetch
from benchmarks import fetch_variants as variants
from benchmarks.__main__ import BENCHMARKS, _parse, chosen, states_of
from benchmarks.fetch import MEMORY, RATE, judge
from benchmarks.options import Options, Size, turns
from benchmarks.report import Group, Sample


def parse(monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    return _parse()


class TestTurns:
    def test_each_round_begins_with_another_variant(self) -> None:
        assert list(turns(("a", "b", "c"), 4)) == [
            *((0, each) for each in "abc"),
            *((1, each) for each in "bca"),
            *((2, each) for each in "cab"),
            *((3, each) for each in "abc"),
        ]


class TestCommandLine:
    def test_all_benchmarks_or_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert chosen(argparse.Namespace(benchmark="all")) == list(BENCHMARKS.values())
        assert chosen(parse(monkeypatch, "loop")) == [BENCHMARKS["loop"]]

    def test_states_are_the_benchmarks_own(self) -> None:
        assert states_of(fetch.BENCHMARK, None) == fetch.BENCHMARK.states
        assert states_of(fetch.BENCHMARK, ["nested", "big", "1000"]) == ("big",)

    @pytest.mark.parametrize(
        "words", [("fetch", "--state", "1000"), ("loop", "--full", "--quick"), ("loop", "--samples", "0")]
    )
    def test_what_measures_nothing_is_refused(self, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
        with pytest.raises(SystemExit):
            parse(monkeypatch, *words)


class TestDefaultRun:
    """It has what its verdicts need, and nothing else."""

    @pytest.mark.parametrize("state", fetch.BENCHMARK.states)
    def test_of_fetch(self, state: str) -> None:
        pytest.importorskip("torchft")
        measured = fetch.measured_variants(state, is_full=False)
        group = Group("fetch", state, "title")
        for variant in measured:
            for unit in (RATE, MEMORY):
                group.add(variant.key, Sample(0, 1.0), label="", role=variant.role, phase="cold", unit=unit)
        assert None not in [verdict.met for verdict in judge(group)]
        assert variants.BARE_FRESH not in measured
        assert (variants.HTTP_BUSY in measured) is (state != "small")

    def test_of_clone(self) -> None:
        options = Options(size=Size(scale=0.005, num_samples=2), states=("big",))
        (group,) = clone.BENCHMARK.run(options)
        assert [verdict.value for verdict in group.verdicts] != [None]
        assert {series.role for series in group.series} == {"ours", "ceiling"}
