"""Replicas in the real Ray Train: Ray replaces workers that were killed, and the run is the one that nobody killed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from killed_programs import all_notes

WORKER = Path(__file__).parents[1] / "workers" / "ray_run.py"

pytestmark = pytest.mark.timeout(1800)


def run(*command: object) -> str:
    """Run a driver, with an output as text. Ray's processes must not be forked from the test's program server."""
    environment = {**os.environ, "RAY_TRAIN_V2_ENABLED": "1", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120"}
    ended = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-5000:]
    return ended.stdout


def check_undisturbed(directory: Path) -> None:
    """Compare what a disturbed run has noted with as many steps of a run that nobody disturbs."""
    num_steps = int((directory / "disturbed" / "last").read_text())
    run(WORKER, directory / "undisturbed", "--steps", num_steps)
    notes = all_notes(directory / "undisturbed" / "notes")
    assert len(notes) == 5 * num_steps  # the losses of four microbatches, and the weights
    assert all_notes(directory / "disturbed" / "notes") == notes


def test_kills_of_workers_at_random_moments_change_neither_losses_nor_weights_nor_samples(tmp_path: Path) -> None:
    printed = run(WORKER, tmp_path / "disturbed", "--kills", 20, "--seed", 1)
    assert len(re.findall("^kill ", printed, re.MULTILINE)) == 20
    check_undisturbed(tmp_path)


def test_a_preempted_worker_saves_and_resumes_also_if_all_are_preempted(tmp_path: Path) -> None:
    printed = run(WORKER, tmp_path / "disturbed", "--notices", 4, "--seed", 2)
    assert {"notice to 1", "notice to 2"} == set(re.findall("^notice to .", printed, re.MULTILINE))
    check_undisturbed(tmp_path)


DRIVER = """
import sys
import changed_example as example

trainer = example.TorchTrainer(
    example.train_func,
    train_loop_config={"num_steps": 400, "error_step": 50, "training_requires_all_workers": False},
    torch_config=example.TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
    scaling_config=example.ScalingConfig(num_workers=2),
    run_config=example.RunConfig(
        storage_path=sys.argv[1], failure_config=example.ray.train.FailureConfig(max_failures=1)
    ),
)
print(trainer.fit().return_value[-1])
"""


def test_the_documented_changes_let_rays_own_example_heal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("ray.train.v2.examples.pytorch.torchft_linear_example")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    document = (Path(__file__).parents[2] / "docs" / "ray.md").read_text()
    diff = document.split("```diff\n")[1].split("```")[0].splitlines()
    assert sum(line[0] in "+-" for line in diff) <= 5
    for part in ("\n".join(diff)).split("@@"):
        lines = part.strip("\n").splitlines()
        before = "\n".join(line[1:] for line in lines if line[0] != "+")
        assert source.count(before) == 1, before
        source = source.replace(before, "\n".join(line[1:] for line in lines if line[0] != "-"))
    (tmp_path / "changed_example.py").write_text(source)
    (tmp_path / "driver.py").write_text(DRIVER)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}")
    printed = run(tmp_path / "driver.py", tmp_path)
    assert "'step': 400" in printed
    assert list(tmp_path.rglob("error_marker"))  # the worker has failed
