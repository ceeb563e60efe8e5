"""The state of managers, as ``/state`` shows it."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta
from typing import Any

import msgspec
import torch
from quorum_threads import loopback_transport, make_manager, run_replicas
from scrapes import scraped

from ft_transport import HTTPTransport
from ft_transport.cli.top import JobFinder
from ft_transport.http.client.peer_status import connecting
from ft_transport.telemetry.process_state import ManagerStatus, ProcessState, decode_state
from manager import Manager, StateManager

MIN_REPLICAS = 2


def told_by(transport: HTTPTransport[Any]) -> ProcessState:
    return decode_state(msgspec.json.encode(transport.process_status.state()))


def manager_part(transport: HTTPTransport[Any]) -> ManagerStatus:
    part = told_by(transport).manager
    assert part is not None
    return part


def test_a_quorum_its_steps_and_why_one_was_refused(address: str) -> None:
    transports = {name: loopback_transport() for name in ("a", "b")}

    def step(manager: Manager, *, spoilt: bool = False) -> bool:
        manager.start_quorum()
        manager.allreduce(torch.ones(4)).wait()
        if spoilt:
            manager.report_error(RuntimeError("a broken cable"))
        return manager.should_commit()

    def train(name: str) -> None:
        manager = make_manager(address, name, min_replica_size=2, checkpoint_transport=transports[name], has_part=True)
        try:
            assert manager_part(transports[name]).activity == "idle"
            assert step(manager)
            assert step(manager)
            assert not step(manager, spoilt=True)
            assert step(manager)
            told = told_by(transports[name])
            part = told.manager
            assert part is not None
            assert (part.replica_id, part.step, part.activity) == (manager.replica_id(), 3, "training")
            assert (part.num_committed, part.num_refused, part.num_participants) == (3, 1, 2)
            assert [each.is_committed for each in part.steps] == [True, True, False, True]
            assert [each.step for each in part.steps] == [0, 1, 2, 2]
            assert "a broken cable" in part.steps[2].cause
            assert [member.replica_id.partition(":")[0] for member in part.members] == ["a", "b"]
            assert {each.metadata() for each in transports.values()} == {member.addresses[0] for member in part.members}
            assert part.lighthouse == address
            assert told.errors
            find_job = JobFinder(transports[name].metadata(), connecting(None, None))
            assert [member.name for member in find_job().members] == ["a", "b"]
            done.wait()
        finally:
            manager.shutdown()

    done = threading.Barrier(2, timeout=60)
    run_replicas(lambda: train("a"), lambda: train("b"))


def test_who_waits_for_the_lock_and_who_holds_it() -> None:
    transport = loopback_transport()
    manager = StateManager(checkpoint_transport=transport)
    try:
        holding, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with manager.reading("a long look"):
                holding.set()
                may_end.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        assert holding.wait(20)
        lock = manager_part(transport).lock
        assert [(holder.kind, holder.what) for holder in lock.holders] == [("read", "a long look")]
        assert lock.num_waits == 0
        timer = threading.Timer(0.2, may_end.set)
        timer.start()
        with manager.writing():
            pass
        thread.join()
        timer.join()
        lock = manager_part(transport).lock
        assert (lock.holders, lock.num_waits) == ((), 1)
        assert lock.longest_wait_s == lock.waited_s > 0.05
        for number in range(3):
            manager.start_step(number)
        told = manager_part(transport)
        assert (told.step, told.num_committed, told.activity) == (2, 2, "training")
        assert [each.step for each in told.steps] == [0, 1]
    finally:
        manager.shutdown()


def test_status_and_metrics_keep_no_manager_that_was_dropped() -> None:
    transport = loopback_transport()
    manager = StateManager(checkpoint_transport=transport, timeout=timedelta(seconds=5))
    model = torch.nn.Linear(2, 2)
    manager.register("model", model)
    manager.start_step(3)
    assert (manager_part(transport).step, scraped(transport)["step",]) == (3, 3)
    found = weakref.ref(model)
    del manager, model
    gc.collect()
    assert found() is None
    assert told_by(transport).manager is None
    assert "step" not in {each.name for each in transport.process_status.metrics.readings()}
    transport.shutdown()
