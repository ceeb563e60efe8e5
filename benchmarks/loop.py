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

from benchmarks import peers
from benchmarks.machine import Watch, is_busy
from benchmarks.options import Benchmark, Options, Size, turns
from benchmarks.replicas.lighthouse import lighthouse
from benchmarks.replicas.managers import NO_MANAGER, OURS, TORCHFT, ManagerVariant
from benchmarks.replicas.processes import Child
from benchmarks.replicas.stepping import Plan, StepTimes, step_replica
from benchmarks.replicas.training import Model
from benchmarks.report import Group, Sample, Series, Verdict

MS: Final = "ms"
START_QUORUM: Final = "start_quorum"
STEP: Final = "a step, gradients one by one"
BUCKET_STEP: Final = "a step, gradients in one bucket"
_STEPS: Final = (STEP, BUCKET_STEP)
OVER: Final = ", over no manager"
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
    _ModelSize(model=Model(name="300", num_tensors=300, num_items=1000), num_pairs=12),
    _ModelSize(model=Model(name="1000", num_tensors=1000, num_items=1000), num_pairs=6, is_start_quorum_judged=True),
    _ModelSize(model=Model(name="3000", num_tensors=3000, num_items=1000), num_pairs=3),
    _ModelSize(model=Model(name="20x16MB", num_tensors=20, num_items=4_000_000), num_pairs=3),
)
_NUM_WARMUP_PAIRS: Final = 1
_FULL_TIMES: Final = 4
"""So many more pairs of steps has a sample of a full run."""


def run(options: Options) -> Iterator[Group]:
    """Measures one model after the other. A full run adds two replicas that train together, and the parts of a step."""
    if not peers.torchft_is_installed():
        group = Group("loop", "steps", "the fault-tolerant loop")
        group.notes.append("it needs the Lighthouse of torchft, which is not installed")
        yield group
        return
    sizes = [size for size in _SIZES if size.model.name in options.states]
    for num_replicas in (1, 2) if options.is_full else (1,):
        for size in sizes:
            sampling = _Sampling(size, num_replicas, is_full=options.is_full)
            group = sampling.group
            for round_number, variant in turns(_VARIANTS, options.num_samples):
                options.settle()
                options.say(f"loop {group.state} {round_number + 1}/{options.num_samples} {variant.label}")
                sampling.measure(variant, round_number)
            group.series.sort(key=lambda series: _VARIANTS.index(_variant_of(series)))
            note_overheads(group)
            group.notes.append("the allocator keeps what is freed, so that no page fault is taken for a manager's cost")
            group.verdicts = judge(group, is_start_quorum_judged=size.is_start_quorum_judged)
            yield group


class _Sampling:
    """Takes samples of one model, with one replica or more."""

    def __init__(self, size: _ModelSize, num_replicas: int, *, is_full: bool) -> None:
        self._num_replicas = num_replicas
        self._is_full = is_full
        self._plan = Plan(
            model=size.model,
            num_threads=max(1, (os.cpu_count() or 1) // num_replicas),
            num_warmup_pairs=_NUM_WARMUP_PAIRS,
            num_pairs=size.num_pairs * (_FULL_TIMES if is_full else 1),
        )
        replicas = "one replica" if num_replicas == 1 else f"{num_replicas} replicas, each"
        state = size.model.name if num_replicas == 1 else f"{size.model.name}, {num_replicas} replicas"
        steps = f"{2 * self._plan.num_pairs} steps"
        self.group = Group("loop", state, f"{replicas} of {size.model.title}, asynchronous quorum, {steps}")

    def measure(self, variant: ManagerVariant, round_number: int) -> None:
        """Takes one sample: fresh replicas under a Lighthouse of their own."""
        with contextlib.ExitStack() as stack:
            address = stack.enter_context(lighthouse(self._num_replicas))
            children: list[Child] = []
            for number in range(self._num_replicas):
                child = Child(step_replica, variant.key, f"replica_{number}", address, self._plan)
                stack.callback(child.close)
                children.append(child)
            for child in children:
                child.receive()
            watch = Watch([os.getpid(), *(child.process_id for child in children)])
            watch.start()
            for child in children:
                child.say("go")
            # Of the first replica; the watch ends when the last one has stepped.
            times, *_ = [child.receive() for child in children]
            share = watch.stop()
        for label, seconds in quantities(times, is_full=self._is_full).items():
            _note(self.group, variant, label, Sample(round_number, seconds * 1e3, is_busy(share), share))


def quantities(times: Sequence[StepTimes], *, is_full: bool) -> dict[str, float]:
    """What is shown of the steps of one sample, in seconds."""
    found = {START_QUORUM: statistics.median(each.start_quorum_s for each in times)}
    for label, is_bucketed in zip(_STEPS, (False, True), strict=True):
        chosen = [each for each in times if each.is_bucketed == is_bucketed]
        found[label] = statistics.median(each.whole_s for each in chosen)
        if is_full:
            found[f"{label}, 95th percentile"] = statistics.quantiles(
                [each.whole_s for each in chosen], n=20, method="inclusive"
            )[-1]
            for name in ("backward", "allreduce", "should_commit", "optimizer"):
                found[f"{label}: {name}"] = statistics.median(getattr(each, f"{name}_s") for each in chosen)
    return found


def _note(group: Group, variant: ManagerVariant, label: str, sample: Sample) -> None:
    group.add(f"{variant.key}, {label}", sample, label=label, role=variant.role, phase="warm", unit=MS)


def _variant_of(series: Series) -> ManagerVariant:
    return next(variant for variant in _VARIANTS if series.key.startswith(f"{variant.key}, "))


def note_overheads(group: Group) -> None:
    """Adds how much longer a step took than the one without a manager, round by round."""
    for label in _STEPS:
        without = _found(group, NO_MANAGER, label)
        by_round = {sample.round: sample.value for sample in without.samples} if without is not None else {}
        for variant in (OURS, TORCHFT):
            series = _found(group, variant, label)
            for sample in series.samples if series is not None and by_round else []:
                over = sample.value - by_round[sample.round]
                _note(group, variant, label + OVER, Sample(sample.round, over, sample.busy, sample.others_share))


def judge(group: Group, *, is_start_quorum_judged: bool) -> list[Verdict]:
    """The targets. The smaller overhead is the shorter step, whose ratio stays sound where an overhead is about 0."""
    verdicts = []
    if is_start_quorum_judged:
        series = _found(group, OURS, START_QUORUM)
        verdicts.append(Verdict.of_series("start_quorum", series, _START_QUORUM_LIMIT_MS, "at most"))
    for label in _STEPS:
        ratio = Group.ratio(_found(group, OURS, label), _found(group, TORCHFT, label))
        verdicts.append(Verdict.at_most(f"overhead less than torchft's: {label}, ours / torchft", ratio, 1.0))
    return verdicts


def _found(group: Group, variant: ManagerVariant, label: str) -> Series | None:
    return group.find(f"{variant.key}, {label}", "warm", MS)


BENCHMARK: Final = Benchmark(
    name="loop", run=run, states=tuple(size.model.name for size in _SIZES), default=Size(scale=1.0, num_samples=3)
)
