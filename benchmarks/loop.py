"""The fault-tolerant loop: what a manager costs per step, ours and torchft's beside no manager at all.

Every sample is a fresh replica with a Lighthouse of its own; the managers by turns, beginning with another one each
round. Gradients are reduced one by one. Nobody joins or leaves, so this is what a step costs in which nobody asks.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks import peers
from benchmarks.machine import Watch, is_busy
from benchmarks.replicas.lighthouse import lighthouse
from benchmarks.replicas.managers import NO_MANAGER, OURS, TORCHFT, ManagerVariant
from benchmarks.replicas.processes import Child
from benchmarks.replicas.stepping import Plan, step_replica
from benchmarks.replicas.training import Model
from benchmarks.report import Group, Sample, Series, Verdict

MS: Final = "ms"
START_QUORUM: Final = "start_quorum"
STEP: Final = "a step"
OVERHEAD: Final = "a step, over no manager"
_SLOW_STEP: Final = "a step, 95th percentile"
_START_QUORUM_LIMIT_MS: Final = 1.0
_VARIANTS: Final = (OURS, TORCHFT, NO_MANAGER)


@dataclass(frozen=True, kw_only=True)
class _Size:
    """A model, and how many steps of it make a sample."""

    model: Model
    num_steps: int
    is_start_quorum_judged: bool = False


_SIZES: Final = (
    _Size(model=Model(name="4", num_tensors=4, num_items=1000), num_steps=200),
    _Size(model=Model(name="300", num_tensors=300, num_items=1000), num_steps=60),
    _Size(model=Model(name="1000", num_tensors=1000, num_items=1000), num_steps=25, is_start_quorum_judged=True),
    _Size(model=Model(name="3000", num_tensors=3000, num_items=1000), num_steps=12),
    _Size(model=Model(name="20x16MB", num_tensors=20, num_items=4_000_000), num_steps=10),
)
MODEL_NAMES: Final = tuple(size.model.name for size in _SIZES)
_SHARE_OF_WARMUP: Final = 0.25
_MIN_WARMUP_STEPS: Final = 4


def run(
    names: Sequence[str],
    num_samples: int,
    say: Callable[[str], None],
    settle: Callable[[], None],
    *,
    is_full: bool = False,
) -> Iterator[Group]:
    """Measures one model after the other.

    Args:
        names: Of the models.
        num_samples: Fresh replicas of each variant.
        say: Takes a line about the progress.
        settle: Called before each sample; returns when it may be taken.
        is_full: Whether two replicas that train together are measured too, and the parts of a step.
    """
    sizes = [size for size in _SIZES if size.model.name in names]
    if not peers.torchft_is_installed():
        group = Group("loop", "steps", "the fault-tolerant loop")
        group.notes.append("it needs the Lighthouse of torchft, which is not installed")
        yield group
        return
    for num_replicas in (1, 2) if is_full else (1,):
        for size in sizes:
            group = _new_group(size, num_replicas)
            for round_number in range(num_samples):
                first = round_number % len(_VARIANTS)
                for variant in _VARIANTS[first:] + _VARIANTS[:first]:
                    settle()
                    say(f"loop {group.state} {round_number + 1}/{num_samples} {variant.label}")
                    _measure(group, size, variant, num_replicas, round_number, is_full=is_full)
            group.series.sort(key=lambda series: _VARIANTS.index(_variant_of(series)))
            note_overheads(group)
            group.verdicts = judge(group, is_start_quorum_judged=size.is_start_quorum_judged)
            yield group


def _new_group(size: _Size, num_replicas: int) -> Group:
    replicas = "one replica" if num_replicas == 1 else f"{num_replicas} replicas, each"
    state = size.model.name if num_replicas == 1 else f"{size.model.name}, {num_replicas} replicas"
    return Group("loop", state, f"{replicas} of {size.model.title}, asynchronous quorum, {size.num_steps} steps")


def _measure(
    group: Group, size: _Size, variant: ManagerVariant, num_replicas: int, round_number: int, *, is_full: bool
) -> None:
    """Takes one sample: fresh replicas under a Lighthouse of their own."""
    plan = Plan(
        model=size.model,
        num_threads=max(1, (os.cpu_count() or 1) // num_replicas),
        num_warmup_steps=max(_MIN_WARMUP_STEPS, int(size.num_steps * _SHARE_OF_WARMUP)),
        num_steps=size.num_steps,
    )
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(lighthouse(num_replicas))
        children: list[Child] = []
        for number in range(num_replicas):
            child = Child(step_replica, variant.key, f"replica_{number}", address, plan)
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
    quantities = {
        START_QUORUM: statistics.median(each.start_quorum_s for each in times),
        STEP: statistics.median(each.whole_s for each in times),
        _SLOW_STEP: statistics.quantiles([each.whole_s for each in times], n=20, method="inclusive")[-1],
    }
    if is_full:
        for name in ("backward", "allreduce", "should_commit", "optimizer"):
            quantities[f"of it: {name}"] = statistics.median(getattr(each, f"{name}_s") for each in times)
    for label, seconds in quantities.items():
        _note(group, variant, label, Sample(round_number, seconds * 1e3, is_busy(share), share))


def _note(group: Group, variant: ManagerVariant, label: str, sample: Sample) -> None:
    group.add(f"{variant.key}, {label}", sample, label=label, role=variant.role, phase="warm", unit=MS)


def _variant_of(series: Series) -> ManagerVariant:
    return next(variant for variant in _VARIANTS if series.key.startswith(f"{variant.key}, "))


def note_overheads(group: Group) -> None:
    """Adds how much longer a step took than the one without a manager, round by round."""
    without = group.find(f"{NO_MANAGER.key}, {STEP}", "warm", MS)
    if without is None:
        return
    by_round = {sample.round: sample.value for sample in without.samples}
    for variant in (OURS, TORCHFT):
        series = group.find(f"{variant.key}, {STEP}", "warm", MS)
        for sample in series.samples if series is not None else []:
            over = sample.value - by_round[sample.round]
            _note(group, variant, OVERHEAD, Sample(sample.round, over, sample.busy, sample.others_share))


def judge(group: Group, *, is_start_quorum_judged: bool) -> list[Verdict]:
    """The targets. The smaller overhead is the shorter step, whose ratio stays sound where an overhead is about 0."""

    def found(variant: ManagerVariant, label: str) -> Series | None:
        return group.find(f"{variant.key}, {label}", "warm", MS)

    verdicts = []
    if is_start_quorum_judged:
        verdicts.append(Verdict.of_series("start_quorum", found(OURS, START_QUORUM), _START_QUORUM_LIMIT_MS, "at most"))
    ratio = Group.ratio(found(OURS, STEP), found(TORCHFT, STEP))
    verdicts.append(Verdict.at_most("overhead less than torchft's: a step, ours / torchft", ratio, 1.0))
    return verdicts
