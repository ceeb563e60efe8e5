"""Cap: what a trainer's steps take while it sends a state at its cap, beside as many bytes of an unrelated process.

Three kinds of short phases take turns: nobody sends; the trainer's own server sends at `max_send_bytes_per_s`; another
process sends at the same rate, with the same calls. The same third process receives in both. So what differs is where
the sending threads are: in the trainer's process, beside its interpreter, or not.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

import torch

from benchmarks.machine import Watch, own_processes
from benchmarks.options import Benchmark, Options, Size, rotated
from benchmarks.processes import Channel, Child
from benchmarks.replicas.training import Model, Training
from benchmarks.report import Group, Named, Quantity, Verdict
from ft_transport import HTTPTransport, Limits, TransportSettings
from ft_transport.http.server.body_sender import BodySocket, RateLimiter

_STATE_BYTES: Final = 512_000_000
_BYTES_PER_S: Final = 200e6
_BLOCK_BYTES: Final = 1 << 20
_PHASE_S: Final = 0.25
_NUM_TURNS: Final = {False: 10, True: 30}
"""Phases of each kind in a sample, by whether the run is a full one."""
_NUM_WARMUP_STEPS: Final = 20
_SETTLING_S: Final = 0.05
"""Of each phase, not counted: a connection begins, or what is in the sockets' buffers comes to its end."""
_TIMEOUT: Final = timedelta(seconds=60)

ALONE: Final = Named("nobody sends", "ceiling")
SERVING: Final = Named("the trainer serves", "ours")
UNRELATED: Final = Named("an unrelated process sends", "ceiling")
MEDIAN: Final = Quantity("median step", "ms")
MEAN: Final = Quantity("mean step", "ms")
LONG: Final = Quantity("99 % of the steps within", "ms")
RATE: Final = Quantity("sent meanwhile", "MB/s")
_KINDS: Final = (ALONE, SERVING, UNRELATED)


@dataclass(slots=True)
class _Phases:
    """All phases of one kind in a sample: the seconds of each step, and what was received at which rate."""

    steps_s: list[float] = field(default_factory=list)
    num_bytes: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def _unrelated(num_bytes: int) -> Iterator[int]:
    """Starts the unrelated process; yields the port where it sends.

    It stays in the trainer's session: Linux divides the cores among sessions first (``sched_autogroup_enabled`` in
    sched(7)), so on a busy machine a session of its own would have time that the trainer's threads have not.
    """
    command = [sys.executable, "-m", "benchmarks.cap", str(num_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def _send(num_bytes: int) -> None:
    """The unrelated process: sends to whoever connects, again and again from memory, until the connection ends."""
    descriptor = os.memfd_create("cap")
    os.write(descriptor, b"\x01" * num_bytes)
    cap = RateLimiter(_BYTES_PER_S)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connected, _ = listener.accept()
            with connected:
                paced = BodySocket(connected, cap)
                try:
                    while True:
                        position = 0
                        while position < num_bytes:
                            position += paced.send_file(descriptor, position, num_bytes - position)
                except OSError:
                    continue


def _receive(channel: Channel, url: str, port: int) -> None:
    """Receives from the trainer's server or the unrelated process until told to stop; says how much that was."""
    block = bytearray(_BLOCK_BYTES)
    channel.say("ready")
    while True:
        num_bytes, began_s = 0, time.monotonic()
        if channel.wait() == SERVING.name:
            parts = urlsplit(url)
            peer = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60.0)
            while not channel.has_message():
                peer.request("GET", parts.path)
                response = peer.getresponse()
                while not channel.has_message() and (got := response.readinto(block)):
                    num_bytes += got
            peer.close()
        else:
            with socket.create_connection(("127.0.0.1", port), timeout=60.0) as raw:
                while not channel.has_message() and (got := raw.recv_into(block)):
                    num_bytes += got
        channel.wait()
        channel.say((num_bytes, time.monotonic() - began_s))


def run(options: Options) -> Iterator[Group]:
    """Measures all three kinds by turns, several times in each sample."""
    num_state_items = int(_STATE_BYTES * options.scale) // 4
    model = Model(name="cap", num_tensors=8, num_items=100_000, is_foreach=None)
    group = Group("cap", "trainer", f"{model.title}, {_BYTES_PER_S / 1e6:.0f} MB/s sent")
    training = Training(model)
    # A step of several threads waits for the last of them, whoever holds that one up.
    torch.set_num_threads(1)
    settings = TransportSettings(
        host="127.0.0.1", advertise="127.0.0.1", limits=Limits(max_send_bytes_per_s=_BYTES_PER_S)
    )
    transport: HTTPTransport[object] = HTTPTransport(_TIMEOUT, settings=settings)
    stack = contextlib.ExitStack()
    try:
        transport.send_checkpoint([], 1, {"w": torch.ones(num_state_items)}, _TIMEOUT)
        port = stack.enter_context(_unrelated(num_state_items * 4))
        receiver = Child(_receive, f"{transport.metadata()}1/full", port)
        try:
            receiver.receive()
            for _ in range(_NUM_WARMUP_STEPS):
                _step(training)
            for round_number in range(options.size.num_samples):
                options.settle()
                options.say(f"cap {round_number + 1}/{options.size.num_samples}")
                _sample(group, round_number, training, receiver, options)
        finally:
            receiver.close()
    finally:
        stack.close()
        transport.shutdown()
    group.sort(_KINDS)
    group.notes.append(
        "phases of a quarter of a second take turns; the receiver is the same process in both, the unrelated one sends "
        "with the same calls, in pieces of the same size"
    )
    group.verdicts = judge(group)
    yield group


def _sample(group: Group, round_number: int, training: Training, receiver: Child, options: Options) -> None:
    phases = {kind: _Phases() for kind in _KINDS}
    with Watch(own_processes()) as watch:
        for turn in range(_NUM_TURNS[options.is_full]):
            for kind in rotated(_KINDS, turn + round_number):
                if kind is not ALONE:
                    receiver.say(kind.name)
                _train(training, _SETTLING_S)
                phases[kind].steps_s += _train(training, _PHASE_S)
                if kind is not ALONE:
                    receiver.say("stop")
                    num_bytes, seconds = receiver.receive()
                    phases[kind].num_bytes += num_bytes
                    phases[kind].seconds += seconds
                _train(training, _SETTLING_S)
    for kind, each in phases.items():
        times = sorted(each.steps_s)
        for quantity, seconds in (
            (MEDIAN, times[len(times) // 2]),
            (MEAN, statistics.fmean(times)),
            (LONG, times[int(len(times) * 0.99)]),
        ):
            group.add(kind, quantity, watch.sample(round_number, seconds * 1e3))
        if kind is not ALONE:
            group.add(kind, RATE, watch.sample(round_number, each.num_bytes / each.seconds / 1e6))


def _train(training: Training, seconds: float) -> list[float]:
    """Trains for so long; returns how long each step took, in seconds."""
    steps_s = []
    until_s = time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < until_s:
        _step(training)
        steps_s.append(time.perf_counter() - began_s)
    return steps_s


def _step(training: Training) -> None:
    training.backward()
    training.optimizer.step()


def judge(group: Group) -> list[Verdict]:
    """A step beside the trainer's own sending threads against one beside somebody else's."""
    return [
        Verdict.at_most(
            "median step while serving at the cap / while an unrelated process sends as much",
            group.ratio(SERVING, UNRELATED, MEDIAN),
            1.05,
        ),
        Verdict.at_most(
            "mean step while serving at the cap / while an unrelated process sends as much",
            group.ratio(SERVING, UNRELATED, MEAN),
            1.05,
        ),
    ]


BENCHMARK: Final = Benchmark(
    name="cap", question="What does serving at a cap cost a step?", run=run, default=Size(scale=0.5, num_samples=5)
)

if __name__ == "__main__":
    _send(int(sys.argv[1]))
