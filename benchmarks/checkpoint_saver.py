"""A process that saves a state several times, by ours or by DCP, and prints one line of JSON with what it measured.

python -m benchmarks.checkpoint_saver ours|thread|process|thread_kept|process_kept STATE --directory DIRECTORY
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.ceilings import MemoryCopy
from benchmarks.machine import Watch, back_free_memory, return_free_memory
from benchmarks.states import State, StateSpec, build_source, digest_of, num_bytes_of, tensors_of

_WRITE_BYTES: Final = 8 << 20
_SETTLE_S: Final = 0.2
_KERNEL: Final = 2
"""Parent of all threads of the kernel, some of which write to the disk what we have written."""


class _Clock:
    """Times what is measured, and notes it."""

    def __init__(self) -> None:
        self.samples: list[dict[str, object]] = []
        self.notes: list[str] = []

    @contextlib.contextmanager
    def measure(self, key: str, quantity: str) -> Iterator[Callable[[str], None]]:
        """Notes the time of the block; what is yielded notes the time so far, as another quantity."""
        reached: list[tuple[str, float]] = []
        watch = Watch(_processes())
        watch.start()
        started_s = time.perf_counter()
        yield lambda what: reached.append((what, time.perf_counter() - started_s))
        reached.append((quantity, time.perf_counter() - started_s))
        share = watch.stop()
        for what, seconds in reached:
            self.samples.append({"key": key, "quantity": what, "seconds": seconds, "others_share": share})


def _processes() -> list[int]:
    """This process, all that descend from it, and the kernel's threads."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    ours = {os.getpid()}
    while found := {child for child, parent in parents.items() if parent in ours} - ours:
        ours |= found
    return [*ours, *(child for child, parent in parents.items() if parent == _KERNEL)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["ours", "thread", "process", "thread_kept", "process_kept"])
    parser.add_argument("state")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--directory", type=Path, required=True, help="empty; everything there is removed")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--turn", type=int, default=0, help="what is measured first")
    arguments = parser.parse_args()
    state = build_source(StateSpec(arguments.state, arguments.scale))
    # What a process touches first, the host has to find; and so for the pages of a file.
    back_free_memory(3 * num_bytes_of(state))
    clock = _Clock()
    if arguments.kind == "ours":
        _save_ours(clock, state, arguments)
    else:
        _save_dcp(clock, state, arguments)
    report = {
        "num_bytes": num_bytes_of(state),
        "num_tensors": sum(1 for _ in tensors_of(state)),
        "samples": clock.samples,
        "notes": clock.notes,
    }
    print(json.dumps(report), flush=True)


def _turned(steps: Sequence[Callable[[], None]], turn: int) -> list[Callable[[], None]]:
    first = turn % len(steps)
    return [*steps[first:], *steps[:first]]


def _settle_disk() -> None:
    """What was removed or written before must not be paid for by what follows."""
    os.sync()
    time.sleep(_SETTLE_S)


# -------------------------------------------------------------------------------------------------------------- ours


def _save_ours(clock: _Clock, state: State, arguments: argparse.Namespace) -> None:
    from ft_transport import CheckpointStore, StoreSettings
    from ft_transport.state.stager import Stager
    from ft_transport.wire.chunks import CHUNK_BYTES

    settings = StoreSettings()
    # As the HTTP transport has one.
    stager = Stager(max_snapshots=1, num_threads=settings.num_copy_threads, chunk_bytes=CHUNK_BYTES, is_digested=False)
    num_threads = torch.get_num_threads()
    clock.notes.append(f"ours copies with {settings.num_copy_threads} threads, what it is compared with {num_threads}")
    plain = MemoryCopy(list(tensors_of(state)))
    step = 0
    try:
        with CheckpointStore(arguments.directory / "ours", settings=settings) as store:

            def save() -> None:
                nonlocal step
                step += 1
                with clock.measure("ours", "durable") as reached:
                    handle = store.save(step, state)
                    reached("pause")
                    handle.result()
                # It also verifies what was written.
                store.prune(keep=1)

            save()
            _clone(clock, state, stager)
            _measure_loads(_Clock(), store, arguments.directory / "ours" / f"step-{step}", state, plain, turn=0)
            clock.samples.clear()
            for turn in range(arguments.turn, arguments.turn + arguments.repeats):
                steps = [
                    save,
                    lambda: _clone(clock, state, stager),
                    lambda: _copy_plainly(clock, state, plain),
                    lambda: _write_bare(clock, plain.memory, arguments.directory / "bare"),
                ]
                for measured_step in _turned(steps, turn):
                    _settle_disk()
                    measured_step()
                _measure_loads(clock, store, arguments.directory / "ours" / f"step-{step}", state, plain, turn=turn)
    finally:
        stager.close()
        plain.close()


def _clone(clock: _Clock, state: State, stager: Any) -> None:
    with clock.measure("clone", "pause"):
        pending = stager.begin(0, state)
    pending.abandon()


def _copy_plainly(clock: _Clock, state: State, plain: MemoryCopy) -> None:
    with clock.measure("memmove", "pause"):
        plain.memmove()
    with clock.measure("copy", "pause"):
        plain.torch_copy()
    tensors = list(tensors_of(state))
    with clock.measure("torch_clone", "pause"):
        clones = [tensor.clone() for tensor in tensors]
    del clones
    return_free_memory()


def _write_bare(clock: _Clock, memory: memoryview, path: Path) -> None:
    with clock.measure("bare", "durable"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        start = 0
        while start < len(memory):
            start += os.write(descriptor, memory[start : start + _WRITE_BYTES])
        os.fsync(descriptor)
        os.close(descriptor)
    path.unlink()


def _measure_loads(clock: _Clock, store: Any, checkpoint: Path, state: State, plain: MemoryCopy, *, turn: int) -> None:
    """Each into memory that is there, from files that are in the page cache."""
    import torch.distributed.checkpoint as dcp

    expected = digest_of(state)

    def load_ours() -> None:
        with clock.measure("ours", "load"):
            store.load(into=state)

    def load_dcp() -> None:
        with clock.measure("dcp", "load"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=checkpoint, no_dist=True)

    for load in _turned([load_ours, load_dcp, lambda: _read_bare(clock, checkpoint, plain.memory)], turn):
        is_bare = load not in (load_ours, load_dcp)
        if not is_bare:
            with torch.no_grad():
                for tensor in tensors_of(state):
                    tensor.zero_()
        load()
        if not is_bare and digest_of(state) != expected:
            raise RuntimeError(f"{load.__name__} delivered another state than was saved")


def _read_bare(clock: _Clock, checkpoint: Path, memory: memoryview) -> None:
    """As many bytes as the state has, from the largest file, front to back."""
    path = max((each for each in checkpoint.iterdir() if each.is_file()), key=lambda each: each.stat().st_size)
    with clock.measure("bare", "load"):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        start = 0
        while start < len(memory):
            start += os.preadv(descriptor, [memory[start : start + _WRITE_BYTES]], start)
        os.close(descriptor)


# --------------------------------------------------------------------------------------------------------------- DCP


def _save_dcp(clock: _Clock, state: State, arguments: argparse.Namespace) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    name, _, kept = arguments.kind.partition("_")
    is_process = name == "process"
    if is_process:
        _allow_many_files(clock, num_tensors=sum(1 for _ in tensors_of(state)))
    # The process that writes joins a group of its own, by the same store; without this, by a port that may be taken.
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(
        DCP_USE_PREFIX_STORE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(rendezvous.port), GLOO_SOCKET_IFNAME="lo"
    )
    dist.init_process_group("gloo", store=dist.PrefixStore("trainer", rendezvous), rank=0, world_size=1)
    # Pinned memory and streams are for accelerators.
    stager = DefaultStager(StagingOptions(False, is_process, False, False)) if kept else None
    checkpoint_type = AsyncCheckpointerType.PROCESS if is_process else AsyncCheckpointerType.THREAD

    def save() -> None:
        path = arguments.directory / "dcp"
        with clock.measure(arguments.kind, "durable") as reached:
            saving = dcp.async_save(
                state,
                # A stager itself, unless one is given.
                storage_writer=dcp.FileSystemWriter(path),
                async_stager=stager,
                async_checkpointer_type=checkpoint_type,
            )
            reached("pause")
            assert isinstance(saving, Future), "it was staged before the call returned"
            saving.result()
        num_bytes = sum(each.stat().st_size for each in path.iterdir())
        if num_bytes < num_bytes_of(state):
            raise RuntimeError(f"expected a checkpoint of {num_bytes_of(state)} bytes or more, got {num_bytes}")
        shutil.rmtree(path)

    save()
    clock.samples.clear()
    for _ in range(arguments.repeats):
        _settle_disk()
        save()
    if stager is not None:
        stager.close()
    dist.destroy_process_group()


def _allow_many_files(clock: _Clock, num_tensors: int) -> None:
    """Each tensor goes to the process by file descriptors: one of its memory, and one of a copy that is on its way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 3 * num_tensors + 1000
    if hard != resource.RLIM_INFINITY and hard < needed:
        with contextlib.suppress(ValueError, OSError):  # Only root may.
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, needed))
            hard = soft = needed
    if hard != resource.RLIM_INFINITY and hard < needed:
        torch.multiprocessing.set_sharing_strategy("file_system")
        clock.notes.append(
            f"DCP's process gets memory by name: {hard} open files are too few for {num_tensors} tensors"
        )
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    clock.notes.append(f"DCP's process needs a file descriptor for each tensor: the limit is raised to {needed}")


if __name__ == "__main__":
    main()
    sys.exit(0)
