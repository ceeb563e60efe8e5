"""A leaf without an encoding is refused by its path when training begins, not when another replica needs the state."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quorum_threads import LONG_S, SHORT, beside, loopback_transport, make_manager

from ft_transport import CheckpointStore
from manager import HealFailedError, Manager, RegistryError
from manager.state_manager import StateManager


class Mode(enum.Enum):
    WARM = 1


UNENCODABLE = [Mode.WARM, len, threading.Lock(), torch.ones(2).to_sparse()]


class Odd(torch.optim.SGD):
    """Its state holds a lock after the first step."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["lock"] = threading.Lock()
        return loss


def _registered(manager: StateManager, value: Callable[[], object], **keywords: Any) -> None:
    manager.register_state_dict_fn("loader", lambda _: None, lambda: {"workers": [{"mode": value()}]}, **keywords)


@pytest.fixture
def manager() -> Iterator[Manager]:
    manager = Manager(checkpoint_transport=loopback_transport())
    yield manager
    manager.shutdown()


@pytest.mark.parametrize("leaf", UNENCODABLE, ids=lambda leaf: type(leaf).__name__)
def test_a_replica_without_a_quorum_is_refused_by_the_path(manager: Manager, leaf: object) -> None:
    _registered(manager, lambda: leaf)
    if isinstance(leaf, torch.Tensor):
        # It might get its memory in the first step.
        manager.start_step(0)
    with pytest.raises(RegistryError, match=r"loader\.workers\.0\.mode: expected a (leaf|dense tensor)") as caught:
        manager.start_step(1)
    assert caught.value.keys == ("loader",)


def test_local_state_is_refused_where_a_store_saves_it(tmp_path: Path) -> None:
    manager = Manager(checkpoint_store=CheckpointStore(tmp_path))
    _registered(manager, lambda: Mode.WARM, scope="local")
    with pytest.raises(RegistryError, match=r"loader\.workers\.0\.mode"):
        manager.start_step(0)
    manager.shutdown()


def test_local_state_that_nobody_saves_may_be_anything(manager: Manager) -> None:
    _registered(manager, lambda: Mode.WARM, scope="local")
    for step in range(3):
        manager.start_step(step)


def test_modules_that_get_their_shapes_in_the_first_step_are_not_refused(manager: Manager) -> None:
    model = torch.nn.LazyLinear(2)
    manager.register("model", model)
    manager.start_step(0)
    model(torch.ones(1, 3))
    manager.start_step(1)
    manager.snapshot().result(LONG_S)


def test_a_state_that_an_optimizer_makes_in_its_first_step_is_looked_at_after_it(manager: Manager) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = Odd(model.parameters(), lr=0.1)
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    manager.attach(optimizer)
    manager.start_step(0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(RegistryError, match=r"optimizer\.state\.0\.lock: expected a leaf with a safe encoding"):
        manager.start_step(1)


def test_a_replica_in_a_quorum_is_refused_before_anybody_waits_for_it(address: str) -> None:
    manager = make_manager(address, "odd")
    _registered(manager, lambda: Mode.WARM)
    with pytest.raises(RegistryError, match=r"loader\.workers\.0\.mode"):
        manager.start_quorum()
    manager.shutdown()


def test_a_source_that_can_never_serve_says_so_at_once_and_trains_on(address: str) -> None:
    """Its state became unencodable after the first steps; the newcomer does not wait for its timeout."""

    def step(manager: Manager) -> bool:
        manager.start_quorum()
        manager.allreduce(torch.ones(2)).wait()
        return manager.should_commit()

    def newcomer() -> None:
        manager = make_manager(address, "newcomer")
        _registered(manager, lambda: 1)
        began_s = time.monotonic()
        try:
            with pytest.raises(HealFailedError, match=r"failed once.*UnsupportedLeafError.*user\.loader\.workers\.0"):
                step(manager)
            assert time.monotonic() - began_s < SHORT.total_seconds() / 2
        finally:
            manager.shutdown()

    committed: list[bool] = []
    healthy = make_manager(address, "healthy")
    _registered(healthy, lambda: Mode.WARM if len(committed) > 2 else 1)
    try:
        beside(lambda: committed.append(step(healthy)), newcomer, num_steps=3)
        until_s = time.monotonic() + LONG_S
        while not committed[-1]:
            committed.append(step(healthy))
            assert time.monotonic() < until_s
    finally:
        healthy.shutdown()
    assert all(committed[:3])
    assert committed.count(False) <= 2
