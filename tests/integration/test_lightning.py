"""The real Lightning with a manager: after a crash, it trains what the undisturbed run does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from heavy_imports import import_frozen
from killed_programs import all_notes, lives

from ft_transport import CheckpointStore, ConfigurationError
from manager import Manager

WORKER = Path(__file__).parents[1] / "workers" / "lightning_run.py"

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def runs() -> Any:
    return import_frozen("lightning_run")


@pytest.mark.parametrize("accumulate", [1, 3])  # an epoch has 7 batches
def test_a_crashed_run_ends_as_one_that_nobody_disturbed(runs: Any, tmp_path: Path, accumulate: int) -> None:
    more = {"accumulate_grad_batches": accumulate}
    undisturbed = runs.train(tmp_path, plain=True, **more)
    per_epoch = -(-7 // accumulate)
    # In the middle of each epoch, twice in one epoch, and at the end of one.
    for step in (2, per_epoch, per_epoch + 1, per_epoch + 2, 3 * per_epoch - 1):
        with pytest.raises(runs.CrashError):
            runs.train(tmp_path, step, **more)
    last = runs.train(tmp_path, **more)
    assert (last["digest"], last["step"]) == (undisturbed["digest"], undisturbed["step"])
    assert last["losses"].items() <= undisturbed["losses"].items()
    assert len(last["losses"]) <= accumulate


def test_every_step_is_a_step_from_which_a_run_resumes(runs: Any, tmp_path: Path) -> None:
    undisturbed = runs.train(tmp_path, plain=True)
    for step in range(1, undisturbed["step"]):
        with pytest.raises(runs.CrashError):
            runs.train(tmp_path, step)
    assert runs.train(tmp_path)["digest"] == undisturbed["digest"]


def test_a_trainer_without_the_plugin_is_refused(runs: Any, tmp_path: Path) -> None:
    manager = Manager(checkpoint_store=CheckpointStore(tmp_path))
    try:
        trainer = runs.lightning.Trainer(callbacks=[runs.FaultTolerance(manager)], accelerator="cpu", logger=False)
        with pytest.raises(ConfigurationError, match="and the plugin checkpoint_io"):
            trainer.fit(runs.Module(-1), runs.DataLoader(runs.Samples(), batch_size=4))
    finally:
        manager.shutdown()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("hook", "Averaging.on_train_batch_end"), ("callback", "Later after FaultTolerance"), ("interval", "val_check")],
)
def test_a_run_that_changes_its_state_after_a_step_has_begun_is_refused(
    runs: Any, tmp_path: Path, kind: str, expected: str
) -> None:
    class Averaging(runs.Module):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, *_: Any) -> None: ...

    class Later(runs.lightning.Callback):  # type: ignore[name-defined,misc]
        def on_train_epoch_end(self, *_: Any) -> None: ...

    manager = Manager(checkpoint_store=CheckpointStore(tmp_path))
    try:
        own = runs.FaultTolerance(manager)
        trainer = runs.lightning.Trainer(
            callbacks=[own, *([Later()] if kind == "callback" else [])],
            plugins=[own.checkpoint_io],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            val_check_interval=2 if kind == "interval" else 1.0,
        )
        module = (Averaging if kind == "hook" else runs.Module)(-1)
        with pytest.raises(ConfigurationError, match=expected):
            trainer.fit(module, runs.DataLoader(runs.Samples(), batch_size=4))
    finally:
        manager.shutdown()


def test_a_checkpoint_of_lightning_is_refused_as_the_beginning(runs: Any, tmp_path: Path) -> None:
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    loader = runs.DataLoader(runs.Samples(), batch_size=4)
    trainer = runs.lightning.Trainer(**quiet)
    trainer.fit(runs.Module(-1), loader)
    trainer.save_checkpoint(tmp_path / "theirs.ckpt")
    manager = Manager(checkpoint_store=CheckpointStore(tmp_path / "steps"))
    try:
        own = runs.FaultTolerance(manager)
        trainer = runs.lightning.Trainer(callbacks=[own], plugins=[own.checkpoint_io], **{**quiet, "max_epochs": 2})
        with pytest.raises(ConfigurationError, match=r"ckpt_path of FaultTolerance.resume, got .*theirs\.ckpt"):
            trainer.fit(runs.Module(-1), loader, ckpt_path=tmp_path / "theirs.ckpt")
    finally:
        manager.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("tier", ["--keep-every", "--save-every"])
def test_kills_at_random_moments_change_neither_weights_nor_logs_nor_samples(tmp_path: Path, tier: str) -> None:
    undisturbed = lives(WORKER, tmp_path / "undisturbed", [], "--plain", "--epochs", "250")
    chosen = random.Random(tier)
    kills = [{"KILL_AFTER_S": str(chosen.uniform(0.0, 0.2))} for _ in range(20)]
    assert lives(WORKER, tmp_path / "killed", kills, tier, "5", "--epochs", "250") == undisturbed
    assert all_notes(tmp_path / "killed" / "notes") == all_notes(tmp_path / "undisturbed" / "notes")
