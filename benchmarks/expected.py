"""Expected: whether the model of goodput (`goodput_model`) predicts what this machine measures.

The costs of a death are measured with two replicas; the work that is left with 2, 4 and 8 is predicted from them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from benchmarks.goodput import GOODPUT, NEXT, STEP, History, Scenario, quantities, run_job
from benchmarks.goodput_model import Costs, Job, expected
from benchmarks.options import Benchmark, Options, Size
from benchmarks.replicas.managers import OURS
from benchmarks.report import Figure, Group, Quantity, Sample, Verdict
from benchmarks.transports import torchft_is_installed

PREDICTED: Final = Quantity("predicted from the costs with 2 replicas", "×")
ERROR: Final = Quantity("measured / predicted - 1, the larger of both signs", "×")
_LIMIT: Final = 0.15
_NUM_REPLICAS: Final = (2, 4, 8)
_SCENARIO: Final = Scenario(
    title="small replicas, steps of 300 ms, a SIGKILL every 12 s",
    num_replicas=2,
    step_s=0.3,
    state_bytes=100_000,
    num_kills=2,
    period_s=12.0,
    most_s=0.0,
    least_goodput=0.0,
    variants=(OURS,),
)


def run(options: Options) -> Iterator[Group]:
    """Measures one number of replicas after the other."""
    group = Group("expected", "", _SCENARIO.title)
    if not torchft_is_installed():
        group.notes.append("it needs the Lighthouse of torchft, which is not installed")
        yield group
        return
    costs: Costs | None = None
    for number in _NUM_REPLICAS:
        scenario = replace(_SCENARIO, num_replicas=number)
        for round_number, _ in options.rounds(f"expected {number}", (OURS,)):
            history = run_job(OURS, scenario, options)
            found = quantities(history, is_lossy=False)
            costs = costs or measured_costs(history, found[STEP], found[NEXT])
            predicted = expected(job_of(scenario, found[STEP], costs), costs)
            variant = replace(OURS, name=f"{number} replicas")
            group.add(variant, GOODPUT, Sample(round_number, found[GOODPUT]))
            group.add(variant, PREDICTED, Sample(round_number, predicted))
            group.add(variant, ERROR, Sample(round_number, abs(found[GOODPUT] / predicted - 1)))
        figure: Figure | None = group.figure(variant, ERROR)
        group.verdicts.append(Verdict.at_most(f"{number} replicas, {ERROR.name}", figure, _LIMIT))
    yield group


def measured_costs(history: History, step_s: float, next_s: float) -> Costs:
    """Returns what a death cost in a run."""
    away: list[float] = []
    longest: list[float] = []
    for kill_s, victim in history.kills_s:
        back_s = next(each.at_s for each in history.commits[victim] if each.at_s > kill_s)
        away.append(back_s - step_s - kill_s)
        for name, commits in history.commits.items():
            if name != victim:
                gaps = [
                    later.at_s - earlier.at_s
                    for earlier, later in itertools.pairwise(commits)
                    if earlier.at_s > kill_s + next_s and earlier.at_s < back_s
                ]
                longest.append(max(gaps) - step_s)
    return Costs(
        # A death is noticed in the middle of a step on average, which would have ended half a step later.
        death_s=max(0.0, next_s - step_s / 2),
        return_s=max(0.0, statistics.median(longest)),
        away_s=statistics.median(away),
    )


def job_of(scenario: Scenario, step_s: float, costs: Costs) -> Job:
    """Returns the job of the model in which as many replicas die as in a scenario."""
    return Job(
        num_replicas=scenario.num_replicas,
        mtbf_s=scenario.num_replicas * scenario.period_s - costs.away_s,
        step_s=step_s,
        state_bytes=scenario.state_bytes,
        bytes_per_s=1e9,
        restart_s=0.0,
    )


BENCHMARK: Final = Benchmark(
    name="expected",
    question="Does the model of the work that failures leave predict what is measured?",
    run=run,
    default=Size(scale=1.0, num_samples=1),
)
