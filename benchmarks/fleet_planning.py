"""What it costs one receiver of a fleet to decide whom to ask for what: all calls of its machine, without any wire."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from benchmarks.options import Options
from benchmarks.report import Group, Quantity, Role, Sample, Verdict
from ft_transport.errors import PeerUnreachableError
from ft_transport.wire.fetch import FetchMachine, Request, WorkerIndex
from ft_transport.wire.swarm import Swarm
from ft_transport.wire.swarm_work import SwarmWork

_NUM_CHUNKS: Final = 20_000
_NUM_HOSTS: Final = 64
_SECONDS: Final = Quantity("all decisions of one receiver", "s")


@dataclass(frozen=True, slots=True)
class Answers:
    """How relays answer.

    Attributes:
        name: What they do.
        num_chunks: How many chunks an answer has at most.
        num_dead: How many of them are dead.
    """

    name: str
    num_chunks: int
    num_dead: int = 0
    role: Role = "ours"


_ANSWERS: Final = (
    Answers("relays have all they are asked for", _NUM_CHUNKS),
    Answers("relays have one chunk at a time", 1),
    Answers("half of the relays are dead", 4, _NUM_HOSTS // 2),
)


def measure(options: Options) -> Group:
    """Measures one kind of relays after the other."""
    title = f"{_NUM_HOSTS} sources, {_NUM_HOSTS} receivers, {_NUM_CHUNKS} chunks"
    group = Group("fleet-simulation", "planning", title)
    for answers in _ANSWERS:
        for number in range(max(3, options.size.num_samples)):
            options.settle()
            options.say(f"fleet-simulation planning {answers.name}")
            group.add(answers, _SECONDS, Sample(number, _seconds_of(answers)))
    slowest = max((series.figure for series in group.series), key=lambda figure: figure.value)
    group.verdicts = [Verdict.at_most("deciding, the slowest median", slowest, 0.2)]
    return group


def _seconds_of(answers: Answers) -> float:
    """Of this process's own time, for other processes decide nothing."""
    fleet = Swarm(num_sources=_NUM_HOSTS, num_receivers=_NUM_HOSTS, own=_NUM_HOSTS // 3)
    names = [f"host {number}" for number in range(2 * _NUM_HOSTS - 1)]
    began_s = time.process_time()
    work = SwarmWork([(0, _NUM_CHUNKS)], num_chunks=_NUM_CHUNKS, swarm=fleet, num_connections=4)
    machine: FetchMachine[int] = FetchMachine(work, sources=names, max_failures=4)
    while machine.stopped is None:
        workers = [WorkerIndex(index) for index in range(work.num_workers)]
        for worker, instruction in [(worker, machine.next(worker)) for worker in workers]:
            if isinstance(instruction, Request):
                _answer(machine, worker, instruction, answers)
    assert machine.stopped.error is None
    return time.process_time() - began_s


def _answer(machine: FetchMachine[int], worker: WorkerIndex, request: Request[int], answers: Answers) -> None:
    num_chunks = len(request.units)
    if request.source >= _NUM_HOSTS:
        if request.source < _NUM_HOSTS + answers.num_dead:
            machine.request_failed(worker, PeerUnreachableError("it has gone"))
            return
        num_chunks = min(num_chunks, answers.num_chunks)
    for _ in range(num_chunks):
        machine.unit_landed(worker)
    machine.request_cut(worker)
