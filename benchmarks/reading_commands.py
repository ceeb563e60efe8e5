"""Reading commands: ``ft-transport inspect`` of many tensors, and ``diff`` beside reading both of what it compares.

Commands are timed as a user has them, from the start of their process to its end; what they are compared with runs in
this one. Files come from the disk (``posix_fadvise`` has the kernel forget them before) or from the page cache.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.machine import Watch
from benchmarks.options import Benchmark, Options, Size
from benchmarks.report import Group, Named, Quantity, Verdict
from ft_transport import CheckpointStore
from ft_transport.cli.diff import find_differences, opened_states

_NUM_TENSORS: Final = 10_000
_TENSOR_ITEMS: Final = 1 << 18
_NUM_LARGE: Final = 1_000
_BLOCK_BYTES: Final = 1 << 20
_SPAN_BYTES: Final = 8 << 20
_NUM_THREADS: Final = 2
_COMMAND: Final = (sys.executable, "-c", "from ft_transport.cli.main import main; main()")
_KINDS: Final = ("file", "dcp", "ours")
_STATES: Final = (*(f"inspect-{kind}" for kind in _KINDS), *(f"diff-{kind}" for kind in _KINDS))

_WHOLE: Final = Quantity("process", "s")
_WARM: Final = Quantity("from the page cache", "s")
_COLD: Final = Quantity("from the disk", "s")
_PROCESSOR: Final = Quantity("processor, nothing from the disk", "s")
_OURS: Final = Named("ft-transport", "ours")
_EMPTY: Final = Named("a Python that does nothing", "ceiling")
_ALONE: Final = Named("its comparison, in this process", "other")
_READ: Final = Named(f"read both, {_NUM_THREADS} threads, reused buffers", "ceiling")

State = dict[str, torch.Tensor]


def run(options: Options) -> Iterator[Group]:
    """Measures one command with one kind of save after the other."""
    for name in options.states:
        command, _, kind = name.partition("-")
        directory = Path(tempfile.mkdtemp(prefix=".reading-commands-", dir=options.directory))
        try:
            measure = _inspect if command == "inspect" else _diff
            yield measure(name, kind, directory, options)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _inspect(name: str, kind: str, directory: Path, options: Options) -> Group:
    num_tensors = max(1, round(_NUM_TENSORS * options.scale))
    path = _save(kind, {f"layer.{number}.weight": torch.rand(4, 4) for number in range(num_tensors)}, directory)
    group = Group("reading-commands", name, f"inspect, {kind}, {num_tensors} tensors")
    actions = {_OURS: lambda: _command("inspect", path), _EMPTY: lambda: _run([sys.executable, "-c", "pass"])}
    _command("inspect", path)  # which makes everything warm
    for number, variant in options.rounds(name, (_OURS, _EMPTY)):
        _time(group, variant, _WHOLE, number, actions[variant])
    group.sort((_OURS, _EMPTY))
    group.verdicts = [Verdict.at_most("inspect, the whole process", group.figure(_OURS, _WHOLE), 0.5)]
    return group


def _diff(name: str, kind: str, directory: Path, options: Options) -> Group:
    num_tensors = max(1, round(_NUM_LARGE * options.scale))
    state = {f"layer.{number}.weight": torch.rand(_TENSOR_ITEMS) for number in range(num_tensors)}
    paths = [_save(kind, state, directory / each) for each in ("a", "b")]
    num_bytes = 4 * _TENSOR_ITEMS * num_tensors
    group = Group("reading-commands", name, f"diff, {kind}, twice {num_bytes / 1e9:.2f} GB in {num_tensors} tensors")
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.distcp")))]
    actions: dict[Named, Callable[[], None]] = {
        _OURS: lambda: _command("diff", *paths),
        _ALONE: lambda: _compare(*map(str, paths)),
        _READ: lambda: _read(files),
    }
    for number, variant in options.rounds(name, (_OURS, _ALONE, _READ)):
        for quantity in (_COLD, _WARM):
            if quantity is _COLD:
                _forget(files)
            _time(group, variant, quantity, number, actions[variant])
    group.sort((_OURS, _ALONE, _READ))
    group.verdicts = [
        Verdict.at_most("diff, the whole process / reading both, from the disk", group.ratio(_OURS, _READ, _COLD), 1.2),
        Verdict.at_most("its comparison / reading both, from the page cache", group.ratio(_ALONE, _READ, _WARM), 1.2),
        Verdict("the whole process / reading both, from it", group.ratio(_OURS, _READ, _WARM), None, "at most"),
        Verdict("its comparison / reading both, processor", group.ratio(_ALONE, _READ, _PROCESSOR), None, "at most"),
    ]
    return group


def _time(group: Group, variant: Named, quantity: Quantity, number: int, action: Callable[[], None]) -> None:
    """By the clock, and by what the processor did for it here and in processes that were started."""
    began_s = _processor_s()
    with Watch([os.getpid()]) as watch:
        action()
    group.add(variant, quantity, watch.sample(number, watch.seconds))
    if quantity is not _COLD:
        group.add(variant, _PROCESSOR, watch.sample(number, _processor_s() - began_s))


def _processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _save(kind: str, state: State, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    match kind:
        case "file":
            path = directory / "model.safetensors"
            _write_safetensors(path, state)
            return path
        case "dcp":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is one process
                dcp.save(state, checkpoint_id=directory / "dcp", no_dist=True)
            return directory / "dcp"
        case _:
            with CheckpointStore(directory / "ours") as store:
                store.save(1, state, wait=True)
            return directory / "ours"


def _write_safetensors(path: Path, state: State) -> None:
    table, end = {}, 0
    for name, tensor in state.items():
        table[name] = {"dtype": "F32", "shape": [*tensor.shape], "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    header = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in state.values():
            file.write(tensor.numpy().data)


def _command(*arguments: object) -> None:
    _run([*_COMMAND, *map(str, arguments)])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _compare(one: str, other: str) -> None:
    with opened_states(one, other, step=None, by_digests=False, timeout_s=1.0) as opened:
        if find_differences(opened.one, opened.other, chunks=opened.chunks).differences:
            raise RuntimeError("two saves of one state differ")


def _forget(files: Sequence[Path]) -> None:
    """Has the kernel drop what it keeps of files, which are on the disk then."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read(files: Sequence[Path]) -> None:
    """Each byte once, span by span, by as many threads as the command has."""
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    spans = (
        (descriptor, start)
        for descriptor in descriptors
        for start in range(0, os.fstat(descriptor).st_size, _SPAN_BYTES)
    )
    lock = threading.Lock()

    def work(_thread: int) -> None:
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        while True:
            with lock:
                span = next(spans, None)
            if span is None:
                return
            for start in range(span[1], span[1] + _SPAN_BYTES, _BLOCK_BYTES):
                os.preadv(span[0], [buffer], start)

    try:
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            list(threads.map(work, range(_NUM_THREADS)))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


BENCHMARK: Final = Benchmark(
    name="reading-commands",
    question="How long do inspect and diff take?",
    run=run,
    states=_STATES,
    default=Size(scale=1.0, num_samples=5),
    misses={
        "from the disk": "Two processes read the metadata, and each tensor has an envelope: 0.3 to 0.4 s.",
        "page cache": "The metadata and the envelopes of torch.save take longer than 2 GB from memory.",
    },
)
