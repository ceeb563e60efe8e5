"""The fault-tolerant loop: what a manager costs per step, ours and torchft's beside no manager at all.

Every sample is a fresh replica with a Lighthouse of its own; the managers by turns, beginning with another one each
round. Gradients are reduced one by one, and in every other step all at once, as DistributedDataParallel does it: so a
cost of each collective is told from a cost of the step. Nobody joins or leaves, so nobody asks for a snapshot.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.machine import Watch
from benchmarks.options import Benchmark, Options, Size
from benchmarks.processes import Child
from benchmarks.replicas.lighthouse import lighthouse
from benchmarks.replicas.managers import NO_MANAGER, OURS, TORCHFT, ManagerVariant
from benchmarks.replicas.steps import Plan, StepTimes, step_replica
from benchmarks.replicas.training import Model
from benchmarks.report import Group, Quantity, Sample, Verdict
from benchmarks.transports import torchft_is_installed

START_QUORUM: Final = Quantity("start_quorum", "ms")
STEP: Final = Quantity("a step, gradients one by one", "ms")
BUCKET_STEP: Final = Quantity("a step, gradients in one bucket", "ms")
_STEPS: Final = (STEP, BUCKET_STEP)
_START_QUORUM_LIMIT_MS: Final = 1.0
_VARIANTS: Final = (OURS, TORCHFT, NO_MANAGER)


@dataclass(frozen=True, kw_only=True)
class _ModelSize:
    """A model, and how many pairs of steps (gradients one by one, in one bucket) make a sample."""

    model: Model
    num_pairs: int
    is_start_quorum_judged: bool = False


_SIZES: Final = (
    _ModelSize(model=Model(name="4", num_tensors=4, num_items=1000), num_pairs=60),
    _ModelSize(model=Model(name="300", num_tensors=300, num_items=1000), num_pairs=8),
    _ModelSize(model=Model(name="1000", num_tensors=1000, num_items=1000), num_pairs=4, is_start_quorum_judged=True),
    _ModelSize(model=Model(name="3000", num_tensors=3000, num_items=1000), num_pairs=2),
    _ModelSize(model=Model(name="20x16MB", num_tensors=20, num_items=4_000_000), num_pairs=2),
)
_NUM_WARMUP_PAIRS: Final = 1
_FULL_TIMES: Final = 4
"""So many more pairs of steps has a sample of a full run."""


def run(options: Options) -> Iterator[Group]:
    """Measures one model after the other. A full run adds two replicas that train together, and the parts of a step."""
    if not torchft_is_installed():
        group = Group("loop", "steps", "the fault-tolerant loop")
        group.notes.append("it needs the Lighthouse of torchft, which is not installed")
        yield group
        return
    for num_replicas in (1, 2) if options.is_full else (1,):
        for size in _SIZES:
            if size.model.name in options.states:
                yield _run_size(size, num_replicas, options)


def _run_size(size: _ModelSize, num_replicas: int, options: Options) -> Group:
    plan = Plan(
        model=size.model,
        num_threads=max(1, (os.cpu_count() or 1) // num_replicas),
        num_warmup_pairs=_NUM_WARMUP_PAIRS,
        num_pairs=size.num_pairs * (_FULL_TIMES if options.is_full else 1),
    )
    replicas = "one replica" if num_replicas == 1 else f"{num_replicas} replicas, each"
    state = size.model.name if num_replicas == 1 else f"{size.model.name}, {num_replicas} replicas"
    group = Group("loop", state, f"{replicas} of {size.model.title}, asynchronous quorum, {2 * plan.num_pairs} steps")
    for round_number, variant in options.rounds(f"loop {state}", _VARIANTS):
        times, others_share = _measure(plan, variant, num_replicas)
        for quantity, seconds in quantities(times, is_full=options.is_full).items():
            group.add(variant, quantity, Sample(round_number, seconds * 1e3, others_share))
    note_overheads(group)
    group.sort(_VARIANTS)
    group.notes.append("the allocator keeps what is freed, so that no page fault is taken for a manager's cost")
    group.verdicts = judge(group, is_start_quorum_judged=size.is_start_quorum_judged)
    return group


def _measure(plan: Plan, variant: ManagerVariant, num_replicas: int) -> tuple[list[StepTimes], float | None]:
    """Takes one sample, of the first of fresh replicas under a Lighthouse of their own; and the others' share."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(lighthouse(num_replicas)) if variant.needs_lighthouse else ""
        children: list[Child] = []
        for number in range(num_replicas):
            child = Child(step_replica, variant, f"replica_{number}", address, plan)
            stack.callback(child.close)
            children.append(child)
        for child in children:
            child.receive()
        with Watch([os.getpid(), *(child.process_id for child in children)]) as watch:
            for child in children:
                child.say("go")
            # The watch ends when the last one has stepped.
            times, *_ = [child.receive() for child in children]
        return times, watch.others_share


def quantities(times: Sequence[StepTimes], *, is_full: bool) -> dict[Quantity, float]:
    """What is shown of the steps of one sample, in seconds."""
    found = {START_QUORUM: statistics.median(each.start_quorum_s for each in times)}
    for step, is_bucketed in zip(_STEPS, (False, True), strict=True):
        chosen = [each for each in times if each.is_bucketed == is_bucketed]
        whole = [each.whole_s for each in chosen]
        found[step] = statistics.median(whole)
        if is_full:
            found[_part(step, ", 95th percentile")] = statistics.quantiles(whole, n=20, method="inclusive")[-1]
            for name in ("backward", "allreduce", "should_commit", "optimizer"):
                found[_part(step, f": {name}")] = statistics.median(getattr(each, f"{name}_s") for each in chosen)
    return found


def _part(step: Quantity, name: str) -> Quantity:
    return Quantity(step.name + name, step.unit)


def overhead(step: Quantity) -> Quantity:
    return _part(step, ", over no manager")


def note_overheads(group: Group) -> None:
    """Adds how much longer a step took than the one without a manager, round by round."""
    for step in _STEPS:
        without = group.find(NO_MANAGER, step)
        for variant in (OURS, TORCHFT):
            series = group.find(variant, step)
            if series is not None and without is not None:
                by_round = {sample.round: sample.value for sample in without.samples}
                for sample in series.samples:
                    over = sample.value - by_round[sample.round]
                    group.add(variant, overhead(step), Sample(sample.round, over, sample.others_share))


def judge(group: Group, *, is_start_quorum_judged: bool) -> list[Verdict]:
    """The targets. The smaller overhead is the shorter step, whose ratio stays sound where an overhead is about 0."""
    verdicts = [
        Verdict.at_most(
            f"overhead less than torchft's: {step.name}, ours / torchft", group.ratio(OURS, TORCHFT, step), 1.0
        )
        for step in _STEPS
    ]
    if is_start_quorum_judged:
        verdicts.insert(0, Verdict.at_most("start_quorum", group.figure(OURS, START_QUORUM), _START_QUORUM_LIMIT_MS))
    return verdicts


BENCHMARK: Final = Benchmark(
    name="loop",
    question="What does the manager cost a step?",
    run=run,
    states=tuple(size.model.name for size in _SIZES),
    default=Size(scale=1.0, num_samples=3),
    misses={
        "one by one": "A step of 20 large tensors is bound by memory, for either manager.",
        "one bucket": "One collective for all gradients leaves nothing to save.",
    },
)
