"""Checkpoint: how long a save holds the training thread, when it is on disk, and how long a load takes.

Ours beside a copy of the same tensors into warm memory, beside a bare file of the same bytes, and beside
``torch.distributed.checkpoint``. Each sample's process (``benchmarks.checkpoint_saver``) is a fresh one that has saved
once before it measures; ours and what it is compared with alternate in one, the peers follow in theirs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.machine import is_busy
from benchmarks.options import Benchmark, Options, Size, turns
from benchmarks.report import Group, Role, Sample, Series, Verdict
from benchmarks.states import CHECKPOINT_STATE_NAMES, StateSpec

MS: Final = "ms"
RATE: Final = "GB/s"
PAUSE: Final = "pause"
DURABLE: Final = "durable"
LOAD: Final = "load"
QUANTITIES: Final = (PAUSE, DURABLE, LOAD)

_WARM_PER_ROUND: Final = 2
_TIMEOUT_S: Final = 900.0
_REPOSITORY: Final = Path(__file__).resolve().parent.parent
_IN_MEMORY: Final = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


@dataclass(frozen=True)
class _Measured:
    """Who or what a figure belongs to."""

    label: str
    role: Role


_MEASURED: Final = {
    "ours": _Measured("ft_transport CheckpointStore", "ours"),
    "clone": _Measured("the transport's clone alone", "other"),
    "memmove": _Measured("memmove into warm memory", "ceiling"),
    "copy": _Measured("Tensor.copy_ into warm memory", "ceiling"),
    "torch_clone": _Measured("Tensor.clone()", "other"),
    "bare": _Measured("bare write and fsync, bare preadv", "ceiling"),
    "thread": _Measured("DCP async_save, thread", "peer"),
    "thread_kept": _Measured("DCP async_save, thread, kept stager", "peer"),
    "process": _Measured("DCP async_save, process", "peer"),
    "process_kept": _Measured("DCP async_save, process, kept stager", "peer"),
    "dcp": _Measured("DCP load of ours", "peer"),
}
_COPIES: Final = ("memmove", "copy")
_KEPT_PEERS: Final = ("thread_kept", "process_kept")
_PEERS: Final = ("thread", "thread_kept", "process", "process_kept")


def file_system_of(directory: Path) -> str:
    """The type of the file system that a directory is on, ``unknown`` where it cannot be told."""
    best = ("", "unknown")
    try:
        for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
            _, mounted, kind, *_ = line.split()
            at = mounted.encode().decode("unicode_escape")
            # Of several on one place, the last one hides the others.
            if directory.resolve().is_relative_to(at) and len(at) >= len(best[0]):
                best = (at, kind)
    except (OSError, ValueError):
        return "unknown"
    return best[1]


def is_on_disk(directory: Path) -> bool:
    """Whether what is written there is written to a disk."""
    return file_system_of(directory) not in _IN_MEMORY


def run(options: Options) -> Iterator[Group]:
    """Measures one state after the other, in a new directory beneath the given one, which is removed.

    Of DCP's writers a full run measures those, too, that copy into new memory at each save: they are slower.
    """
    for name in options.states:
        yield _run_state(StateSpec(name, options.scale), options)


def _run_state(spec: StateSpec, options: Options) -> Group:
    group = Group("checkpoint", spec.name, spec.title)
    failures: dict[str, str] = {}
    kinds = ("ours", *(_PEERS if options.is_full else _KEPT_PEERS))
    for round_number, kind in turns(kinds, options.num_samples):
        if kind in failures:
            continue
        options.settle()
        options.say(f"checkpoint {spec.name} {round_number + 1}/{options.num_samples} {_MEASURED[kind].label}")
        try:
            outcome = _save(kind, spec, round_number, options.directory)
        except RuntimeError as error:
            if kind == "ours":
                raise
            failures[kind] = str(error)
            continue
        _take_note(group, round_number, outcome)
        gigabytes = outcome["num_bytes"] / 1e9
        group.title = f"{spec.title}, {gigabytes:.2f} GB, {outcome['num_tensors']} tensors"
        for note in outcome["notes"]:
            if note not in group.notes:
                group.notes.append(note)
    order = list(_MEASURED)
    group.series.sort(key=lambda series: order.index(series.key.rpartition("_")[0]))
    for kind, text in failures.items():
        group.notes.append(f"{_MEASURED[kind].label} could not be measured: {text.splitlines()[-1]}")
    group.notes += [
        f"on {file_system_of(options.directory)}; loads from the page cache",
        "pause: until the call returns; durable: from the call until everything is on disk and has its name",
        "DCP: FileSystemWriter as it is by default (sync_files), which copies into new memory at each save; "
        "kept stager: a DefaultStager that keeps its copy's memory, shared memory for a process",
    ]
    group.verdicts = judge(group)
    return group


def _save(kind: str, spec: StateSpec, round_number: int, directory: Path) -> dict[str, Any]:
    """Runs one process that saves, and returns what it measured. Nothing of it is left, process or file."""
    place = tempfile.mkdtemp(prefix=".checkpoint-benchmark-", dir=directory)
    command = [
        sys.executable, "-m", "benchmarks.checkpoint_saver", kind, spec.name,
        "--scale", str(spec.scale),
        "--directory", place,
        "--repeats", str(_WARM_PER_ROUND),
        "--turn", str(round_number),
    ]  # fmt: skip
    try:
        with subprocess.Popen(
            command, cwd=_REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                output, errors = process.communicate(timeout=_TIMEOUT_S)
            except BaseException:
                # Not waited for yet, so that the number is still its own: it and what it has started.
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode != 0:
            raise RuntimeError(f"the process of {_MEASURED[kind].label!r} failed:\n{errors[-4000:]}")
        outcome: dict[str, Any] = json.loads(output.splitlines()[-1])
        return outcome
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _take_note(group: Group, round_number: int, outcome: dict[str, Any]) -> None:
    for each in outcome["samples"]:
        measured = _MEASURED[each["key"]]
        key, share = f"{each['key']}_{each['quantity']}", each["others_share"]
        for unit, value in ((MS, each["seconds"] * 1e3), (RATE, outcome["num_bytes"] / each["seconds"] / 1e9)):
            sample = Sample(round_number, value, is_busy(share), share)
            group.add(key, sample, label=measured.label, role=measured.role, phase="warm", unit=unit)


def judge(group: Group) -> list[Verdict]:
    """The targets: the pause against a clone, the write against a bare one, many tensors against DCP."""

    def found(kind: str, quantity: str) -> Series | None:
        return group.find(f"{kind}_{quantity}", "warm", MS)

    def fastest(kinds: Sequence[str], quantity: str) -> Series | None:
        candidates = [series for kind in kinds if (series := found(kind, quantity)) is not None]
        return min(candidates, key=lambda series: series.summary.median, default=None)

    pause, durable, load = (found("ours", quantity) for quantity in QUANTITIES)
    verdicts = [
        Verdict.at_most(
            "save() holds the trainer / the transport's clone", group.ratio(pause, found("clone", PAUSE)), 1.2
        ),
        Verdict.at_most(
            "save() holds the trainer / copy into warm memory", group.ratio(pause, fastest(_COPIES, PAUSE)), 1.2
        ),
        Verdict.at_least(
            "write rate, from save() to durable / bare write", group.ratio(found("bare", DURABLE), durable), 0.8
        ),
    ]
    for name, kinds in (("thread", _PEERS[:2]), ("process", _PEERS[2:])):
        ratio = group.ratio(fastest(kinds, DURABLE), durable)
        verdicts.append(Verdict.at_least(f"time to durable, DCP with a {name} / ours", ratio, 1.0))
    verdicts.append(Verdict.at_least("time to load, DCP / ours", group.ratio(found("dcp", LOAD), load), 1.0))
    return verdicts


BENCHMARK: Final = Benchmark(
    name="checkpoint", run=run, states=CHECKPOINT_STATE_NAMES, default=Size(scale=0.15, num_samples=1)
)
