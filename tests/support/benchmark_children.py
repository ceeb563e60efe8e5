"""What the processes of the tests of ``benchmarks.replicas.processes`` run."""

from __future__ import annotations

import os
import sys

from benchmarks.replicas.processes import Channel


def repeat(channel: Channel, what: str) -> None:
    while True:
        channel.say((what, channel.wait(), os.getpid()))


def fail(_channel: Channel) -> None:
    print("said before the end", file=sys.stderr, flush=True)
    raise ValueError("the reason")
