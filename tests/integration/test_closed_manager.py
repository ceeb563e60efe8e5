"""A manager that was shut down, and one in a forked child: each call says so at once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch
from quorum_threads import lighthouse, make_manager
from served_memory import until

from manager import Manager, ManagerClosedError

pytestmark = pytest.mark.usefixtures("quorum_ready")

CALLS: dict[str, Callable[[Manager], object]] = {
    "start_quorum": Manager.start_quorum,
    "wait_quorum": Manager.wait_quorum,
    "allreduce": lambda manager: manager.allreduce(torch.ones(2)),
    "should_commit": Manager.should_commit,
    "compare_replicas": Manager.compare_replicas,
    "snapshot": Manager.snapshot,
    "save": Manager.save,
    "resume": Manager.resume,
    "recover": lambda manager: manager.recover("http://127.0.0.1:1/checkpoint/"),
}
WAITING: dict[str, Callable[[Manager], object]] = {
    "num_participants": Manager.num_participants,
    "participating_rank": Manager.participating_rank,
}
"""After a shutdown they return what the last quorum decided."""


def made(address: str, name: str = "a") -> Manager:
    manager = make_manager(address, name)
    manager.register("model", torch.nn.Linear(2, 2))
    return manager


@pytest.mark.parametrize("has_begun", [True, False])
def test_each_call_after_shutdown_says_that_the_manager_was_shut_down(has_begun: bool) -> None:
    with lighthouse() as address:
        manager = made(address)
        if has_begun:
            manager.start_quorum()
        name = manager.replica_id()
        manager.shutdown()
        for call in CALLS.values():
            with pytest.raises(ManagerClosedError, match="this one was shut down; make another one"):
                call(manager)
        assert manager.num_participants() == int(has_begun)
        assert manager.replica_id() == name
        assert manager.current_step() == 0
        manager.shutdown()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_that_asks_while_a_quorum_forms_is_refused_at_once() -> None:
    with lighthouse(min_replicas=2) as address:
        manager = made(address)
        starting = threading.Thread(target=manager.start_quorum)
        starting.start()
        assert manager._loop is not None
        until(lambda: manager._loop._participant.round is not None)
        child = os.fork()
        if not child:
            os._exit(_num_wrong(manager))
        try:
            deadline_s = time.monotonic() + 10
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                assert time.monotonic() < deadline_s, "the child waits"
                time.sleep(0.01)
            assert os.waitstatus_to_exitcode(ended[1]) == 0
            assert starting.is_alive()
            other = made(address, "b")
            other.start_quorum()
            starting.join(20)
            assert manager.num_participants() == 2, "the parent's manager goes on"
            other.shutdown()
        finally:
            manager.shutdown()


def _num_wrong(manager: Manager) -> int:
    num_wrong = 0
    for call in [*CALLS.values(), *WAITING.values()]:
        try:
            call(manager)
            num_wrong += 1
        except ManagerClosedError as error:
            num_wrong += f"one of process {os.getppid()}, which forked this one" not in str(error)
        except BaseException:
            num_wrong += 1
    manager.shutdown()
    return num_wrong
