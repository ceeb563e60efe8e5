"""Heal: how long a replica that joins needs until it trains with the others, with our manager and with torchft's.

One replica trains, another one joins it; both are fresh processes under a Lighthouse of their own, the managers by
turns. Measured from the first quorum that has both to the end of the newcomer's first committed step.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any, Final

from benchmarks.machine import Watch
from benchmarks.options import Benchmark, Options, Size
from benchmarks.processes import Child
from benchmarks.replicas.healing import Report, Step, join, train
from benchmarks.replicas.lighthouse import lighthouse
from benchmarks.replicas.managers import OURS, TORCHFT, ManagerVariant
from benchmarks.replicas.parts import ASK
from benchmarks.replicas.training import Model
from benchmarks.report import Group, Quantity, Verdict
from benchmarks.transports import torchft_is_installed

HEALED: Final = Quantity("quorum to first commit", "ms")
_LIMIT: Final = 0.9
_VARIANTS: Final = (OURS, TORCHFT)
_NUM_TENSORS: Final = 16
_STATE_BYTES: Final = 1_000_000_000
_ADAPTER_SHARE: Final = 0.01
"""About as much as low-rank adapters train of a model (Hu et al., LoRA, 2021)."""
_TITLES: Final = {"adapter": "frozen weights and an adapter under AdamW", "adamw": "all under AdamW"}
_NUM_STEPS_BEFORE: Final = {False: 2, True: 30}
"""Of the replica that trains, by whether the run is a full one."""
_NUM_STEPS_AFTER: Final = 1


def run(options: Options) -> Iterator[Group]:
    """Measures one state after the other. In a full run the replica that trains makes more steps alone."""
    if not torchft_is_installed():
        group = Group("heal", "replica", "a replica joins")
        group.notes.append("it needs the Lighthouse of torchft, which is not installed")
        yield group
        return
    for name in options.states:
        model = _model(name, options.scale)
        group = Group("heal", name, f"a replica of {model.state_bytes / 1e6:.0f} MB joins, {_TITLES[name]}")
        for round_number, variant in options.rounds(f"heal {name}", _VARIANTS):
            _measure(group, model, variant, round_number, num_steps_before=_NUM_STEPS_BEFORE[options.is_full])
        group.verdicts = [judge(group)]
        group.notes.append("ours compares every bit of the loaded state with the source's, and torchft does not")
        group.notes.append("torchft receives beside forward and backward; ours before them")
        yield group


def _model(name: str, scale: float) -> Model:
    num_items = int(_STATE_BYTES * scale) // 4 // _NUM_TENSORS
    is_adapter = name == "adapter"
    num_trained = int(num_items * _ADAPTER_SHARE) if is_adapter else num_items // 3
    return Model(
        name=name,
        num_tensors=_NUM_TENSORS,
        num_items=num_trained,
        num_frozen_items=num_items - 3 * num_trained if is_adapter else 0,
        is_foreach=False,
    )


def _measure(group: Group, model: Model, variant: ManagerVariant, round_number: int, *, num_steps_before: int) -> None:
    """Takes one sample."""
    trained, joined, watch = let_join(
        model, variant, num_steps_before=num_steps_before, num_steps_after=_NUM_STEPS_AFTER
    )
    for name, seconds in quantities(trained, joined).items():
        group.add(variant, Quantity(name, "ms"), watch.sample(round_number, seconds * 1e3))


def let_join(
    model: Model, variant: ManagerVariant, *, num_steps_before: int, num_steps_after: int
) -> tuple[Report, Report, Watch]:
    """Has one replica train, and another one join it: what each of them did, and who used the machine meanwhile."""
    return joined_by(
        lambda address: Child(train, variant, model, address, num_steps_before),
        lambda address: Child(join, variant, model, address, num_steps_after),
    )


def joined_by(
    make_training: Callable[[str], Child],
    make_joining: Callable[[str], Child],
    make_joined: Callable[[str], Child] | None = None,
) -> tuple[Any, Any, Watch]:
    """Has one child train and another one join it, under a Lighthouse of their own: what they say of it.

    Args:
        make_training: The child that trains, given the address of its Lighthouse.
        make_joining: The one that joins.
        make_joined: Whom it joins, under another Lighthouse; ``None`` for the one that trains.
    """
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(lighthouse(1))
        training = make_training(address)
        stack.callback(training.close)
        others = [training]
        if make_joined is not None:
            address = stack.enter_context(lighthouse(1))
            others.append(make_joined(address))
            stack.callback(others[-1].close)
        joining = make_joining(address)
        stack.callback(joining.close)
        joining.receive()
        for other in reversed(others):
            for answer in ("fill", "go"):
                other.receive()
                other.say(answer)
            other.receive()
        joining.say("fill")
        joining.receive()
        with Watch([os.getpid(), joining.process_id, *(other.process_id for other in others)]) as watch:
            joining.say("go")
            joined = joining.receive()
            training.say("stop")
            trained = training.receive()
    return trained, joined, watch


def quantities(trained: Report, joined: Report) -> dict[str, float]:
    """What took how long, in seconds."""
    first = joined.committed[0]
    quorum_s = first_common_quorum(trained, joined)
    found = {HEALED.name: first.ended_s - quorum_s}
    parts = [part for part in joined.parts if quorum_s <= part.ended_s and part.began_s <= first.ended_s]
    if parts:
        found["of it: before the first part"] = max(0.0, min(part.began_s for part in parts) - quorum_s)
    for name in dict.fromkeys(part.name for part in sorted(parts, key=lambda part: part.began_s)):
        found[f"of it: {name}"] = sum(part.seconds for part in parts if part.name == name)
    for name in ("backward", "allreduce", "should_commit", "optimizer"):
        found[f"of it: first {name}"] = getattr(first.times, f"{name}_s")
    before = [step.times.whole_s for step in trained.steps if step.ended_s < quorum_s]
    # The very first steps make the optimizer's state and the process group.
    found["the other's median step before"] = statistics.median(before[len(before) // 2 :])
    during = [step for step in trained.steps if step.ended_s >= quorum_s and step.began_s <= first.ended_s]
    found["the other's longest step meanwhile"] = max(step.times.whole_s for step in during)
    return found


def first_common_quorum(trained: Report, joined: Report) -> float:
    """When the first quorum that has both was asked for by the later of the two.

    The Lighthouse answers both as soon as both have asked, within a millisecond.
    """
    asked_s = asked_at(joined)
    common = joined.committed[0].committed_step
    last: Step = next(step for step in trained.steps if step.committed_step == common)
    return min((step.began_s for step in trained.steps if asked_s <= step.began_s <= last.began_s), default=asked_s)


def asked_at(joined: Report) -> float:
    """When the newcomer asked for its first quorum; what it has done before kept nobody waiting."""
    return next((part.began_s for part in joined.parts if part.name == ASK), joined.steps[0].began_s)


def judge(group: Group) -> Verdict:
    """The target."""
    return Verdict.at_most(f"{HEALED.name}: ours / torchft", group.ratio(OURS, TORCHFT, HEALED), _LIMIT)


BENCHMARK: Final = Benchmark(
    name="heal",
    question="How long until a healed replica trains again?",
    run=run,
    states=tuple(_TITLES),
    default=Size(scale=1.0, num_samples=3),
    misses={
        "quorum to first commit": "torchft computes during the transfer and contributes zeros; ours heals first.",
    },
)
