"""Programs that are killed by SIGKILL and started again, and what they note of each step in all their lives."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from programs import run


def lives(worker: Path, root: Path, kills: Iterable[Mapping[str, str]], *arguments: str, ranks: int = 1) -> str:
    """Run the worker once for each kill, which its environment asks for, and once without. Return its last line."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    for kill in [*kills, {}]:
        command = [sys.executable, *launch, str(worker), str(root), *arguments]
        ended = run(command, env={**os.environ, **kill}, timeout=120)
        assert (ended.returncode == 0) <= (not kill), ended.stderr
    return str(ended.stdout.splitlines()[-1])


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_later() -> None:
    """Kill this process ``KILL_AFTER_S`` seconds after the first call, if that is in the environment."""
    if after_s := os.environ.pop("KILL_AFTER_S", None):
        timer = threading.Timer(float(after_s), kill)
        timer.daemon = True
        timer.start()


class Notes:
    """The notes of one life of a program, in a file of their own. A key names the step and the quantity."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        name = f"{len(list(directory.iterdir()))}-{os.getpid()}.txt"
        self._file = (directory / name).open("w", buffering=1)

    def add(self, key: str, value: Any) -> None:
        self._file.write(json.dumps([key, value]) + "\n")


def all_notes(directory: Path) -> dict[str, Any]:
    """Return the notes of all lives, which must agree: a step that is trained again is the same step."""
    notes: dict[str, Any] = {}
    for path in sorted(directory.iterdir()):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # a kill may cut off the last line
                key, value = json.loads(line)
                assert notes.setdefault(key, value) == value, (path.name, key)
    return notes
