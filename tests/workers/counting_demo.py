"""The demo, which prints its counts at its end: a line of JSON for each process. Its replicas wait for a line on stdin.

Before each failure it prints the processes that it is about to kill, and waits for a line as well.

Command line: as for ``python -m manager.demo``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from forking_demo import fork_replicas
from rich.console import Console

from manager.demo.__main__ import Demo, parse
from manager.demo.replica import ReplicaProcess

COUNTS = "counts: "
KILLS = "kills: "


def tell(processes: Sequence[ReplicaProcess]) -> None:
    for each in processes:
        told = {
            "replica": each.name,
            "process": str(each.process.pid),
            "is_running": each.process.poll() is None,
            "recoveries": each.num_recoveries,
            "received_bytes": each.received_bytes,
            "committed_unix_s": [unix_s(at_s) for at_s in each.committed_s],
        }
        print(COUNTS + json.dumps(told), flush=True)
    print(COUNTS, flush=True)
    sys.stdin.readline()


def announce(processes: Sequence[ReplicaProcess]) -> None:
    print(KILLS + json.dumps([str(each.process.pid) for each in processes]), flush=True)
    sys.stdin.readline()


def unix_s(monotonic_s: float) -> float:
    return datetime.now(timezone.utc).timestamp() - (time.monotonic() - monotonic_s)


if __name__ == "__main__":
    fork_replicas()
    is_equal = Demo(Console(stderr=True, width=120), parse(None, program="counting_demo")).run(
        tell, before_kill=announce
    )
    sys.exit(0 if is_equal else 1)
