"""Examples of ``docs/examples`` as processes: started as their pages say, killed, and what they print read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from programs import Program
from ranks import served_store

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

_LINE = re.compile(
    r"step (?P<step>\d+) (?:rank \d+ )?(?:loss \S+ )?replicas (?P<replicas>\d+) weights (?P<weights>\w+)"
)
_SHOWN_CHARS = 4000


@dataclass
class Rank:
    """One process of one start of a replica.

    Attributes:
        weights: By step, the digest that it printed last.
        num_replicas: By step, how many replicas it said took part.
        printed: The lines that it has printed.
    """

    process: subprocess.Popen[Any]
    log: Path
    weights: dict[int, str] = field(default_factory=dict)
    num_replicas: dict[int, int] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)


class ExampleReplicas:
    """Replicas of one example that share a Lighthouse. Used by one thread.

    Args:
        script: Name of the example.
        lighthouse: Its address.
        directory: For logs.
    """

    def __init__(self, script: str, lighthouse: str, directory: Path) -> None:
        self._script = EXAMPLES / script
        self._lighthouse = lighthouse
        self._directory = directory
        self._news = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._stack = ExitStack()
        self.starts: dict[str, list[list[Rank]]] = defaultdict(list)

    def start(self, name: str, *arguments: str, environment: Mapping[str, str], num_ranks: int = 1) -> list[Rank]:
        """Starts all ranks of a replica, in an environment as torchrun makes it."""
        port = self._stack.enter_context(served_store())
        ranks = []
        for rank in range(num_ranks):
            log = self._directory / f"{name}-{len(self.starts[name])}-{rank}.log"
            own = {
                **os.environ,
                **environment,
                "TORCHFT_LIGHTHOUSE": self._lighthouse,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "OMP_NUM_THREADS": "1",
                "RUST_LOG": "error",
            }
            with log.open("w") as file:
                process = Program(
                    [sys.executable, str(self._script), *arguments],
                    env=own,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                )
            ranks.append(Rank(process, log))
            thread = threading.Thread(target=self._read, args=(ranks[-1], process.stdout), daemon=True)
            thread.start()
            self._threads.append(thread)
        self.starts[name].append(ranks)
        return ranks

    def kill(self, name: str) -> None:
        """Ends all ranks of the newest start of a replica with SIGKILL."""
        for rank in self.starts[name][-1]:
            rank.process.kill()
            rank.process.wait()

    def wait_for_step(self, ranks: list[Rank], step: int, timeout_s: float) -> None:
        """Returns when each of the ranks has printed that step."""
        self._wait_for(ranks, f"step {step}", lambda rank: max(rank.weights, default=-1) >= step, timeout_s)

    def wait_for_lines(self, ranks: list[Rank], num_lines: int, timeout_s: float) -> None:
        """Returns when each of the ranks has printed so many lines, whatever they say."""
        self._wait_for(ranks, f"{num_lines} lines", lambda rank: len(rank.printed) >= num_lines, timeout_s)

    def _wait_for(self, ranks: list[Rank], what: str, is_so: Callable[[Rank], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        with self._news:
            while not all(map(is_so, ranks)):
                ended = [rank for rank in ranks if rank.process.poll() not in (None, 0)]
                assert not ended, f"expected {what}\n{self.logs()}"
                assert time.monotonic() < deadline_s, f"expected {what}\n{self.logs()}"
                self._news.wait(0.2)

    def wait_for_end(self, timeout_s: float) -> None:
        """Returns when the newest starts of all replicas have ended, each with status 0."""
        deadline_s = time.monotonic() + timeout_s
        for starts in self.starts.values():
            for rank in starts[-1]:
                try:
                    status = rank.process.wait(max(0.0, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    status = -1
                assert status == 0, f"expected all to end with status 0, got {status}\n{self.logs()}"
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def digests(self, rank: int = 0) -> dict[int, set[str]]:
        """By step, what that rank of any start of any replica had after it."""
        found: dict[int, set[str]] = defaultdict(set)
        for starts in self.starts.values():
            for ranks in starts:
                for step, digest in ranks[rank].weights.items():
                    found[step].add(digest)
        return found

    def logs(self) -> str:
        """The ends of what all processes wrote to their standard error."""
        logs = [rank.log for starts in self.starts.values() for ranks in starts for rank in ranks]
        return "\n".join(f"=== {log.name}\n{log.read_text()[-_SHOWN_CHARS:]}" for log in logs)

    def close(self) -> None:
        """Ends what still runs."""
        for starts in self.starts.values():
            for rank in (rank for ranks in starts for rank in ranks):
                if rank.process.poll() is None:
                    rank.process.kill()
                rank.process.wait()
        for thread in self._threads:
            thread.join()
        self._stack.close()

    def _read(self, rank: Rank, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                with self._news:
                    rank.printed.append(line)
                    if found := _LINE.match(line):
                        rank.weights[int(found["step"])] = found["weights"]
                        rank.num_replicas[int(found["step"])] = int(found["replicas"])
                    self._news.notify_all()


@contextmanager
def example_replicas(script: str, lighthouse: str) -> Iterator[ExampleReplicas]:
    """Replicas of one example; those that still run are ended."""
    with tempfile.TemporaryDirectory() as directory:
        replicas = ExampleReplicas(script, lighthouse, Path(directory))
        try:
            yield replicas
        finally:
            replicas.close()
