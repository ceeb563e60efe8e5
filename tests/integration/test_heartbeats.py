"""Signs of life while the GIL is held, and while the process is stopped: real Lighthouse, real signals."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
from programs import Program
from quorum_threads import lighthouse, make_manager, run_replicas

from manager import Manager

# The default.
HEARTBEAT_TIMEOUT = timedelta(seconds=1)
LONGER_S = 3.0

pytestmark = [pytest.mark.usefixtures("quorum_ready"), pytest.mark.timeout(60), pytest.mark.alone]


def hold_gil(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(round(seconds * 1e6))


def test_a_gil_that_is_held_for_long_costs_no_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def step(manager: Manager, hold_s: float = 0.0) -> None:
        manager.start_quorum()
        manager.wait_quorum()
        if hold_s:
            hold_gil(hold_s)
        manager.allreduce(torch.ones(1)).wait()
        assert manager.should_commit()
        assert manager.num_participants() == 2

    def train(manager: Manager, hold_s: float) -> None:
        step(manager)
        step(manager, hold_s)
        step(manager)

    with lighthouse(min_replicas=2, heartbeat_timeout_ms=1000) as address:
        keywords = {"min_replica_size": 2, "heartbeat_timeout": HEARTBEAT_TIMEOUT, "has_part": True}
        managers = [make_manager(address, name, **keywords) for name in "ab"]
        try:
            run_replicas(lambda: train(managers[0], LONGER_S), lambda: train(managers[1], 0.0))
        finally:
            for manager in managers:
                manager.shutdown()
    messages = [record.getMessage() for record in caplog.records]
    # At step 0 one takes the other's state; nobody is behind afterwards.
    assert sum("healed to step" in message for message in messages) == 1
    assert sum("set up in" in message for message in messages) == 2


_CHILD = """
import ctypes, sys, time
from datetime import timedelta
from manager.quorum.lighthouse import LighthouseSession

second = timedelta(seconds=1)
session = LighthouseSession(
    sys.argv[1],
    "a:1",
    connect_timeout=10 * second,
    heartbeat_interval=second / 10,
    heartbeat_timeout=second,
    keys=None,
    min_replicas=1,
    stand_in=None,
)
for line in sys.stdin:
    if line.strip() == "hold":
        ctypes.PyDLL(None).usleep(2_000_000)
    print(session.num_missed_heartbeats(), flush=True)
session.close()
"""


def test_a_stopped_process_has_lapsed_and_one_whose_gil_is_held_has_not() -> None:
    with (
        lighthouse(heartbeat_timeout_ms=1000) as address,
        Program(
            [sys.executable, "-c", _CHILD, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
    ):

        def ask(what: str) -> int:
            assert child.stdin is not None
            assert child.stdout is not None
            print(what, file=child.stdin, flush=True)
            return int(child.stdout.readline())

        assert ask("count") == 0
        assert ask("hold") == 0
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(1.5)  # what is tested is this time
        os.kill(child.pid, signal.SIGCONT)
        assert ask("count") == 1
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(20) == 0
