"""No request gets a snapshot older than itself, and none is forgotten, in any order of requests and boundaries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replica_stand_in import StandInTransport

from ft_transport import SnapshotError, SnapshotLimitError
from manager.snapshots.requests import FailureLog, OpenRequests
from manager.snapshots.scheduler import SnapshotScheduler
from manager.state.replica_state import ReplicaState


def _at(step: int) -> OpenRequests:
    requests = OpenRequests()
    requests.begin_boundary(step)
    return requests


def test_the_later_of_two_requests_counts() -> None:
    requests = _at(3)
    requests.add_after(2)
    requests.add_after(0)
    assert requests.take_boundary(2, is_sync=False)
    assert not requests.take_boundary(3, is_sync=False)


def test_of_many_steps_to_come_the_next_sixteen_are_kept() -> None:
    requests = _at(0)
    for step in range(100, 0, -1):
        requests.add_step(step, None)
    taken = []
    for step in range(1, 101):
        requests.begin_boundary(step)
        taken += [step] if requests.take_boundary(0, is_sync=False) else []
        assert not requests.take_boundary(0, is_sync=False), "it is taken once"
    assert taken == list(range(1, 17))


def test_sharing_is_forgotten_with_the_need() -> None:
    requests = _at(3)
    requests.is_to_share = True
    requests.add_after(0)
    assert requests.take_boundary(0, is_sync=False)
    assert requests.is_to_share
    requests.take_boundary(1, is_sync=False)
    assert not requests.is_to_share


def test_where_there_are_syncs_a_request_waits_for_the_next() -> None:
    requests = _at(3)
    assert not requests.take_boundary(0, is_sync=True)
    requests.add_after(0)
    assert not requests.take_boundary(0, is_sync=False)
    assert requests.take_boundary(0, is_sync=True)


def test_one_that_is_shared_or_of_a_step_does_not_wait_for_a_sync() -> None:
    requests = _at(3)
    requests.take_boundary(0, is_sync=True)
    requests.add_step(4, None)
    requests.begin_boundary(4)
    assert requests.take_boundary(0, is_sync=False)
    requests.add_after(0)
    requests.is_to_share = True
    assert requests.take_boundary(0, is_sync=False)


def test_a_failure_is_told_to_those_who_waited_for_it_and_to_no_others() -> None:
    requests = _at(3)
    requests.add_after(1)
    requests.forget(0)
    assert requests.is_open(1), "it was promised the snapshot after the one that failed"
    requests.forget(1)
    assert not requests.is_open(1)
    requests.add_after(7)
    requests.forget()
    assert not requests.is_open(0)


def test_of_a_held_state_it_is_said_once_as_well(caplog: pytest.LogCaptureFixture) -> None:
    failures, passing = FailureLog(), SnapshotLimitError("all places are taken")
    for step in range(3):
        failures.held_not_taken(step, passing)
    failures.held_not_taken(3, SnapshotError("no encoding"))
    failures.held_not_taken(4, SnapshotError("no encoding"))
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.partition(":")[0] for message in warned] == ["step 0", "step 4"]


_LONG_S = 20.0


class Requests:
    """A snapshot_scheduler over the stand-in, with a background that moves only when told to."""

    def __init__(self) -> None:
        self._state = ReplicaState(timedelta(seconds=_LONG_S))
        self.transport: Any = StandInTransport(self._state.lock)
        self.transport.during_copy = self._copy
        self.snapshot_scheduler = SnapshotScheduler(self._state, self.transport)
        self.request = self.snapshot_scheduler.request
        self._may_copy = threading.Event()
        self._copy_error: Exception | None = None
        self._num_ended = 0

    def _copy(self) -> None:
        assert self._may_copy.wait(_LONG_S)
        if self._copy_error is not None:
            raise self._copy_error

    def boundary(self, step: int) -> None:
        if not self.is_running:
            self._may_copy.clear()
        self._state.step = step
        self.snapshot_scheduler.boundary()

    @property
    def is_running(self) -> bool:
        """Whether a snapshot was begun that no `finish` has let end."""
        return len(self.transport.begun) > self._num_ended

    def steps(self) -> list[int]:
        """The steps of the published snapshots."""
        return [snapshot.step for snapshot in self.transport.published]

    def answer(self, after: int) -> int | None:
        """The step that the server would serve to a receiver that was given this number."""
        return self.steps()[-1] if len(self.steps()) > after else None

    def finish(self, error: Exception | None = None) -> None:
        num_published, num_failures = len(self.steps()), len(self.transport.failures)
        self._copy_error = error
        self._may_copy.set()
        self.snapshot_scheduler._pool.submit(lambda: None).result(_LONG_S)
        if self.is_running:
            assert [each for _, each in self.transport.failures[num_failures:]] == ([] if error is None else [error])
            assert len(self.steps()) - num_published == (error is None)
        self._num_ended, self._copy_error = len(self.transport.begun), None


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests()
    yield requests
    requests.finish()
    requests.snapshot_scheduler.close()


def test_a_request_before_the_first_boundary_is_answered_by_it(requests: Requests) -> None:
    after = requests.request()
    assert requests.answer(after) is None
    requests.boundary(0)
    requests.finish()
    assert requests.answer(after) == 0


def test_without_a_request_there_is_no_snapshot(requests: Requests) -> None:
    for step in range(3):
        requests.boundary(step)
        assert not requests.is_running


def test_the_snapshot_of_the_present_step_serves_everybody(requests: Requests) -> None:
    requests.request()
    requests.boundary(4)
    during = requests.request()
    requests.finish()
    assert requests.answer(during) == 4
    assert requests.answer(requests.request()) == 4
    requests.boundary(5)
    assert not requests.is_running


def test_a_snapshot_of_an_older_step_does_not_serve_a_later_request(requests: Requests) -> None:
    requests.request()
    requests.boundary(1)
    requests.boundary(2)
    after = requests.request()
    requests.finish()
    assert requests.answer(after) is None
    requests.boundary(3)
    requests.finish()
    assert requests.answer(after) == 3


@pytest.mark.parametrize("is_older", [False, True])
def test_a_request_in_the_very_moment_of_publication(requests: Requests, is_older: bool) -> None:
    after: list[int] = []
    requests.transport.after_publish = lambda: after.append(requests.request())
    requests.request()
    requests.boundary(1)
    if is_older:
        requests.boundary(2)
    requests.finish()
    assert requests.answer(after[0]) == (None if is_older else 1)
    requests.boundary(3)
    requests.finish()
    assert requests.answer(after[0]) == (3 if is_older else 1)


def test_a_request_during_a_snapshot_that_fails_is_not_forgotten(requests: Requests) -> None:
    requests.request()
    requests.boundary(1)
    requests.boundary(2)
    after = requests.request()
    requests.finish(SnapshotError("the device is gone"))
    for step in (3, 4):
        requests.boundary(step)
        requests.finish()
    assert requests.answer(after) in (3, 4)


def test_the_same_step_number_with_another_state_is_not_the_same_snapshot(requests: Requests) -> None:
    requests.request()
    requests.boundary(0)
    requests.finish()
    requests.snapshot_scheduler.replaced()
    replaced = requests.request()
    assert requests.answer(replaced) is None
    requests.boundary(0)
    requests.finish()
    assert requests.answer(replaced) == 0
    # A step that did not commit is run again under its number; forward has changed the buffers meanwhile.
    requests.boundary(0)
    assert requests.answer(requests.request()) is None


_OPERATIONS = st.lists(
    st.sampled_from(["request", "boundary", "boundary", "finish", "fail", "full"]), min_size=5, max_size=40
)


@settings(max_examples=60)
@given(_OPERATIONS)
def test_any_order_of_events(operations: list[str]) -> None:
    def refuse() -> None:
        raise SnapshotLimitError("full")

    requests = Requests()
    try:
        outstanding: list[tuple[int, int]] = []
        steps = iter(range(1000))
        step = 0

        def check() -> None:
            for asked, after in list(outstanding):
                shown = requests.answer(after)
                if shown is not None:
                    assert shown >= asked, "older than the request"
                    outstanding.remove((asked, after))

        for operation in operations:
            if operation == "request":
                outstanding.append((step, requests.request()))
            elif operation == "boundary":
                step = next(steps)
                requests.boundary(step)
            elif operation == "full":
                requests.transport.before_begin = refuse
                step = next(steps)
                requests.boundary(step)
                requests.transport.before_begin = lambda: None
            elif requests.is_running:
                requests.finish(SnapshotLimitError("full") if operation == "fail" else None)
            check()
        requests.finish()
        for _ in range(3):
            requests.boundary(next(steps))
            requests.finish()
        check()
        assert not outstanding, "forgotten"
    finally:
        requests.finish()
        requests.snapshot_scheduler.close()


def test_a_step_to_come_is_taken_at_its_boundary(requests: Requests) -> None:
    requests.boundary(3)
    assert requests.request(5) is not None
    requests.boundary(4)
    assert not requests.is_running
    requests.boundary(5)
    # It is under way, although the trainer goes on meanwhile.
    requests.boundary(6)
    assert requests.request(5) is not None
    requests.finish()
    assert requests.steps() == [5]
    requests.boundary(7)
    assert not requests.is_running


def test_a_step_that_is_over_does_not_come_any_more(requests: Requests) -> None:
    requests.boundary(3)
    assert requests.request(2) is None
    assert requests.request(3) is not None  # somebody may still take it
    requests.boundary(4)
    assert requests.request(3) is None
