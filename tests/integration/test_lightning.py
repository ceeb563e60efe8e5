"""The real Lightning with a manager: after a crash, it trains what the undisturbed run does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from heavy_imports import import_frozen
from killed_programs import Notes, all_notes, lives

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


def train_noted(runs: Any, directory: Path, crash_at: int = -1, **more: Any) -> dict[str, Any]:
    logger = runs.NotingLogger(Notes(directory / "notes"))
    return dict(runs.train(directory / "steps", crash_at, logger=logger, log_every_n_steps=1, **more))


def check_each_step(runs: Any, root: Path, steps: Iterable[int], callback: Callable[[], Any], **more: Any) -> int:
    """Crash at these steps. Return the last step of the undisturbed run, which must have logged the same."""
    undisturbed = train_noted(runs, root / "undisturbed", plain=True, callbacks=[callback()], **more)
    for step in steps:
        with pytest.raises(runs.CrashError):
            train_noted(runs, root / "crashed", step, callbacks=[callback()], **more)
    last = train_noted(runs, root / "crashed", callbacks=[callback()], **more)
    assert (last["digest"], last["step"]) == (undisturbed["digest"], undisturbed["step"])
    assert all_notes(root / "crashed" / "notes") == all_notes(root / "undisturbed" / "notes")
    return int(last["step"])


def test_a_run_that_validates_in_the_middle_of_an_epoch_resumes_after_the_validation(runs: Any, tmp_path: Path) -> None:
    steps = (2, 3, 6, 8)  # it validates after the batches 3 and 6 of an epoch
    check_each_step(runs, tmp_path, steps, runs.Counting, val_check_interval=3, max_epochs=2)


def test_early_stopping_at_the_end_of_an_epoch_resumes_as_if_nothing_had_happened(runs: Any, tmp_path: Path) -> None:
    # Lightning calls its hook after those of other callbacks.
    callback = partial(runs.lightning.callbacks.EarlyStopping, "validation", patience=1, min_delta=0.5)
    assert check_each_step(runs, tmp_path, (6, 7), callback) == 14  # it has stopped after the second epoch


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Counting", {}),
        ("Counting", {"val_check_interval": 0.5, "accumulate_grad_batches": 2}),
        ("EMAWeightAveraging", {"val_check_interval": 5, "check_val_every_n_epoch": None}),
        ("EMAWeightAveraging", {}),
        ("EarlyStopping", {"val_check_interval": 2}),
        ("EarlyStopping", {"accumulate_grad_batches": 3}),
    ],
    ids=str,
)
def test_a_run_with_callbacks_resumes_at_each_step(runs: Any, tmp_path: Path, name: str, more: dict[str, Any]) -> None:
    of_early_stopping: dict[str, Any] = {"monitor": "validation", "patience": 2, "min_delta": 0.01}
    kind = runs.Counting if name == "Counting" else getattr(runs.lightning.callbacks, name)
    callback = partial(kind, **(of_early_stopping if name == "EarlyStopping" else {}))
    num_steps = check_each_step(runs, tmp_path / "none", [], callback, **more)
    check_each_step(runs, tmp_path / "each", range(1, num_steps), callback, **more)


def test_a_trainer_without_the_plugin_is_refused(runs: Any, tmp_path: Path) -> None:
    manager = Manager(checkpoint_store=CheckpointStore(tmp_path))
    try:
        trainer = runs.lightning.Trainer(callbacks=[runs.FaultTolerance(manager)], accelerator="cpu", logger=False)
        with pytest.raises(ConfigurationError, match="and the plugin checkpoint_io"):
            trainer.fit(runs.Module(-1), runs.DataLoader(runs.Samples(), batch_size=4))
    finally:
        manager.shutdown()


@pytest.mark.parametrize(
    ("hook", "interval", "expected"),
    [
        ("on_train_batch_end", 1.0, "Changing.on_train_batch_end"),
        ("on_validation_end", 2, "Changing.on_validation_end"),
        ("on_train_epoch_end", "00:00:01:00", "a val_check_interval in time"),
    ],
)
def test_a_run_that_changes_its_state_after_a_step_has_begun_is_refused(
    runs: Any, tmp_path: Path, hook: str, interval: Any, expected: str
) -> None:
    module = type("Changing", (runs.Module,), {hook: lambda *_: None})(-1)
    own = runs.FaultTolerance(checkpoint_store=CheckpointStore(tmp_path))
    try:
        trainer = runs.lightning.Trainer(
            callbacks=[own],
            plugins=[own.checkpoint_io],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            val_check_interval=interval,
        )
        with pytest.raises(ConfigurationError, match=expected):
            trainer.fit(module, runs.DataLoader(runs.Samples(), batch_size=4))
    finally:
        own.manager.shutdown()


def test_a_manager_and_settings_of_another_one_are_refused(runs: Any, tmp_path: Path) -> None:
    manager = Manager(checkpoint_store=CheckpointStore(tmp_path))
    try:
        with pytest.raises(ConfigurationError, match=r"got both: manager and \['save_every'\]"):
            runs.FaultTolerance(manager, save_every=2)
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
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tier", ["--keep-every", "--save-every"])
def test_kills_at_random_moments_change_neither_weights_nor_logs_nor_samples(tmp_path: Path, tier: str) -> None:
    undisturbed = lives(WORKER, tmp_path / "undisturbed", [], "--plain", "--epochs", "250")
    chosen = random.Random(tier)
    kills = [{"KILL_AFTER_S": str(chosen.uniform(0.0, 0.2))} for _ in range(20)]
    assert lives(WORKER, tmp_path / "killed", kills, tier, "5", "--epochs", "250") == undisturbed
    assert all_notes(tmp_path / "killed" / "notes") == all_notes(tmp_path / "undisturbed" / "notes")
