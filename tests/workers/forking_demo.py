"""The demo, ``python -m manager.demo``, whose replicas are forked by the server of `programs`."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

from programs import Program

from manager.demo import __main__ as demo
from manager.demo import replica


def fork_replicas() -> None:
    replica.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=Program, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )


if __name__ == "__main__":
    fork_replicas()
    demo.main()
