"""Served bytes equal the state at one committed step, while the trainer never pauses (promise 1)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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

    def __init__(self, *arguments: str) -> None:
        self._process = Program([sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

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


@contextmanager
def scripts(kind: str) -> Iterator[tuple[Script, list[Script]]]:
    running: list[Script] = []
    try:
        running.append(Script(str(WORKERS / "stepping_trainer.py"), kind))
        url = running[0].receive()
        running += [Script(str(WORKERS / "receiving_replica.py"), kind, url) for _ in range(2)]
        yield running[0], running[1:]
    finally:
        for script in running:
            script.close()


def count_torn(fetched: list[dict[str, Any]], digests: dict[str, str]) -> int:
    return sum(item["digest"] != digests[str(item["step"])] for item in fetched)


@pytest.mark.timeout(240)
def test_no_fetch_is_torn_while_the_trainer_steps_without_pause() -> None:
    with scripts("ours") as (trainer, receivers):
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

    assert count_torn(fetched, digests) == 0


@pytest.mark.timeout(240)
def test_the_same_check_finds_torchft_torn(torchft_ready: None) -> None:
    with scripts("torchft") as (trainer, receivers):
        fetched = []
        for _ in range(3):
            trainer.send("serve")
            step = trainer.receive()
            for receiver in receivers:
                receiver.send(str(step))
            fetched += [receiver.receive() for receiver in receivers]
        trainer.send("digests")
        digests = trainer.receive()

    assert count_torn(fetched, digests) > 0
