"""Stall: what a trainer that steps without pause loses while a receiver reads its state at 50 MB/s.

Ours: the manager's ``start_step`` at the top of each iteration, and its lock around each optimizer step. torchft: as
in its manager, the quorum's thread calls ``send_checkpoint``, and ``should_commit`` calls ``disallow_checkpoint``.
"""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from benchmarks import transports
from benchmarks.machine import Watch
from benchmarks.options import Benchmark, Options, Size
from benchmarks.processes import Channel, Child
from benchmarks.replicas.serving import Ours, Side, Torchft
from benchmarks.replicas.training import Model, Training
from benchmarks.report import Figure, Group, Named, Quantity, Verdict

_STATE_BYTES: Final = 256_000_000
_NUM_TENSORS: Final = 4
_BYTES_PER_S: Final = 50e6
_BLOCK_BYTES: Final = 64 << 10
_QUIET_S: Final = {False: 0.5, True: 2.0}
"""How long the trainer is watched before and after the transfer, by whether the run is a full one."""
_NUM_WARMUP_STEPS: Final = 3
_STEPS_AHEAD: Final = 5
"""The receiver is told of a step so long before it, because torchft's asks for the step that the quorum agreed on."""

NEW_ARENA: Final = Named("ft_transport, new arena", "ours")
WARM_ARENA: Final = Named("ft_transport, warm arena", "ours")
TORCHFT: Final = Named("torchft", "peer")
WAIT: Final = Quantity("longest wait before the optimizer", "ms")
CLONE: Final = Quantity("clone under the lock", "ms")
LOST: Final = Quantity("longest time lost in a step", "ms")
TRANSFER: Final = Quantity("the transfer", "ms")


@dataclass(slots=True)
class _Step:
    """One iteration of the trainer, on the monotonic clock.

    ``lost_s`` is the time that it waited for the transport or did its work: at the step boundary, and before the
    optimizer's step.
    """

    start_s: float
    end_s: float = 0.0
    boundary_s: float = 0.0
    wait_s: float = 0.0

    @property
    def lost_s(self) -> float:
        return self.boundary_s + self.wait_s

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class _Trainer:
    """Steps without pause, on the calling thread."""

    def __init__(self, training: Training, side: Side) -> None:
        self.steps: list[_Step] = []
        self._training = training
        self.side = side
        self._hook_began_s = 0.0
        # Hooks run in the order of their registration: `attach` registered its own before. So the wait is timed from
        # the call of `step` to the first hook behind the manager's.
        training.optimizer.register_step_pre_hook(self._hook_ended)

    def train_until(self, is_over: Callable[[], bool]) -> list[_Step]:
        """Returns the steps that it made."""
        first = len(self.steps)
        while not is_over():
            step = _Step(time.monotonic())
            self.side.begin_step(len(self.steps))
            step.boundary_s = time.monotonic() - step.start_s
            self._training.backward()
            self.steps.append(step)
            self._hook_began_s = time.monotonic()
            self.side.before_optimizer()
            self._training.optimizer.step()
            step.end_s = time.monotonic()
        return self.steps[first:]

    def is_warm(self) -> bool:
        return len(self.steps) >= _NUM_WARMUP_STEPS

    def train_for(self, seconds: float) -> list[_Step]:
        until_s = time.monotonic() + seconds
        return self.train_until(lambda: time.monotonic() >= until_s)

    def _hook_ended(self, *_hook_arguments: object) -> None:
        self.steps[-1].wait_s = time.monotonic() - self._hook_began_s


def _read_slowly(channel: Channel, bytes_per_s: float) -> None:
    """A receiver on a slow network: waits for a URL, reads it at a fixed pace, and says how many seconds that took."""
    channel.say("ready")
    parts = urlsplit(channel.wait())
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120.0)
    connection.request("GET", parts.path)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"expected status 200, got {response.status} {response.reason}")
    began_s = time.monotonic()
    block = bytearray(_BLOCK_BYTES)
    num_bytes = 0
    while got := response.readinto(block):
        num_bytes += got
        time.sleep(max(0.0, began_s + num_bytes / bytes_per_s - time.monotonic()))
    channel.say(time.monotonic() - began_s)
    channel.wait_for_end()


def run(options: Options) -> Iterator[Group]:
    """Measures ours and torchft's by turns."""
    num_items = int(_STATE_BYTES * options.scale) // (3 * 4 * _NUM_TENSORS)
    model = Model(name="stall", num_tensors=_NUM_TENSORS, num_items=num_items, is_foreach=None)
    title = f"{model.state_bytes / 1e6:.0f} MB under AdamW, a receiver at {_BYTES_PER_S / 1e6:.0f} MB/s"
    group = Group("stall", "trainer", title)
    sides: tuple[type[Ours] | type[Torchft], ...] = (Ours, Torchft) if transports.torchft_is_installed() else (Ours,)
    for round_number, make_side in options.rounds("stall", sides):
        training = Training(model)
        side = make_side(training)
        try:
            trainer = _Trainer(training, side)
            trainer.train_until(trainer.is_warm)
            # torchft has no arena that could be warm.
            for variant in (NEW_ARENA, WARM_ARENA) if make_side is Ours else (TORCHFT,):
                if variant is WARM_ARENA:
                    side.prefault()
                _transfer(group, variant, round_number, trainer, _QUIET_S[options.is_full])
        finally:
            side.close()
    if not transports.torchft_is_installed():
        group.notes.append(transports.NO_TORCHFT)
    group.notes.append(
        "lost: at the step boundary and before the optimizer's step together, the longest of any one step"
    )
    group.sort((NEW_ARENA, WARM_ARENA, TORCHFT))
    group.verdicts = judge(group)
    yield group


def _transfer(group: Group, variant: Named, round_number: int, trainer: _Trainer, quiet_s: float) -> None:
    """Trains before, during and after one transfer."""
    reader = Child(_read_slowly, _BYTES_PER_S)
    try:
        reader.receive()
        before = trainer.train_for(quiet_s)
        with Watch([os.getpid(), reader.process_id]) as watch:
            reader.say(trainer.side.url(len(trainer.steps) + _STEPS_AHEAD))
            during = trainer.train_until(reader.has_message)
        transfer_s = reader.receive()
    finally:
        reader.close()
    after = trainer.train_for(quiet_s)

    def add(quantity: Quantity, seconds: float) -> None:
        group.add(variant, quantity, watch.sample(round_number, seconds * 1e3))

    add(WAIT, max(step.wait_s for step in during))
    if (clone_s := trainer.side.clone_s()) is not None:
        add(CLONE, clone_s)
    add(LOST, max(step.lost_s for step in during))
    add(TRANSFER, transfer_s)
    for name, steps in (("before", before), ("during", during), ("after", after)):
        times = sorted(step.seconds for step in steps)
        add(Quantity(f"median step {name}", "ms"), times[len(times) // 2])
        add(Quantity(f"longest step {name}", "ms"), times[-1])


def judge(group: Group) -> list[Verdict]:
    """The longest wait of each transfer against the clone that it waited for: the worst of all counts."""
    ratios: list[float] = []
    for arena in (NEW_ARENA, WARM_ARENA):
        wait, clone = group.find(arena, WAIT), group.find(arena, CLONE)
        if wait is not None and clone is not None:
            ratios += [w.value / c.value for w, c in zip(wait.samples, clone.samples, strict=True)]
    worst = Figure(max(ratios), min(ratios), max(ratios)) if ratios else None
    peer_wait, transfer = group.figure(TORCHFT, WAIT), group.figure(TORCHFT, TRANSFER)
    if peer_wait is not None and transfer is not None:
        group.notes.append(f"torchft's trainer waited for {peer_wait.value / transfer.value:.0%} of the transfer")
    return [Verdict.at_most("longest wait before the optimizer / clone under the lock", worst, 1.0)]


BENCHMARK: Final = Benchmark(
    name="stall",
    question="How long does a slow receiver hold the trainer?",
    run=run,
    default=Size(scale=0.5, num_samples=3),
)
