from __future__ import annotations

import argparse
import sys

import pytest

from benchmarks import clone, fetch
from benchmarks.__main__ import BENCHMARKS, _parse, chosen, states_of
from benchmarks.fetch import BARE_FRESH, COLD, HTTP_BUSY, MEMORY, judge
from benchmarks.options import Options, Size
from benchmarks.report import Group, Named, Sample


def parse(monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    return _parse()


class TestRounds:
    def test_each_begins_with_another_variant(self) -> None:
        said: list[str] = []
        options = Options(size=Size(scale=1.0, num_samples=4), say=said.append, settle=lambda: said.append("settled"))
        variants = tuple(Named(name, "ours") for name in "abc")
        assert [(number, variant.name) for number, variant in options.rounds("title", variants)] == [
            *((0, each) for each in "abc"),
            *((1, each) for each in "bca"),
            *((2, each) for each in "cab"),
            *((3, each) for each in "abc"),
        ]
        assert said[:4] == ["settled", "title 1/4 a", "settled", "title 1/4 b"]


class TestCommandLine:
    def test_all_benchmarks_or_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert chosen(argparse.Namespace(benchmark="all")) == [
            each for each in BENCHMARKS.values() if each.name != "gpu"
        ]
        assert chosen(parse(monkeypatch, "loop")) == [BENCHMARKS["loop"]]

    def test_states_are_the_benchmarks_own(self) -> None:
        assert states_of(fetch.BENCHMARK, None) == fetch.BENCHMARK.states
        assert states_of(fetch.BENCHMARK, ["nested", "big", "1000"]) == ("big",)

    @pytest.mark.parametrize(
        "words",
        [
            ("fetch", "--state", "1000"),
            ("loop", "--full", "--quick"),
            ("loop", "--samples", "0"),
            ("loop", "--quick", "--record"),
        ],
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
            for quantity in (COLD, MEMORY):
                group.add(variant, quantity, Sample(0, 1.0))
        assert None not in [verdict.met for verdict in judge(group)]
        assert BARE_FRESH not in measured
        assert (HTTP_BUSY in measured) is (state != "small")

    def test_of_clone(self) -> None:
        options = Options(size=Size(scale=0.005, num_samples=2), states=("big",))
        (group,) = clone.BENCHMARK.run(options)
        assert None not in [verdict.met for verdict in group.verdicts]
        assert {series.variant.role for series in group.series} == {"ours", "ceiling"}
