"""Trainers with keepers: processes that run what a test sends them, and what their keepers did."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

LONG_S = 20.0


def wait_until(condition: Callable[[], bool], message: Callable[[], str] = lambda: "") -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s, message()
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Return whether a process runs. Whoever inherits a dead one may collect it later."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Notes:
    """The file in which the duties of `kept_trainer` record their beginning and end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def wait_for(self, *wanted: str) -> int:
        """Wait until the notes are these, and return the process id of the keeper that wrote the last one."""

        def noted() -> list[str]:
            return [f"{what} {name}" for what, name, _ in self.lines()]

        wait_until(lambda: noted() == list(wanted), lambda: f"expected {list(wanted)}, got {noted()}")
        return int(self.lines()[-1][2])


class Trainer:
    """A process of a script that prints ``ready``, and then runs each line that it is sent, and prints ``done``."""

    def __init__(
        self, script: str, *arguments: str, launch: type[subprocess.Popen[Any]] = subprocess.Popen, **options: Any
    ) -> None:
        self.process = launch(
            [sys.executable, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        self._expect("ready")

    def run(self, statement: str) -> None:
        self.send(statement)
        self._expect("done")

    def ask(self, expression: str) -> Any:
        """Return the value of an expression, which must be a literal."""
        self.send(f"print(repr({expression}), flush=True)")
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        self._expect("done")
        return ast.literal_eval(answer)

    def send(self, statement: str) -> None:
        assert self.process.stdin is not None
        print(statement, file=self.process.stdin, flush=True)

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        self.process.wait(LONG_S)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()

    def _expect(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{line}\n"
