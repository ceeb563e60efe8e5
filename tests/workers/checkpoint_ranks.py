"""What the ranks of a group do with a checkpoint store while one of them fails; started by `ranks`.

Usage: ``checkpoint_ranks.py DIRECTORY SCENARIO...``, as `ranks.report_scenarios` says.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from made_objects import made
from programs import fork_writers, start_writers
from ranks import report_scenarios
from state_equality import exact

from ft_transport import CheckpointStore, StoreSettings, TransportError
from ft_transport.checkpoint import directory, roots, writer_process
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.files import DirectoryFiles
from ft_transport.checkpoint.manifest import data_file_name
from ft_transport.checkpoint.save_job import SaveJob
from ft_transport.checkpoint.stored_files import ReadRetries, read_manifest
from ft_transport.checkpoint.writer_process import WriterProcess
from ft_transport.coordination.gloo_exchange import GlooExchange
from ft_transport.state.snapshot import PendingSnapshot

TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 3.0
VISIBLE_TIMEOUT_S = 0.5
NUM_FAILED_ALLOWED = 100
LARGE_BYTES = 192 << 20

FIRST_ONLY_PHASES = ("set up the directory", "plan", "compare", "commit")
"""What the first rank does alone, so that it alone can fail there."""

PHASES = (
    *("snapshot", "copy", "set up the directory", "find the directory", "take the snapshot"),
    *("read the headers", "plan", "digest", "compare", "write", "commit"),
)
EXCHANGES = ("gather the headers", "divide the work", "gather the digests", "gather what was written")

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
"""What is injected where nothing else is said: it does not pass."""


# ------------------------------------------------------------------------------------------------------------- tools


class Ranks:
    """What a scenario needs of its rank."""

    def __init__(self, directory: Path, scenario: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.directory = directory
        self.root = directory / scenario / "checkpoints"
        self.root.parent.mkdir(exist_ok=True)

    def store(self, **options: Any) -> CheckpointStore:
        chosen = {"timeout": timedelta(seconds=TIMEOUT_S), "max_failed_saves": NUM_FAILED_ALLOWED}
        settings = StoreSettings(**{**chosen, **options.pop("settings", {})})
        return CheckpointStore(options.pop("root", self.root), rank_local=("own",), settings=settings, **options)


def until(condition: Callable[[], Any], what: str, timeout_s: float = 30) -> None:
    """Polls; only what another process does cannot be waited for in another way."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s"
        time.sleep(0.002)


def state_of(step: int, rank: int) -> dict[str, Any]:
    return {
        # Every rank holds these, so that there is something to compare.
        "weight": torch.full((128, 64), float(step)),
        "half": torch.full((33,), step, dtype=torch.bfloat16),
        # Another structure at each step, so that the work is divided anew.
        f"only-at-{step}": torch.full((5,), float(step)),
        "step": step,
        "own": {"rank": rank, "random": torch.full((7,), float(1000 * step + rank))},
    }


def is_loaded(store: CheckpointStore, step: int, rank: int) -> bool:
    """Whether a checkpoint is there, is what was written, and is that of this step and rank."""
    store.verify(step)
    loaded = store.load(step)
    return loaded.step == step and exact(loaded.state) == exact(state_of(step, rank))


def told(error: BaseException | None) -> dict[str, Any]:
    """An error and when it was raised, for the report."""
    names = ("rank", "ranks", "phase", "cause_type", "errno")
    return {
        "type": type(error).__name__,
        "text": str(error),
        "cause": type(error.__cause__).__name__ if error is not None else None,
        "at_s": time.monotonic(),
        **{name: getattr(error, name, None) for name in names},
    }


def raised(action: Callable[[], Any]) -> dict[str, Any]:
    try:
        action()
    except TransportError as error:
        return told(error)
    return told(None)


@contextmanager
def replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Calls ``by`` in place of a function of a class or a module, with the function and then what that is called with.

    A rank is a process with one store, so that what a class does there is done for that store.
    """
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: by(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)


@dataclass
class Injection:
    """So many failures are left; the last one was raised at this time."""

    times: int
    at_s: float | None = None


@contextmanager
def injected(
    owner: Any, name: str, error: Exception = FULL, times: int = 1, on: Callable[..., bool] = lambda *_args: True
) -> Iterator[Injection]:
    """Puts a failure in front of a function, as `replaced` does, so many times."""
    injection = Injection(times)

    def strike(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if injection.times and on(*args):
            injection.times -= 1
            injection.at_s = time.monotonic()
            raise error
        return original(*args, **kwargs)

    with replaced(owner, name, strike):
        yield injection


def failing_in(phase: str, error: Exception = FULL, times: int = 1) -> AbstractContextManager[Injection]:
    """A failure of this rank in a phase, at the place where it would arise."""
    requests = {
        "take the snapshot": writer_process.Take,
        "plan": writer_process.Plan,
        "digest": writer_process.Digest,
        "compare": writer_process.Compare,
        "write": writer_process.Write,
        "commit": writer_process.Describe,
    }
    if phase in requests:
        return injected(
            WriterProcess, "call", error, times, lambda _, request, *_args: type(request) is requests[phase]
        )
    gathers = [each for each in EXCHANGES if each.startswith("gather")]
    if phase in gathers:
        numbers = itertools.count()
        return injected(GlooExchange, "gather", error, times, lambda *_args: gathers[next(numbers)] == phase)
    owner, name = {
        "divide the work": (GlooExchange, "scatter"),
        "read the headers": (SaveJob, "header"),
        "set up the directory": (NumberedDirectory, "begin"),
        "find the directory": (roots, "wait_until_visible"),
        "copy": (PendingSnapshot, "finish"),  # after save() has returned, in the background
    }[phase]
    return injected(owner, name, error, times)


@contextmanager
def counted_attempts() -> Iterator[list[int]]:
    attempts: list[int] = []

    def attempt(take: Callable[..., Any], job: SaveJob) -> Any:
        attempts.append(1)  # Each attempt passes the snapshot to the writer process.
        return take(job)

    with replaced(SaveJob, "take", attempt):
        yield attempts


# --------------------------------------------------------------------------------------- one rank fails in each phase


def _fail_and_save_again(ranks: Ranks, store: CheckpointStore, phase: str, victim: int, number: int) -> dict[str, Any]:
    """One save in which a rank fails, and the next, in which none does."""
    is_victim = ranks.rank == victim
    failing_step, good_step = 2 * number, 2 * number + 1
    state = state_of(failing_step, ranks.rank)
    dist.barrier()
    if phase == "snapshot":  # What can never be saved is refused in the call.
        if is_victim:
            state["own"]["unsupported"] = object()
        failed_s: float | None = time.monotonic()
        error = raised(lambda: store.save(failing_step, state))
    else:
        with failing_in(phase, times=int(is_victim)) as injection:
            error = told(store.save(failing_step, state).exception())
        failed_s = injection.at_s
    incomplete = sorted(path.name for path in ranks.root.glob(f"step-{failing_step}*"))
    store.save(good_step, state_of(good_step, ranks.rank), wait=True)
    dist.barrier()
    return {
        "error": error,
        "failed_s": failed_s,
        "left": incomplete if ranks.rank == 0 else [],
        "is_next_loaded": is_loaded(store, good_step, ranks.rank),
        "is_failed_one_there": failing_step in store.steps(),
    }


def victim_of(phase: str) -> int:
    """Ranks 1 and 2 in turn, where it can be another than the first."""
    return 0 if phase in FIRST_ONLY_PHASES else 1 + (*PHASES, *EXCHANGES).index(phase) % 2


def phases(ranks: Ranks) -> dict[str, Any]:
    with ranks.store() as store:
        return {
            phase: _fail_and_save_again(ranks, store, phase, victim_of(phase), number)
            for number, phase in enumerate((*PHASES, *EXCHANGES))
        }


# ------------------------------------------------------------------------------------------------ failures that pass


def _fail_and_retry(ranks: Ranks, store: CheckpointStore, step: int, victim: int, times: int) -> dict[str, Any]:
    dist.barrier()
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    with counted_attempts() as attempts, failing_in("write", error, times * (ranks.rank == victim)) as injection:
        failure = store.save(step, state_of(step, ranks.rank)).exception()
    assert not injection.times, "each attempt had its failure"
    return {
        "error": told(failure),
        "attempts": len(attempts),
        "is_loaded": is_loaded(store, step, ranks.rank),
    }


def passing(ranks: Ranks) -> dict[str, Any]:
    with ranks.store() as store:
        return {"once": _fail_and_retry(ranks, store, 3, 1, 1), "twice": _fail_and_retry(ranks, store, 4, 2, 2)}


# --------------------------------------------------------------------------------------------------- at construction


def refused_root(ranks: Ranks) -> dict[str, Any]:
    file = ranks.root.parent / "file"
    if ranks.rank == 0:
        file.touch()
    dist.barrier()
    started_s = time.monotonic()
    error = raised(lambda: ranks.store(root=file / "root"))
    return {"error": error, "took_s": error["at_s"] - started_s}


def _in_a_namespace_of_its_own(path: Path) -> bool:
    """Gives this thread, and those that it starts, an empty file system of their own there. Returns whether it may."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, ms_rec_private = 0x00020000, 0x4000 | 0x40000
    if not hasattr(libc, "unshare") or libc.unshare(clone_newns):
        return False
    if libc.mount(b"none", b"/", None, ms_rec_private, None):
        return False
    return not libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, None)


def invisible_root(ranks: Ranks) -> dict[str, Any]:
    """On the last rank, another directory is where the root should be."""
    is_last = ranks.rank == ranks.size - 1
    outer = ranks.root.parent / "outer"
    outer.mkdir(exist_ok=True)
    dist.barrier()
    root = outer / "root"
    if is_last and not _in_a_namespace_of_its_own(outer):
        root = ranks.root.parent / "elsewhere" / "root"
    dist.barrier()
    started_s = time.monotonic()
    with patch.object(directory, "_VISIBLE_S", VISIBLE_TIMEOUT_S):
        error = raised(lambda: ranks.store(root=root))
    return {"error": error, "took_s": error["at_s"] - started_s}


def invisible_step(ranks: Ranks) -> dict[str, Any]:
    """All see a root, and the last rank sees another one."""
    is_last = ranks.rank == ranks.size - 1
    ranks.root.mkdir(exist_ok=True)
    dist.barrier()
    is_hidden = is_last and _in_a_namespace_of_its_own(ranks.root)
    dist.barrier()
    with patch.object(directory, "_VISIBLE_S", VISIBLE_TIMEOUT_S), ranks.store() as store:

        def look_elsewhere(wait: Callable[..., None], marker: Path, *args: Any) -> None:
            wait(ranks.directory / "elsewhere" / marker.parent.name / marker.name, *args)

        is_elsewhere = is_last and not is_hidden
        dist.barrier()
        started_s = time.monotonic()
        with replaced(roots, "wait_until_visible", look_elsewhere) if is_elsewhere else nullcontext():
            error = told(store.save(1, state_of(1, ranks.rank)).exception())
        return {"error": error, "took_s": error["at_s"] - started_s, "steps": list(store.steps())}


def poisoned(ranks: Ranks) -> dict[str, Any]:
    modules = ranks.root.parent / "modules"
    modules.mkdir(exist_ok=True)
    (modules / "msgspec.py").write_text("raise ImportError('poisoned')\n")
    dist.barrier()
    with (
        patch.dict(os.environ, {"PYTHONPATH": str(modules)} if ranks.rank == 1 else {}),
        start_writers() if ranks.rank == 1 else nullcontext(),  # a fork would find what was imported before
    ):
        started_s = time.monotonic()
        error = raised(ranks.store)
    with ranks.store() as store:  # The failure has left neither a claim nor a lost step in the agreement.
        store.save(1, state_of(1, ranks.rank), wait=True)
        is_loaded_afterwards = is_loaded(store, 1, ranks.rank)
    return {"error": error, "took_s": error["at_s"] - started_s, "is_loaded_afterwards": is_loaded_afterwards}


# ------------------------------------------------------------------------------------------------------ the directory


def stale(ranks: Ranks) -> dict[str, Any]:
    incomplete = ranks.root / "step-5.incomplete"
    with ranks.store() as store:
        if ranks.rank == 0:
            (incomplete / "nested").mkdir(parents=True)
            (incomplete / "nested" / "garbage").write_bytes(b"garbage")
            # Names that are written, too, longer than what will be written.
            for name in (data_file_name(0), "manifest.json", ".metadata"):
                (incomplete / name).write_bytes(b"g" * (1 << 20))
        else:
            until((incomplete / ".metadata").exists, "the garbage")
        dist.barrier()
        delayed_s = 0.5

        def late(begin: Callable[..., Path], *args: Any) -> Path:
            threading.Event().wait(delayed_s)  # Nobody sets it: the delay is the fault.
            return begin(*args)

        started_s = time.monotonic()
        with replaced(NumberedDirectory, "begin", late):  # which the first rank alone calls
            store.save(5, state_of(5, ranks.rank), wait=True)
        took_s = time.monotonic() - started_s
        dist.barrier()
        listed = {
            entry.name
            for entry in read_manifest(
                DirectoryFiles(ranks.root / "step-5"), 5, StoreSettings().trust(), ReadRetries(0)
            ).files
        }
        there = {str(path.relative_to(ranks.root / "step-5")) for path in (ranks.root / "step-5").rglob("*")}
        return {
            "took_s": took_s,
            "delayed_s": delayed_s,
            "unlisted": sorted(there - listed - {"manifest.json"}),
            "is_loaded": is_loaded(store, 5, ranks.rank),
            "left": sorted(path.name for path in ranks.root.glob("step-*")),
        }


def _kept(ranks: Ranks) -> list[list[str]]:
    """What each rank finds in the directory at the moment in which its handle is done."""
    root = ranks.root.with_name("kept")
    found: list[list[str]] = []
    write = SaveJob.write
    may_begin = threading.Event()

    def late(*arguments: Any) -> Any:
        assert may_begin.wait(TIMEOUT_S)
        return write(*arguments)

    with ranks.store(root=root, keep=1) as store:
        SaveJob.write = late  # type: ignore[method-assign]
        for step in (1, 2, 3):
            may_begin.clear()
            handle = store.save(step, state_of(step, ranks.rank))
            handle.future.add_done_callback(
                lambda _: found.append([path.name for path in root.glob("step-*") if "." not in path.name])
            )
            may_begin.set()
            handle.result()
            dist.barrier()
        SaveJob.write = write  # type: ignore[method-assign]
    return found


def differing_settings(ranks: Ranks) -> dict[str, Any]:
    differing: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "busy": ({"settings": {"busy": "wait"}}, {"settings": {"busy": "skip"}}),
        "read": ({"settings": {"read": "once"}}, {"settings": {"read": "each"}}),
        "max_failed_saves": ({"settings": {"max_failed_saves": 0}}, {"settings": {"max_failed_saves": 3}}),
        "keep": ({"keep": 1}, {"keep": 3}),
        "consolidate": ({}, {"consolidate": "model"}),
        "read_only": ({}, {"read_only": True}),
    }
    report: dict[str, Any] = {}
    for name, options in differing.items():
        report[name] = raised(lambda options=options: ranks.store(**options[min(ranks.rank, 1)]))
    report["refused"] = raised(lambda: ranks.store(**({"keep": "x"} if ranks.rank == 1 else {})))
    with ranks.store() as store:
        for step in (1, 2):
            store.save(step, state_of(step, ranks.rank), wait=True)
        number = 1 if ranks.rank else 2
        damaged = ranks.root / "step-1" / data_file_name(0)
        content = damaged.read_bytes()
        dist.barrier()
        if not ranks.rank:
            damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        dist.barrier()
        report["verify"] = raised(lambda: store.verify(number))
        report["load"] = raised(lambda: store.load(number))
        report["prune"] = raised(lambda: store.prune(number))
        report["refused step"] = raised(lambda: store.verify("first" if ranks.rank == 1 else "latest"))
        report["refused keep"] = raised(lambda: store.prune(0 if ranks.rank == 1 else 1))
        report["steps"] = store.steps()
        dist.barrier()
        if not ranks.rank:
            damaged.write_bytes(content)
        dist.barrier()
        report["is_loaded"] = is_loaded(store, 1, ranks.rank)
    report["kept"] = _kept(ranks)
    return report


# --------------------------------------------------------------------------------------------------------- the writer


def is_running(process_id: int) -> bool:
    """A zombie does not run."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _healths(store: CheckpointStore, count: int) -> list[list[int]]:
    return [list(store.check_health().dead_writers) for _ in range(count)]


def killed_writer(ranks: Ranks) -> dict[str, Any]:
    report: dict[str, Any] = {}
    is_victim = ranks.rank == 1
    with made(WriterProcess) as writers, ranks.store() as store:
        (writer,) = writers
        report["before"] = _healths(store, 3)
        # Once it is seen at once, once when another one has long taken its place: a step may take longer than that.
        for name in ("at once", "after it was replaced"):
            killed = writer.process_id
            assert killed is not None

            def is_replaced(killed: int = killed) -> bool:
                return writer.process_id not in (None, killed)

            dist.barrier()
            if is_victim:
                os.kill(killed, signal.SIGKILL)
                # Not only for the system: who waits for its end holds the lock under which it is asked for.
                until(lambda killed=killed: writer.process_id != killed or not writer.is_alive(), "its end")
                if name != "at once":
                    until(is_replaced, "another one", TIMEOUT_S)
            dist.barrier()
            report[name] = _healths(store, 2)
            if is_victim:
                until(is_replaced, "another one", TIMEOUT_S)
            dist.barrier()
            _healths(store, 2)
            report[f"{name}, later"] = _healths(store, 1)
        store.save(1, state_of(1, ranks.rank), wait=True)
        report["is_loaded"] = is_loaded(store, 1, ranks.rank)
    return report


def killed_while_writing(ranks: Ranks) -> dict[str, Any]:
    is_victim = ranks.rank == 1
    report: dict[str, Any] = {}
    large = torch.arange(LARGE_BYTES // 4, dtype=torch.int32)
    with made(WriterProcess) as writers, ranks.store() as store:
        (writer,) = writers
        killed = writer.process_id
        assert killed is not None
        sizes: list[int] = []

        def kill_in_the_middle() -> None:
            file = ranks.root / "step-1.incomplete" / data_file_name(ranks.rank)
            until(lambda: file.exists() and file.stat().st_size, f"the first bytes of {file.name}")
            os.kill(killed, signal.SIGSTOP)  # Its file does not grow while it is looked at.
            sizes.append(file.stat().st_size)
            os.kill(killed, signal.SIGKILL)

        killer = threading.Thread(target=kill_in_the_middle)
        state = state_of(1, ranks.rank)
        if is_victim:
            state["own"]["large"] = large
            killer.start()
        with counted_attempts() as attempts:
            handle = store.save(1, state)
            if is_victim:
                killer.join()
            report["error"] = told(handle.exception())
        loaded = store.load(1).state
        report["is_loaded"] = exact(loaded) == exact(state)
        report["sizes"] = sizes
        report["attempts"] = len(attempts)
        report["is_replaced"] = writer.process_id != killed
    return report


# ---------------------------------------------------------------------------------------------------- a rank that goes


def _gone(ranks: Ranks, victim: int, number: signal.Signals) -> dict[str, Any]:
    """The victim gets a signal in the middle of a save; the others wait for it for as long as they were told to."""
    is_victim = ranks.rank == victim
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks.size)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    # With patience: several processes that import torch at once take longer than the short one on a small machine.
    with ranks.store() as patient:
        patient.save(0, state_of(0, ranks.rank), wait=True)
    dist.barrier()
    with made(WriterProcess) as writers:
        store = ranks.store(settings={"timeout": timedelta(seconds=GONE_TIMEOUT_S)})

    def strike(find: Callable[..., None], *args: Any) -> None:
        os.kill(os.getpid(), number)
        find(*args)

    dist.barrier()
    started_s = time.monotonic()
    with replaced(roots, "wait_until_visible", strike) if is_victim else nullcontext():
        error = told(store.save(1, state_of(1, ranks.rank)).exception())
    report = {"error": error, "took_s": error["at_s"] - started_s}
    if number == signal.SIGSTOP:
        # The one that was given up goes on when all others have noticed.
        noticed = ranks.directory / f"noticed-{ranks.rank}"
        noticed.touch()
        others = [rank for rank in range(ranks.size) if rank != victim]
        if not is_victim:
            until(lambda: all((ranks.directory / f"noticed-{rank}").exists() for rank in others), "the others")
            os.kill(int(pids[victim].item()), signal.SIGCONT)
        dist.barrier()
        report["later"] = []
        for step in (2, 3, 4):
            report["later"].append(told(store.save(step, state_of(step, ranks.rank)).exception()))
            dist.barrier()
    started_s = time.monotonic()
    store.close()
    report["close_s"] = time.monotonic() - started_s
    report["writer_runs"] = writers[0].process_id is not None
    return report


def stopped_rank_2(ranks: Ranks) -> dict[str, Any]:
    return _gone(ranks, 2, signal.SIGSTOP)


def stopped_rank_0(ranks: Ranks) -> dict[str, Any]:
    return _gone(ranks, 0, signal.SIGSTOP)


def killed_rank_2(ranks: Ranks) -> dict[str, Any]:
    return _gone(ranks, 2, signal.SIGKILL)


def killed_rank_0(ranks: Ranks) -> dict[str, Any]:
    return _gone(ranks, 0, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------- a busy store


def _busy(ranks: Ranks, policy: str) -> dict[str, Any]:
    """One rank is not done with a save yet, the others are."""
    may_end = threading.Event()

    def linger(run: Callable[[SaveJob], None], job: SaveJob) -> None:
        run(job)
        assert may_end.wait(TIMEOUT_S)

    with (
        replaced(SaveJob, "run", linger) if ranks.rank == 1 else nullcontext(),
        ranks.store(root=ranks.root / policy, settings={"busy": policy}) as store,
    ):
        first = store.save(1, state_of(1, ranks.rank))
        if ranks.rank != 1:
            first.result()
        was_done = first.done()
        dist.barrier()
        report: dict[str, Any] = {"was_done": was_done, "is_skipped": None}

        def save() -> None:
            report["is_skipped"] = store.save(2, state_of(2, ranks.rank)).is_skipped

        report["error"] = raised(save)
        may_end.set()
        store.wait()
        dist.barrier()
        report["is_next_skipped"] = store.save(3, state_of(3, ranks.rank), wait=True).is_skipped
        report["steps"] = list(store.steps())
        return report


def busy(ranks: Ranks) -> dict[str, Any]:
    return {policy: _busy(ranks, policy) for policy in ("skip", "error")}


SCENARIOS = (
    *(phases, passing, refused_root, invisible_root, invisible_step, poisoned, stale),
    *(killed_writer, killed_while_writing, stopped_rank_2, stopped_rank_0, killed_rank_2, killed_rank_0),
    *(differing_settings, busy),
)

if __name__ == "__main__":
    fork_writers()
    report_scenarios(SCENARIOS, Ranks)
