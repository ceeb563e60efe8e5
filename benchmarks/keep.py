"""Keep: what a state that outlives its process costs the trainer, and how soon a killed process has it again.

Ours: ``keep_every=10``. DCP: ``dcp.async_save`` every 10 steps, with its writer process and a stager that keeps its
memory. Each trains in a process of its own, blocks of steps that keep alternating with blocks that do not, and is then
killed; a fresh process with the same model loads the state. The ceilings are copies of the same bytes in memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from uuid import uuid4

import torch

from benchmarks.machine import Watch, back_free_memory
from benchmarks.options import Benchmark, Options, Size
from benchmarks.processes import Channel, Child
from benchmarks.replicas.training import Model, Training
from benchmarks.report import Figure, Group, Named, Quantity, Sample, Verdict
from ft_transport import HTTPTransport
from ft_transport.cli.bench import MemoryCopy
from manager import Manager

_STATE_BYTES: Final = 1_000_000_000
_NUM_TENSORS: Final = {"tensors300": 300, "tensors3000": 3000}
EVERY: Final = 10
_NUM_BLOCKS: Final = 5
"""Of `EVERY` steps each, half of them with a kept one. A first pair of blocks warms up, and is not measured."""

OURS: Final = Named("ft_transport keep_every", "ours")
DCP: Final = Named("dcp.async_save, process, kept stager", "peer")
COPY: Final = Named("memmove, warm memory", "ceiling")
FRESH_COPY: Final = Named("memmove, fresh memory", "ceiling")
PAUSE: Final = Quantity("pause of a kept step", "ms")
STEP: Final = Quantity("mean step without keeping", "ms")
COST: Final = Quantity("time added to 10 steps, beyond the pause", "ms")
BACK: Final = Quantity("a fresh process has the state", "ms")


class Side(Protocol):
    """Keeps the state of a trainer, and loads what an earlier process kept."""

    def begin_step(self, step: int, *, keeps: bool) -> None:
        """At the top of an iteration."""

    def settle(self) -> None:
        """Return when the last kept state is complete."""

    def load(self) -> int:
        """Load the kept state into the training, and return its step."""


class Ours:
    """The manager and its keeper."""

    def __init__(self, training: Training, _directory: Path) -> None:
        self._manager = Manager(checkpoint_transport=HTTPTransport(), keep_every=1)
        self._manager.register("model", training.model)
        self._manager.register("optimizer", training.optimizer)
        self._manager.attach(training.optimizer)
        self._replica = self._manager._replica
        self._keeping = self._replica.keeping
        assert self._keeping is not None, "the manager has keep_every"

    def begin_step(self, step: int, *, keeps: bool) -> None:
        self._replica.keeping = self._keeping if keeps else None
        self._manager.start_step(step)

    def settle(self) -> None:
        keeping: Any = self._keeping
        while keeping.kept._stager._pool._preparing is not None:
            time.sleep(0.01)
        if keeping._job is not None:
            keeping._job.result()

    def load(self) -> int:
        recovery = self._manager.resume()
        assert recovery is not None, "the earlier process has kept a state"
        return recovery.step

    def close(self) -> None:
        self._manager.shutdown()


class Dcp:
    """DCP's asynchronous save, to a directory."""

    def __init__(self, training: Training, directory: Path) -> None:
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._training, self._directory = training, directory
        # DCP passes one descriptor for each tensor.
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.environ.update(DCP_USE_PREFIX_STORE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(rendezvous.port))
        dist.init_process_group("gloo", store=dist.PrefixStore("trainer", rendezvous), rank=0, world_size=1)
        self._stager = DefaultStager(StagingOptions(False, True, False, False))
        self._future: Any = None

    def _state(self, step: int) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._training.model, self._training.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(step)}

    def begin_step(self, step: int, *, keeps: bool) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if keeps:
            self.settle()
            shutil.rmtree(self._directory / "dcp", ignore_errors=True)
            self._future = dcp.async_save(
                self._state(step),
                storage_writer=dcp.FileSystemWriter(self._directory / "dcp"),
                async_stager=self._stager,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )

    def settle(self) -> None:
        if self._future is not None:
            self._future.result()

    def load(self) -> int:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state(0)
        dcp.load(state, checkpoint_id=self._directory / "dcp")
        set_state_dict(
            self._training.model,
            self._training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return int(state["step"])

    def close(self) -> None:
        """The process ends."""


_SIDES: Final[dict[Named, Callable[[Training, Path], Ours | Dcp]]] = {OURS: Ours, DCP: Dcp}


@dataclass(frozen=True, slots=True)
class _Trained:
    """The measurements of a trainer until it is killed; durations in seconds."""

    pauses: list[float]
    step_s: float
    added_s: float
    copy_s: float
    step: int


def _train(channel: Channel, variant: Named, model: Model, directory: str, job: str) -> None:
    """Train, and wait to be killed."""
    os.environ["TORCHELASTIC_RUN_ID"] = job
    training = Training(model)
    side = _SIDES[variant](training, Path(directory))
    waited_s: list[float] = []
    began: list[float] = []
    training.optimizer.register_step_pre_hook(lambda *_: waited_s.append(time.perf_counter() - began[-1]))
    step = 0
    blocks: dict[bool, list[tuple[float, list[float]]]] = {False: [], True: []}
    for number in range(_NUM_BLOCKS):
        for keeps in (False, True):
            lost: list[float] = []
            start_s = time.perf_counter()
            for _ in range(EVERY):
                step += 1
                boundary_s = time.perf_counter()
                side.begin_step(step, keeps=keeps and step % EVERY == 0)
                boundary_s = time.perf_counter() - boundary_s
                training.backward()
                began.append(time.perf_counter())
                training.optimizer.step()
                lost.append(boundary_s + waited_s[-1])
            if number:
                blocks[keeps].append((time.perf_counter() - start_s, lost))
            side.settle()
    step_s = statistics.median(seconds for seconds, _ in blocks[False]) / EVERY
    pauses = [max(kept) - statistics.median(kept) for _, kept in blocks[True]]
    added_s = statistics.median(seconds for seconds, _ in blocks[True]) - EVERY * step_s - statistics.median(pauses)
    copy_s = min(copy_seconds(training, is_fresh=False) for _ in range(3))
    channel.say(_Trained(pauses, step_s, added_s, copy_s, step))
    channel.wait_for_end()


def copy_seconds(training: Training, *, is_fresh: bool) -> float:
    """How long a copy of the state takes, into memory that was in use, or into fresh memory."""
    states = training.optimizer.state.values()
    tensors = [*training.trained, *(each for state in states for each in state.values())]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    with contextlib.ExitStack() as stack:
        memory = None
        if is_fresh:
            mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # As ours does: fewer and larger page faults.
            mapped.madvise(mmap.MADV_HUGEPAGE)
            memory = torch.frombuffer(mapped, dtype=torch.uint8)
        copy = MemoryCopy(tensors, memory)
        stack.callback(copy.close)
        start_s = time.perf_counter()
        copy.memmove()
        return time.perf_counter() - start_s


def _resume(channel: Channel, variant: Named, model: Model, directory: str, job: str) -> None:
    """Load what the dead process kept, and say how long that took from the moment at which the process is up."""
    os.environ["TORCHELASTIC_RUN_ID"] = job
    training = Training(model)
    side = _SIDES[variant](training, Path(directory))
    back_free_memory(2 * model.state_bytes)
    with Watch([os.getpid()]) as watch:
        step = side.load()
    # Once more: the memory that was free has been used.
    back_free_memory(2 * model.state_bytes)
    copy_s = copy_seconds(training, is_fresh=True)
    side.close()
    channel.say((watch.seconds, copy_s, step))
    channel.wait_for_end()


def run(options: Options) -> Iterator[Group]:
    """Measures ours and DCP by turns."""
    for name in options.states:
        yield _run_state(name, options)


def _run_state(name: str, options: Options) -> Group:
    num_tensors = _NUM_TENSORS[name]
    num_items = int(_STATE_BYTES * options.scale) // (12 * num_tensors)
    model = Model(name=name, num_tensors=num_tensors, num_items=num_items, is_foreach=None)
    group = Group("keep", name, f"{model.state_bytes / 1e9:.2f} GB, {model.title}")
    for round_number, variant in options.rounds(f"keep {name}", (OURS, DCP)):
        try:
            trained, seconds, copy_s = _lives(variant, model, options.directory)
        except RuntimeError as error:
            if variant is OURS:
                raise
            group.notes.append(f"{variant.name} could not be measured: {str(error).splitlines()[-1]}")
            continue
        for quantity, measured_s in (
            (PAUSE, statistics.median(trained.pauses)),
            (STEP, trained.step_s),
            (COST, trained.added_s),
            (BACK, seconds),
        ):
            group.add(variant, quantity, Sample(round_number, measured_s * 1e3, None))
        if variant is OURS:
            group.add(COPY, PAUSE, Sample(round_number, trained.copy_s * 1e3, None))
            group.add(FRESH_COPY, BACK, Sample(round_number, copy_s * 1e3, None))
    group.sort((OURS, DCP, COPY, FRESH_COPY))
    group.notes.append(f"a state is kept every {EVERY} steps; DCP writes to a disk, and loads from the page cache")
    group.verdicts = judge(group)
    return group


def _lives(variant: Named, model: Model, parent: Path) -> tuple[_Trained, float, float]:
    """Train, kill, and start again; return what both processes measured."""
    directory, job = tempfile.mkdtemp(prefix=".keep-benchmark-", dir=parent), uuid4().hex
    try:
        trainer = Child(_train, variant, model, directory, job)
        try:
            trained: _Trained = trainer.receive()
        finally:
            trainer.close()
        successor = Child(_resume, variant, model, directory, job)
        try:
            seconds, copy_s, step = successor.receive()
        finally:
            successor.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if step != trained.step:
        raise RuntimeError(f"expected the state of step {trained.step}, got that of step {step}")
    return trained, seconds, copy_s


def judge(group: Group) -> list[Verdict]:
    """The pause against a copy, the rest against the steps, and the way back against DCP's."""
    back = group.figure(OURS, BACK)
    return [
        Verdict.at_most("pause of a kept step / memmove of the state", group.ratio(OURS, COPY, PAUSE), 1.05),
        Verdict.at_most("time added beyond the pause / 10 steps", share_of_steps(group, OURS), 0.01),
        Verdict.at_most("milliseconds until a fresh process has the state", back, 1000.0),
        Verdict(
            "memmove into fresh memory / time to have the state", group.ratio(FRESH_COPY, OURS, BACK), None, "at least"
        ),
        Verdict.at_least("time to have the state, DCP / ours", group.ratio(DCP, OURS, BACK), 1.0),
        Verdict.at_least("pause, DCP / ours", group.ratio(DCP, OURS, PAUSE), 1.0),
    ]


def share_of_steps(group: Group, variant: Named) -> Figure | None:
    """The time that keeping adds to `EVERY` steps beyond the pause, as a part of these steps."""
    step, cost = group.figure(variant, STEP), group.figure(variant, COST)
    if step is None or cost is None or not step.value:
        return None
    return type(cost)(*(value / (EVERY * step.value) for value in (cost.value, cost.low, cost.high)))


BENCHMARK: Final = Benchmark(
    name="keep",
    question="What does a state cost that outlives its process, and how soon is it back?",
    run=run,
    states=tuple(_NUM_TENSORS),
    default=Size(scale=0.25, num_samples=1),
    misses={
        "beyond the pause": "The copy in the background takes cores and memory that this step uses fully; single "
        "rounds reach from -0.02 to 0.08. On an H100, a step takes 1.00 times as long.",
    },
)
