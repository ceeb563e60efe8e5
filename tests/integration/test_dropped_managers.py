"""A manager that is refused, or dropped without shutdown, leaves no thread, no socket and no model behind."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from quorum_threads import lighthouse, loopback_transport, make_manager

from ft_transport import TransportError
from manager import ConfigError, Manager, ManagerConfig, QuorumError, StateManager

LONG_S = 30.0
NOBODY = "http://127.0.0.1:1"


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("ft-transport")}


BRIEF: Any = dict.fromkeys(("timeout", "connect_timeout", "quorum_timeout"), timedelta(seconds=0.3))


@pytest.mark.usefixtures("quorum_ready")
@pytest.mark.parametrize(
    ("construct", "error"),
    [
        (lambda: StateManager(None, dict, checkpoint_transport=loopback_transport()), ValueError),
        (lambda: StateManager(checkpoint_transport=loopback_transport(), save_every=5), ConfigError),
        (lambda: Manager(checkpoint_transport=loopback_transport(), config=ManagerConfig(), rank=1), ConfigError),
        (lambda: Manager(None, None, dict, min_replica_size=1, lighthouse_addr=NOBODY), ValueError),
        (lambda: Manager(checkpoint_transport=loopback_transport(), lighthouse_addr=NOBODY, **BRIEF), QuorumError),
    ],
    ids=["a function is missing", "no store", "settings twice", "its own transport", "no Lighthouse"],
)
def test_a_refused_manager_ends_the_transport_that_it_was_given(
    construct: Callable[[], object], error: type[Exception]
) -> None:
    before = own_threads()
    for _ in range(3):
        with pytest.raises(error):
            construct()
    assert own_threads() <= before


def test_a_refused_manager_leaves_another_managers_transport_alone() -> None:
    shared = loopback_transport()
    owner = StateManager(checkpoint_transport=shared)
    try:
        owner.register_state_dict_fn("part", lambda _: None, lambda: {"value": 7})
        for wrong in ({}, {"save_every": 5}):
            with pytest.raises((TransportError, ConfigError)):
                StateManager(checkpoint_transport=shared, **wrong)  # type: ignore[arg-type]
        owner.start_step(1)
        owner.snapshot().result(LONG_S)
        assert shared.fetch(shared.metadata(), 1).state["user"] == {"part": {"value": 7}}
    finally:
        owner.shutdown()


def drop_state_manager() -> weakref.ref[torch.nn.Module]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = StateManager(checkpoint_transport=loopback_transport())
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    manager.attach(optimizer)
    manager.start_step(0)
    manager.snapshot().result(LONG_S)
    return weakref.ref(model)


def drop_manager() -> weakref.ref[torch.nn.Module]:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lighthouse() as address:
        manager = make_manager(address, "dropped")
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        manager.attach(optimizer)
        for _ in range(2):
            manager.start_quorum()
            optimizer.zero_grad()
            model(torch.ones(4)).sum().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                manager.allreduce(parameter.grad).wait()
            assert manager.should_commit()
            optimizer.step()
        del manager
        gc.collect()
    return weakref.ref(model)


@pytest.mark.usefixtures("quorum_ready")
@pytest.mark.parametrize("drop", [drop_state_manager, drop_manager])
def test_a_manager_that_is_dropped_frees_the_model_and_ends_its_threads(
    drop: Callable[[], weakref.ref[torch.nn.Module]], caplog: pytest.LogCaptureFixture
) -> None:
    before = own_threads()
    model = drop()
    gc.collect()
    assert model() is None
    deadline_s = time.monotonic() + LONG_S
    while own_threads() - before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert own_threads() <= before
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([warning for warning in warnings if "was dropped without shutdown" in warning]) == 1


@pytest.mark.usefixtures("quorum_ready")
def test_a_transport_that_is_kept_keeps_no_model_of_a_manager_that_was_shut_down() -> None:
    kept = loopback_transport()
    model = torch.nn.Linear(2, 1)
    with lighthouse() as address:
        manager = make_manager(address, "replica_0", checkpoint_transport=kept)
        manager.register("model", model)
        manager.start_quorum()
        manager.shutdown()
    found = weakref.ref(model)
    del manager, model
    gc.collect()
    assert found() is None
    assert kept.process_status.state()["changes"] == ()


def test_a_manager_that_is_shut_down_is_not_complained_of(caplog: pytest.LogCaptureFixture) -> None:
    StateManager(checkpoint_transport=loopback_transport()).shutdown()
    gc.collect()
    assert not caplog.records
