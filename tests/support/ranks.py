"""The one way in which tests launch ranks: as torchrun does, without its imports, and without its agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import serving_store
from programs import Program, run

_POLL_S = 0.02
_SHOWN_CHARS = 5000


def run_ranks(script: str, num_ranks: int, *arguments: str, timeout_s: float) -> None:
    """Runs a script on so many ranks of one process group, and returns when all have ended.

    The group's store is in a process of its own, as with torchrun in its agent: it outlives every rank. A rank that was
    killed is no failure, and the others are left alone with it; one that fails ends the others.

    Raises:
        AssertionError: A rank has failed, or not all have ended in time; with what they have written.
    """
    with served_store() as port:
        _run(script, num_ranks, arguments, port, timeout_s)


def run_scenarios(
    script: str, directory: Path, num_ranks: int, *scenarios: str, timeout_s: float = 150
) -> list[dict[str, Any]]:
    """Runs scenarios of a script, and returns what each rank reported of each; nothing of the one it was killed in.

    The script ends with `report_scenarios`.
    """
    run_ranks(script, num_ranks, str(directory), *scenarios, timeout_s=timeout_s)
    paths = [directory / f"{rank}.json" for rank in range(num_ranks)]
    return [json.loads(path.read_text()) if path.exists() else {} for path in paths]


def report_scenarios(scenarios: Iterable[Callable[[Any], Any]], make: Callable[[Path, str], Any]) -> None:
    """Runs the scenarios that the command line names, one after the other, as one rank of a group.

    Args:
        scenarios: All functions that may be named; what each returns goes to ``DIRECTORY/RANK.json``.
        make: Makes the argument of a scenario from the directory and the scenario's name.
    """
    import torch.distributed as dist

    directory, named = Path(sys.argv[1]), {each.__name__: each for each in scenarios}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    report: dict[str, Any] = {}
    path = directory / f"{dist.get_rank()}.json"
    for name in sys.argv[2:]:
        report[name] = named[name](make(directory, name))
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report))
        partial.rename(path)
    # The group is not destroyed: a rank that was killed would not take part.


@contextmanager
def served_store() -> Iterator[int]:
    """The port of a store, and not in this process: its library would keep descriptors."""
    with Program(
        [sys.executable, serving_store.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


def _run(script: str, num_ranks: int, arguments: Sequence[str], port: int, timeout_s: float) -> None:
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    processes: list[subprocess.Popen[Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        logs = [Path(directory, str(rank)) for rank in range(num_ranks)]
        try:
            for rank, log in enumerate(logs):
                with log.open("w") as file:
                    command = [sys.executable, script, *arguments]
                    own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    processes.append(
                        Program(command, env=own, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file)
                    )
            what = _outcome(processes, timeout_s)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        written = "\n".join(f"=== rank {rank}\n{log.read_text()[-_SHOWN_CHARS:]}" for rank, log in enumerate(logs))
    assert not what, f"{Path(script).name} {' '.join(arguments)}: {what}\n{written}"


def _outcome(processes: list[subprocess.Popen[Any]], timeout_s: float) -> str:
    """Waits until all ranks have ended, or one has failed; returns what went wrong."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        statuses = [process.poll() for process in processes]
        for rank, status in enumerate(statuses):
            if status not in (None, 0, -signal.SIGKILL):
                return f"rank {rank} ended with status {status}"
        if None not in statuses:
            return ""
        if time.monotonic() > deadline_s:
            return f"ranks {[rank for rank, status in enumerate(statuses) if status is None]} took over {timeout_s} s"
        time.sleep(_POLL_S)


def run_torchrun(script: str, num_ranks: int, *arguments: str, timeout_s: float) -> None:
    """The same by torchrun itself, which takes seconds more, and ends the others where a rank is killed."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), script, *arguments]
    done = run([sys.executable, *command], env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-_SHOWN_CHARS:]
