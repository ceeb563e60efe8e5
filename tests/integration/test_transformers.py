"""transformers' real Trainer with a manager: after a crash, it trains and logs what the undisturbed run does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from heavy_imports import import_frozen
from killed_programs import lives
from tqdm import tqdm

from ft_transport import CheckpointStore, ConfigurationError, state_digest
from manager import Manager

WORKER = Path(__file__).parents[1] / "workers" / "transformers_run.py"


@pytest.fixture(scope="module")
def runs() -> Any:
    return import_frozen("transformers_run")


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # a thread that outlives the progress bars


class CrashError(Exception):
    pass


def crash() -> None:
    raise CrashError


def manager_of(root: Path, save_every: int = 2) -> Manager:
    return Manager(checkpoint_store=CheckpointStore(root / "steps", keep=2), save_every=save_every)


def crashed(runs: Any, root: Path, steps: list[int], save_every: int = 2, **more: Any) -> dict[str, Any]:
    """Train, crash at each of the steps, and return the outcome of the last run."""
    for step in steps:
        manager = manager_of(root, save_every)
        try:
            with pytest.raises(CrashError):
                runs.build(root, manager, step, crash, **more).train()
        finally:
            manager.shutdown()
    return runs.outcome(runs.build(root, manager_of(root, save_every), **more))


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 2},  # the last step of an epoch has one batch
        # It draws the order from the global generator.
        {"train_sampling_strategy": "group_by_length", "max_steps": 17, "lr_scheduler_type": "cosine"},
    ],
    ids=str,
)
def test_a_crashed_run_ends_as_one_that_nobody_disturbed(runs: Any, tmp_path: Path, more: dict[str, Any]) -> None:
    undisturbed = runs.outcome(runs.build(tmp_path, None, **more))
    chosen = random.Random(str(more))
    num_steps = len(undisturbed["log"]) * 3
    steps = sorted(chosen.sample(range(3, num_steps), 3))
    assert crashed(runs, tmp_path, steps, **more) == undisturbed


def test_worker_processes_draw_the_same_samples(runs: Any, tmp_path: Path) -> None:
    more = {"dataloader_num_workers": 1, "max_steps": 8}
    assert crashed(runs, tmp_path, [5], **more) == runs.outcome(runs.build(tmp_path, None, **more))


def test_a_run_that_was_complete_trains_nothing(runs: Any, tmp_path: Path) -> None:
    first = runs.outcome(runs.build(tmp_path, manager_of(tmp_path, 1), max_steps=3))
    again = runs.build(tmp_path, manager_of(tmp_path, 1), 4, crash, max_steps=3)
    assert runs.outcome(again) == first


def test_a_run_with_other_batches_is_refused_unless_the_epoch_begins_again(runs: Any, tmp_path: Path) -> None:
    runs.outcome(runs.build(tmp_path, manager_of(tmp_path, 1), max_steps=3))
    other = {"per_device_train_batch_size": 2, "max_steps": 5}
    manager = manager_of(tmp_path)
    try:
        with pytest.raises(ConfigurationError, match=r"'samples per step': 4.*'samples per step': 2"):
            runs.build(tmp_path, manager, **other).train()
    finally:
        manager.shutdown()
    trainer = runs.build(tmp_path, manager_of(tmp_path), ignore_data_skip=True, **other)
    trainer.train()
    assert trainer.state.global_step == 5


def test_a_run_that_a_callback_has_stopped_stays_so(runs: Any, tmp_path: Path) -> None:
    class Stops(runs.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step >= 5

    first = runs.build(tmp_path, manager_of(tmp_path, 1))
    first.add_callback(Stops)
    digest = runs.outcome(first)["digest"]
    again = runs.build(tmp_path, manager_of(tmp_path, 1))
    assert (runs.outcome(again)["digest"], again.state.global_step) == (digest, 5)


def test_a_run_that_began_at_a_checkpoint_of_trainer_resumes_at_its_next_sample(runs: Any, tmp_path: Path) -> None:
    theirs = {"save_strategy": "steps", "save_steps": 5}
    with pytest.raises(CrashError):
        runs.build(tmp_path, None, 6, crash, **theirs).train()
    undisturbed = runs.build(tmp_path, None, **theirs)
    undisturbed.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-5"))
    manager = manager_of(tmp_path, 1)
    try:
        trainer = runs.build(tmp_path, manager, 8, crash)
        with pytest.raises(CrashError):
            trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-5"))
    finally:
        manager.shutdown()
    last = runs.build(tmp_path, manager_of(tmp_path, 1))
    last.train()
    assert state_digest(last.model.state_dict()) == state_digest(undisturbed.model.state_dict())


def test_a_trainer_trains_once(runs: Any, tmp_path: Path) -> None:
    trainer = runs.build(tmp_path, manager_of(tmp_path), max_steps=1)
    trainer.train()
    with pytest.raises(ConfigurationError, match="one call of train"):
        trainer.train()


def test_the_best_model_is_loaded_while_a_checkpoint_is_written(runs: Any, tmp_path: Path) -> None:
    more = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    trainer = runs.build(tmp_path, manager_of(tmp_path, 1), load_best_model_at_end=True, **more)
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    with CheckpointStore(tmp_path / "steps") as store:
        assert store.latest() == 4
        store.verify(4)


def test_a_trainer_that_is_not_resumed_exactly_is_refused(runs: Any, tmp_path: Path) -> None:
    manager = manager_of(tmp_path)
    try:
        with pytest.raises(ConfigurationError, match="auto_find_batch_size"):
            runs.build(tmp_path, manager, auto_find_batch_size=True)
    finally:
        manager.shutdown()


@pytest.mark.slow
def test_a_killed_process_resumes_from_host_memory(tmp_path: Path) -> None:
    undisturbed = lives(WORKER, tmp_path / "undisturbed", [], "--plain")
    kills = [{"KILL_AT": "7"}, {"KILL_AT": "20"}]
    assert lives(WORKER, tmp_path / "killed", kills, "--keep-every", "1") == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("tier", ["--keep-every", "--save-every"])
def test_kills_at_random_moments_change_nothing(tmp_path: Path, tier: str) -> None:
    undisturbed = lives(WORKER, tmp_path / "undisturbed", [], "--plain", "--epochs", "80")
    chosen = random.Random(tier)
    kills = [{"KILL_AFTER_S": str(chosen.uniform(0.0, 0.4))} for _ in range(20)]
    assert lives(WORKER, tmp_path / "killed", kills, tier, "5", "--epochs", "80") == undisturbed


@pytest.mark.long
def test_two_killed_ranks_resume_from_a_checkpoint(tmp_path: Path) -> None:
    undisturbed = lives(WORKER, tmp_path / "undisturbed", [], "--plain", "--accumulate", "2", ranks=2)
    kills = [{"KILL_AT": "3"}, {"KILL_AT": "5"}]
    assert lives(WORKER, tmp_path / "killed", kills, "--save-every", "2", "--accumulate", "2", ranks=2) == undisturbed
