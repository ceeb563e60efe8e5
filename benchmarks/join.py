"""Join: what the others notice of a replica that joins, with our manager and with torchft's.

As in `heal` one replica trains and another one joins it, but a step takes as long as one that really computes with the
weights, and the newcomer has computed once before. The longest step of the replica that trains is taken from the moment
at which the newcomer first asks for a quorum, or begins to get ready for one, to its first committed step. With frozen
weights the same is measured while somebody joins another job on the machine, which takes as much of the cores and of
the memory's bandwidth.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.heal import joined_by, let_join
from benchmarks.heal import quantities as heal_quantities
from benchmarks.machine import Watch
from benchmarks.options import Benchmark, Options, Size
from benchmarks.processes import Child
from benchmarks.replicas import diloco
from benchmarks.replicas.diloco import Iteration
from benchmarks.replicas.healing import Report, Step, join, rest, train
from benchmarks.replicas.managers import OURS, OURS_AT_ONCE, TORCHFT
from benchmarks.replicas.training import Model
from benchmarks.report import Group, Quantity, Verdict
from benchmarks.transports import torchft_is_installed

JOINED: Final = Quantity("first common step, from its beginning at the other", "ms")
LONGEST: Final = Quantity("the other's longest step meanwhile", "ms")
NORMAL: Final = Quantity("the other's normal step", "ms")
RUNNING_RATIO: Final = Quantity("longest step / normal step, without waits for a processor", "×")
"""On a machine of few cores, or with others, the newcomer's own work takes them from the replica that trains."""
RATIO: Final = Quantity("longest step / normal step", "×")
UNDISTURBED_RATIO: Final = Quantity("longest step / normal step, of those that the machine's host left alone", "×")
"""A virtual machine gives free memory back now and then; for half a second all in it takes twice as long then."""
_MOST_STOLEN: Final = 0.03
"""Of a step, by the host."""
LATER_RATIO: Final = Quantity("longest step / normal step, when all have joined", "×")
"""What the machine alone makes of the longest step."""
_ELSEWHERE: Final = replace(OURS, name="ours, another job is joined", role="ceiling")
"""The newcomer joins a replica that computes nothing, of a job of its own, with as much work for the machine: what the
replica that trains notices then is a matter of the machine that they share."""
_VARIANTS: Final = (OURS, OURS_AT_ONCE, TORCHFT)
_STEP_LIMIT: Final = 1.2
_HEAL_LIMIT: Final = 0.8
_STATE_BYTES: Final = 1_000_000_000
_NUM_LAYERS: Final = 16
_ADAPTER_SHARE: Final = 0.01
_TITLES: Final = {
    "lora": "frozen weights and an adapter",
    "diloco": "what DiLoCo synchronises",
    "all": "everything trained",
}
_NUM_STEPS_BEFORE: Final = 4
_NUM_STEPS_AFTER: Final = 5
_NUM_SYNCS: Final = 2


def run(options: Options) -> Iterator[Group]:
    """Measures one state after the other."""
    if not torchft_is_installed():
        group = Group("join", "replica", "a replica joins")
        group.notes.append("it needs the Lighthouse of torchft, which is not installed")
        yield group
        return
    for name in options.states:
        if name == "diloco":
            yield _run_diloco(options)
            continue
        model = _model(name, options.scale)
        group = Group("join", name, f"a replica of {model.state_bytes / 1e6:.0f} MB joins, {_TITLES[name]}")
        variants = (*_VARIANTS, _ELSEWHERE) if model.width else _VARIANTS
        for round_number, variant in options.rounds(f"join {name}", variants):
            if variant is _ELSEWHERE:
                trained, joined, watch = _let_join_elsewhere(model)
                found = ratios(trained, joined)
            else:
                trained, joined, watch = let_join(
                    model, variant, num_steps_before=_NUM_STEPS_BEFORE, num_steps_after=_NUM_STEPS_AFTER
                )
                found = quantities(trained, joined)
            for quantity, value in found.items():
                group.add(variant, quantity, watch.sample(round_number, value))
        group.verdicts = judge(group, name)
        group.notes.append("a normal step: the median before, or with the newcomer, whichever is longer")
        yield group


def _let_join_elsewhere(model: Model) -> tuple[Report, Report, Watch]:
    return joined_by(
        lambda address: Child(train, OURS, model, address, _NUM_STEPS_BEFORE),
        lambda address: Child(join, OURS, model, address, _NUM_STEPS_AFTER),
        lambda address: Child(rest, OURS, model, address, _NUM_STEPS_BEFORE),
    )


def _run_diloco(options: Options) -> Group:
    num_bytes = int(_STATE_BYTES * options.scale)
    group = Group("join", "diloco", f"a replica of {num_bytes / 1e6:.0f} MB joins, {_TITLES['diloco']}")
    for round_number, variant in options.rounds("join diloco", (OURS, OURS_AT_ONCE)):
        arguments = (num_bytes, variant is OURS)
        trained, joined, watch = joined_by(
            lambda address, told=arguments: Child(diloco.train, *told, address, _NUM_SYNCS),  # type: ignore[misc]
            lambda address, told=arguments: Child(diloco.join, *told, address, _NUM_SYNCS + 2),  # type: ignore[misc]
        )
        for quantity, value in quantities_of_diloco(trained, joined).items():
            group.add(variant, quantity, watch.sample(round_number, value))
    group.verdicts = [Verdict.at_most(RATIO.name, group.figure(OURS, RATIO), _STEP_LIMIT)]
    group.notes.append("a normal step: the median of those with the newcomer; steps with a sync are compared with such")
    return group


def quantities_of_diloco(trained: Sequence[Iteration], joined: Sequence[Iteration]) -> dict[Quantity, float]:
    """What is shown of one sample. The newcomer is there from its first sync on."""
    began_s = joined[0].began_s
    joined_s = next(each.ended_s for each in joined if each.is_sync)
    found: dict[Quantity, float] = {}
    ratios, running_ratios, undisturbed_ratios, later_ratios = [], [], [], []
    for is_sync, name in ((False, "a step between syncs"), (True, "a step with a sync")):
        kind = [each for each in trained if each.is_sync == is_sync]
        meanwhile = [each for each in kind if each.ended_s >= began_s and each.began_s <= joined_s]
        later = [each for each in kind if each.began_s > joined_s]
        during, normal = max(each.took_s for each in meanwhile), statistics.median(each.took_s for each in later)
        found[Quantity(f"{name}, normally", "ms")] = normal * 1e3
        found[Quantity(f"{name}, longest meanwhile", "ms")] = during * 1e3
        ratios.append(during / normal)
        later_ratios.append(max(each.took_s for each in later) / normal)
        undisturbed = [each.took_s for each in meanwhile if each.stolen_s <= _MOST_STOLEN * each.took_s]
        undisturbed_ratios.append(max(undisturbed, default=0.0) / normal)
        running = max(each.took_s - each.waited_s for each in meanwhile)
        running_ratios.append(running / statistics.median(each.took_s - each.waited_s for each in later))
    return {
        **found,
        RATIO: max(ratios),
        RUNNING_RATIO: max(running_ratios),
        UNDISTURBED_RATIO: max(undisturbed_ratios),
        LATER_RATIO: max(later_ratios),
    }


def _model(name: str, scale: float) -> Model:
    num_items = int(_STATE_BYTES * scale) // 4 // _NUM_LAYERS
    if name == "all":
        return Model(name=name, num_tensors=_NUM_LAYERS, num_items=num_items // 3, is_foreach=False, is_warm=True)
    width = int(num_items**0.5)
    return Model(
        name=name,
        num_tensors=_NUM_LAYERS,
        num_items=int(num_items * _ADAPTER_SHARE),
        num_frozen_items=width * width,
        is_foreach=False,
        width=width,
        is_warm=True,
    )


def quantities(trained: Report, joined: Report) -> dict[Quantity, float]:
    """What is shown of one sample."""
    first = joined.committed[0]
    asked_s, joined_s = joined.steps[0].began_s, first.ended_s
    common = next(step for step in trained.steps if step.committed_step == first.committed_step)
    return {
        JOINED: (joined_s - common.began_s) * 1e3,
        Quantity("the newcomer's time to its first commit", "ms"): (joined_s - asked_s) * 1e3,
        **ratios(trained, joined),
        **{Quantity(name, "ms"): s * 1e3 for name, s in heal_quantities(trained, joined).items() if "of it" in name},
    }


def ratios(trained: Report, joined: Report, *, joined_s: float | None = None) -> dict[Quantity, float]:
    """The cost that a training replica pays while another one joins its job, or a job beside it.

    Args:
        trained: Of the replica that trains.
        joined: Of the newcomer.
        joined_s: When the newcomer has joined; ``None`` for the end of its first committed step.
    """
    asked_s = joined.steps[0].began_s
    joined_s = joined.committed[0].ended_s if joined_s is None else joined_s
    before = [step for step in trained.steps if step.ended_s < asked_s]
    during = [step for step in trained.steps if step.ended_s >= asked_s and step.began_s <= joined_s]
    after = [step for step in trained.steps if step.began_s > joined_s]

    def normal(seconds: Callable[[Step], float]) -> float:
        # The very first steps make the optimizer's state and the process group.
        return max(statistics.median(map(seconds, part[len(part) // 2 :])) for part in (before, after) if part)

    return {
        NORMAL: normal(_whole_s) * 1e3,
        LONGEST: max(map(_whole_s, during)) * 1e3,
        RATIO: max(map(_whole_s, during)) / normal(_whole_s),
        RUNNING_RATIO: max(map(_running_s, during)) / normal(_running_s),
    }


def _whole_s(step: Step) -> float:
    return step.times.whole_s


def _running_s(step: Step) -> float:
    return step.times.whole_s - step.waited_s


def judge(group: Group, name: str) -> list[Verdict]:
    """The targets."""
    if name == "all":
        ratio = group.ratio(OURS, TORCHFT, JOINED)
        return [Verdict.at_most(f"{JOINED.name}: ours / torchft", ratio, _HEAL_LIMIT)]
    beside = group.ratio(OURS, _ELSEWHERE, RATIO)
    return [
        Verdict.at_most(RATIO.name, group.figure(OURS, RATIO), _STEP_LIMIT),
        Verdict(f"{RATIO.name}: this job joined / another one", beside, None, "at most"),
    ]


BENCHMARK: Final = Benchmark(
    name="join",
    question="What does a joining replica cost the others?",
    run=run,
    states=tuple(_TITLES),
    default=Size(scale=1.0, num_samples=2),
    misses={
        "longest step": "The host took processors away in the long steps; the others reach 1.04.",
        "first common step": "torchft computes that step during the transfer and contributes zeros; ours heals first.",
    },
)
