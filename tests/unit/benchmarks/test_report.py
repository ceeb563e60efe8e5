from __future__ import annotations

import math

import pytest

from benchmarks.report import Figure, Group, Named, Quantity, Sample, Series, Verdict, paired_ratios, ratio

RATE = Quantity("fetch", "GB/s")
MEMORY = Quantity("memory", "MB")
SLOW, FAST = Named("slow", "peer"), Named("fast", "peer")


def samples(*values: float) -> list[Sample]:
    return [Sample(number, value) for number, value in enumerate(values)]


def series(*values: float) -> Series:
    return Series(Named("ours", "ours"), RATE, samples(*values))


class TestFigures:
    @pytest.mark.parametrize(
        ("values", "figure"),
        [
            ((5.0, 1.0, 3.0), Figure(3.0, 1.0, 5.0, "GB/s")),
            ((4.0, 1.0, 2.0, 100.0), Figure(3.0, 1.0, 100.0, "GB/s")),
            ((2.0,), Figure(2.0, 2.0, 2.0, "GB/s")),
        ],
    )
    def test_are_the_median_and_the_spread(self, values: tuple[float, ...], figure: Figure) -> None:
        assert series(*values).figure == figure

    def test_busy_samples_are_counted_and_not_left_out(self) -> None:
        busy = Series(SLOW, RATE, [Sample(0, 1.0, 0.2), Sample(1, 2.0, 0.05), Sample(2, 3.0, 0.9), Sample(3, 4.0)])
        assert (len(busy.samples), busy.num_busy, busy.figure.value) == (4, 2, 2.5)


class TestRatios:
    def test_pairs_are_of_the_same_round_and_several_samples_of_it_are_averaged(self) -> None:
        above = [Sample(1, 6.0), Sample(0, 1.0), Sample(0, 3.0)]
        assert paired_ratios(above, [Sample(0, 4.0), Sample(1, 3.0), Sample(2, 1.0)]) == [0.5, 2.0]

    def test_pairs_see_a_slow_phase_of_the_machine_for_what_it_is(self) -> None:
        # Both were half as fast in the second half; the ratio was 0.8 all the time.
        figure = ratio(series(8.0, 8.0, 4.0, 4.0), series(10.0, 10.0, 5.0, 5.0))
        assert figure is not None
        assert figure.low == figure.high == 0.8
        assert math.isclose(figure.value, 0.8)

    def test_without_pairs_the_medians_remain(self) -> None:
        other = Series(SLOW, RATE, [Sample(7, 2.0)])
        assert ratio(series(1.0), other) == Figure(0.5, 0.5, 0.5)


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
        figure = Figure(value, value, value) if value is not None else None
        assert Verdict("", figure, limit, direction).met is met

    def test_of_a_ratio_judges_the_medians_and_keeps_the_spread(self) -> None:
        verdict = Verdict.at_least("", ratio(series(3.0, 4.0, 5.0), series(4.0, 4.0, 4.0)), 1.0)
        assert (verdict.figure, verdict.met) == (Figure(1.0, 0.75, 1.25), True)
        assert Verdict.at_least("", ratio(series(1.0), None), 1.0).met is None, "it was not measured"
        assert Verdict("", Figure(1.0, 1.0, 1.0), None, "at most").met is None, "it has no target"


class TestGroup:
    @pytest.fixture
    def group(self) -> Group:
        group = Group("fetch", "big", "title")
        for variant, value in ((SLOW, 1.0), (FAST, 2.0)):
            group.add(variant, RATE, Sample(0, value))
        group.add(SLOW, MEMORY, Sample(0, 9.0))
        group.add(FAST, MEMORY, Sample(0, 8.0))
        return group

    def test_samples_of_one_quantity_make_one_series(self, group: Group) -> None:
        group.add(SLOW, RATE, Sample(1, 3.0))
        found = group.find(SLOW, RATE)
        assert found is not None
        assert [sample.value for sample in found.samples] == [1.0, 3.0]
        assert group.find(SLOW, Quantity("later fetch", "GB/s")) is None

    def test_best_has_the_highest_rate_and_the_least_of_the_rest(self, group: Group) -> None:
        group.add(Named("ours", "ours"), RATE, Sample(0, 7.0))
        for quantity in (RATE, MEMORY):
            best = group.best_of("peer", quantity)
            assert best is not None
            assert best.variant == FAST
        of_one = group.best([SLOW], RATE)
        assert of_one is not None
        assert of_one.variant == SLOW
        assert group.best_of("ceiling", RATE) is None
