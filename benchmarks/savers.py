"""What the processes of ``checkpoint`` do: each saves a state several times, by ours or by DCP, and times it.

Ours and what it is compared with alternate in one process; each of DCP's kinds has one of its own.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.machine import Watch, back_free_memory, own_processes, return_free_memory
from benchmarks.options import rotated
from benchmarks.report import Named, Quantity, Role
from benchmarks.states import State, StateSpec, build_source, digest_of, num_bytes_of, tensors_of
from benchmarks.transports import clone, our_transport
from ft_transport import CheckpointStore, HTTPTransport, Limits
from ft_transport.cli.bench import MemoryCopy

_WRITE_BYTES: Final = 8 << 20
_SETTLE_S: Final = 0.2

PAUSE: Final = Quantity("pause", "ms")
DURABLE: Final = Quantity("durable", "ms")
LOAD: Final = Quantity("load", "ms")

CLONE: Final = Named("the transport's clone alone", "other")
MEMMOVE: Final = Named("memmove into warm memory", "ceiling")
COPY: Final = Named("Tensor.copy_ into warm memory", "ceiling")
TORCH_CLONE: Final = Named("Tensor.clone()", "other")
BARE: Final = Named("bare write and fsync, bare preadv", "ceiling")
DCP_LOAD: Final = Named("DCP load of ours", "peer")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverVariant:
    """A process that saves.

    Attributes:
        save: In the process: measures it, and what it is compared with.
        is_judged: Whether a verdict needs it.
    """

    name: str
    role: Role
    save: Callable[[Saving], None]
    is_judged: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process is told: what it saves, into which empty directory, how often, and what comes first."""

    variant: SaverVariant
    spec: StateSpec
    directory: Path
    num_repeats: int
    turn: int


@dataclass(frozen=True, slots=True)
class Timed:
    """One measured duration."""

    variant: Named | SaverVariant
    quantity: Quantity
    seconds: float
    others_share: float | None


@dataclass(slots=True)
class Outcome:
    """What a process has measured."""

    num_bytes: int
    num_tensors: int
    timed: list[Timed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Saving:
    """A process's state, job and outcome so far."""

    job: Job
    state: State
    outcome: Outcome

    @contextlib.contextmanager
    def timing(self, variant: Named | SaverVariant, quantity: Quantity) -> Iterator[Callable[[Quantity], None]]:
        """Notes the time of the block; what is yielded notes the time so far, as another quantity."""
        reached: list[tuple[Quantity, float]] = []
        with Watch(own_processes()) as watch:
            yield lambda quantity: reached.append((quantity, watch.elapsed_s()))
        for what, seconds in (*reached, (quantity, watch.seconds)):
            self.outcome.timed.append(Timed(variant, what, seconds, watch.others_share))


def save(job: Job) -> Outcome:
    """Runs in a fresh process; the first save of each kind does not count."""
    state = build_source(job.spec)
    outcome = Outcome(num_bytes_of(state), sum(1 for _ in tensors_of(state)))
    # What a process touches first, the host has to find; and so for the pages of a file.
    back_free_memory(3 * outcome.num_bytes)
    job.variant.save(Saving(job, state, outcome))
    return outcome


def _settle_disk() -> None:
    """What was removed or written before must not be paid for by what follows."""
    os.sync()
    time.sleep(_SETTLE_S)


# -------------------------------------------------------------------------------------------------------------- ours


def _save_ours(saving: Saving) -> None:
    job = saving.job
    transport = our_transport(limits=Limits(max_snapshots=1))
    plain = MemoryCopy(list(tensors_of(saving.state)))
    step = 0
    try:
        with CheckpointStore(job.directory / "ours") as store:

            def save_once() -> None:
                nonlocal step
                step += 1
                # What has not changed would not be written.
                with torch.no_grad():
                    for tensor in tensors_of(saving.state):
                        tensor.add_(1)
                with saving.timing(OURS, DURABLE) as reached:
                    handle = store.save(step, saving.state)
                    reached(PAUSE)
                    handle.result()
                # It also verifies what was written.
                store.prune(keep=1)

            turns = (
                save_once,
                lambda: _clone(saving, transport),
                lambda: _copy_plainly(saving, plain),
                lambda: _write_bare(saving, plain.memory),
            )
            save_once()
            _clone(saving, transport)
            _measure_loads(saving, store, step, plain, turn=0)
            saving.outcome.timed.clear()
            for turn in range(job.turn, job.turn + job.num_repeats):
                for measure in rotated(turns, turn):
                    _settle_disk()
                    measure()
                _measure_loads(saving, store, step, plain, turn=turn)
    finally:
        transport.shutdown()
        plain.close()


def _clone(saving: Saving, transport: HTTPTransport[Any]) -> None:
    with saving.timing(CLONE, PAUSE):
        snapshot = clone(transport, saving.state)
    snapshot.abandon()


def _copy_plainly(saving: Saving, plain: MemoryCopy) -> None:
    with saving.timing(MEMMOVE, PAUSE):
        plain.memmove()
    with saving.timing(COPY, PAUSE):
        plain.torch_copy()
    tensors = list(tensors_of(saving.state))
    with saving.timing(TORCH_CLONE, PAUSE):
        clones = [tensor.clone() for tensor in tensors]
    del clones
    return_free_memory()


def _write_bare(saving: Saving, memory: memoryview) -> None:
    path = saving.job.directory / "bare"
    with saving.timing(BARE, DURABLE):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        start = 0
        while start < len(memory):
            start += os.write(descriptor, memory[start : start + _WRITE_BYTES])
        os.fsync(descriptor)
        os.close(descriptor)
    path.unlink()


def _measure_loads(saving: Saving, store: CheckpointStore, step: int, plain: MemoryCopy, *, turn: int) -> None:
    """Each into memory that is there, from files that are in the page cache."""
    import torch.distributed.checkpoint as dcp

    state = saving.state
    checkpoint = saving.job.directory / "ours" / f"step-{step}"
    expected = digest_of(state)

    def load_ours() -> None:
        with saving.timing(OURS, LOAD):
            store.load(into=state)

    def load_dcp() -> None:
        with saving.timing(DCP_LOAD, LOAD), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=checkpoint, no_dist=True)

    for load in rotated((load_ours, load_dcp, None), turn):
        if load is None:
            _read_bare(saving, checkpoint, plain.memory)
            continue
        with torch.no_grad():
            for tensor in tensors_of(state):
                tensor.zero_()
        load()
        if digest_of(state) != expected:
            raise RuntimeError(f"{load.__name__} delivered another state than was saved")


def _read_bare(saving: Saving, checkpoint: Path, memory: memoryview) -> None:
    """As many bytes as the state has, from the largest file, front to back."""
    path = max((each for each in checkpoint.iterdir() if each.is_file()), key=lambda each: each.stat().st_size)
    with saving.timing(BARE, LOAD):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        start = 0
        while start < len(memory):
            start += os.preadv(descriptor, [memory[start : start + _WRITE_BYTES]], start)
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------------------- DCP


def _save_dcp(saving: Saving, *, is_process: bool, is_kept: bool) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    if is_process:
        _allow_many_files(saving.outcome)
    # The process that writes joins a group of its own, by the same store; without this, by a port that may be taken.
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(DCP_USE_PREFIX_STORE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(rendezvous.port))
    dist.init_process_group("gloo", store=dist.PrefixStore("trainer", rendezvous), rank=0, world_size=1)
    # Pinned memory and streams are for accelerators.
    stager = DefaultStager(StagingOptions(False, is_process, False, False)) if is_kept else None
    path = saving.job.directory / "dcp"

    def save_once() -> None:
        with saving.timing(saving.job.variant, DURABLE) as reached:
            future = dcp.async_save(
                saving.state,
                # A stager itself, unless one is given.
                storage_writer=dcp.FileSystemWriter(path),
                async_stager=stager,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS if is_process else AsyncCheckpointerType.THREAD,
            )
            reached(PAUSE)
            assert isinstance(future, Future), "it was staged before the call returned"
            future.result()
        num_bytes = sum(each.stat().st_size for each in path.iterdir())
        if num_bytes < saving.outcome.num_bytes:
            raise RuntimeError(f"expected a checkpoint of {saving.outcome.num_bytes} bytes or more, got {num_bytes}")
        shutil.rmtree(path)

    save_once()
    saving.outcome.timed.clear()
    for _ in range(saving.job.num_repeats):
        _settle_disk()
        save_once()
    if stager is not None:
        stager.close()
    dist.destroy_process_group()


def _allow_many_files(outcome: Outcome) -> None:
    """Each tensor goes to the process by file descriptors: one of its memory, and one of a copy that is on its way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 3 * outcome.num_tensors + 1000
    if hard != resource.RLIM_INFINITY and hard < needed:
        with contextlib.suppress(ValueError, OSError):  # Only root may.
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, needed))
            hard = soft = needed
    if hard != resource.RLIM_INFINITY and hard < needed:
        torch.multiprocessing.set_sharing_strategy("file_system")
        outcome.notes.append(
            f"DCP's process gets memory by name: {hard} open files are too few for {outcome.num_tensors} tensors"
        )
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    outcome.notes.append(f"DCP's process needs a file descriptor for each tensor: the limit is raised to {needed}")


def _dcp(name: str, *, is_process: bool, is_kept: bool) -> SaverVariant:
    # Those that copy into new memory at each save are slower, so no verdict needs them.
    run = partial(_save_dcp, is_process=is_process, is_kept=is_kept)
    return SaverVariant(name=f"DCP async_save, {name}", role="peer", save=run, is_judged=is_kept)


OURS: Final = SaverVariant(name="ft_transport CheckpointStore", role="ours", save=_save_ours)
THREADS: Final = (
    _dcp("thread", is_process=False, is_kept=False),
    _dcp("thread, kept stager", is_process=False, is_kept=True),
)
PROCESSES: Final = (
    _dcp("process", is_process=True, is_kept=False),
    _dcp("process, kept stager", is_process=True, is_kept=True),
)
