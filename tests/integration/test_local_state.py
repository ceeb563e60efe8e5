"""Whose local state a checkpoint holds: a replica resumes its own, and never another replica's."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from quorum_threads import LONG_S, lighthouse, make_manager, run_replicas

from ft_transport import CheckpointStore
from manager import Manager, StateManager

pytestmark = pytest.mark.usefixtures("quorum_ready")


class Draws:
    """A random generator of one replica's own: threads of a test share the global one."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> float:
        return torch.rand((), generator=self._generator).item()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._generator.set_state(state["generator"])


def _registered(manager: StateManager, draws: Draws) -> torch.optim.Optimizer:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    manager.register("draws", draws, scope="local")
    manager.attach(optimizer)
    return optimizer


def _saved(manager: StateManager, num_draws: int) -> list[float]:
    """Save a checkpoint after some draws, and return the next draws."""
    draws = Draws(0)
    _registered(manager, draws)
    for _ in range(num_draws):
        draws.draw()
    manager.save(wait=True)
    manager.shutdown()
    return [draws.draw() for _ in range(3)]


def _resumed(manager: StateManager) -> list[float]:
    draws = Draws(1)
    _registered(manager, draws)
    assert manager.resume() is not None
    manager.shutdown()
    return [draws.draw() for _ in range(3)]


def _fresh() -> list[float]:
    draws = Draws(1)
    return [draws.draw() for _ in range(3)]


def test_after_a_restart_of_everything_replicas_draw_their_own_numbers(tmp_path: Path) -> None:
    """One replica saves, the other opens the root to read: without names both would draw the same for ever."""
    barrier = threading.Barrier(2)

    def train(index: int, until: int, address: str) -> list[float]:
        store = CheckpointStore(tmp_path, read_only=index == 1)
        manager = make_manager(
            address,
            f"replica_{index}",
            min_replica_size=2,
            checkpoint_store=store,
            save_every=2 if index == 0 else None,
        )
        draws, drawn = Draws(index), []
        optimizer = _registered(manager, draws)
        manager.resume()
        barrier.wait(LONG_S)
        while manager.current_step() < until:
            manager.start_quorum()
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.full_like(parameter, draws.draw())
                manager.allreduce(parameter.grad).wait()
            if manager.should_commit():
                optimizer.step()
                drawn.append(draws.draw())
        manager.start_quorum()
        manager.should_commit()
        barrier.wait(LONG_S)
        manager.shutdown()
        return drawn

    def run(until: int) -> list[list[float]]:
        with lighthouse(min_replicas=2) as address:
            return run_replicas(*(lambda index=index: train(index, until, address) for index in range(2)))

    before = run(4)
    after = run(8)

    assert [len(drawn) for drawn in (*before, *after)] == [4] * 4
    assert not set(after[0]) & {*before[0], *before[1], *after[1]}, "replica 0 goes on with its own"
    assert after[1] == before[1], "replica 1 has nothing to go on with, and begins anew"


@pytest.mark.parametrize("name", ["replica_0", "a.b/c:d"])
def test_a_replica_goes_on_with_what_was_saved_under_its_name(
    tmp_path: Path, address: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _saved(make_manager(address, name, checkpoint_store=CheckpointStore(tmp_path)), 5)

    with caplog.at_level(logging.WARNING, "manager.recovery"):
        drawn = _resumed(make_manager(address, name, checkpoint_store=CheckpointStore(tmp_path, read_only=True)))

    assert drawn == expected
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("replica_0", "replica_1"), "local states of replica 'replica_0', and this replica is 'replica_1'"),
        (("", ""), "local states of a replica without a replica_id, and this replica has no replica_id"),
        (
            (None, "replica_0"),
            "local states of a replica without a quorum, or of an older version, and this replica is 'replica_0'",
        ),
        (("replica_0", None), "local states of replica 'replica_0', and this replica has no quorum"),
    ],
)
def test_what_belongs_to_another_name_is_left_and_said(
    tmp_path: Path, address: str, names: tuple[str | None, str | None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    saver, resumer = names

    def manager(name: str | None, **keywords: Any) -> StateManager:
        store = CheckpointStore(tmp_path, **keywords)
        if name is None:
            return StateManager(checkpoint_store=store)
        return make_manager(address, name, checkpoint_store=store)

    _saved(manager(saver), 5)

    with caplog.at_level(logging.WARNING, "manager.recovery"):
        drawn = _resumed(manager(resumer, read_only=True))

    assert drawn == _fresh()
    [message] = caplog.messages
    assert said in message
    assert "['draws']" in message


def test_without_a_quorum_the_state_is_that_of_the_only_replica(tmp_path: Path) -> None:
    expected = _saved(StateManager(checkpoint_store=CheckpointStore(tmp_path)), 5)

    assert _resumed(Manager(checkpoint_store=CheckpointStore(tmp_path))) == expected
    # The layout of checkpoints from before replicas had names.
    manifest = json.loads((tmp_path / "step-0" / "manifest.json").read_bytes())
    assert manifest["body"]["local_keys"] == ["local"]
