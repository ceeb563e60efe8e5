"""A loop with the real Accelerate and a manager: after a crash, it trains what the undisturbed run does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from heavy_imports import import_frozen
from killed_programs import all_notes, lives

from ft_transport import CheckpointStore, ConfigurationError
from manager import Manager

WORKER = Path(__file__).parents[1] / "workers" / "accelerate_run.py"


@pytest.fixture(scope="module")
def runs() -> Any:
    return import_frozen("accelerate_run")


@pytest.mark.parametrize(
    ("more", "steps_per_epoch"),
    # An epoch has 7 batches. By hand, the last one adds to the gradients of the next epoch.
    [({}, 7), ({"accumulate": 3}, 3), ({"by_hand": True}, 2)],
    ids=str,
)
def test_a_crashed_run_ends_as_one_that_nobody_disturbed(
    runs: Any, tmp_path: Path, more: dict[str, Any], steps_per_epoch: int
) -> None:
    undisturbed = runs.train(tmp_path, plain=True, **more)
    num_steps = len(undisturbed["losses"])
    assert num_steps == runs.NUM_EPOCHS * steps_per_epoch
    for step in sorted(random.Random(str(more)).sample(range(2, num_steps), 3)):
        with pytest.raises(runs.CrashError):
            runs.train(tmp_path, step, **more)
    last = runs.train(tmp_path, **more)
    assert last["digest"] == undisturbed["digest"]
    assert last["losses"].items() <= undisturbed["losses"].items()
    assert len(last["losses"]) < num_steps


def test_a_run_that_was_complete_trains_what_follows_its_last_checkpoint(runs: Any, tmp_path: Path) -> None:
    first = runs.train(tmp_path)
    again = runs.train(tmp_path)
    assert again == {"digest": first["digest"], "losses": {21: first["losses"][21]}}


def test_a_run_with_other_batches_is_refused(runs: Any, tmp_path: Path) -> None:
    with pytest.raises(runs.CrashError):
        runs.train(tmp_path, 5)
    with pytest.raises(ConfigurationError, match=r"'samples': 4.*'samples': 2"):
        runs.train(tmp_path, batch_size=2)


def test_an_accelerator_without_a_model_is_refused(runs: Any, tmp_path: Path) -> None:
    manager = Manager(checkpoint_store=CheckpointStore(tmp_path))
    accelerator = runs.Accelerator(cpu=True)
    accelerator._models.clear()
    try:
        with pytest.raises(ConfigurationError, match="prepare before"):
            runs.FaultTolerantLoop(accelerator, manager)
    finally:
        manager.shutdown()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tier", ["--keep-every", "--save-every"])
def test_kills_at_random_moments_change_neither_state_nor_losses_nor_samples(tmp_path: Path, tier: str) -> None:
    undisturbed = lives(WORKER, tmp_path / "undisturbed", [], "--plain", "--epochs", "300")
    chosen = random.Random(tier)
    kills = [{"KILL_AFTER_S": str(chosen.uniform(0.0, 0.2))} for _ in range(20)]
    assert lives(WORKER, tmp_path / "killed", kills, tier, "5", "--epochs", "300") == undisturbed
    assert all_notes(tmp_path / "killed" / "notes") == all_notes(tmp_path / "undisturbed" / "notes")
