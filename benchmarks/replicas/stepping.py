"""A replica that steps without pause and reports how long each part of its steps took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.replicas.managers import VARIANTS, Loop
from benchmarks.replicas.processes import Channel
from benchmarks.replicas.training import Model, Training

READY: Final = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One iteration, in seconds."""

    start_quorum_s: float
    backward_s: float
    allreduce_s: float
    should_commit_s: float
    optimizer_s: float

    @property
    def whole_s(self) -> float:
        return self.start_quorum_s + self.backward_s + self.allreduce_s + self.should_commit_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a replica does: steps that warm it up, and steps that count."""

    model: Model
    num_threads: int
    num_warmup_steps: int
    num_steps: int


def step_replica(channel: Channel, variant: str, name: str, lighthouse: str, plan: Plan) -> None:
    """Says `READY`, waits for a word, steps, says the times of the steps that count, and waits for its end."""
    torch.set_num_threads(plan.num_threads)
    training = Training(plan.model)
    loop = VARIANTS[variant].make(training, name, lighthouse)
    channel.say(READY)
    channel.wait()
    channel.say(list(_step(training, loop, plan.num_warmup_steps + plan.num_steps))[-plan.num_steps :])
    channel.wait_for_end()


def _step(training: Training, loop: Loop, num_steps: int) -> Iterator[StepTimes]:
    # Replicas that heal make other iterations than those that do not, and end with the same step.
    while loop.current_step() < num_steps:
        times, _ = step_once(training, loop)
        yield times


def step_once(training: Training, loop: Loop) -> tuple[StepTimes, bool]:
    """One iteration: how long its parts took, and whether it was committed."""
    began_s = time.perf_counter()
    loop.start_quorum()
    quorum_s = time.perf_counter()
    training.backward()
    backward_s = time.perf_counter()
    works = [loop.allreduce(parameter.grad) for parameter in training.trained]  # type: ignore[arg-type]
    for work in works:
        work.wait()
    reduced_s = time.perf_counter()
    is_committed = loop.should_commit()
    committed_s = time.perf_counter()
    if is_committed:
        training.optimizer.step()
    times = StepTimes(
        start_quorum_s=quorum_s - began_s,
        backward_s=backward_s - quorum_s,
        allreduce_s=reduced_s - backward_s,
        should_commit_s=committed_s - reduced_s,
        optimizer_s=time.perf_counter() - committed_s,
    )
    return times, is_committed
