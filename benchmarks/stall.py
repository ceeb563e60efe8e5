"""Stall: what a trainer that steps without pause loses while a receiver reads its state at 50 MB/s.

Ours: the manager's ``start_step`` at the top of each iteration, and its lock around each optimizer step. torchft: as
in its manager, the quorum's thread calls ``send_checkpoint``, and ``should_commit`` calls ``disallow_checkpoint``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Protocol

import torch

from benchmarks import peers
from benchmarks.machine import Watch, is_busy
from benchmarks.options import Benchmark, Options, Size
from benchmarks.report import Group, Phase, Ratio, Role, Sample, Verdict
from ft_transport import HTTPTransport, SnapshotInProgress, TransportSettings
from manager import Manager

_STATE_BYTES: Final = 256_000_000
_NUM_TENSORS: Final = 4
_BYTES_PER_S: Final = 50e6
_QUIET_S: Final = 0.5
"""How long the trainer is watched before and after the transfer."""
_FULL_QUIET_S: Final = 2.0
"""The same in a full run."""
_NUM_WARMUP_STEPS: Final = 3
_STEPS_AHEAD: Final = 5
"""The receiver is told of a step so long before it, because torchft's asks for the step that the quorum agreed on."""
_REPOSITORY: Final = Path(__file__).resolve().parent.parent

MS: Final = "ms"


@dataclass
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


class _Side(Protocol):
    """What differs between ours and torchft's."""

    def begin_step(self, step: int) -> None:
        """At the top of an iteration."""

    def before_optimizer(self) -> None:
        """Between backward and the optimizer's step."""

    def url(self, step: int) -> str:
        """What the receiver reads, if it is told so ``_STEPS_AHEAD`` before ``step``."""

    def clone_s(self) -> float | None:
        """How long the last snapshot held the lock."""

    def prefault(self) -> None:
        """Between two steps: uses every buffer once, so that none has to be made any more."""

    def close(self) -> None:
        """Ends everything."""


class _Training:
    """Four tensors under AdamW: a third of the state is parameters."""

    def __init__(self, scale: float) -> None:
        num_items = int(_STATE_BYTES * scale) // (3 * 4 * _NUM_TENSORS)
        self.model = torch.nn.ParameterList([torch.randn(num_items) for _ in range(_NUM_TENSORS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        torch.stack([parameter.square().mean() for parameter in self.model]).sum().backward()

    def state_dict(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class _TimedTransport(HTTPTransport[Any]):
    """Notes how long the parts of a snapshot take that the lock is held for."""

    last_clone_s: float | None = None

    def begin_snapshot(self, step: int, state: object, **options: Any) -> SnapshotInProgress:
        started_s = time.monotonic()
        in_progress = super().begin_snapshot(step, state, **options)
        begin_s = time.monotonic() - started_s
        copy_deferred = in_progress.copy_deferred

        def timed_copy() -> None:
            copy_started_s = time.monotonic()
            copy_deferred()
            self.last_clone_s = begin_s + time.monotonic() - copy_started_s

        in_progress.copy_deferred = timed_copy  # type: ignore[method-assign]
        return in_progress


class _Ours:
    def __init__(self, training: _Training) -> None:
        self._transport = _TimedTransport(settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1"))
        self._manager = Manager(checkpoint_transport=self._transport)
        self._manager.register("model", training.model)
        self._manager.register("optimizer", training.optimizer)
        self._manager.attach(training.optimizer)

    def begin_step(self, step: int) -> None:
        self._manager.start_step(step)

    def before_optimizer(self) -> None:
        """The hook that ``attach`` registered waits inside of ``optimizer.step``."""

    def url(self, _step: int) -> str:
        return f"{self._transport.metadata()}latest/full"

    def clone_s(self) -> float | None:
        return self._transport.last_clone_s

    def prefault(self) -> None:
        for _ in range(TransportSettings().max_snapshots):
            # The last step has ended.
            self._manager.snapshot(self._manager.current_step() + 1).result()

    def close(self) -> None:
        self._manager.shutdown()


class _Torchft:
    def __init__(self, training: _Training) -> None:
        self._training = training
        self._transport = peers.torchft_http_transport(0)
        self._quorum_thread = ThreadPoolExecutor(1)
        self._send_at: int | None = None

    def begin_step(self, step: int) -> None:
        if step == self._send_at:
            # As Manager.start_quorum does; the trainer's first all-reduce waits for the thread.
            self._quorum_thread.submit(
                self._transport.send_checkpoint, [1], step, self._training.state_dict(), peers.TIMEOUT
            ).result()

    def before_optimizer(self) -> None:
        self._transport.disallow_checkpoint()

    def url(self, step: int) -> str:
        self._send_at = step
        return f"{peers.on_loopback(self._transport.metadata())}{step}/full"

    def clone_s(self) -> float | None:
        return None

    def prefault(self) -> None:
        """It has no buffers."""

    def close(self) -> None:
        self._quorum_thread.shutdown()
        self._transport.shutdown()


@dataclass
class _Reader:
    """The slow receiver's process. ``done`` is set when it has read everything or failed."""

    process: subprocess.Popen[str]
    done: threading.Event = field(default_factory=threading.Event)
    outcome: dict[str, float] = field(default_factory=dict)

    def go(self, url: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(url + "\n")
        self.process.stdin.flush()

    def listen(self, output: IO[str]) -> None:
        line = output.readline()
        if line:
            self.outcome.update(json.loads(line))
        self.done.set()


@contextlib.contextmanager
def _reader(bytes_per_s: float) -> Iterator[_Reader]:
    command = [sys.executable, "-m", "benchmarks.throttled_reader", str(bytes_per_s)]
    with subprocess.Popen(
        command, cwd=_REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            reader = _Reader(process)
            listener = threading.Thread(target=reader.listen, args=(process.stdout,), daemon=True)
            listener.start()
            yield reader
        finally:
            process.kill()


def run(options: Options) -> Iterator[Group]:
    """Measures ours and torchft's by turns."""
    size = _STATE_BYTES * options.scale
    quiet_s = _FULL_QUIET_S if options.is_full else _QUIET_S
    group = Group("stall", "trainer", f"{size / 1e6:.0f} MB under AdamW, a receiver at {_BYTES_PER_S / 1e6:.0f} MB/s")
    for round_number in range(options.num_samples):
        options.settle()
        options.say(f"stall {round_number + 1}/{options.num_samples} ft_transport")
        _run_side(group, round_number, options.scale, "ours", _Ours, num_transfers=2, quiet_s=quiet_s)
        if peers.torchft_is_installed():
            options.settle()
            options.say(f"stall {round_number + 1}/{options.num_samples} torchft")
            _run_side(group, round_number, options.scale, "peer", _Torchft, num_transfers=1, quiet_s=quiet_s)
    if not peers.torchft_is_installed():
        group.notes.append("torchft is not installed, so its rows are missing")
    group.notes.append(
        "lost: at the step boundary and before the optimizer's step together, the longest of any one step"
    )
    group.verdicts = judge(group)
    yield group


def _run_side(
    group: Group,
    round_number: int,
    scale: float,
    role: Role,
    make_side: Callable[[_Training], _Side],
    *,
    num_transfers: int,
    quiet_s: float,
) -> None:
    """Trains through some transfers: the first one with an arena that has to be made, the second with a warm one."""
    training = _Training(scale)
    side = make_side(training)
    try:
        trainer = _Trainer(training, side)
        trainer.train_until(lambda: len(trainer.steps) >= _NUM_WARMUP_STEPS)
        for index in range(num_transfers):
            phase: Phase = "warm" if index else "cold"
            if index:
                side.prefault()
            with _reader(_BYTES_PER_S) as reader:
                outcome = _transfer(trainer, reader, side, quiet_s)
            _take_note(group, round_number, role, phase, outcome)
    finally:
        side.close()


class _Trainer:
    """Steps without pause, on the calling thread."""

    def __init__(self, training: _Training, side: _Side) -> None:
        self.steps: list[_Step] = []
        self._training = training
        self._side = side
        self._hook_began_s = 0.0
        # Hooks run in the order of their registration: `attach` registered its own before. So the wait is timed from
        # the call of `step` to the first hook behind the manager's.
        training.optimizer.register_step_pre_hook(self._hook_ended)

    @property
    def next_step(self) -> int:
        return len(self.steps)

    def train_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            step = _Step(time.monotonic())
            self._side.begin_step(len(self.steps))
            step.boundary_s = time.monotonic() - step.start_s
            self._training.backward()
            self.steps.append(step)
            self._hook_began_s = time.monotonic()
            self._side.before_optimizer()
            self._training.optimizer.step()
            step.end_s = time.monotonic()

    def _hook_ended(self, *_hook_arguments: object) -> None:
        self.steps[-1].wait_s = time.monotonic() - self._hook_began_s


@dataclass(frozen=True)
class _Outcome:
    """The steps of one transfer, and how long the receiver read."""

    before: list[_Step]
    during: list[_Step]
    after: list[_Step]
    transfer_s: float
    others_share: float | None
    clone_s: float | None


def _transfer(trainer: _Trainer, reader: _Reader, side: _Side, quiet_s: float) -> _Outcome:
    first = trainer.next_step
    quiet_until_s = time.monotonic() + quiet_s
    trainer.train_until(lambda: time.monotonic() >= quiet_until_s)
    watch = Watch([os.getpid(), reader.process.pid])
    watch.start()
    go = trainer.next_step
    reader.go(side.url(go + _STEPS_AHEAD))
    trainer.train_until(reader.done.is_set)
    share = watch.stop()
    if not reader.outcome:
        raise RuntimeError("the receiver failed; its message is above")
    end = trainer.next_step
    quiet_until_s = time.monotonic() + quiet_s
    trainer.train_until(lambda: time.monotonic() >= quiet_until_s)
    return _Outcome(
        before=trainer.steps[first:go],
        during=trainer.steps[go:end],
        after=trainer.steps[end:],
        transfer_s=reader.outcome["ended_s"] - reader.outcome["began_s"],
        others_share=share,
        clone_s=side.clone_s(),
    )


def _take_note(group: Group, round_number: int, role: Role, phase: Phase, outcome: _Outcome) -> None:
    def add(key: str, label: str, seconds: float) -> None:
        sample = Sample(round_number, seconds * 1e3, is_busy(outcome.others_share), outcome.others_share)
        group.add(f"{role}_{key}", sample, label=label, role=role, phase=phase, unit=MS)

    add("wait", "longest wait before the optimizer", max(step.wait_s for step in outcome.during))
    if outcome.clone_s is not None:
        add("clone", "clone under the lock", outcome.clone_s)
    add("lost", "longest time lost in a step", max(step.lost_s for step in outcome.during))
    add("transfer", "the transfer", outcome.transfer_s)
    for key, steps in (("before", outcome.before), ("during", outcome.during), ("after", outcome.after)):
        times = sorted(step.seconds for step in steps)
        add(f"step_{key}", f"median step {key}", times[len(times) // 2])
        add(f"longest_{key}", f"longest step {key}", times[-1])


def judge(group: Group) -> list[Verdict]:
    """The longest wait of each transfer against the clone that it waited for: the worst of all counts."""
    ratios: list[float] = []
    for phase in ("cold", "warm"):
        wait, clone = group.find("ours_wait", phase, MS), group.find("ours_clone", phase, MS)
        if wait is not None and clone is not None:
            ratios += [w.value / c.value for w, c in zip(wait.samples, clone.samples, strict=True)]
    verdicts = [
        Verdict("longest wait before the optimizer / clone under the lock", max(ratios, default=None), 1.0, "at most")
    ]
    wait, transfer = group.find("peer_wait", "cold", MS), group.find("peer_transfer", "cold", MS)
    if wait is not None and transfer is not None:
        share = Ratio.between(wait, transfer).of_medians
        group.notes.append(f"torchft's trainer waited for {share:.0%} of the transfer")
    return verdicts


BENCHMARK: Final = Benchmark(name="stall", run=run, default=Size(scale=0.5, num_samples=3))
