"""Kills all ranks of a job that keeps its state, again and again at random instants (by hand: ``ARGS``).

``kill_ranks.py --ranks 2 --kills 200 --seed 7``. Every state that any life of any rank had at a step must be the same.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import keeping_rank
from programs import Program
from ranks import served_store

LONG_S = 60.0
_SHARE_OF_EARLY_KILLS = 0.3
"""Share of the lives that are killed while they start, resume or make their first step."""


class Job:
    """The lives of one job. The notes of all lives are in one directory."""

    def __init__(self, directory: Path, num_ranks: int, keep_every: int, num_steps: int = 1_000_000) -> None:
        self.directory, self.num_ranks, self.keep_every = directory, num_ranks, keep_every
        self.num_steps = num_steps
        self.processes: list[Any] = []
        self.num_notes: list[int] = []
        self.lost_steps: list[int] = []

    def notes(self, rank: int) -> list[list[str]]:
        path = self.directory / f"{rank}.txt"
        # The last line may be cut off by a kill.
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [line.split() for line in lines if line.endswith("\n")]

    def newest_step(self, rank: int) -> int:
        return max((int(words[0]) for words in self.notes(rank) if words[0].isdigit()), default=0)

    def resumed(self, rank: int) -> list[int]:
        return [int(words[1]) for words in self.notes(rank) if words[0] == "resumed"]

    def start(self, port: int, **variables: str) -> None:
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
        for rank in range(self.num_ranks):
            with (self.directory / f"{rank}.err").open("a") as errors:
                self.processes.append(
                    Program(
                        [sys.executable, keeping_rank.__file__, *arguments],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        cwd=self.directory,
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
        return len(notes) > self.num_notes[rank] + 1

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes.clear()

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


def run(num_ranks: int, num_kills: int, keep_every: int, seed: int) -> Job:
    chosen = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory), num_ranks, keep_every)
        try:
            for _ in range(num_kills):
                with served_store() as port:
                    job.start(port)
                    if chosen.random() < _SHARE_OF_EARLY_KILLS:
                        time.sleep(chosen.uniform(0, 1.5))
                    else:
                        job.wait()
                        time.sleep(chosen.uniform(0, 0.3))
                    job.kill()
            job.check()
            resumed = job.resumed(0)
            assert resumed == sorted(resumed)
            lost = max(job.lost_steps)
            print(f"{num_ranks} ranks, {num_kills} kills: step {job.newest_step(0)}, at most {lost} steps lost")
        finally:
            job.kill()
    return job


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run(options.ranks, options.kills, options.every, options.seed)
