from __future__ import annotations

import pytest

from benchmarks.heal import BENCHMARK, HEALED, first_common_quorum, judge, quantities
from benchmarks.options import Options, Size
from benchmarks.replicas.healing import Report, Step
from benchmarks.replicas.managers import OURS, TORCHFT
from benchmarks.replicas.parts import Part, PartRecorder
from benchmarks.replicas.steps import StepTimes
from benchmarks.report import Group, Quantity, Sample


def step(began_s: float, committed_step: int | None, seconds: float = 1.0) -> Step:
    """All but a tenth of it in start_quorum."""
    times = StepTimes(
        start_quorum_s=seconds - 0.1, backward_s=0.025, allreduce_s=0.025, should_commit_s=0.025, optimizer_s=0.025
    )
    return Step(began_s=began_s, times=times, committed_step=committed_step)


def report(*steps: Step, parts: tuple[Part, ...] = ()) -> Report:
    return Report(steps=list(steps), parts=list(parts))


class TestFirstCommonQuorum:
    def test_newcomer_waits_for_the_others_next_step(self) -> None:
        trained = report(step(10.0, 1), step(11.0, 2), step(12.0, 3, 4.0))
        assert first_common_quorum(trained, report(step(11.5, 3, 4.5))) == 12.0

    def test_the_other_waits_for_a_newcomer_that_has_announced_itself(self) -> None:
        trained = report(step(10.0, 1), step(11.0, 2, 4.0), step(15.0, 3))
        assert first_common_quorum(trained, report(step(11.2, 2, 3.8))) == 11.2

    def test_counts_quorums_before_the_one_that_healed_it(self) -> None:
        trained = report(step(10.0, 1), step(11.0, 2), step(12.0, 3), step(13.0, 4))
        assert first_common_quorum(trained, report(step(10.5, None, 2.5), step(13.0, 4))) == 11.0


class TestQuantities:
    def test_from_the_quorum_to_the_end_of_the_first_committed_step(self) -> None:
        trained = report(step(0.0, 1), step(1.0, 2), step(2.0, 3, 4.0), step(6.0, 4))
        load = Part(name="load", began_s=2.5, ended_s=3.0)
        early, late = Part(name="early", began_s=1.5, ended_s=1.9), Part(name="late", began_s=7.0, ended_s=8.0)
        found = quantities(trained, report(step(1.5, 3, 4.5), step(6.0, 4), parts=(early, load, late)))
        assert found[HEALED.name] == pytest.approx(4.0)
        assert found["of it: load"] == 0.5
        assert found["of it: before the first part"] == 0.5
        assert not {"of it: early", "of it: late"} & found.keys()
        assert found["the other's median step before"] == pytest.approx(1.0)
        assert found["the other's longest step meanwhile"] == pytest.approx(4.0)


def test_a_part_recorder_notes_calls_that_return_and_that_raise_and_lets_be_what_is_not_there() -> None:
    class Owner:
        def work(self, outcome: int) -> float:
            return 1 / outcome

    recorder = PartRecorder()
    recorder.wrap(object(), "gone", "part")
    recorder.wrap(Owner, "work", "part")
    assert Owner().work(2) == 0.5
    with pytest.raises(ZeroDivisionError):
        Owner().work(0)
    assert [part.name for part in recorder.parts] == ["part", "part"]


@pytest.mark.parametrize(("ours", "met"), [(0.89, True), (0.91, False)])
def test_verdict(ours: float, met: bool) -> None:
    group = Group("heal", "adamw", "title")
    for variant, value in ((OURS, ours), (TORCHFT, 1.0)):
        group.add(variant, HEALED, Sample(0, value))
    assert judge(group).met is met


@pytest.mark.slow  # torch is imported twice
@pytest.mark.usefixtures("fork_server")
def test_measures_both_and_what_it_consists_of() -> None:
    pytest.importorskip("torchft")
    (group,) = BENCHMARK.run(Options(size=Size(scale=0.01, num_samples=1), states=BENCHMARK.states[:1]))
    assert group.verdicts[0].figure is not None
    for variant in (OURS, TORCHFT):
        for part in ("transfer", "process group is set up", "first optimizer"):
            figure = group.figure(variant, Quantity(f"of it: {part}", "ms"))
            assert figure is not None
            assert figure.value > 0
