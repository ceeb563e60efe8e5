"""The demo, ``python -m manager.demo``, whose replicas are forked by the server of `programs`."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

from programs import Program

from manager.demo import __main__ as demo
from manager.demo import replica_process

if __name__ == "__main__":
    replica_process.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=Program, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
    demo.main()
