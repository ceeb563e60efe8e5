"""A trainer with a keeper whose duty appends to a file: when it begins, what process does it, and when it ends.

``kept_trainer.py FILE NAME [SLOT]`` gives its keeper the duty NAME and prints ``ready``, then does what it reads.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ft_transport.keeper import program
from ft_transport.keeper.messages import Attend
from ft_transport.keeper.process import KeeperProcess
from ft_transport.runtime.unix_sockets import shared_address


class NotingDuty:
    def __init__(self, argument: bytes, note_over: Callable[[], object]) -> None:
        self._path, self._name = argument.decode().split("|")
        self._note_over = note_over
        self._note("attended")

    def begin(self) -> None:
        self._note("begun")

    def end(self) -> None:
        self._note("ended")

    def _note(self, what: str) -> None:
        # In one write, because several keepers may append to the file.
        with Path(self._path).open("a") as file:
            file.write(f"{what} {self._name} {os.getpid()}\n")
        if "over" in self._name and what == "begun":
            self._note_over()


def main() -> None:
    program.run({"note": NotingDuty})


keeper = KeeperProcess("kept_trainer", "main")


def attend(path: str, name: str, slot: str = "") -> None:
    address = shared_address(slot) if slot else ""
    keeper.attend(Attend(name, "note", f"{path}|{name}".encode(), address))


def fork(function: Callable[[], object]) -> int:
    """Call a function in a forked child, which then outlives its parent, but not the test by much."""
    child = os.fork()
    if not child:
        function()
        time.sleep(10)
        os._exit(0)
    return child


if __name__ == "__main__":
    _, path, name, *slots = sys.argv
    attend(path, name, *slots)
    print("ready", flush=True)
    for line in sys.stdin:
        exec(line)
        print("done", flush=True)
