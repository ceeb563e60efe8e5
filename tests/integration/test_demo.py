"""The demo is the main job end to end: it succeeds when the replicas agree, and fails when they do not."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys

import pytest
from rich.console import Console

pytest.importorskip("torchft")

from manager.demo.__main__ import Demo
from manager.demo.replica_process import ReplicaProcess


@pytest.mark.timeout(180)
def test_the_demo_heals_killed_replicas_and_exits_with_zero() -> None:
    command = [sys.executable, "-m", "manager.demo", "--steps", "3", "--width", "64", "--num-layers", "1"]

    finished = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "3 replicas killed and healed" in finished.stdout
    assert "was the same on all replicas" in finished.stdout
    assert finished.stdout.count("healed to step") >= 3


@pytest.mark.timeout(180)
def test_a_killed_replica_of_two_fsdp_ranks_heals_rank_by_rank() -> None:
    command = [sys.executable, "-m", "manager.demo", "--sharded", "--steps", "3", "--width", "64", "--num-layers", "1"]

    finished = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "1 replica killed and healed" in finished.stdout
    assert "was the same on all replicas" in finished.stdout
    assert {f"B/{rank}  healed to step" in finished.stdout for rank in (0, 1)} == {True}


def test_a_difference_in_a_single_state_is_found() -> None:
    output = io.StringIO()
    demo = Demo(Console(file=output, width=120), argparse.Namespace(steps=3, width=64, num_layers=1, sharded=False))
    with subprocess.Popen([sys.executable, "-c", ""], text=True) as process:
        for name in "ABC":
            digests = {step: f"00f{step}" for step in range(3)}
            demo._all.append(ReplicaProcess(name, 0, process, digests, {0: 0.1}))
        # An earlier start of A counts as well.
        demo._all.append(ReplicaProcess("A", 0, process, {0: "00f0"}, {}))
        assert demo._compare()
        demo._all[3].digests[0] = "00fe"

        assert not demo._compare()

    assert "1 of 3 steps differ" in output.getvalue()
