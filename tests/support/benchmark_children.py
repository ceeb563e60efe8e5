"""What the processes of the tests of ``benchmarks.processes`` run."""

from __future__ import annotations

import os
import signal
import sys

from benchmarks.processes import Channel


def repeat(channel: Channel, what: str) -> None:
    while True:
        channel.say((what, channel.wait(), os.getpid()))


def fail(_channel: Channel) -> None:
    print("said before the end", file=sys.stderr, flush=True)
    raise ValueError("the reason")


def with_a_child() -> int:
    """Leaves a process behind that waits for ever; returns its id."""
    child = os.fork()
    if not child:
        signal.pause()
    return child
