"""Saves that are killed at every step; each in a process of its own, forked from this one, which has imported torch.

Usage: ``checkpoint_crashes.py SCENARIO DIRECTORY``: a key of `SCENARIOS`, and an empty directory. Prints a report as
JSON: a list of cases, of each what a new process has found.

A forked writer stands for the writer process.

What lies on the disk behind one step lies there before the next, too: most scenarios kill on one side of each step.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from dying import Fuse
from state_equality import exact

from ft_transport import CheckpointError, CheckpointStore, StoreSettings
from ft_transport.checkpoint import writer, writer_process

SETTINGS = StoreSettings(timeout=timedelta(seconds=60))
"""A rank that is dead is waited for this long; where one is going to die, `IMPATIENT`."""
IMPATIENT = StoreSettings(timeout=timedelta(seconds=3))
OLD, NEW, NEXT = 1, 5, 9
_PR_SET_CHILD_SUBREAPER = 36  # include/uapi/linux/prctl.h


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A save that is killed.

    `step` is saved where step 1 has been, so that it replaces that if it is 1. The victim is a trainer or a writer, of
    one rank. Of all steps at which it can be killed, `chosen` are tried; by default each. If `is_shared`, the process
    has itself saved step 1, whose files it shares.
    """

    step: int
    victim: str = "trainer"
    victim_rank: int = 0
    is_exchange_there: bool = True
    num_ranks: int = 1
    is_in_recovery: bool = False
    is_shared: bool = False
    keep: int | None = None
    chosen: tuple[int, ...] | None = None
    sides: tuple[str, ...] = ("before", "after")


_TWO = Scenario(step=2, num_ranks=2, sides=("before",))
SCENARIOS = {
    "new": Scenario(step=2),
    "new, deleting the old": Scenario(step=2, keep=1, sides=("after",)),
    "replacing": Scenario(step=1, sides=("before",)),
    "replacing without exchange": Scenario(step=1, is_exchange_there=False, sides=("after",)),
    "writer of new": Scenario(step=2, victim="writer", sides=("before",)),
    "writer of new, after": Scenario(step=2, victim="writer", sides=("after",)),
    "writer of new, shared": Scenario(step=2, victim="writer", sides=("after",), is_shared=True),
    "writer of replacing": Scenario(step=1, victim="writer", sides=("before",)),
    "recovering": Scenario(step=1, is_in_recovery=True),
    "recovering without exchange": Scenario(step=1, is_in_recovery=True, is_exchange_there=False, sides=("after",)),
    "two ranks, the first": dataclasses.replace(_TWO, chosen=(3,)),
    "two ranks, every step of the first": dataclasses.replace(_TWO, step=1),
    "two ranks, every step of the second": dataclasses.replace(_TWO, step=1, victim_rank=1),
    "two ranks, every step of a writer": dataclasses.replace(_TWO, step=1, victim="writer", victim_rank=1),
}


def state(value: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((1000, 3), float(value)), "b": torch.full((7,), value, dtype=torch.int64)},
        "frozen": torch.full((1000, 7), 3.0),
        "progress": {"n": value, "names": ["a", value]},
    }


class ForkedProcess:
    """Stands for ``subprocess.Popen``, and starts a writer by a fork, which costs no import."""

    fuse: Fuse
    fatal: int | None = None
    is_after = False
    num_started = 0

    def __init__(self, command: list[str], *, pass_fds: tuple[int, ...], **_options: Any) -> None:
        kind = type(self)
        kind.num_started += 1
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        with contextlib.suppress(BaseException):
            (descriptor,) = pass_fds
            os.closerange(3, descriptor)
            os.closerange(descriptor + 1, 1 << 12)
            if kind.num_started == 1:
                kind.fuse.arm(kind.fatal, is_after=kind.is_after)
            with socket.socket(fileno=descriptor) as connection:
                writer.serve(connection)
        os._exit(0)

    def poll(self) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        # One that hangs ends the test, by its timeout.
        if self._status is None:
            _, status = os.waitpid(self.pid, 0)
            self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, 9)


def fork_writers(fuse: Fuse) -> None:
    """Has the stores of this process start their writers as `ForkedProcess`."""
    ForkedProcess.fuse = fuse
    writer_process.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=ForkedProcess, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


def in_children(*works: Callable[[], Any]) -> list[Any]:
    """Runs each in a process of its own; returns what it returned, or ``None`` if it was killed.

    Returns when all processes are gone, and those that they have left as well: no writer outlives its trainer.
    """
    pipes, processes = [], []
    for work in works:
        reading, writing = os.pipe()
        process = os.fork()
        if not process:
            try:
                os.write(writing, json.dumps(work()).encode())
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(writing)
        pipes.append(reading)
        processes.append(process)
    statuses = {}
    while len(statuses) < len(processes):
        process, status = os.wait()
        if process in processes:
            statuses[process] = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    reports = []
    for process, reading in zip(processes, pipes, strict=True):
        with open(reading, "rb") as file:
            reported = file.read()
        if statuses[process] == 1:
            raise AssertionError("a process failed; its traceback is above")
        reports.append(json.loads(reported) if reported else None)
    return reports


@contextlib.contextmanager
def group_of(rank: int, num_ranks: int, meeting: Path) -> Any:
    if num_ranks > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(meeting), num_ranks), rank=rank, world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
    yield
    if num_ranks > 1:
        dist.destroy_process_group()


def trainer(scenario: Scenario, rank: int, root: Path, meeting: Path, *, fatal: int, is_after: bool) -> Any:
    """Saves, and is killed meanwhile, or its writer is. Returns what it has found otherwise."""
    fuse = Fuse(root.parent / "killed-at")
    fuse.install(is_exchange_there=scenario.is_exchange_there)
    is_victim = rank == scenario.victim_rank
    fork_writers(fuse)
    if scenario.victim == "writer" and is_victim:
        ForkedProcess.fatal, ForkedProcess.is_after = fatal, is_after
    if rank:
        fuse.install_phases()
    settings = IMPATIENT if scenario.num_ranks > 1 and scenario.victim == "trainer" else SETTINGS
    failure = ""
    with group_of(rank, scenario.num_ranks, meeting):
        if scenario.is_in_recovery:
            fuse.arm(fatal, is_after=is_after)
        store = CheckpointStore(root, keep=scenario.keep, settings=settings)
        if not scenario.is_in_recovery:
            if scenario.victim == "trainer" and is_victim:
                fuse.arm(fatal, is_after=is_after)
            try:
                if scenario.is_shared:
                    store.save(1, state(OLD), overwrite=True, wait=True)
                store.save(scenario.step, state(NEW), overwrite=True, wait=True)
            except CheckpointError as error:
                failure = f"{type(error).__name__}: {error}"
        store.close()  # What is deleted behind the save is a part of it.
        fuse.disarm()
    return {"failure": failure, "steps": fuse.steps}


def check(rank: int, num_ranks: int, root: Path, meeting: Path) -> dict[str, Any]:
    """What a process that starts anew finds."""
    report: dict[str, Any] = {}
    fork_writers(Fuse(root.parent / "unused"))
    with group_of(rank, num_ranks, meeting):
        with CheckpointStore(root, read_only=True, settings=SETTINGS) as store:
            report["latest_before"] = store.latest()
            report["value_before"] = _value_of(store)
        with CheckpointStore(root, settings=SETTINGS) as store:
            report["names"] = sorted(os.listdir(root))
            report["steps"] = store.steps()
            report["latest"] = store.latest()
            report["value"] = _value_of(store)
            store.save(NEXT, state(NEXT), wait=True)
            report["next_latest"] = store.latest()
            report["next_value"] = _value_of(store)
    return report


def _value_of(store: CheckpointStore) -> int | None:
    """Of which state all bits are there; ``None`` if of none."""
    store.verify()
    into = state(-1)
    loaded = store.load(into=into).state
    assert loaded["model"]["w"] is into["model"]["w"]
    return next((value for value in (OLD, NEW, NEXT) if exact(loaded) == exact(state(value))), None)


def run_case(scenario: Scenario, directory: Path, template: Path, fatal: int, is_after: bool) -> dict[str, Any]:
    """Kills, and looks what is left; the last case of a matrix gets through without a kill."""
    case = directory / f"{fatal}-{is_after}"
    root = case / "root"
    shutil.copytree(template, root)
    ranks = range(scenario.num_ranks)
    ended = in_children(
        *(partial(trainer, scenario, rank, root, case / "meeting", fatal=fatal, is_after=is_after) for rank in ranks)
    )
    left = sorted(os.listdir(root))
    found = in_children(*(partial(check, rank, scenario.num_ranks, root, case / "meeting-again") for rank in ranks))
    record = case / "killed-at"
    report: dict[str, Any] = {
        "at": fatal,
        "is_after": is_after,
        "killed_at": record.read_text() if record.exists() else None,
        "ended": ended,
        "left": left,
        "found": found,
    }
    shutil.rmtree(case)
    return report


def make_template(scenario: Scenario, root: Path) -> None:
    """A root with step 1; and, for a recovery, with what crashes at all sorts of steps have left."""

    def save() -> None:
        fork_writers(Fuse(root.parent / "unused"))
        with CheckpointStore(root) as store:
            store.save(1, state(OLD), wait=True)

    in_children(save)
    if scenario.is_in_recovery:
        complete = root / "step-1"
        for name in ("step-0.deleted", "step-2.incomplete", "step-0.deleted-1", "step-3.incomplete"):
            shutil.copytree(complete, root / name)
        (root / "step-0.deleted" / "manifest.json").unlink()
        (root / "step-2.incomplete" / "manifest.json").unlink()
        if not scenario.is_exchange_there:
            complete.rename(root / "step-1.replaced")


def main() -> None:
    scenario, directory = SCENARIOS[sys.argv[1]], Path(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    assert threading.active_count() == 1, "a fork copies no thread"
    # Else each child collects, and thereby copies, what was imported: more than all the rest that it does.
    gc.freeze()
    make_template(scenario, directory / "template")
    reports = []
    for fatal in scenario.chosen if scenario.chosen is not None else itertools.count():
        cases = [
            run_case(scenario, directory, directory / "template", fatal, side == "after") for side in scenario.sides
        ]
        reports += cases
        if scenario.chosen is None and not any(case["killed_at"] for case in cases):
            break
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
