"""A step boundary copies what may change, the lock guards the rest, and a snapshot that fails stops no training."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from replica_stand_in import LARGE, LONG_S, Replica, elsewhere, flat, open_replica

from ft_transport import SnapshotError, SnapshotLimitError
from manager.errors import LockTimeoutError, ManagerError
from manager.snapshots.requests import SnapshotJob


@pytest.fixture
def replica() -> Iterator[Replica]:
    with open_replica() as replica:
        yield replica


# ----------------------------------------------------------------------------------------- what is copied, and when


def test_only_large_guarded_tensors_are_left_for_later(replica: Replica) -> None:
    replica.forward_backward()
    replica.optimizer.step()
    replica.more = flat(replica.optimizer.state_dict()["state"])
    replica.take(1).result(LONG_S)
    (snapshot,) = replica.transport.published
    # The bias is a large parameter here, the buffers are large and nobody guards them, and the rest is small.
    assert set(snapshot.later) == {
        "/model/0.weight",
        "/model/0.bias",
        "/more//0/momentum_buffer",
        "/more//1/momentum_buffer",
    }
    assert {"/model/1.running_mean", "/model/1.running_var", "/model/1.num_batches_tracked"} == set(
        snapshot.at_boundary
    )
    assert snapshot.boundary_thread == threading.get_ident()


def test_small_parameters_are_copied_at_the_boundary(replica: Replica) -> None:
    small = torch.nn.Parameter(torch.zeros(LARGE - 1))
    large = torch.nn.Parameter(torch.zeros(LARGE))
    with replica.attach(torch.optim.SGD([small, large])):
        replica.state = lambda: {"small": small, "large": large}
        replica.take(0).result(LONG_S)
    (snapshot,) = replica.transport.published
    assert (set(snapshot.at_boundary), set(snapshot.later)) == ({"/small"}, {"/large"})


def test_a_buffer_in_the_storage_of_a_parameter_is_not_guarded_by_it(replica: Replica) -> None:
    memory = torch.zeros(2 * LARGE)
    parameter = torch.nn.Parameter(memory[:LARGE])
    with replica.attach(torch.optim.SGD([parameter])):
        replica.state = lambda: {"parameter": parameter, "buffer": memory[LARGE:], "whole": memory}
        replica.take(0).result(LONG_S)
    (snapshot,) = replica.transport.published
    assert (set(snapshot.at_boundary), set(snapshot.later)) == ({"/buffer", "/whole"}, {"/parameter"})


def test_replaced_parameters_are_guarded_in_place_of_the_old_ones(replica: Replica) -> None:
    old, new = torch.nn.Parameter(torch.zeros(LARGE)), torch.nn.Parameter(torch.ones(LARGE))
    optimizer = torch.optim.SGD([old])
    with replica.attach(optimizer):
        replica.state = lambda: {"old": old, "new": new}
        replica.take(0).result(LONG_S)
        optimizer.param_groups[0]["params"] = [new]
        replica.take(1).result(LONG_S)
    assert [set(snapshot.later) for snapshot in replica.transport.published] == [{"/old"}, {"/new"}]


def test_detached_optimizers_guard_nothing(replica: Replica) -> None:
    replica.attachment.remove()
    replica.take(0).result(LONG_S)
    (snapshot,) = replica.transport.published
    assert not snapshot.later
    assert "/model/0.weight" in snapshot.at_boundary


def test_optimizer_state_without_memory_of_its_own_does_no_harm(replica: Replica) -> None:
    parameter = replica.optimizer.param_groups[0]["params"][0]
    replica.optimizer.state[parameter]["sparse"] = torch.eye(3).to_sparse()
    replica.take(0).result(LONG_S)
    assert "/model/0.weight" in replica.transport.published[0].later


def test_within_a_write_section_of_the_caller_nothing_is_deferred(replica: Replica) -> None:
    with replica.lock.write("averaging"):
        future = replica.take(0)
        (snapshot,) = replica.transport.begun
        assert "/model/0.weight" in snapshot.at_boundary
        assert [holder.what for holder in replica.lock.holders()] == ["averaging"]
    future.result(LONG_S)
    replica.boundary(1)
    replica.snapshot_scheduler.request()
    replica.lock.disallow()
    replica.boundary(2)
    replica.lock.allow()
    replica.finish()
    assert [snapshot.later for snapshot in replica.transport.published] == [{}, {}]


# ----------------------------------------------------------------------------------------- the lock meanwhile


def test_forward_goes_on_during_the_copy_and_the_step_waits_for_it(replica: Replica) -> None:
    replica.snapshot_scheduler.request()
    forward_done, stepped = threading.Event(), threading.Event()
    order: list[str] = []

    def copy() -> None:
        assert forward_done.wait(LONG_S)
        # If the step did not wait for this copy, it would come in between now.
        if stepped.wait(0.3):
            order.append("stepped during the copy")
        order.append("copied")

    replica.transport.during_copy = copy
    weight = replica.model[0].weight.detach().clone()
    mean = replica.model[1].running_mean.clone()
    replica.boundary(0)
    replica.forward_backward()
    forward_done.set()
    replica.optimizer.step()
    stepped.set()
    order.append("stepped")
    assert order == ["copied", "stepped"]
    replica.finish()
    (snapshot,) = replica.transport.published
    assert torch.equal(snapshot.later["/model/0.weight"], weight)
    assert not torch.equal(replica.model[0].weight, weight)
    assert torch.equal(snapshot.at_boundary["/model/1.running_mean"], mean)
    assert not torch.equal(replica.model[1].running_mean, mean)


def test_the_read_section_is_open_before_the_trainer_goes_on(replica: Replica) -> None:
    may_copy = threading.Event()
    replica.transport.during_copy = lambda: may_copy.wait(LONG_S)
    replica.take(7)
    holders = replica.lock.holders()
    may_copy.set()
    # Opened by this thread, so no step of its own can slip in before the other thread has come to it.
    expected = [("read", "snapshot of step 7", threading.get_ident())]
    assert [(holder.kind, holder.what, holder.thread_id) for holder in holders] == expected
    at_boundary = replica.transport.begun[0].holders_at_boundary
    assert [holder.what for holder in at_boundary] == ["snapshot of step 7"]


def test_the_lock_is_open_while_a_snapshot_is_published(replica: Replica) -> None:
    open_at_publish: list[bool] = []
    replica.transport.during_publish = lambda: open_at_publish.append(replica.is_free())
    replica.take(0).result(LONG_S)
    assert open_at_publish == [True]


def test_detaching_waits_for_the_copy_that_relies_on_it(replica: Replica) -> None:
    detached = threading.Event()
    came_between: list[bool] = []
    replica.transport.during_copy = lambda: came_between.append(detached.wait(0.3))
    replica.take(0)
    replica.attachment.remove()
    detached.set()
    replica.optimizer.step()
    replica.finish()
    assert came_between == [False]


def test_another_threads_write_section_does_not_hold_up_the_boundary(replica: Replica) -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with replica.lock.write("averaging elsewhere"):
            held.set()
            release.wait(LONG_S)

    thread = elsewhere(hold)
    assert held.wait(LONG_S)
    replica.snapshot_scheduler.request()
    replica.boundary(0)  # the lock's own deadline is 20 s
    assert not replica.transport.begun
    assert not release.is_set()
    release.set()
    thread.join(LONG_S)
    replica.boundary(1)
    replica.finish()
    assert replica.transport.newest_step() == 1


# ----------------------------------------------------------------------------------------- memory, before it is needed


def test_memory_is_prepared_once_after_the_first_step(replica: Replica) -> None:
    prepared: list[dict[str, torch.Tensor]] = []
    replica.transport.on_prepare = lambda state: prepared.append(flat(state))
    replica.boundary(0)
    assert prepared == []
    replica.forward_backward()
    replica.optimizer.step()
    replica.more = flat(replica.optimizer.state_dict()["state"])
    for step in range(1, 4):
        replica.boundary(step)
    assert len(prepared) == 1
    # What the optimizer made in that step is counted.
    assert any("momentum" in path for path in prepared[0])
    assert replica.is_free()


def test_memory_that_cannot_be_prepared_stops_nobody(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_state: object) -> None:
        raise RuntimeError("no memory today")

    replica.transport.on_prepare = fail
    replica.boundary(0)
    replica.boundary(1)
    assert "could not be prefaulted: no memory today" in caplog.text
    assert replica.is_free()
    replica.take(1).result(LONG_S)


def _fail(error: Exception) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


@pytest.mark.parametrize("where", ["state", "begin"])
def test_a_failure_at_the_boundary_is_logged_and_not_raised(
    replica: Replica, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = SnapshotError("no encoding for it")
    good = replica.state
    replica.snapshot_scheduler.request()
    if where == "state":
        replica.state = _fail(error)
    else:
        replica.transport.before_begin = _fail(error)
    replica.boundary(3)
    assert "step 3: the requested snapshot could not be taken" in caplog.text
    assert "no encoding for it" in caplog.text
    assert replica.is_free()
    assert replica.transport.failures == [(3, error)]
    with pytest.raises(SnapshotError, match="no encoding for it"):
        replica.take(3)
    assert replica.is_free()
    replica.state, replica.transport.before_begin = good, lambda: None
    caplog.clear()
    replica.boundary(4)  # nobody is owed one any more
    replica.finish()
    assert not replica.transport.begun
    replica.snapshot_scheduler.request()
    replica.boundary(5)
    replica.finish()
    assert replica.transport.newest_step() == 5
    assert not caplog.records


def test_the_same_failure_shows_its_traceback_once(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    replica.transport.before_begin = _fail(SnapshotError("no encoding for it"))
    for step in range(3):
        replica.snapshot_scheduler.request()
        replica.boundary(step)
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False]
    replica.transport.before_begin = _fail(SnapshotError("no memory"))
    replica.snapshot_scheduler.request()
    replica.boundary(3)
    assert caplog.records[-1].exc_info


def test_a_retryable_failure_keeps_the_request_and_is_logged_once(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    replica.transport.before_begin = _fail(SnapshotLimitError("two snapshots are being fetched"))
    replica.snapshot_scheduler.request()
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            replica.boundary(step)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(SnapshotLimitError):
        replica.take(3)
    replica.transport.before_begin = lambda: None
    replica.boundary(3)
    replica.finish()
    assert [snapshot.step for snapshot in replica.transport.published] == [3]
    assert replica.is_free()


@pytest.mark.parametrize("where", ["during_copy", "during_publish"])
def test_a_failure_in_the_background_keeps_nothing_alive_without_the_garbage_collector(
    replica: Replica, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Captured log records keep the traceback.
    monkeypatch.setattr(logging.getLogger("manager.snapshots.scheduler"), "disabled", True)
    setattr(replica.transport, where, _fail(SnapshotError("the device is gone")))
    gc.collect()
    gc.disable()
    try:
        assert replica.take(3).exception(LONG_S) is not None
        replica.finish()
        assert not [each for each in gc.get_objects() if isinstance(each, SnapshotJob)]
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["during_copy", "during_publish"])
def test_a_failure_in_the_background_opens_the_lock_and_is_told(replica: Replica, where: str) -> None:
    setattr(replica.transport, where, _fail(SnapshotError("the device is gone")))
    future = replica.take(1)
    with pytest.raises(SnapshotError, match="the device is gone"):
        future.result(LONG_S)
    assert replica.is_free()
    assert not replica.transport.published
    assert [(step, str(error)) for step, error in replica.transport.failures] == [(1, "the device is gone")]
    setattr(replica.transport, where, lambda: None)
    replica.take(2).result(LONG_S)
    assert replica.transport.newest_step() == 2


def test_take_waits_for_the_one_before_and_names_it_when_it_does_not_end(replica: Replica) -> None:
    may_publish = threading.Event()
    replica.transport.during_publish = lambda: may_publish.wait(LONG_S)
    first = replica.take(1)
    with pytest.raises(LockTimeoutError, match="a snapshot of step 2 after that of step 1"):
        replica.take(2, timedelta(milliseconds=20))
    may_publish.set()
    replica.take(2).result(LONG_S)
    assert first.done()
    assert [snapshot.step for snapshot in replica.transport.published] == [1, 2]


def test_a_snapshot_cannot_be_cancelled_into_a_leak(replica: Replica) -> None:
    may_copy = threading.Event()
    replica.transport.during_copy = lambda: may_copy.wait(LONG_S)
    future = replica.take(1)
    assert not future.cancel()
    may_copy.set()
    future.result(LONG_S)
    assert replica.is_free()


def test_close_finishes_what_is_under_way_and_ends_it(replica: Replica) -> None:
    may_copy = threading.Event()
    replica.transport.during_copy = lambda: may_copy.wait(LONG_S)
    future = replica.take(1)
    closing = elsewhere(replica.snapshot_scheduler.close)
    may_copy.set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    assert future.done()
    assert replica.transport.newest_step() == 1
    replica.boundary(2)
    replica.snapshot_scheduler.request()
    replica.boundary(3)
    with pytest.raises(ManagerError, match="shut down"):
        replica.take(4)
    assert len(replica.transport.begun) == 1
    replica.snapshot_scheduler.close()


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_an_interrupt_as_the_work_is_handed_over_ends_it_once(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, is_handed_over: bool
) -> None:
    submit = replica.snapshot_scheduler._pool.submit

    def interrupted(*work: Any) -> None:
        if is_handed_over:
            submit(*work).result(LONG_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(replica.snapshot_scheduler._pool, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replica.take(1)
    monkeypatch.undo()
    assert replica.is_free()
    (snapshot,) = replica.transport.begun
    assert snapshot.is_abandoned == (not is_handed_over)
    assert replica.transport.published == ([snapshot] if is_handed_over else [])
    replica.take(2).result(LONG_S)
