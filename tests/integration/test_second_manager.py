"""A manager that follows another one in the same process does not wait until the Lighthouse has forgotten that one."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
from quorum_threads import Gate, lighthouse, make_manager, run_replicas

from manager import Manager
from manager.quorum.replica_identity import give_back_id, take_id

pytest.importorskip("torchft")

pytestmark = pytest.mark.usefixtures("quorum_ready")

_HEARTBEAT_TIMEOUT_MS = 60_000
_LONG_BEFORE_IT = timedelta(seconds=20)


def commit(manager: Manager) -> None:
    manager.start_quorum(timeout=_LONG_BEFORE_IT)
    manager.allreduce(torch.ones(1))
    assert manager.should_commit()


def new_manager(address: str, name: str = "replica_0") -> Manager:
    manager = make_manager(address, name)
    manager.register_state_dict_fn("part", lambda part: None, dict)
    return manager


def test_the_second_of_two_managers_gets_its_quorum_at_once() -> None:
    with lighthouse(heartbeat_timeout_ms=_HEARTBEAT_TIMEOUT_MS) as address:
        ids = []
        for _ in range(3):
            manager = new_manager(address)
            commit(manager)
            commit(manager)
            ids.append(manager.replica_id())
            manager.shutdown()
    assert len(set(ids)) == 1


def test_a_manager_that_comes_again_sets_up_its_group_with_the_others_anew() -> None:
    def stays(address: str) -> int:
        manager = new_manager(address, "replica_1")
        commit(manager)
        gate.wait("first has left")
        # Its collective fails, or the other one is there already.
        while manager.current_step() < 4:
            manager.start_quorum()
            manager.allreduce(torch.ones(1))
            manager.should_commit()
        gate.wait("second is done")
        manager.shutdown()
        return manager.current_step()

    def comes_again(address: str) -> int:
        manager = new_manager(address)
        commit(manager)
        manager.shutdown()
        gate.open("first has left")
        manager = new_manager(address)
        while manager.current_step() < 4:
            manager.start_quorum(timeout=_LONG_BEFORE_IT)
            manager.allreduce(torch.ones(1))
            manager.should_commit()
        gate.open("second is done")
        manager.shutdown()
        return manager.current_step()

    gate = Gate()
    with lighthouse(min_replicas=2, heartbeat_timeout_ms=_HEARTBEAT_TIMEOUT_MS) as address:
        assert run_replicas(lambda: stays(address), lambda: comes_again(address)) == [4, 4]


def test_managers_that_live_at_the_same_time_have_different_names() -> None:
    with lighthouse(heartbeat_timeout_ms=_HEARTBEAT_TIMEOUT_MS) as address:
        managers = [new_manager(address) for _ in range(2)]
        assert managers[0].replica_id() != managers[1].replica_id()
        for manager in managers:
            manager.shutdown()
            # Twice: its name is given back once.
            manager.shutdown()


def test_a_name_is_taken_once_and_not_in_a_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    own = take_id("http://here:1", "replica_0")
    give_back_id(own)
    with monkeypatch.context() as context:
        pid = os.getpid()
        context.setattr(os, "getpid", lambda: pid + 1)
        assert take_id("http://here:1", "replica_0").replica_id != own.replica_id
    assert take_id("http://there:1", "replica_0").replica_id != own.replica_id
    assert take_id("http://here:1", "replica_1").replica_id != own.replica_id
    assert take_id("http://here:1", "replica_0") == own
    assert take_id("http://here:1", "replica_0") != own
