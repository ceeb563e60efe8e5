"""The demo is the main job end to end: it succeeds when the replicas agree, and fails when they do not."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys

import pytest
from rich.console import Console

from manager.demo.__main__ import Demo, ReplicaProcess


@pytest.mark.timeout(180)
def test_the_demo_recovers_a_late_replica_and_exits_with_zero() -> None:
    command = [sys.executable, "-m", "manager.demo", "--steps", "4", "--width", "64", "--num-layers", "1"]

    finished = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)

    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "4 of 4 steps equal" in finished.stdout
    assert "A did not pause" in finished.stdout


@pytest.mark.parametrize("changed", ["loss", "digest"])
def test_a_difference_in_a_single_step_is_found(changed: str) -> None:
    output = io.StringIO()
    demo = Demo(Console(file=output, width=120), argparse.Namespace(steps=3, width=64, num_layers=1))
    reports = {step: {"loss": 1.5, "digest": "00ff"} for step in range(3)}
    demo._recovered_step = 0
    with subprocess.Popen([sys.executable, "-c", ""], text=True) as process:
        for name in "AB":
            demo._replicas[name] = ReplicaProcess(
                name, process, {step: dict(report) for step, report in reports.items()}
            )
        assert demo._compare()
        demo._replicas["B"].steps[2][changed] = 1.5000001 if changed == "loss" else "00fe"

        assert not demo._compare()

    assert "1 of 3 steps differ" in output.getvalue()
