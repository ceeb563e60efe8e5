"""The demo is the main job end to end: it succeeds when the replicas agree, and fails when they do not."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run
from rich.console import Console

pytest.importorskip("torchft")

from manager.demo.__main__ import compare
from manager.demo.replica import ReplicaProcess

_SMALL = ["--steps", "3", "--width", "64", "--num-layers", "1"]
_FORKING = Path(__file__).parents[1] / "workers" / "forking_demo.py"


@pytest.mark.timeout(330)
def test_the_demo_heals_killed_replicas_and_exits_with_zero() -> None:
    finished = run([sys.executable, str(_FORKING), *_SMALL], timeout=300)

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "3 replicas killed and healed" in finished.stdout
    assert "were the same on all replicas" in finished.stdout
    assert finished.stdout.count("healed to step") >= 3
    assert finished.stdout.count("watch it at http://") >= 6
    assert "[torchft::" not in finished.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_replica_of_two_fsdp_ranks_heals_rank_by_rank() -> None:
    finished = run([sys.executable, str(_FORKING), "--sharded", *_SMALL], timeout=150)

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "1 replica killed and healed" in finished.stdout
    assert "were the same on all replicas" in finished.stdout
    assert {f"B/{rank}  healed to step" in finished.stdout for rank in (0, 1)} == {True}


def test_a_difference_in_a_single_state_is_found() -> None:
    output = io.StringIO()
    console = Console(file=output, width=120)
    with subprocess.Popen([sys.executable, "-c", ""], text=True) as process:
        started = [
            ReplicaProcess(name, 0, process, {step: f"00f{step}" for step in range(3)}, {0: 0.1}) for name in "ABC"
        ]
        # An earlier start of A counts as well.
        started.append(ReplicaProcess("A", 0, process, {0: "00f0"}, {}))
        assert compare(console, started, names="ABC", num_ranks=1, num_steps=3)
        started[3].digests[0] = "00fe"

        assert not compare(console, started, names="ABC", num_ranks=1, num_steps=3)

    assert "1 of 3 steps differ" in output.getvalue()
