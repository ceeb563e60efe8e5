"""A snapshot that fails, is interrupted or comes too late stops nobody, leaks nothing and is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from replica_stand_in import LONG_S, Replica, elsewhere, open_replica

from ft_transport import SnapshotError, SnapshotLimitError
from manager.errors import LockTimeoutError, ManagerError


@pytest.fixture
def replica() -> Iterator[Replica]:
    with open_replica() as replica:
        yield replica


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
        replica.sink.before_begin = _fail(error)
    replica.boundary(3)
    assert "step 3: no snapshot could be taken" in caplog.text
    assert "no encoding for it" in caplog.text
    assert replica.is_free()
    assert replica.sink.failures == [(3, error)]
    with pytest.raises(SnapshotError, match="no encoding for it"):
        replica.take(3)
    assert replica.is_free()
    replica.state, replica.sink.before_begin = good, lambda: None
    caplog.clear()
    replica.boundary(4)  # nobody is owed one any more
    replica.finish()
    assert not replica.sink.begun
    replica.snapshot_scheduler.request()
    replica.boundary(5)
    replica.finish()
    assert replica.sink.newest_step() == 5
    assert not caplog.records


def test_the_same_failure_shows_its_traceback_once(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    replica.sink.before_begin = _fail(SnapshotError("no encoding for it"))
    for step in range(3):
        replica.snapshot_scheduler.request()
        replica.boundary(step)
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False]
    replica.sink.before_begin = _fail(SnapshotError("no memory"))
    replica.snapshot_scheduler.request()
    replica.boundary(3)
    assert caplog.records[-1].exc_info


def test_a_retryable_failure_keeps_the_request_and_is_logged_once(
    replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    replica.sink.before_begin = _fail(SnapshotLimitError("two snapshots are being fetched"))
    replica.snapshot_scheduler.request()
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            replica.boundary(step)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(SnapshotLimitError):
        replica.take(3)
    replica.sink.before_begin = lambda: None
    replica.boundary(3)
    replica.finish()
    assert [snapshot.step for snapshot in replica.sink.published] == [3]
    assert replica.is_free()


@pytest.mark.parametrize("where", ["during_copy", "during_publish"])
def test_a_failure_in_the_background_opens_the_lock_and_is_told(replica: Replica, where: str) -> None:
    setattr(replica.sink, where, _fail(SnapshotError("the device is gone")))
    future = replica.take(1)
    with pytest.raises(SnapshotError, match="the device is gone"):
        future.result(LONG_S)
    assert replica.is_free()
    assert not replica.sink.published
    assert [(step, str(error)) for step, error in replica.sink.failures] == [(1, "the device is gone")]
    setattr(replica.sink, where, lambda: None)
    replica.take(2).result(LONG_S)
    assert replica.sink.newest_step() == 2


def test_take_waits_for_the_one_before_and_names_it_when_it_does_not_end(replica: Replica) -> None:
    may_publish = threading.Event()
    replica.sink.during_publish = lambda: may_publish.wait(LONG_S)
    first = replica.take(1)
    with pytest.raises(LockTimeoutError, match="a snapshot of step 2 after that of step 1"):
        replica.take(2, timedelta(milliseconds=20))
    may_publish.set()
    replica.take(2).result(LONG_S)
    assert first.done()
    assert [snapshot.step for snapshot in replica.sink.published] == [1, 2]


def test_a_snapshot_cannot_be_cancelled_into_a_leak(replica: Replica) -> None:
    may_copy = threading.Event()
    replica.sink.during_copy = lambda: may_copy.wait(LONG_S)
    future = replica.take(1)
    assert not future.cancel()
    may_copy.set()
    future.result(LONG_S)
    assert replica.is_free()


def test_close_finishes_what_is_under_way_and_ends_it(replica: Replica) -> None:
    may_copy = threading.Event()
    replica.sink.during_copy = lambda: may_copy.wait(LONG_S)
    future = replica.take(1)
    closing = elsewhere(replica.snapshot_scheduler.close)
    may_copy.set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    assert future.done()
    assert replica.sink.newest_step() == 1
    replica.boundary(2)
    replica.snapshot_scheduler.request()
    replica.boundary(3)
    with pytest.raises(ManagerError, match="shut down"):
        replica.take(4)
    assert len(replica.sink.begun) == 1
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
    (snapshot,) = replica.sink.begun
    assert snapshot.is_abandoned == (not is_handed_over)
    assert replica.sink.published == ([snapshot] if is_handed_over else [])
    replica.take(2).result(LONG_S)
