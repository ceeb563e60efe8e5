"""Telemetry: what a replica's steps take while it is watched, beside the same replica while nobody looks.

Records go to a file all the time. Phases of a second take turns: in the midst of one, another process asks for
``/metrics`` and ``/state``, as Prometheus and a page do every second; in the other nobody asks. One step in dozens is
hit by an answer, so the mean of a phase's steps is compared, and of many phases the median: what other programs do hits
few of them. Where they are busy all the time, the processor's time tells more: that of the trainer's process for each
step, answers included, and that of the answers alone, of a replica that does nothing else.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import torch

from benchmarks.machine import Watch, keep_free_memory, own_processes
from benchmarks.options import Benchmark, Options, Size, rotated
from benchmarks.processes import Channel, Child
from benchmarks.replicas.lighthouse import lighthouse
from benchmarks.replicas.managers import OURS
from benchmarks.replicas.steps import step_once
from benchmarks.replicas.training import Model, Training
from benchmarks.report import Group, Named, Quantity, Verdict
from benchmarks.transports import torchft_is_installed

_MODEL: Final = Model(name="1000", num_tensors=1000, num_items=1000)
_INTERVAL_S: Final = 1.0
_PHASE_S: Final = 1.0
_NUM_TURNS: Final = {False: 7, True: 21}
"""Phases of each kind in a sample, by whether the run is a full one."""
_IDLE_S: Final = 1.0
_SHORT_INTERVAL_S: Final = 0.02
"""Between the questions to a replica that does nothing else: what it does beside shall not count much."""
_NUM_WARMUP_STEPS: Final = 20
_PATHS: Final = ("/metrics", "/state")
_MOST: Final = 0.01

WATCHED: Final = Named("watched every second", "ours")
ALONE: Final = Named("nobody looks", "ceiling")
_KINDS: Final = (ALONE, WATCHED)
MEAN: Final = Quantity("mean step", "ms")
PROCESSOR: Final = Quantity("processor's time of a step", "ms")
ANSWERS: Final = Quantity("processor's time for the answers of a second", "ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """The mean length of its steps, the processor's time of all that the process did meanwhile, and how many."""

    mean_s: float
    processor_s: float
    num_steps: int


def run(options: Options) -> Iterator[Group]:
    """Measures both kinds by turns, one phase of each in a sample."""
    group = Group("telemetry", _MODEL.name, f"{_MODEL.title}, one replica in a quorum, gradients in one bucket")
    if not torchft_is_installed():
        group.notes.append("it needs the Lighthouse of torchft, which is not installed")
        yield group
        return
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-"))
        address = stack.enter_context(lighthouse(1))
        trainer = Child(_train_when_told, address, str(Path(directory) / "records.jsonl"))
        stack.callback(trainer.close)
        watcher = Child(_watch_when_told, trainer.receive())
        stack.callback(watcher.close)
        watcher.receive()
        for round_number in range(options.size.num_samples):
            options.settle()
            options.say(f"telemetry {round_number + 1}/{options.size.num_samples}")
            with Watch([os.getpid(), trainer.process_id, watcher.process_id, *own_processes()]) as watch:
                phases: dict[Named, list[_Phase]] = {kind: [] for kind in _KINDS}
                for turn in range(_NUM_TURNS[options.is_full]):
                    for kind in rotated(_KINDS, turn):
                        phases[kind].append(_phase(trainer, watcher, kind))
            for kind, of_kind in phases.items():
                mean_s = statistics.median(each.mean_s for each in of_kind)
                processor_s = sum(each.processor_s for each in of_kind) / sum(each.num_steps for each in of_kind)
                group.add(kind, MEAN, watch.sample(round_number, mean_s * 1e3))
                group.add(kind, PROCESSOR, watch.sample(round_number, processor_s * 1e3))
            group.add(WATCHED, ANSWERS, watch.sample(round_number, _answers_s(trainer, watcher) * 1e3))
    group.sort(_KINDS)
    group.notes.append(
        "phases of a second take turns, with one answer of each route in every other one; records go to a file in both"
    )
    group.verdicts = judge(group)
    yield group


def judge(group: Group) -> list[Verdict]:
    """The cost by the clock and by the processor's time, and that of the answers alone, against a second."""
    return [
        Verdict.at_most(
            "processor's time of a step while watched / while nobody looks",
            group.ratio(WATCHED, ALONE, PROCESSOR),
            1.0 + _MOST,
        ),
        Verdict.at_most("mean step while watched / while nobody looks", group.ratio(WATCHED, ALONE, MEAN), 1.0 + _MOST),
        Verdict.at_most(
            "processor's time for the answers of a second", group.figure(WATCHED, ANSWERS), _MOST * _INTERVAL_S * 1e3
        ),
    ]


def _phase(trainer: Child, watcher: Child, kind: Named) -> _Phase:
    with _watching(watcher, kind):
        trainer.say(("train", _PHASE_S))
        phase: _Phase = trainer.receive()
        return phase


def _answers_s(trainer: Child, watcher: Child) -> float:
    """The processor's time that the trainer's process takes for an answer of each route, while it does not train."""
    watcher.say(_SHORT_INTERVAL_S)
    trainer.say(("idle", _IDLE_S))
    spent_s = float(trainer.receive())
    watcher.say("stop")
    return spent_s / int(watcher.receive())


@contextlib.contextmanager
def _watching(watcher: Child, kind: Named) -> Iterator[None]:
    if kind is WATCHED:
        watcher.say(_INTERVAL_S)
    try:
        yield
    finally:
        if kind is WATCHED:
            watcher.say("stop")
            assert watcher.receive() > 0, "it has asked"


def _train_when_told(channel: Channel, lighthouse_address: str, records: str) -> None:
    os.environ["FT_TRANSPORT_RECORDS"] = records
    # A step of several threads waits for the last of them, whoever holds that one up, and spins meanwhile.
    torch.set_num_threads(1)
    keep_free_memory()
    training = Training(_MODEL)
    loop = OURS.make(training, "watched", lighthouse_address)
    bucket = torch.zeros(sum(parameter.numel() for parameter in training.trained))

    def step() -> float:
        return step_once(training, loop, bucket)[0].whole_s

    for _ in range(_NUM_WARMUP_STEPS):
        step()
    channel.say(loop.metadata())  # type: ignore[attr-defined]
    while True:
        what, seconds = channel.wait()
        before_s = time.process_time()
        if what == "train":
            steps_s = []
            until_s = time.perf_counter() + seconds
            while time.perf_counter() < until_s:
                steps_s.append(step())
            spent_s = time.process_time() - before_s
            channel.say(_Phase(mean_s=statistics.fmean(steps_s), processor_s=spent_s, num_steps=len(steps_s)))
        else:
            time.sleep(seconds)
            channel.say(time.process_time() - before_s)


def _watch_when_told(channel: Channel, address: str) -> None:
    """Asks in the interval that it is told until it is told to stop; says how often that was."""
    parts = urlsplit(address)
    peer = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60.0)
    _ask(peer)  # the first scrape imports what writes it
    channel.say("ready")
    while True:
        interval_s = channel.wait()
        num_asked, next_s = 0, time.monotonic() + interval_s / 2
        while not channel.has_message():
            if time.monotonic() >= next_s:
                _ask(peer)
                num_asked, next_s = num_asked + 1, next_s + interval_s
            time.sleep(0.005)
        channel.wait()
        channel.say(num_asked)


def _ask(peer: http.client.HTTPConnection) -> None:
    for path in _PATHS:
        peer.request("GET", path)
        response = peer.getresponse()
        assert (response.status, bool(response.read())) == (200, True)


BENCHMARK: Final = Benchmark(
    name="telemetry",
    question="What does watching cost a step?",
    run=run,
    states=("1000",),
    default=Size(scale=1.0, num_samples=5),
)
