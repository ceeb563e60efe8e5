"""The replicas of the benchmark ``goodput``: they train until they are killed, and report each commit."""

from __future__ import annotations

import contextlib
import resource
import shutil
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch

from benchmarks.processes import Channel
from benchmarks.replicas.managers import ManagerVariant
from benchmarks.replicas.steps import step_once
from benchmarks.replicas.training import Model, Training

START_S: Final = 3.0
"""How long a restarted process is busy with imports before it makes its manager; these processes are forked."""
_TIMEOUT: Final = timedelta(seconds=10)
_SAVE_EVERY: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job of a run, which all its replicas train.

    Attributes:
        model: The model.
        step_s: Length of a step, in seconds.
        num_replicas: Number of replicas.
    """

    model: Model
    step_s: float
    num_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A start of one replica.

    Attributes:
        name: Of the replica; a number.
        address: Of the Lighthouse, or of the store through which ranks without a manager find each other.
        is_restart: Whether it was started before.
    """

    name: str
    address: str
    is_restart: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit of one replica.

    Attributes:
        step: The committed step.
        at_s: When, on the monotonic clock of the machine.
        contributed: Whether the replica contributed to the step.
        began_s: When the replica began to ask for its first quorum.
        rss_bytes: The largest memory of the process so far.
    """

    step: int
    at_s: float
    contributed: bool = True
    began_s: float = 0.0
    rss_bytes: int = 0


class PacedTraining(Training):
    """Computes for a given time, without a processor: the replicas of a run share two."""

    def __init__(self, model: Model, step_s: float) -> None:
        super().__init__(model)
        self._step_s = step_s

    def backward(self) -> None:
        time.sleep(self._step_s)
        for parameter in self.trained:
            parameter.grad = torch.full_like(parameter, 1e-3)


def train(channel: Channel, variant: ManagerVariant, job: Job, start: Start) -> None:
    """Trains with a manager until it is killed, and says each `Commit`."""
    torch.set_num_threads(1)
    time.sleep(START_S if start.is_restart else 0.0)
    training = PacedTraining(job.model, job.step_s)
    loop = variant.make(training, start.name, start.address)
    began_s = time.monotonic()
    while True:
        _, is_committed = step_once(training, loop)
        if is_committed:
            channel.say(
                Commit(
                    step=loop.current_step(),
                    at_s=time.monotonic(),
                    contributed=loop.is_participating(),
                    began_s=began_s,
                    rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
                )
            )


def train_with_checkpoints(channel: Channel, job: Job, start: Start, directory: Path) -> None:
    """As `train` without fault tolerance: all ranks restart together, from the newest checkpoint of DCP."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    torch.set_num_threads(1)
    time.sleep(START_S if start.is_restart else 0.0)
    training = PacedTraining(job.model, job.step_s)
    for parameter in training.trained:
        parameter.grad = torch.zeros_like(parameter)
    training.optimizer.step()  # makes its state, which is loaded in place
    dist.init_process_group(
        "gloo", init_method=start.address, rank=int(start.name), world_size=job.num_replicas, timeout=_TIMEOUT
    )
    # The save's thread has collectives of its own, beside those of the gradients.
    saving_group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(), "step": 0}
    newest = newest_checkpoint(directory)
    if newest is not None:
        dcp.load(state, checkpoint_id=str(newest))
        training.optimizer.load_state_dict(state["optimizer"])
    step = int(state["step"])
    saving = None
    while True:
        training.backward()
        for parameter in training.trained:
            dist.all_reduce(parameter.grad)
        training.optimizer.step()
        step += 1
        channel.say(Commit(step=step, at_s=time.monotonic()))
        if step % _SAVE_EVERY == 0:
            if saving is not None:
                saving.result()
            state = {
                "model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(), "step": step,
            }  # fmt: skip
            saving = dcp.async_save(state, checkpoint_id=str(directory / f"step-{step}"), process_group=saving_group)


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint; older ones are removed. DCP writes ``.metadata`` last."""
    complete = sorted(
        (each for each in directory.glob("step-*") if (each / ".metadata").exists()),
        key=lambda each: int(each.name.rpartition("-")[2]),
    )
    for each in complete[:-1]:
        with contextlib.suppress(OSError):  # another rank is faster
            shutil.rmtree(each)
    return complete[-1] if complete else None
