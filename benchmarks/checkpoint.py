"""Checkpoint: how long a save holds the training thread, when it is on disk, and how long a load takes.

Ours beside a copy of the same tensors into warm memory, beside a bare file of the same bytes, and beside
``torch.distributed.checkpoint``. Each sample's process is a fresh one that has saved once before it measures.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks import savers
from benchmarks.machine import file_system_of
from benchmarks.options import Benchmark, Options, Size
from benchmarks.processes import in_fresh_process
from benchmarks.report import Group, Sample, Verdict, ratio
from benchmarks.savers import BARE, CLONE, DURABLE, LOAD, OURS, PAUSE, PROCESSES, THREADS, Job, Outcome, SaverVariant
from benchmarks.states import CHECKPOINT_STATE_NAMES, StateSpec

_NUM_REPEATS: Final = 2
_COPIES: Final = (savers.MEMMOVE, savers.COPY)
_ORDER: Final = (OURS, CLONE, *_COPIES, savers.TORCH_CLONE, BARE, *THREADS, *PROCESSES, savers.DCP_LOAD)


def run(options: Options) -> Iterator[Group]:
    """Measures one state after the other, in a new directory beneath the given one, which is removed."""
    for name in options.states:
        yield _run_state(StateSpec(name, options.scale), options)


def _run_state(spec: StateSpec, options: Options) -> Group:
    group = Group("checkpoint", spec.name, spec.title)
    failures: dict[SaverVariant, str] = {}
    measured = tuple(saver for saver in (OURS, *THREADS, *PROCESSES) if options.is_full or saver.is_judged)
    for round_number, saver in options.rounds(f"checkpoint {spec.name}", measured):
        if saver in failures:
            continue
        try:
            outcome = _save(saver, spec, round_number, options.directory)
        except RuntimeError as error:
            if saver is OURS:
                raise
            failures[saver] = str(error).splitlines()[-1]
            continue
        for timed in outcome.timed:
            sample = Sample(round_number, timed.seconds * 1e3, timed.others_share)
            group.add(timed.variant, timed.quantity, sample)
        group.title = f"{spec.title}, {outcome.num_bytes / 1e9:.2f} GB, {outcome.num_tensors} tensors"
        group.notes += [note for note in outcome.notes if note not in group.notes]
    group.sort(_ORDER)
    group.notes += [f"{saver.name} could not be measured: {text}" for saver, text in failures.items()]
    group.notes += [
        f"on {file_system_of(options.directory)}; loads from the page cache",
        "pause: until the call returns; durable: from the call until everything is on disk and has its name",
        "DCP: FileSystemWriter as it is by default (sync_files), which copies into new memory at each save; "
        "kept stager: a DefaultStager that keeps its copy's memory, shared memory for a process",
    ]
    group.verdicts = judge(group)
    return group


def _save(saver: SaverVariant, spec: StateSpec, turn: int, directory: Path) -> Outcome:
    """Runs one process that saves. Nothing of it is left, process or file."""
    place = tempfile.mkdtemp(prefix=".checkpoint-benchmark-", dir=directory)
    job = Job(variant=saver, spec=spec, directory=Path(place), num_repeats=_NUM_REPEATS, turn=turn)
    try:
        return in_fresh_process(savers.save, job)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def judge(group: Group) -> list[Verdict]:
    """The targets: the pause against a clone, the write against a bare one, many tensors against DCP."""
    pause, durable = group.find(OURS, PAUSE), group.find(OURS, DURABLE)
    copy = group.best(_COPIES, PAUSE)
    return [
        Verdict.at_most("save() holds the trainer / the transport's clone", group.ratio(OURS, CLONE, PAUSE), 1.2),
        Verdict.at_most("save() holds the trainer / copy into warm memory", ratio(pause, copy), 1.2),
        Verdict.at_least("write rate, from save() to durable / bare write", group.ratio(BARE, OURS, DURABLE), 0.8),
        *(
            Verdict.at_least(
                f"time to durable, DCP with a {name} / ours", ratio(group.best(variants, DURABLE), durable), 1.0
            )
            for name, variants in (("thread", THREADS), ("process", PROCESSES))
        ),
        Verdict.at_least("time to load, DCP / ours", group.ratio(savers.DCP_LOAD, OURS, LOAD), 1.0),
    ]


BENCHMARK: Final = Benchmark(
    name="checkpoint",
    question="How long does a save hold the trainer, and when is it on disk?",
    run=run,
    states=CHECKPOINT_STATE_NAMES,
    default=Size(scale=0.15, num_samples=1),
    misses={
        "copy into warm memory": "Flattening takes 2.4 µs for each tensor, in Python, before the first byte is copied.",
        "write rate": "The disk is shared: single rounds of this ratio reach from 0.46 to 1.69.",
    },
)
