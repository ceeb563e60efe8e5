from __future__ import annotations

import json
import math

import pytest

from benchmarks.report import Group, Ratio, Sample, Series, Summary, Verdict, as_json, paired_ratios


def samples(*values: float) -> list[Sample]:
    return [Sample(number, value) for number, value in enumerate(values)]


def series(*values: float) -> Series:
    return Series("key", "label", "ours", "cold", "GB/s", samples(*values))


class TestSummary:
    def test_odd_number_of_samples(self) -> None:
        summary = Summary.of(samples(5.0, 1.0, 3.0))
        assert (summary.low, summary.median, summary.high) == (1.0, 3.0, 5.0)
        assert (summary.lower_quartile, summary.upper_quartile) == (2.0, 4.0)

    def test_even_number_of_samples_takes_the_middle_of_two(self) -> None:
        assert Summary.of(samples(4.0, 1.0, 2.0, 100.0)).median == 3.0

    def test_one_sample_is_its_own_spread(self) -> None:
        summary = Summary.of(samples(2.0))
        assert {summary.low, summary.lower_quartile, summary.median, summary.upper_quartile, summary.high} == {2.0}

    def test_busy_samples_are_counted_and_not_left_out(self) -> None:
        summary = Summary.of([Sample(0, 1.0, busy=True), Sample(1, 2.0), Sample(2, 3.0, busy=True)])
        assert (summary.num_samples, summary.num_busy, summary.median) == (3, 2, 2.0)


class TestRatios:
    def test_pairs_are_of_the_same_round(self) -> None:
        above = [Sample(1, 6.0), Sample(0, 2.0)]
        below = [Sample(0, 4.0), Sample(1, 3.0), Sample(2, 1.0)]
        assert paired_ratios(above, below) == [0.5, 2.0]

    def test_several_samples_of_a_round_are_averaged(self) -> None:
        assert paired_ratios([Sample(0, 2.0), Sample(0, 4.0)], [Sample(0, 6.0)]) == [0.5]

    def test_no_common_round(self) -> None:
        assert paired_ratios([Sample(0, 1.0)], [Sample(1, 1.0)]) == []

    def test_pairs_see_a_slow_phase_of_the_machine_for_what_it_is(self) -> None:
        # Both were half as fast in the second half; the ratio was 0.8 all the time.
        ratio = Ratio.between(series(8.0, 8.0, 4.0, 4.0), series(10.0, 10.0, 5.0, 5.0))
        assert ratio.paired_low == ratio.paired_median == ratio.paired_high == 0.8
        assert math.isclose(ratio.of_medians, 0.8)

    def test_without_pairs_the_medians_remain(self) -> None:
        other = Series("other", "", "peer", "cold", "GB/s", [Sample(7, 2.0)])
        assert Ratio.between(series(1.0), other) == Ratio(0.5, 0.5, 0.5, 0.5)


class TestVerdicts:
    @pytest.mark.parametrize(
        ("value", "direction", "met"),
        [
            (0.75, "at least", True),
            (0.7499, "at least", False),
            (64.0, "at most", True),
            (64.1, "at most", False),
            (None, "at least", None),
        ],
    )
    def test_met(self, value: float | None, direction: str, met: bool | None) -> None:
        limit = 0.75 if direction == "at least" else 64.0
        assert Verdict("", value, limit, direction).met is met

    def test_of_a_ratio_judges_the_medians_and_keeps_the_spread(self) -> None:
        verdict = Verdict.at_least("", Ratio.between(series(3.0, 4.0, 5.0), series(4.0, 4.0, 4.0)), 1.0)
        assert (verdict.value, verdict.spread, verdict.met) == (1.0, (0.75, 1.25), True)

    def test_of_what_was_not_measured(self) -> None:
        assert Verdict.at_least("", Group.ratio(series(1.0), None), 1.0).met is None


class TestGroup:
    @pytest.fixture
    def group(self) -> Group:
        group = Group("fetch", "big", "title")
        for key, value in (("slow", 1.0), ("fast", 2.0)):
            group.add(key, Sample(0, value), label=key, role="peer", phase="cold", unit="GB/s")
        group.add("slow", Sample(0, 9.0), label="slow", role="peer", phase="cold", unit="MB")
        return group

    def test_samples_of_one_quantity_make_one_series(self, group: Group) -> None:
        group.add("slow", Sample(1, 3.0), label="slow", role="peer", phase="cold", unit="GB/s")
        found = group.find("slow", "cold", "GB/s")
        assert found is not None
        assert [sample.value for sample in found.samples] == [1.0, 3.0]
        assert group.find("slow", "warm", "GB/s") is None

    def test_best_has_the_highest_median_of_its_unit(self, group: Group) -> None:
        best = group.best("peer", "cold", "GB/s")
        assert best is not None
        assert best.key == "fast"

    def test_best_of_given_keys(self, group: Group) -> None:
        best = group.best("peer", "cold", "GB/s", ["slow"])
        assert best is not None
        assert best.key == "slow"
        assert group.best("ceiling", "cold", "GB/s") is None

    def test_json_holds_every_sample_and_the_verdicts(self, group: Group) -> None:
        group.verdicts.append(Verdict("target", None, 1.0, "at least"))
        content = json.loads(json.dumps(as_json([group], {"cores": 2}, {"quick": True})))
        (result,) = content["results"]
        assert [len(entry["samples"]) for entry in result["series"]] == [1, 1, 1]
        assert result["series"][0]["median"] == 1.0
        assert result["verdicts"][0]["met"] is None
