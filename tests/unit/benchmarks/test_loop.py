from __future__ import annotations

import pytest

from benchmarks.loop import MODEL_NAMES, MS, OVERHEAD, START_QUORUM, STEP, judge, note_overheads, run
from benchmarks.report import Group, Sample

ROLES = {"ours": "ours", "torchft": "peer", "none": "ceiling"}


def group_of(label: str, **values: list[float]) -> Group:
    group = Group("loop", "4", "title")
    for key, of_rounds in values.items():
        for number, value in enumerate(of_rounds):
            group.add(f"{key}, {label}", Sample(number, value), label=label, role=ROLES[key], phase="warm", unit=MS)  # type: ignore[arg-type]
    return group


class TestOverheads:
    def test_are_above_the_same_round_without_a_manager(self) -> None:
        group = group_of(STEP, ours=[12.0, 25.0], torchft=[11.0, 24.0], none=[10.0, 20.0])
        note_overheads(group)
        for key, expected in (("ours", [2.0, 5.0]), ("torchft", [1.0, 4.0])):
            series = group.find(f"{key}, {OVERHEAD}", "warm", MS)
            assert series is not None
            assert [sample.value for sample in series.samples] == expected

    def test_none_without_the_figure_to_compare_with(self) -> None:
        group = group_of(STEP, ours=[12.0])
        note_overheads(group)
        assert [series.label for series in group.series] == [STEP]


class TestJudge:
    @pytest.mark.parametrize(("ours", "met"), [(39.0, True), (41.0, False)])
    def test_overhead_against_torchfts(self, ours: float, met: bool) -> None:
        (verdict,) = judge(group_of(STEP, ours=[ours], torchft=[40.0], none=[34.0]), is_start_quorum_judged=False)
        assert verdict.met is met

    @pytest.mark.parametrize(("ours", "met"), [(0.9, True), (1.1, False)])
    def test_start_quorum_by_its_median(self, ours: float, met: bool) -> None:
        group = group_of(START_QUORUM, ours=[0.1, ours, 37.0], torchft=[0.1, 0.1, 0.1])
        verdict, _ = judge(group, is_start_quorum_judged=True)
        assert (verdict.met, verdict.unit, verdict.spread) == (met, MS, (0.1, 37.0))

    def test_what_was_not_measured_has_no_verdict(self) -> None:
        verdicts = judge(group_of(STEP, ours=[1.0]), is_start_quorum_judged=True)
        assert [verdict.met for verdict in verdicts] == [None, None]


@pytest.mark.slow  # torch is imported twice
@pytest.mark.usefixtures("fork_server")
def test_measures_all_three_beside_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torchft")
    said: list[str] = []
    (group,) = run(MODEL_NAMES[:1], 1, said.append, lambda: None)
    assert {series.key.partition(",")[0] for series in group.series if series.label == STEP} == set(ROLES)
    assert len(said) == len(ROLES)
    assert [verdict.met for verdict in group.verdicts] != [None]
    # Neither the Lighthouse nor a manager writes between the figures.
    assert capfd.readouterr() == ("", "")
