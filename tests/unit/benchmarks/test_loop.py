from __future__ import annotations

import pytest

from benchmarks.loop import BENCHMARK, BUCKET_STEP, START_QUORUM, STEP, judge, note_overheads, overhead, quantities
from benchmarks.options import Options, Size
from benchmarks.replicas.managers import NO_MANAGER, OURS, TORCHFT
from benchmarks.replicas.steps import StepTimes
from benchmarks.report import Figure, Group, Quantity, Sample

VARIANTS = {"ours": OURS, "torchft": TORCHFT, "none": NO_MANAGER}


def group_of(quantity: Quantity, **values: list[float]) -> Group:
    group = Group("loop", "4", "title")
    for name, of_rounds in values.items():
        for number, value in enumerate(of_rounds):
            group.add(VARIANTS[name], quantity, Sample(number, value))
    return group


def step(seconds: float, *, is_bucketed: bool) -> StepTimes:
    return StepTimes(
        start_quorum_s=seconds / 2,
        backward_s=0.0,
        allreduce_s=seconds / 2,
        should_commit_s=0.0,
        optimizer_s=0.0,
        is_bucketed=is_bucketed,
    )


class TestQuantities:
    def test_tell_the_two_kinds_of_steps_apart(self) -> None:
        times = [step(4.0, is_bucketed=False), step(2.0, is_bucketed=True)] * 3
        assert quantities(times, is_full=False) == {START_QUORUM: 1.5, STEP: 4.0, BUCKET_STEP: 2.0}
        assert quantities(times, is_full=True)[Quantity(f"{BUCKET_STEP.name}: allreduce", "ms")] == 1.0


class TestOverheads:
    def test_are_above_the_same_round_without_a_manager(self) -> None:
        group = group_of(STEP, ours=[12.0, 25.0], torchft=[11.0, 24.0], none=[10.0, 20.0])
        note_overheads(group)
        for variant, expected in ((OURS, [2.0, 5.0]), (TORCHFT, [1.0, 4.0])):
            series = group.find(variant, overhead(STEP))
            assert series is not None
            assert [sample.value for sample in series.samples] == expected
        alone = group_of(STEP, ours=[12.0])
        note_overheads(alone)
        assert [series.quantity for series in alone.series] == [STEP]


class TestJudge:
    @pytest.mark.parametrize("quantity", [STEP, BUCKET_STEP])
    @pytest.mark.parametrize(("ours", "met"), [(39.0, True), (41.0, False)])
    def test_overhead_against_torchfts(self, quantity: Quantity, ours: float, met: bool) -> None:
        group = group_of(quantity, ours=[ours], torchft=[40.0], none=[34.0])
        found = {quantity.name in verdict.text: verdict.met for verdict in judge(group, is_start_quorum_judged=False)}
        assert found == {True: met, False: None}

    @pytest.mark.parametrize(("ours", "met"), [(0.9, True), (1.1, False)])
    def test_start_quorum_by_its_median(self, ours: float, met: bool) -> None:
        group = group_of(START_QUORUM, ours=[0.1, ours, 37.0], torchft=[0.1, 0.1, 0.1])
        verdict, *_ = judge(group, is_start_quorum_judged=True)
        assert verdict.met is met
        assert verdict.figure == Figure(ours, 0.1, 37.0, "ms")

    def test_what_was_not_measured_has_no_verdict(self) -> None:
        verdicts = judge(group_of(STEP, ours=[1.0]), is_start_quorum_judged=True)
        assert [verdict.met for verdict in verdicts] == [None] * 3


@pytest.mark.long
@pytest.mark.usefixtures("fork_server")
def test_measures_all_three_beside_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchft")
    said: list[str] = []
    options = Options(size=Size(scale=1.0, num_samples=1), states=BENCHMARK.states[:1], say=said.append)
    (group,) = BENCHMARK.run(options)
    assert [series.variant for series in group.series if series.quantity == STEP] == list(VARIANTS.values())
    assert len(said) == len(VARIANTS)
    assert None not in [verdict.met for verdict in group.verdicts]
    # Neither the Lighthouse nor a manager writes between the figures.
    assert capfd.readouterr() == ("", "")
