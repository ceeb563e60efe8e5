"""Reading: ranks that all hold the same state read a checkpoint once and pass it on, or each reads all of it.

The files are in the page cache, which is the best case for reading by each: storage that is slower than memory turns
it round. There is no target; the figure says when ``StoreSettings(read="each")`` pays.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal

import torch
import torch.distributed as dist

from benchmarks.options import Benchmark, Options, Size, rotated
from benchmarks.processes import Channel, Child
from benchmarks.report import Group, Quantity, Role, Sample, Verdict
from ft_transport import CheckpointStore, StoreSettings

_NUM_RANKS: Final = 2
_TENSOR_ITEMS: Final = 1 << 20
_NUM_TENSORS: Final = 64
_TIMEOUT: Final = timedelta(seconds=60)
_LOAD: Final = Quantity("load", "s")
_READ: Final = Quantity("read from files", "× of the state")


@dataclass(frozen=True, slots=True)
class ReadVariant:
    """A way of ``StoreSettings(read=…)``."""

    name: str
    read: Literal["once", "each"]
    role: Role = "ours"


ONCE: Final = ReadVariant("read once and passed on", "once")
EACH: Final = ReadVariant("read by each rank", "each")
_VARIANTS: Final = (ONCE, EACH)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What all ranks are told: the port of their store, where the checkpoint goes, and how much is done."""

    port: int
    directory: Path
    num_tensors: int
    num_rounds: int


@dataclass(frozen=True, slots=True)
class _Load:
    """One load of all ranks."""

    round_number: int
    variant: ReadVariant
    seconds: float
    num_bytes_read: int


def run(options: Options) -> Iterator[Group]:
    """Measures both ways in turn, in ranks that stay."""
    num_tensors = max(1, round(_NUM_TENSORS * options.scale))
    num_bytes = 4 * _TENSOR_ITEMS * num_tensors
    title = f"{_NUM_RANKS} ranks, {num_bytes / 1e6:.0f} MB each, files in the page cache"
    group = Group("reading", "replicated", title)
    directory = tempfile.mkdtemp(prefix=".reading-benchmark-", dir=options.directory)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    plan = _Plan(
        port=store.port, directory=Path(directory), num_tensors=num_tensors, num_rounds=options.size.num_samples
    )
    options.settle()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        ranks: list[Child] = []
        for rank in range(_NUM_RANKS):
            child = Child(_load, rank, plan)
            stack.callback(child.close)
            ranks.append(child)
        loads, *_ = [child.receive() for child in ranks]
    for load in loads:
        group.add(load.variant, _LOAD, Sample(load.round_number, load.seconds))
        group.add(load.variant, _READ, Sample(load.round_number, load.num_bytes_read / num_bytes))
    group.sort(_VARIANTS)
    group.verdicts = [
        Verdict("read once and passed on / read by each", group.ratio(ONCE, EACH, _LOAD), None, "at most")
    ]
    yield group


def _load(channel: Channel, rank: int, plan: _Plan) -> None:
    """One rank. Says its list of `_Load`."""
    store = dist.TCPStore("127.0.0.1", plan.port, is_master=False, timeout=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_NUM_RANKS)
    state = {"model": {f"layer.{number}": torch.rand(_TENSOR_ITEMS) for number in range(plan.num_tensors)}}
    for tensor in state["model"].values():
        dist.broadcast(tensor, 0)
    with CheckpointStore(plan.directory) as writing:
        writing.save(1, state, wait=True)
    stores = {
        each: CheckpointStore(plan.directory, read_only=True, settings=StoreSettings(read=each.read))
        for each in _VARIANTS
    }
    loads = []
    for number in range(plan.num_rounds + 1):
        for variant in rotated(_VARIANTS, number):
            dist.barrier()
            started_s = time.perf_counter()
            loaded = stores[variant].load(1, into=state)
            dist.barrier()
            seconds = time.perf_counter() - started_s
            total = torch.tensor([loaded.num_bytes_read])
            dist.all_reduce(total)
            if number:  # The first makes connections.
                loads.append(_Load(number, variant, seconds, int(total)))
    for each in stores.values():
        each.close()
    dist.destroy_process_group()
    channel.say(loads)
    channel.wait_for_end()


BENCHMARK: Final = Benchmark(
    name="reading",
    question="Is a checkpoint read once and passed on, or read by each rank?",
    run=run,
    default=Size(scale=1.0, num_samples=7),
)
