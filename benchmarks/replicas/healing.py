"""The two replicas of the benchmark ``heal``: one that trains, and one that joins it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.machine import back_free_memory, processor_wait_s
from benchmarks.processes import Channel
from benchmarks.replicas.managers import ManagerVariant
from benchmarks.replicas.parts import LOAD, Part, PartRecorder
from benchmarks.replicas.steps import READY, StepTimes, step_once
from benchmarks.replicas.training import LowRankTraining, Model, Resting, Training, make_training

WARM: Final = "warm"
_FILLED_TIMES: Final = 3
"""A replica's state, its gradients, and what a transport receives into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration: when it began, on the monotonic clock of the machine, and its parts.

    Attributes:
        began_s: See above.
        times: See above.
        committed_step: The step that it committed, if it did.
        waited_s: For how long it had no processor.
        contributed: Whether the replica contributed to the step that it committed.
    """

    began_s: float
    times: StepTimes
    committed_step: int | None
    waited_s: float = 0.0
    contributed: bool = False

    @property
    def ended_s(self) -> float:
        return self.began_s + self.times.whole_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a replica has done."""

    steps: list[Step]
    parts: list[Part]

    @property
    def committed(self) -> list[Step]:
        return [step for step in self.steps if step.committed_step is not None]

    @property
    def contributed(self) -> list[Step]:
        return [step for step in self.steps if step.contributed]


def train(channel: Channel, variant: ManagerVariant, model: Model, lighthouse: str, num_steps: int) -> None:
    """Steps without pause, says `WARM` after ``num_steps``, and its `Report` when it is told to."""
    _train(
        _Replica(channel, variant, make_training(model), model=model, name="trains", lighthouse=lighthouse),
        channel,
        num_steps,
    )


def rest(channel: Channel, variant: ManagerVariant, model: Model, lighthouse: str, num_steps: int) -> None:
    """As `train`, without computing."""
    _train(
        _Replica(channel, variant, Resting(model), model=model, name="rests", lighthouse=lighthouse), channel, num_steps
    )


def _train(replica: _Replica, channel: Channel, num_steps: int) -> None:
    replica.commit(num_steps)
    channel.say(WARM)
    while not channel.has_message():
        replica.step()
    channel.say(replica.report)
    channel.wait_for_end()


def join(channel: Channel, variant: ManagerVariant, model: Model, lighthouse: str, num_steps: int) -> None:
    """Steps, says its `Report` after ``num_steps`` were committed, and goes on."""
    replica = _Replica(channel, variant, make_training(model), model=model, name="joins", lighthouse=lighthouse)
    replica.commit(num_steps)
    channel.say(replica.report)
    while True:
        replica.step()


def join_and_contribute(
    channel: Channel, variant: ManagerVariant, model: Model, lighthouse: str, num_steps: int
) -> None:
    """As `join`, but says its `Report` when it has contributed to ``num_steps``."""
    replica = _Replica(channel, variant, make_training(model), model=model, name="joins", lighthouse=lighthouse)
    while len(replica.report.contributed) < num_steps:
        replica.step()
    channel.say(replica.report)
    while True:
        replica.step()


class _Replica:
    """Says `READY` twice: before it fills memory, and when only the manager is missing. With it others wait for it."""

    def __init__(
        self,
        channel: Channel,
        variant: ManagerVariant,
        training: Training | LowRankTraining,
        *,
        model: Model,
        name: str,
        lighthouse: str,
    ) -> None:
        torch.set_num_threads(1)
        recorder = PartRecorder()
        variant.record(recorder)
        self._training = training
        for stateful in (self._training.model, self._training.optimizer):
            recorder.wrap(stateful, "load_state_dict", LOAD)
        channel.say(READY)
        channel.wait()
        # What a process touches first, the host has to find; found pages are filled at ten times the speed.
        back_free_memory(_FILLED_TIMES * model.state_bytes)
        channel.say(READY)
        channel.wait()
        if model.is_warm:
            # A replica that is started warms up what it computes with before it joins.
            self._training.backward()
            self._training.optimizer.zero_grad()
        self._loop = variant.make(self._training, name, lighthouse)
        self.report = Report(steps=[], parts=recorder.parts)

    def commit(self, num_steps: int) -> None:
        while len(self.report.committed) < num_steps:
            self.step()

    def step(self) -> None:
        began_s, waited_s = time.monotonic(), processor_wait_s()
        times, committed = step_once(self._training, self._loop)
        step = self._loop.current_step() if committed else None
        waited_s = processor_wait_s() - waited_s
        contributed = committed and self._loop.is_participating()
        self.report.steps.append(
            Step(began_s=began_s, times=times, committed_step=step, waited_s=waited_s, contributed=contributed)
        )
