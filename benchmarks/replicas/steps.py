"""A replica that steps without pause and reports how long each part of its steps took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.machine import keep_free_memory
from benchmarks.processes import Channel
from benchmarks.replicas.managers import Loop, ManagerVariant
from benchmarks.replicas.training import Model, Training

READY: Final = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One iteration, in seconds; and whether all gradients were reduced at once."""

    start_quorum_s: float
    backward_s: float
    allreduce_s: float
    should_commit_s: float
    optimizer_s: float
    is_bucketed: bool = False

    @property
    def whole_s(self) -> float:
        return self.start_quorum_s + self.backward_s + self.allreduce_s + self.should_commit_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a replica does: pairs of steps, one that reduces gradients one by one and one that does it at once.

    Attributes:
        model: What it trains.
        num_threads: Of torch.
        num_warmup_pairs: How many do not count.
        num_pairs: How many do.
    """

    model: Model
    num_threads: int
    num_warmup_pairs: int
    num_pairs: int


def step_replica(channel: Channel, variant: ManagerVariant, name: str, lighthouse: str, plan: Plan) -> None:
    """Says `READY`, waits for a word, steps, says the times of the steps that count, and waits for its end."""
    torch.set_num_threads(plan.num_threads)
    keep_free_memory()
    training = Training(plan.model)
    loop = variant.make(training, name, lighthouse)
    channel.say(READY)
    channel.wait()
    num_steps = 2 * (plan.num_warmup_pairs + plan.num_pairs)
    channel.say(list(_step(training, loop, num_steps))[-2 * plan.num_pairs :])
    channel.wait_for_end()


def _step(training: Training, loop: Loop, num_steps: int) -> Iterator[StepTimes]:
    # As long as all gradients together, as a bucket of DistributedDataParallel that holds them.
    bucket = torch.zeros(sum(parameter.numel() for parameter in training.trained))
    # Replicas that heal make other iterations than those that do not, and end with the same step.
    while (step := loop.current_step()) < num_steps:
        times, _ = step_once(training, loop, bucket if step % 2 else None)
        yield times


def step_once(training: Training, loop: Loop, bucket: torch.Tensor | None = None) -> tuple[StepTimes, bool]:
    """One iteration: how long its parts took, and whether it was committed.

    Args:
        training: What is trained.
        loop: Its manager.
        bucket: Reduced in place of the gradients; without it they are reduced one by one.
    """
    began_s = time.perf_counter()
    loop.start_quorum()
    quorum_s = time.perf_counter()
    training.backward()
    backward_s = time.perf_counter()
    reduced = [bucket] if bucket is not None else [parameter.grad for parameter in training.trained]
    works = [loop.allreduce(tensor) for tensor in reduced]  # type: ignore[arg-type]
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
        is_bucketed=bucket is not None,
    )
    return times, is_committed
