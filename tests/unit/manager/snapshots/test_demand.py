"""Which snapshots are still waited for, in any order of requests, boundaries and ends."""

from __future__ import annotations

from manager.snapshots.demand import SnapshotDemand


def _at(step: int) -> SnapshotDemand:
    demand = SnapshotDemand()
    demand.begin_boundary(step)
    return demand


def test_nobody_waits_before_a_request() -> None:
    assert not _at(3).take_boundary(0, is_sync=False)


def test_a_request_stays_until_a_later_snapshot_has_been_published() -> None:
    demand = _at(3)
    demand.want_after(0)
    assert demand.take_boundary(0, is_sync=False)
    assert demand.take_boundary(0, is_sync=False), "a snapshot that failed met nobody"
    assert not demand.take_boundary(1, is_sync=False)


def test_the_later_of_two_requests_counts() -> None:
    demand = _at(3)
    demand.want_after(2)
    demand.want_after(0)
    assert demand.take_boundary(2, is_sync=False)
    assert not demand.take_boundary(3, is_sync=False)


def test_a_step_to_come_is_taken_at_its_own_boundary() -> None:
    demand = _at(3)
    demand.want_step(5)
    assert not demand.take_boundary(0, is_sync=False)
    demand.begin_boundary(4)
    assert not demand.take_boundary(0, is_sync=False)
    demand.begin_boundary(5)
    assert demand.take_boundary(0, is_sync=False)
    assert not demand.take_boundary(0, is_sync=False), "it is taken once"


def test_a_step_that_is_past_is_not_waited_for() -> None:
    demand = _at(3)
    demand.want_step(3)
    demand.want_step(2)
    assert not demand.take_boundary(0, is_sync=False)


def test_of_many_steps_to_come_the_next_sixteen_are_kept() -> None:
    demand = _at(0)
    for step in range(100, 0, -1):
        demand.want_step(step)
    taken = []
    for step in range(1, 101):
        demand.begin_boundary(step)
        taken += [step] if demand.take_boundary(0, is_sync=False) else []
    assert taken == list(range(1, 17))


def test_sharing_is_forgotten_with_the_need() -> None:
    demand = _at(3)
    demand.is_to_share = True
    demand.want_after(0)
    assert demand.take_boundary(0, is_sync=False)
    assert demand.is_to_share
    demand.take_boundary(1, is_sync=False)
    assert not demand.is_to_share


def test_where_there_are_syncs_a_request_waits_for_the_next() -> None:
    demand = _at(3)
    assert not demand.take_boundary(0, is_sync=True)
    demand.want_after(0)
    assert not demand.take_boundary(0, is_sync=False)
    assert demand.take_boundary(0, is_sync=True)


def test_one_that_is_shared_or_of_a_step_does_not_wait_for_a_sync() -> None:
    demand = _at(3)
    demand.take_boundary(0, is_sync=True)
    demand.want_step(4)
    demand.begin_boundary(4)
    assert demand.take_boundary(0, is_sync=False)
    demand.want_after(0)
    demand.is_to_share = True
    assert demand.take_boundary(0, is_sync=False)


def test_a_failure_is_told_to_those_who_waited_for_it_and_to_no_others() -> None:
    demand = _at(3)
    demand.want_after(1)
    demand.forget(0)
    assert demand.is_open(1), "it was promised the snapshot after the one that failed"
    demand.forget(1)
    assert not demand.is_open(1)
    demand.want_after(7)
    demand.forget()
    assert not demand.is_open(0)
