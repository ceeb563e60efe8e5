"""Served bytes equal the state at one committed step, while the trainer never pauses (promise 1)."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from programs import Program

WORKERS = Path(__file__).parents[1] / "workers"
LEAST_FETCHES = 10
"""Of each receiver; more, until they have seen the trainer at different steps."""
MOST_FETCHES = 100


class Script:
    """A script in a process of its own that answers lines with lines."""

    def __init__(self, name: str, *arguments: str) -> None:
        command = [sys.executable, str(WORKERS / name), *arguments]
        self._process = Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait(10)}"
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


@pytest.mark.timeout(240)
def test_no_fetch_is_torn_while_the_trainer_steps_without_pause() -> None:
    with ExitStack() as running:
        trainer = Script("stepping_trainer.py")
        running.callback(trainer.close)
        url = trainer.receive()
        receivers = [Script("receiving_replica.py", url) for _ in range(2)]
        for receiver in receivers:
            running.callback(receiver.close)
        fetched: list[dict[str, Any]] = []
        steps: set[int] = set()
        while len(fetched) < 2 * LEAST_FETCHES or len(steps) < 5 or max(steps) - min(steps) < 10:
            assert len(fetched) < 2 * MOST_FETCHES, "the trainer stands still"
            for receiver in receivers:
                receiver.send("latest")
            fetched += [receiver.receive() for receiver in receivers]
            steps = {item["step"] for item in fetched}
        trainer.send("digests")
        digests = trainer.receive()

    assert [item for item in fetched if item["digest"] != digests[str(item["step"])]] == []
