"""A trainer with a keeper whose duty appends to a file: when it begins, what process does it, and when it ends.

``kept_trainer.py FILE NAME [SLOT]`` gives its keeper the duty NAME and prints ``ready``, then does what it reads.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ft_transport.keeper.messages import Attend
from ft_transport.keeper.predecessor import find_predecessor
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


keeper = KeeperProcess()


def attend(path: str, name: str, slot: str = "", secret: bytes = b"") -> None:
    keeper.attend(Attend(name, "kept_trainer:NotingDuty", f"{path}|{name}".encode(), secret))
    if slot:
        keeper.listen(name, shared_address(slot))


def take_over(path: str, name: str, slot: str) -> None:
    """Give the keeper a duty in place of the dead process's."""
    predecessor = find_predecessor(shared_address(slot))
    assert predecessor is not None
    attend(path, name)
    assert keeper.listen(name, shared_address(slot), predecessor)
    predecessor.close()


def hold(name: str, number: int, content: bytes) -> None:
    """Let the keeper hold a memory file with a content."""
    descriptor = os.memfd_create("held")
    os.write(descriptor, content)
    keeper.hold(name, number, b"about " + content, descriptor)


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
