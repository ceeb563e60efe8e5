"""When the whole machine stood still: another process looks at the clock all the time, and says when it could not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

_TICK_S: Final = 0.02
_SHORTEST_S: Final = 0.5
_WATCHER: Final = f"""
import sys, threading, time
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
last = time.monotonic()
print("watching", flush=True)
is_over = False
while not is_over:
    is_over = ended.wait({_TICK_S})
    now = time.monotonic()
    if now - last > {_SHORTEST_S}:
        print(last, now)
    last = now
"""


@dataclass
class MachinePauses:
    """The pauses, as beginnings and ends by the monotonic clock; known when the watch is over.

    ``watcher`` is the process that looks.
    """

    watcher: int | None
    pauses: list[tuple[float, float]] = field(default_factory=list)

    def overlap_s(self, start_s: float, end_s: float) -> float:
        """How much of a time the machine stood still."""
        return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in self.pauses)


@contextmanager
def watching_for_pauses() -> Iterator[MachinePauses]:
    """Has another process watch. This process's own pauses (a held interpreter lock, say) are none of the machine's."""
    command = [sys.executable, "-c", _WATCHER]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    watcher.stdout.readline()
    found = MachinePauses(watcher.pid)
    try:
        yield found
    finally:
        told, _ = watcher.communicate(timeout=30)
        found.pauses += [(float(start), float(end)) for start, end in map(str.split, told.splitlines())]
