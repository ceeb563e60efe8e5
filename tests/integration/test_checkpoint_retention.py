"""Checkpoints that are deleted or replaced: what remains is exact, and a reader tells deleted from damaged."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ft_transport import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    CheckpointStore,
    ConfigurationError,
    RestoreError,
)
from ft_transport.checkpoint import inventory


def _state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((64, 64), float(value)), "step": int(value)}


def _into() -> dict[str, Any]:
    return {"weight": torch.zeros(64, 64), "step": 0}


def _once(action: Callable[[], object]) -> Callable[[Any], None]:
    """Runs an action at the first call, between the description of a checkpoint and its data."""
    left = [action]
    return lambda _incoming: left.pop()() and None if left else None


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckpointStore]:
    """Saves, and keeps one; shared, because a writer process takes longer to start than a test to run."""
    with CheckpointStore(tmp_path_factory.mktemp("root"), keep=1) as made:
        made.save(1, _state(1), wait=True)  # Its memory stays, and is no test's to give back.
        yield made


@pytest.fixture
def reader(store: CheckpointStore) -> Iterator[CheckpointStore]:
    """What another process is: it reads while the store saves and deletes."""
    with CheckpointStore(store.root, read_only=True) as made:
        yield made


@pytest.fixture
def step(store: CheckpointStore) -> int:
    """Of the one checkpoint that there is."""
    saved = (store.latest() or 0) + 1
    store.save(saved, _state(saved), wait=True)
    return saved


def test_a_slow_deletion_holds_nobody_up(store: CheckpointStore, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    may_delete = threading.Event()
    remove = shutil.rmtree

    def slow(path: Any) -> None:
        assert path.name != f"step-{step}.deleted" or may_delete.wait(10)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", slow)
    try:
        store.save(step + 1, _state(step + 1), wait=True)
        assert store.steps() == (step + 1,)
        assert store.load().state["step"] == step + 1
        assert (store.root / f"step-{step}.deleted").exists()
    finally:
        may_delete.set()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_checkpoint_that_is_deleted_or_replaced_while_it_is_loaded_is_not_called_damaged(
    store: CheckpointStore, reader: CheckpointStore, step: int, is_replaced: bool
) -> None:
    saved = step if is_replaced else step + 1
    save = _once(lambda: store.save(saved, _state(-5), wait=True, overwrite=is_replaced))
    with pytest.raises(
        CheckpointNotFoundError, match=rf"{store.root}/step-{step} was deleted or replaced.*step {step}"
    ):
        reader.load(step, into=_into(), check=save)
    assert reader.load(saved).state["step"] == -5


def test_a_checkpoint_that_is_deleted_while_it_is_verified_is_not_called_damaged(
    store: CheckpointStore, reader: CheckpointStore, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_damage = inventory.find_damage

    def late(*args: Any) -> Any:
        store.save(step + 1, _state(step + 1), wait=True)
        return find_damage(*args)

    monkeypatch.setattr(inventory, "find_damage", late)
    with pytest.raises(CheckpointNotFoundError, match=f"step-{step} was deleted or replaced"):
        reader.verify(step)


def test_the_newest_good_one_is_found_while_others_go_away(
    store: CheckpointStore, reader: CheckpointStore, step: int
) -> None:
    into = _into()
    save = _once(lambda: store.save(step + 1, _state(step + 1), wait=True))
    loaded = reader.load_newest_good(into=into, check=save)
    assert loaded is not None
    assert loaded.step == step + 1
    assert torch.equal(into["weight"], _state(step + 1)["weight"])


def test_an_error_for_the_latest_names_its_step_and_directory(store: CheckpointStore, step: int) -> None:
    expected = rf"the checkpoint is {store.root}/step-{step} \(step {step}\)"
    with pytest.raises(RestoreError, match=rf"weight: float32\[3\] here.*{expected}"):
        store.load("latest", into={"weight": torch.zeros(3)})
    path = store.root / f"step-{step}" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    for use in (store.load, store.verify, store.load_newest_good):
        with pytest.raises(CheckpointDamagedError, match=rf"__0_0\.distcp: .*{expected}"):
            use()


@pytest.mark.parametrize("step", ["newest", -1, 1.5, None, True])
def test_a_step_is_a_number_or_latest(store: CheckpointStore, step: Any) -> None:
    for use in (store.load, store.verify):
        with pytest.raises(ConfigurationError, match="step"):
            use(step)


@pytest.mark.parametrize("keep", [0, -1, "x", None])
def test_so_many_are_kept_at_least_one(store: CheckpointStore, step: int, keep: Any) -> None:
    with pytest.raises(ConfigurationError, match="keep"):
        store.prune(keep)
    assert store.steps() == (step,)
