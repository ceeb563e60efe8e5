"""Kills replicas of two FSDP2 ranks again and again; they join again, and follow (by hand: ``ARGS``).

``join_replicas.py --joins 200 --seed 7``. Some deaths hit a newcomer that follows, or another replica meanwhile. All
replicas must have the same state at each step to which they contribute. Prints how many newcomers followed to the end,
and why others did not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import following_rank
from programs import Program
from quorum_threads import lighthouse
from ranks import served_store

NUM_RANKS = 2
NAMES = "abc"
LONG_S = 90.0
_SHARE_OF_DOUBLE_DEATHS = 0.25
"""Share of the deaths soon after which another one follows, of the newcomer or of a replica that trains."""


class Fleet:
    """The replicas, and the reports of all their starts."""

    def __init__(self, directory: Path, address: str) -> None:
        self._directory = directory
        self._variables = {
            "TORCHFT_LIGHTHOUSE": address,
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(NUM_RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self._stores: dict[str, ExitStack] = {}
        self.processes: dict[str, list[Any]] = {}

    def start(self, replica: str) -> None:
        self._stores[replica] = store = ExitStack()
        port = store.enter_context(served_store())
        self.processes[replica] = []
        for rank in range(NUM_RANKS):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            with (self._directory / f"{replica}-{rank}.log").open("a") as log:
                self.processes[replica].append(
                    Program(
                        [sys.executable, following_rank.__file__, str(self._directory), replica],
                        env={**os.environ, **self._variables, **own},
                        stderr=log,
                    )
                )

    def kill(self, replica: str) -> None:
        for process in self.processes.pop(replica):
            process.kill()
            process.wait()
        self._stores.pop(replica).close()

    def reports(self, replica: str, rank: int = 0) -> list[dict[str, Any]]:
        path = self._directory / f"{replica}-{rank}.txt"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_until_all_contribute(self, after: dict[str, int]) -> None:
        """Wait until each replica has reported so many boundaries, and five more."""
        deadline_s = time.monotonic() + LONG_S
        while any(len(self.boundaries(name)) < number + 5 for name, number in after.items()):
            dead = [name for name, ranks in self.processes.items() if any(each.poll() is not None for each in ranks)]
            assert not dead, f"{dead} have ended\n{self.logs()}"
            assert time.monotonic() < deadline_s, f"expected all replicas to contribute\n{self.logs()}"
            time.sleep(0.05)

    def boundaries(self, replica: str) -> list[dict[str, Any]]:
        return [each for each in self.reports(replica) if each["event"] == "boundary"]

    def check(self) -> None:
        digests: dict[tuple[int, int], set[str]] = defaultdict(set)
        for replica in NAMES:
            for rank in range(NUM_RANKS):
                for each in self.reports(replica, rank):
                    if each["event"] == "boundary" and each["step"] > 0:
                        digests[rank, each["step"]].add(each["digest"])
        differ = sorted(key for key, found in digests.items() if len(found) > 1)
        assert not differ, f"(rank, step) with different states: {differ}\n{self.logs()}"

    def logs(self) -> str:
        return "\n".join(
            f"=== {path.name}\n{path.read_text()[-2500:]}" for path in sorted(self._directory.glob("*.log"))
        )

    def close(self) -> None:
        for replica in list(self.processes):
            self.kill(replica)


def run(least_deaths: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Kill so many replicas at least.

    Returns:
        The reports of all joins, and of those newcomers that followed to the end.
    """
    chosen = random.Random(seed)
    num_deaths = 0
    with tempfile.TemporaryDirectory() as directory, lighthouse(1) as address:
        fleet = Fleet(Path(directory), address)
        try:
            for name in NAMES:
                fleet.start(name)
            fleet.wait_until_all_contribute(dict.fromkeys(NAMES, 0))
            while num_deaths < least_deaths:
                victim, other = chosen.sample(NAMES, 2)
                died = [victim]
                fleet.kill(victim)
                fleet.start(victim)
                if chosen.random() < _SHARE_OF_DOUBLE_DEATHS:
                    # At any moment of the start and of the steps in which the newcomer follows.
                    time.sleep(chosen.uniform(0.5, 8.0))
                    died.append(chosen.choice([victim, other]))
                    fleet.kill(died[-1])
                    fleet.start(died[-1])
                fleet.wait_until_all_contribute({name: len(fleet.boundaries(name)) for name in NAMES})
                num_deaths += len(died)
                fleet.check()
                joined = [each for name in NAMES for each in fleet.reports(name) if each["event"] == "joined"]
                followed = [each for each in joined if each.get("replay", "").startswith("followed")]
                print(f"{num_deaths} deaths, {len(joined)} joins, {len(followed)} followed to the end", flush=True)
        finally:
            fleet.close()
    return joined, followed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--joins", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    joined, followed = run(options.joins, options.seed)
    reasons = Counter(each.get("replay", "no note") for each in joined if each not in followed)
    print("the others healed:", *(f"{number} × {reason}" for reason, number in reasons.items()), sep="\n  ")


if __name__ == "__main__":
    main()
