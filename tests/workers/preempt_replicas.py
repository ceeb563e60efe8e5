"""Preempts a replica of two ranks beside another one, at each moment of a step (by hand: ``preempt_replicas.py``).

All ranks must stop at one step within the grace period and resume exactly there. The other replica goes on. Prints how
long the preempted replica took to end, and how much longer than usual the other one's longest step took.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import preempted_rank
from programs import Program
from quorum_threads import lighthouse
from ranks import served_store

from manager.recovery.preemption import PREEMPTED_EXIT_CODE

NUM_RANKS = 2
LONG_S = 60.0
MOMENTS = ("forward", "quorum", "reduce", "commit", "save", "heal")


class Fleet:
    """Replicas ``a`` and ``b``, and the reports of all their starts."""

    def __init__(self, directory: Path, lighthouse_address: str, width: int, grace_s: float) -> None:
        self.directory = directory
        self._variables = {
            "TORCHFT_LIGHTHOUSE": lighthouse_address,
            "PREEMPTED_WIDTH": str(width),
            "PREEMPTED_GRACE_S": str(grace_s),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(NUM_RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self._stack = ExitStack()
        self.processes: dict[str, list[Any]] = {}

    def start(self, replica: str) -> None:
        port = self._stack.enter_context(served_store())
        self.processes[replica] = []
        for rank in range(NUM_RANKS):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            with (self.directory / f"{replica}-{rank}.log").open("a") as log:
                self.processes[replica].append(
                    Program(
                        [sys.executable, preempted_rank.__file__, str(self.directory), replica],
                        env={**os.environ, **self._variables, **own},
                        stderr=log,
                    )
                )

    def signal_at(self, moment: str, ranks: list[int]) -> None:
        for rank in ranks:
            partial = self.directory / "partial"
            partial.write_text(moment)
            partial.rename(self.directory / f"b-{rank}.signal")

    def reports(self, replica: str, rank: int, event: str) -> list[dict[str, Any]]:
        path = self.directory / f"{replica}-{rank}.txt"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [each for each in found if each["event"] == event]

    def wait_for_steps(self, replica: str, num_steps: int) -> None:
        before = len(self.reports(replica, 0, "committed"))
        deadline_s = time.monotonic() + LONG_S
        while len(self.reports(replica, 0, "committed")) < before + num_steps:
            assert time.monotonic() < deadline_s, f"{replica} makes no steps\n{self.logs()}"
            assert not any(process.poll() for process in self.processes[replica]), self.logs()
            time.sleep(0.02)

    def wait_for_end(self, replica: str) -> float:
        deadline_s = time.monotonic() + LONG_S
        while any(process.poll() is None for process in self.processes[replica]):
            assert time.monotonic() < deadline_s, f"{replica} does not end\n{self.logs()}"
            time.sleep(0.005)
        ended_s = time.monotonic()
        codes = [process.returncode for process in self.processes.pop(replica)]
        assert codes == [PREEMPTED_EXIT_CODE] * NUM_RANKS, f"{codes}\n{self.logs()}"
        return ended_s

    def longest_step_s(self, begin_s: float) -> float:
        """The longest time between two commits of replica a since then, beyond its median time before."""
        times = [each["at_s"] for each in self.reports("a", 0, "committed")]
        steps = [(after, after - before) for before, after in itertools.pairwise(times)]
        median_s = statistics.median(seconds for at_s, seconds in steps if at_s < begin_s)
        longest_s: float = max(seconds for at_s, seconds in steps if at_s > begin_s)
        return longest_s - median_s

    def check(self) -> None:
        """Equal states of a rank's part at a step in all replicas and lives."""
        digests: dict[tuple[int, int], set[str]] = defaultdict(set)
        for replica in "ab":
            for rank in range(NUM_RANKS):
                for each in self.reports(replica, rank, "boundary"):
                    digests[rank, each["step"]].add(each["digest"])
        differ = sorted(key for key, found in digests.items() if len(found) > 1 and key[1] > 0)
        assert not differ, f"(rank, step) with different states: {differ}\n{self.logs()}"

    def logs(self) -> str:
        paths = sorted(self.directory.glob("*.log"))
        return "\n".join(f"=== {path.name}\n{path.read_text()[-2500:]}" for path in paths)

    def close(self) -> None:
        for processes in self.processes.values():
            for process in processes:
                process.kill()
                process.wait()
        self._stack.close()


def preempt(fleet: Fleet, moment: str, ranks: list[int]) -> tuple[float, float, float]:
    """Preempt replica b once.

    Returns:
        The seconds until b's state was kept and saved, and until b had ended; and how much longer than usual a took
        for its longest step.
    """
    if moment == "heal":
        for process in fleet.processes.pop("b"):
            process.kill()
            process.wait()
        fleet.wait_for_steps("a", 2)
        fleet.signal_at(moment, ranks)
        fleet.start("b")
    else:
        fleet.signal_at(moment, ranks)
    ended_s = fleet.wait_for_end("b")
    signalled = [each for rank in ranks for each in fleet.reports("b", rank, "signalled")[-1:]]
    assert {each["moment"] for each in signalled} == {moment}
    begin_s = min(each["at_s"] for each in signalled)
    fleet.wait_for_steps("a", 10)
    waited_s = fleet.longest_step_s(begin_s)
    begun = {fleet.reports("b", rank, "boundary")[-1]["step"] for rank in range(NUM_RANKS)}
    fleet.start("b")
    fleet.wait_for_steps("b", 3)
    resumed = {fleet.reports("b", rank, "resumed")[-1]["step"] for rank in range(NUM_RANKS)}
    assert len(resumed) == 1, f"the ranks resumed at different steps: {resumed}"
    # The step that it had begun last was committed, unless another replica failed in it. A replica that heals has none.
    assert moment == "heal" or resumed.pop() in {max(begun), max(begun) + 1}
    fleet.check()
    saved_s = max(fleet.reports("b", rank, "ending")[-1]["at_s"] for rank in range(NUM_RANKS))
    return saved_s - begin_s, ended_s - begin_s, waited_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256, help="3550 gives the two ranks 150 MB each, 5020 300 MB each")
    parser.add_argument("--grace-s", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moments", nargs="*", default=MOMENTS)
    parser.add_argument("--directory", help="an empty one, for reports and logs")
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as directory, lighthouse(heartbeat_timeout_ms=5000) as address:
        fleet = Fleet(Path(options.directory or directory), address, options.width, options.grace_s)
        try:
            for replica in "ab":
                fleet.start(replica)
            fleet.wait_for_steps("b", 5)
            for moment in options.moments:
                figures = [preempt(fleet, moment, chosen.choice([[0], [1], [0, 1]])) for _ in range(options.rounds)]
                saved, ended, gaps = (
                    f"{statistics.median(each):.2f} s (at most {max(each):.2f})" for each in zip(*figures, strict=True)
                )
                print(f"{moment}: saved after {saved}, ended after {ended}; the other waited {gaps}")
        finally:
            fleet.close()


if __name__ == "__main__":
    main()
