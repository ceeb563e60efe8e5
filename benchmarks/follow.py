"""Follow: what the others notice of a replica that comes back where everything is trained, and when it contributes.

Two replicas train; one is killed and started again. The longest step of the other is taken from the moment at which the
newcomer asks for its first quorum until it contributes.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping
from typing import Final

from benchmarks.goodput import History, Scenario, run_job
from benchmarks.options import Benchmark, Options, Size
from benchmarks.replicas.dying import Commit, Job
from benchmarks.replicas.managers import OURS, OURS_FOLLOWING, TORCHFT, slow
from benchmarks.replicas.training import Model
from benchmarks.report import Group, Quantity, Sample, Verdict
from benchmarks.transports import torchft_is_installed

NORMAL: Final = Quantity("the other's normal step, with both replicas", "s")
RATIO: Final = Quantity("the other's longest step until the newcomer contributes / a normal one", "×")
BACK: Final = Quantity("from the newcomer's first quorum to its first contribution", "s")
MEMORY: Final = Quantity("most memory of the newcomer's process / size of its state", "×")
_RATIO_LIMIT: Final = 1.15
_NUM_TENSORS: Final = 8
_STATE_BYTES: Final = 1_000_000_000
_STEP_S: Final = 0.5
"""Without the optimizer's step and the reduction, which take longer."""
_STATES: Final = {
    "loopback": ("", (OURS_FOLLOWING, OURS, TORCHFT)),
    "slow-network": (", at 200 MB/s", (slow(OURS_FOLLOWING), slow(OURS))),
}
"""By name: the rate of the transfer, and the managers. torchft's transfer has no limit to set."""


class Joining(Scenario):
    """One replica of two is killed once; every step changes all of the state."""

    def job(self, scale: float) -> Job:
        num_items = int(self.state_bytes * scale) // 4 // 3 // _NUM_TENSORS
        model = Model(name="follow", num_tensors=_NUM_TENSORS, num_items=num_items)
        return Job(model=model, step_s=self.step_s, num_replicas=self.num_replicas)


def run(options: Options) -> Iterator[Group]:
    """Measures one state after the other."""
    if not torchft_is_installed():
        group = Group("follow", "loopback", "a replica comes back")
        group.notes.append("it needs the Lighthouse of torchft, which is not installed")
        yield group
        return
    for name in options.states:
        rate, variants = _STATES[name]
        num_bytes = _STATE_BYTES * options.scale
        scenario = Joining(
            title=f"one of two replicas of {num_bytes / 1e9:g} GB comes back, all of it trained{rate}",
            num_replicas=2,
            step_s=_STEP_S,
            state_bytes=_STATE_BYTES,
            num_kills=1,
            period_s=25.0,
            most_s=0.0,
            least_goodput=0.0,
            variants=variants,
        )
        group = Group("follow", name, scenario.title)
        for round_number, variant in options.rounds(f"follow {name}", scenario.variants):
            history = run_job(variant, scenario, options)
            for quantity, value in quantities(history, num_bytes).items():
                group.add(variant, quantity, Sample(round_number, value))
        group.verdicts = [Verdict.at_most(RATIO.name, group.figure(variants[0], RATIO), _RATIO_LIMIT)]
        yield group


def quantities(history: History, state_bytes: float) -> Mapping[Quantity, float]:
    """Returns the figures of one run."""
    kill_s, victim = history.kills_s[0]
    other = next(commits for name, commits in history.commits.items() if name != victim)
    back = [each for each in history.commits[victim] if each.at_s > kill_s]
    contributed_s = next((each.at_s for each in back if each.contributed), None)
    if contributed_s is None:
        raise RuntimeError(f"expected the newcomer to contribute within the run; it made {len(back)} steps without")
    began_s = back[0].began_s
    steps = [(earlier.at_s, later.at_s) for earlier, later in itertools.pairwise(other)]
    normal_s = max(
        statistics.median(later - earlier for earlier, later in part)
        for part in (
            [each for each in steps if history.began_s < each[0] and each[1] < kill_s],
            [each for each in steps if each[0] > contributed_s],
        )
        if part
    )
    meanwhile = [later - earlier for earlier, later in steps if later > began_s and earlier < contributed_s]
    return {
        NORMAL: normal_s,
        RATIO: max(meanwhile) / normal_s,
        BACK: contributed_s - began_s,
        MEMORY: _most_memory(back) / state_bytes,
    }


def _most_memory(commits: list[Commit]) -> float:
    return max(each.rss_bytes for each in commits)


BENCHMARK: Final = Benchmark(
    name="follow",
    question="How long does everybody stand still if a replica of which everything is trained comes back?",
    run=run,
    states=tuple(_STATES),
    default=Size(scale=1.0, num_samples=1),
    misses={
        "longest step": "The source copies its state, and the newcomer makes its steps, on the two cores that train.",
    },
)
