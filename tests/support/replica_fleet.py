"""Replicas as processes: started, killed, stopped and started again, and what they report brought together."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from programs import Program

TRAINING_REPLICA = Path(__file__).parents[1] / "workers" / "training_replica.py"


@dataclass(frozen=True)
class Event:
    name: str
    start: str
    event: str
    fields: dict[str, Any]
    at_s: float


@dataclass
class History:
    """What one start of a replica reported."""

    committed: list[int] = field(default_factory=list)
    boundaries: dict[int, str] = field(default_factory=dict)


class ReplicaFleet:
    """Replicas that share a Lighthouse. Used by one thread."""

    def __init__(self, directory: Path, lighthouse: str, *arguments: str) -> None:
        self._directory = directory
        self._environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"}
        self._arguments = arguments
        self._events: queue.Queue[Event] = queue.Queue()
        self._num_starts = 0
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self._starts: dict[str, str] = {}
        self._threads: list[threading.Thread] = []
        self.events: list[Event] = []
        self.histories: dict[str, History] = defaultdict(History)

    def start(self, name: str, *arguments: str) -> None:
        self._num_starts += 1
        start = f"{name}-{self._num_starts}"
        log = (self._directory / f"{start}.log").open("w")
        process = Program(
            [sys.executable, str(TRAINING_REPLICA), name, *self._arguments, *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        log.close()
        self.processes[name] = process
        self._starts[name] = start
        thread = threading.Thread(target=self._read, args=(name, start, process), daemon=True)
        thread.start()
        self._threads.append(thread)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def stop(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGCONT)

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            remaining_s = deadline_s - time.monotonic()
            assert remaining_s > 0, f"expected {what} within {timeout_s} s\n{self.logs()}"
            self.take(min(remaining_s, 0.5))
            for name, process in self.processes.items():
                assert process.poll() in (None, 0), f"replica {name} ended with {process.returncode}\n{self.logs()}"

    def run_for(self, seconds: float) -> None:
        """Take reports for as long."""
        deadline_s = time.monotonic() + seconds
        while (remaining_s := deadline_s - time.monotonic()) > 0:
            self.take(remaining_s)

    def take(self, timeout_s: float) -> None:
        """Wait for one report, and take all that are there."""
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return
        while True:
            self._note(event)
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return

    def newest_step(self) -> int:
        return max((step for history in self.histories.values() for step in history.boundaries), default=-1)

    def newest_step_of(self, name: str) -> int:
        """The newest boundary of the running start of ``name``; -1 before its first."""
        return max(self.histories[self._starts[name]].boundaries, default=-1) if name in self.processes else -1

    def digests(self) -> dict[int, set[str]]:
        """By step, the digests that any replica held at its boundary."""
        digests: dict[int, set[str]] = defaultdict(set)
        for history in self.histories.values():
            for step, digest in history.boundaries.items():
                digests[step].add(digest)
        return digests

    def logs(self) -> str:
        return "\n".join(
            f"=== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self._directory.glob("*.log"))
        )

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.send_signal(signal.SIGCONT)
            process.wait()
        for thread in self._threads:
            thread.join()

    def _read(self, name: str, start: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                try:
                    fields = json.loads(line)
                except json.JSONDecodeError:
                    continue  # cut off by a signal
                self._events.put(Event(name, start, fields.pop("event"), fields, time.monotonic()))

    def _note(self, event: Event) -> None:
        self.events.append(event)
        history = self.histories[event.start]
        if event.event == "committed":
            history.committed.append(event.fields["step"])
        elif event.event == "boundary":
            history.boundaries[event.fields["step"]] = event.fields["digest"]
