"""A job that registers one part more, or one less, goes on from its checkpoint where it asks for that."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quorum_threads import LONG_S, lighthouse, make_manager, run_replicas

from ft_transport import CheckpointStore
from manager import ConfigError, Manager, ManagerError, RandomState, RegistryError, StateManager

pytestmark = pytest.mark.usefixtures("quorum_ready")


class _Parts:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.head = torch.nn.Linear(2, 2)
        self.average = torch.nn.Linear(2, 2)

    def register(self, manager: StateManager, *others: str) -> None:
        for key in ("model", "optimizer", *others):
            manager.register(key, getattr(self, key))
        manager.attach(self.optimizer)

    def train(self, manager: Manager) -> None:
        manager.start_quorum()
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).square().mean().backward()
        manager.average_gradients(self.model)
        if manager.should_commit():
            self.optimizer.step()


def _save(root: Path) -> _Parts:
    """A checkpoint of step 5 with the key ``average``, of which nothing else remains."""
    parts = _Parts(seed=1)
    manager = StateManager(checkpoint_store=CheckpointStore(root))
    parts.register(manager, "average")
    manager.register("random", RandomState(), scope="local")
    manager.start_step(0)
    parts.model(torch.ones(2, 4)).sum().backward()
    parts.optimizer.step()
    manager.start_step(5)
    manager.save(wait=True)
    manager.shutdown()
    return parts


def test_other_keys_are_refused_by_name_unless_they_are_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, own = _save(tmp_path), _Parts(seed=2)
    head = own.head.weight.detach().clone()
    manager = StateManager(checkpoint_store=CheckpointStore(tmp_path))
    own.register(manager, "head")
    with pytest.raises(RegistryError, match=r"missing: \['head'\], unexpected: \['average'\].*keys='shared'"):
        manager.resume()
    with pytest.raises(ConfigError, match="'same' or 'shared'"):
        manager.resume(keys="some")  # type: ignore[arg-type]
    recovery = manager.resume(keys="shared")
    assert recovery is not None
    assert (recovery.step, manager.current_step()) == (5, 5)
    assert torch.equal(own.model.weight, saved.model.weight)
    assert own.optimizer.state[own.model.weight]["step"] == 1
    assert torch.equal(own.head.weight, head)
    manager.shutdown()
    (line,) = [record.getMessage() for record in caplog.records if "are unchanged" in record.getMessage()]
    assert "['head'] are unchanged" in line
    assert "['average', 'random'] are not loaded" in line


def test_parts_of_one_key_still_have_to_fit(tmp_path: Path) -> None:
    _save(tmp_path)
    manager = StateManager(checkpoint_store=CheckpointStore(tmp_path))
    manager.register("model", torch.nn.Linear(5, 1))
    with pytest.raises(RegistryError, match="same dtypes, shapes"):
        manager.resume(keys="shared")
    manager.shutdown()


def test_a_checkpoint_without_any_of_the_keys_is_another_jobs(tmp_path: Path) -> None:
    _save(tmp_path)
    manager = StateManager(checkpoint_store=CheckpointStore(tmp_path))
    manager.register("other", torch.nn.Linear(5, 1))
    with pytest.raises(RegistryError, match=r"missing: \['other'\]"):
        manager.resume(keys="shared")
    assert manager.current_step() == 0
    manager.shutdown()


def test_what_no_checkpoint_has_is_one_replicas_on_all_after_the_first_quorum(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save(tmp_path)
    ready = threading.Barrier(2)
    parts = [_Parts(seed=2), _Parts(seed=3)]
    assert not torch.equal(parts[0].head.weight, parts[1].head.weight)

    def replica(at: int) -> Callable[[], int]:
        def run() -> int:
            store = CheckpointStore(tmp_path, read_only=True)
            manager = make_manager(address, f"replica_{at}", checkpoint_store=store)
            try:
                parts[at].register(manager, "head")
                manager.resume(keys="shared")
                ready.wait(LONG_S)
                for _ in range(3):
                    parts[at].train(manager)
                ready.wait(LONG_S)
                return manager.current_step()
            finally:
                manager.shutdown()

        return run

    with caplog.at_level(logging.WARNING), lighthouse(min_replicas=2) as address:
        assert run_replicas(replica(0), replica(1)) == [8, 8]
    assert torch.equal(parts[0].head.weight, parts[1].head.weight)
    assert torch.equal(parts[0].model.weight, parts[1].model.weight)
    assert len([each for each in caplog.records if "healed to step 5" in each.getMessage()]) == 1


def test_replicas_without_a_name_could_not_be_told_apart(tmp_path: Path) -> None:
    _save(tmp_path)
    parts = _Parts(seed=2)
    with lighthouse() as address:
        manager = make_manager(address, "", checkpoint_store=CheckpointStore(tmp_path))
        parts.register(manager, "head")
        with pytest.raises(ManagerError, match="replica_id"):
            manager.resume(keys="shared")
        manager.shutdown()
