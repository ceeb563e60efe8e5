"""Kills all ranks of a job that keeps its state, again and again at random instants (by hand: ``ARGS``).

``kill_ranks.py --ranks 2 --kills 200 --seed 7``. Every state that any life of any rank had at a step must be the same.
With ``--hosts 2``, half of the kills take a host and its keepers along. With ``--torchrun``, torchrun starts the ranks
again; ``KEEPING_TABLE_BYTES=333000000`` in the environment gives each rank 1 GB.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import keeping_rank
from programs import Program
from prometheus_client.parser import text_string_to_metric_families
from ranks import served_store

from ft_transport.cli.keepers import find_keepers

LONG_S = 60.0
_SHARE_OF_EARLY_KILLS = 0.3
"""Share of the lives that are killed while they start, resume or make their first step."""


class Job:
    """The lives of one job. The notes of all lives are in one directory.

    A host is a directory of its own: processes of other directories do not find its keepers.
    """

    def __init__(self, directory: Path, num_ranks: int, keep_every: int, num_steps: int = 1_000_000) -> None:
        self.hosts = ["."] * num_ranks
        self.directory, self.num_ranks, self.keep_every = directory, num_ranks, keep_every
        self.num_steps = num_steps
        self.processes: list[Any] = []
        self.num_notes: list[int] = []
        self.lost_steps: list[int] = []
        self.host_of: dict[int, str] = {}
        self.shared_kib = shared_memory_kib()
        self.most_descriptors = 0
        self.most_own_kib = 0

    def notes(self, rank: int) -> list[list[str]]:
        path = self.directory / f"{rank}.txt"
        # The last line may be cut off by a kill.
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [line.split() for line in lines if line.endswith("\n")]

    def newest_step(self, rank: int) -> int:
        return max((int(words[0]) for words in self.notes(rank) if words[0].isdigit()), default=0)

    def resumed(self, rank: int) -> list[int]:
        return [int(words[1]) for words in self.notes(rank) if words[0] == "resumed"]

    def resume_seconds(self, rank: int) -> list[float]:
        return [float(words[2]) for words in self.notes(rank) if words[0] == "resumed" and words[3] != "nothing"]

    def start(self, port: int, **variables: str) -> None:
        self.num_ranks = len(self.hosts)
        self.num_notes = [len(self.notes(rank)) for rank in range(self.num_ranks)]
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(self.num_ranks),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        arguments = [str(self.directory), str(self.num_steps), str(self.keep_every)]
        for rank, host in enumerate(self.hosts):
            (self.directory / host).mkdir(exist_ok=True)
            with (self.directory / f"{rank}.err").open("a") as errors:
                self.processes.append(
                    Program(
                        [sys.executable, keeping_rank.__file__, *arguments],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "KEEPING_HOST": host},
                        cwd=self.directory / host,
                        stderr=errors,
                    )
                )

    def wait(self) -> None:
        """Wait until all ranks of the newest life have made a step."""
        deadline_s = time.monotonic() + LONG_S
        while not all(self._runs(rank) for rank in range(self.num_ranks)):
            ended = [process.poll() for process in self.processes]
            assert not any(ended), f"{ended}: {(self.directory / '0.err').read_text()[-3000:]}"
            assert time.monotonic() < deadline_s, "no step was made in time"
            time.sleep(0.005)

    def _runs(self, rank: int) -> bool:
        notes = self.notes(rank)
        return any(words[0].isdigit() for words in notes[self.num_notes[rank] + 1 :])

    def kill(self) -> None:
        self.host_of |= {process.pid: host for host, process in zip(self.hosts, self.processes, strict=False)}
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes.clear()

    def lose(self, host: str) -> None:
        """End the keepers of a host, whose ranks are dead."""
        for keeper in find_keepers():
            if self.host_of.get(keeper.trainer_pid) == host:
                os.kill(keeper.pid, signal.SIGKILL)

    def close(self) -> None:
        """End all ranks and their keepers."""
        self.kill()
        for host in set(self.host_of.values()):
            self.lose(host)

    def measure_keepers(self) -> None:
        """Note the most descriptors of a keeper, and its most memory beside the snapshots."""
        for keeper in find_keepers():
            with suppress(OSError):
                process = Path(f"/proc/{keeper.pid}")
                self.most_descriptors = max(self.most_descriptors, len(list((process / "fd").iterdir())))
                self.most_own_kib = max(self.most_own_kib, kib_of(process / "status", "RssAnon:"))

    def report_leaks(self) -> None:
        """Print what the keepers used, and what is left of them after `close`."""
        _wait_until("the keepers end", lambda: not any(each.trainer_pid in self.host_of for each in find_keepers()))
        grown_kib = shared_memory_kib() - self.shared_kib
        print(
            f"keepers: at most {self.most_descriptors} descriptors and {self.most_own_kib / 1024:.0f} MB of their own; "
            f"afterwards none, {grown_kib} KiB more shared memory on this host"
        )

    def copied_step(self, rank: int) -> int:
        """The newest step of another rank that this rank holds in its present life; 0 for none."""
        addresses = [words[1] for words in self.notes(rank)[self.num_notes[rank] :] if words[0] == "at"]
        if addresses:
            with (
                suppress(OSError),
                urlopen(addresses[-1].removesuffix("/checkpoint/") + "/metrics", timeout=5) as answer,
            ):
                for family in text_string_to_metric_families(answer.read().decode()):
                    if family.name == "ft_transport_kept_copied_step":
                        return int(sum(sample.value for sample in family.samples))
        return 0

    def check(self) -> None:
        """Every state at a step is the same in all lives."""
        for rank in range(self.num_ranks):
            digests: dict[str, str] = {}
            newest = 0
            for words in self.notes(rank):
                if words[0] == "resumed":
                    self.lost_steps.append(newest - int(words[1]))
                elif words[0].isdigit():
                    newest = int(words[0])
                    assert digests.setdefault(words[0], words[1]) == words[1], f"rank {rank}: step {words[0]} differs"


def kib_of(file: Path, name: str) -> int:
    """Return the figure in a line of a file; 0 without the line, as for a process that has just ended."""
    return next((int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(name)), 0)


def shared_memory_kib() -> int:
    return kib_of(Path("/proc/meminfo"), "Shmem:")


def run(num_ranks: int, num_kills: int, keep_every: int, seed: int, num_hosts: int = 1) -> Job:
    chosen = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory), num_ranks, keep_every)
        hosts = [f"host-{number}" for number in range(num_hosts)]
        num_lost = 0
        try:
            for _ in range(num_kills):
                job.hosts = sorted(hosts * (num_ranks // num_hosts))
                with served_store() as port:
                    job.start(port, KEEPING_COPIES=str(min(2, num_hosts)))
                    if chosen.random() < _SHARE_OF_EARLY_KILLS:
                        time.sleep(chosen.uniform(0, 1.5))
                    else:
                        job.wait()
                        time.sleep(chosen.uniform(0, 0.3))
                    is_copied = num_hosts > 1 and all(job.copied_step(rank) > 0 for rank in range(num_ranks))
                    job.measure_keepers()
                    job.kill()
                if is_copied and chosen.random() < 0.7:
                    lost = chosen.choice(hosts)
                    job.lose(lost)
                    hosts.remove(lost)
                    num_lost += 1
                    hosts.append(f"host-{num_hosts + num_lost}")
            job.check()
            resumed = job.resumed(0)
            # After the loss of a host, ranks resume at a step of which there are copies, perhaps an earlier one.
            assert num_hosts > 1 or resumed == sorted(resumed)
            lost_steps = max(job.lost_steps)
            what = f"{num_ranks} ranks, {num_kills} kills, {num_lost} hosts lost"
            print(f"{what}: step {job.newest_step(0)}, at most {lost_steps} steps lost")
        finally:
            job.close()
        job.report_leaks()
    return job


def run_under_torchrun(num_ranks: int, num_kills: int, keep_every: int, seed: int, within_s: float) -> None:
    chosen = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory), num_ranks, keep_every)
        arguments = ["--standalone", "--nproc-per-node", str(num_ranks), "--monitor-interval", "0.1"]
        arguments += ["--max-restarts", str(num_kills), keeping_rank.__file__]
        with (job.directory / "0.err").open("w") as errors:
            launcher = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    *arguments,
                    directory,
                    str(job.num_steps),
                    str(keep_every),
                ],
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stderr=errors,
            )
        job.num_notes = [0] * num_ranks
        try:
            for _ in range(num_kills):
                if chosen.random() > _SHARE_OF_EARLY_KILLS:
                    job.wait()
                _wait_until("torchrun starts the ranks", lambda: len(_children_of(launcher.pid)) >= num_ranks)
                ranks = _children_of(launcher.pid)
                time.sleep(chosen.uniform(0, within_s))
                job.host_of |= dict.fromkeys(ranks, ".")
                job.measure_keepers()
                for rank in chosen.choice([ranks, ranks[:1], ranks[1:]]):
                    os.kill(rank, signal.SIGKILL)
                _wait_until("torchrun ends the ranks", lambda ended=ranks: not {*ended} & {*_children_of(launcher.pid)})
                job.num_notes = [len(job.notes(rank)) for rank in range(num_ranks)]
            job.wait()
            job.check()
            seconds = sorted(itertools.chain.from_iterable(map(job.resume_seconds, range(num_ranks))))
            assert seconds, f"no rank of {num_kills} lives lived long enough to keep a step; try a larger --within-s"
            num_beyond = sum(lost > keep_every for lost in job.lost_steps)
            print(
                f"{num_ranks} ranks, {num_kills} kills by torchrun: step {job.newest_step(0)}, at most "
                f"{max(job.lost_steps)} steps lost, more than {keep_every} in {num_beyond} of {len(job.lost_steps)} "
                f"lives, ranks resumed {len(seconds)} times in "
                f"{statistics.median(seconds):.2f} s (median; {seconds[0]:.2f} to {seconds[-1]:.2f})"
            )
        finally:
            job.host_of |= dict.fromkeys(_children_of(launcher.pid), ".")
            launcher.terminate()
            launcher.wait()
            job.close()
        job.report_leaks()


def _wait_until(what: str, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s, f"expected within {LONG_S} s: {what}"
        time.sleep(0.01)


def _children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--torchrun", action="store_true")
    parser.add_argument("--within-s", type=float, default=4.0, help="torchrun: latest kill after a life's first step")
    options = parser.parse_args()
    if options.torchrun:
        run_under_torchrun(options.ranks, options.kills, options.every, options.seed, options.within_s)
    else:
        run(options.ranks, options.kills, options.every, options.seed, options.hosts)
