"""No request gets a snapshot older than itself, and none is forgotten, in any order of requests and boundaries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_transport import SnapshotError, SnapshotLimitError
from ft_transport.state.snapshot import Taking
from manager.snapshots.requests import FailureLog, OpenRequests
from manager.snapshots.scheduler import SnapshotScheduler
from manager.state.replica_state import ReplicaState


def _at(step: int) -> OpenRequests:
    requests = OpenRequests()
    requests.begin_boundary(step)
    return requests


def test_nobody_waits_before_a_request() -> None:
    assert not _at(3).take_boundary(0, is_sync=False)


def test_a_request_stays_until_a_later_snapshot_has_been_published() -> None:
    requests = _at(3)
    requests.add_after(0)
    assert requests.take_boundary(0, is_sync=False)
    assert requests.take_boundary(0, is_sync=False), "a snapshot that failed met nobody"
    assert not requests.take_boundary(1, is_sync=False)


def test_the_later_of_two_requests_counts() -> None:
    requests = _at(3)
    requests.add_after(2)
    requests.add_after(0)
    assert requests.take_boundary(2, is_sync=False)
    assert not requests.take_boundary(3, is_sync=False)


def test_a_step_to_come_is_taken_at_its_own_boundary() -> None:
    requests = _at(3)
    requests.add_step(5, None)
    assert not requests.take_boundary(0, is_sync=False)
    requests.begin_boundary(4)
    assert not requests.take_boundary(0, is_sync=False)
    requests.begin_boundary(5)
    assert requests.take_boundary(0, is_sync=False)
    assert not requests.take_boundary(0, is_sync=False), "it is taken once"


def test_a_step_that_is_past_is_not_waited_for() -> None:
    requests = _at(3)
    requests.add_step(3, None)
    requests.add_step(2, None)
    assert not requests.take_boundary(0, is_sync=False)


def test_of_many_steps_to_come_the_next_sixteen_are_kept() -> None:
    requests = _at(0)
    for step in range(100, 0, -1):
        requests.add_step(step, None)
    taken = []
    for step in range(1, 101):
        requests.begin_boundary(step)
        taken += [step] if requests.take_boundary(0, is_sync=False) else []
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


def test_what_may_pass_is_said_once_until_a_snapshot_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    failures, passing = FailureLog(), SnapshotLimitError("all places are taken")
    assert failures.not_taken(1, passing)
    assert failures.not_taken(2, passing)
    failures.taken()
    assert failures.not_taken(3, passing)
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.partition(":")[0] for message in warned] == ["step 1", "step 3"]


def test_of_a_held_state_it_is_said_once_as_well(caplog: pytest.LogCaptureFixture) -> None:
    failures, passing = FailureLog(), SnapshotLimitError("all places are taken")
    for step in range(3):
        failures.held_not_taken(step, passing)
    failures.held_not_taken(3, SnapshotError("no encoding"))
    failures.held_not_taken(4, SnapshotError("no encoding"))
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.partition(":")[0] for message in warned] == ["step 0", "step 4"]


_LONG_S = 20.0


class StandInTransport:
    """Stands in for ``HTTPTransport``: only counts. Each copy waits until the test lets it end, well or badly."""

    def __init__(self) -> None:
        self.server = self
        self.steps: list[int] = []
        self.failures: list[BaseException] = []
        self.is_running = False
        self.begin_error: Exception | None = None
        self.copy_error: Exception | None = None
        self.may_copy = threading.Event()
        self.after_publish: Callable[[], object] = lambda: None
        self._step = -1

    def prefault(self, state: object) -> None: ...

    def serve_fresh(self, request: object) -> None: ...

    def take(self, taking: Taking) -> StandInTransport:
        if self.begin_error is not None:
            raise self.begin_error
        self._step = taking.step
        self.is_running = True
        return self

    def copy_deferred(self) -> None:
        assert self.may_copy.wait(_LONG_S)
        if self.copy_error is not None:
            raise self.copy_error

    def publish(self) -> None:
        self.steps.append(self._step)
        self.after_publish()

    def abandon(self) -> None: ...

    def newest_sequence(self) -> int:
        return len(self.steps)

    def newest_step(self) -> int | None:
        return self.steps[-1] if self.steps else None

    def snapshot_failed(self, step: int, error: BaseException, *, is_final: bool = False) -> None:
        self.failures.append(error)

    def answer(self, after: int) -> int | None:
        """The step that the server would serve to who was given this number."""
        return self.steps[-1] if len(self.steps) > after else None


class Requests:
    """A snapshot_scheduler over the stand-in, with a background that moves only when told to."""

    def __init__(self) -> None:
        self.transport: Any = StandInTransport()
        self._state = ReplicaState(timedelta(seconds=_LONG_S))
        self.snapshot_scheduler = SnapshotScheduler(self._state, self.transport)
        self.request = self.snapshot_scheduler.request

    def boundary(self, step: int) -> None:
        if not self.is_running:
            self.transport.may_copy.clear()
        self._state.step = step
        self.snapshot_scheduler.boundary()

    @property
    def is_running(self) -> bool:
        """Whether a snapshot was begun that no `finish` has let end."""
        return self.transport.is_running

    def finish(self, error: Exception | None = None) -> None:
        num_published, num_failures = len(self.transport.steps), len(self.transport.failures)
        self.transport.copy_error = error
        self.transport.may_copy.set()
        self.snapshot_scheduler._pool.submit(lambda: None).result(_LONG_S)
        if self.is_running:
            assert self.transport.failures[num_failures:] == ([] if error is None else [error])
            assert len(self.transport.steps) - num_published == (error is None)
        self.transport.is_running = False
        self.transport.copy_error = None


@pytest.fixture
def requests() -> Iterator[Requests]:
    requests = Requests()
    yield requests
    requests.finish()
    requests.snapshot_scheduler.close()


def test_a_request_before_the_first_boundary_is_answered_by_it(requests: Requests) -> None:
    after = requests.request()
    assert requests.transport.answer(after) is None
    requests.boundary(0)
    requests.finish()
    assert requests.transport.answer(after) == 0


def test_without_a_request_there_is_no_snapshot(requests: Requests) -> None:
    for step in range(3):
        requests.boundary(step)
        assert not requests.is_running


def test_the_snapshot_of_the_present_step_serves_everybody(requests: Requests) -> None:
    requests.request()
    requests.boundary(4)
    during = requests.request()
    requests.finish()
    assert requests.transport.answer(during) == 4
    assert requests.transport.answer(requests.request()) == 4
    requests.boundary(5)
    assert not requests.is_running


def test_a_snapshot_of_an_older_step_does_not_serve_a_later_request(requests: Requests) -> None:
    requests.request()
    requests.boundary(1)
    requests.boundary(2)
    after = requests.request()
    requests.finish()
    assert requests.transport.answer(after) is None
    requests.boundary(3)
    requests.finish()
    assert requests.transport.answer(after) == 3


@pytest.mark.parametrize("is_older", [False, True])
def test_a_request_in_the_very_moment_of_publication(requests: Requests, is_older: bool) -> None:
    after: list[int] = []
    requests.transport.after_publish = lambda: after.append(requests.request())
    requests.request()
    requests.boundary(1)
    if is_older:
        requests.boundary(2)
    requests.finish()
    assert requests.transport.answer(after[0]) == (None if is_older else 1)
    requests.boundary(3)
    requests.finish()
    assert requests.transport.answer(after[0]) == (3 if is_older else 1)


def test_a_request_during_a_snapshot_that_fails_is_not_forgotten(requests: Requests) -> None:
    requests.request()
    requests.boundary(1)
    requests.boundary(2)
    after = requests.request()
    requests.finish(SnapshotError("the device is gone"))
    for step in (3, 4):
        requests.boundary(step)
        requests.finish()
    assert requests.transport.answer(after) in (3, 4)


def test_the_same_step_number_with_another_state_is_not_the_same_snapshot(requests: Requests) -> None:
    requests.request()
    requests.boundary(0)
    requests.finish()
    requests.snapshot_scheduler.replaced()
    replaced = requests.request()
    assert requests.transport.answer(replaced) is None
    requests.boundary(0)
    requests.finish()
    assert requests.transport.answer(replaced) == 0
    # A step that did not commit is run again under its number; forward has changed the buffers meanwhile.
    requests.boundary(0)
    assert requests.transport.answer(requests.request()) is None


_OPERATIONS = st.lists(
    st.sampled_from(["request", "boundary", "boundary", "finish", "fail", "full"]), min_size=5, max_size=40
)


@settings(max_examples=60)
@given(_OPERATIONS)
def test_any_order_of_events(operations: list[str]) -> None:
    requests = Requests()
    try:
        outstanding: list[tuple[int, int]] = []
        steps = iter(range(1000))
        step = 0

        def check() -> None:
            for asked, after in list(outstanding):
                shown = requests.transport.answer(after)
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
                requests.transport.begin_error = SnapshotLimitError("full")
                step = next(steps)
                requests.boundary(step)
                requests.transport.begin_error = None
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
    assert requests.transport.steps == [5]
    requests.boundary(7)
    assert not requests.is_running


def test_a_step_that_is_over_does_not_come_any_more(requests: Requests) -> None:
    requests.boundary(3)
    assert requests.request(2) is None
    assert requests.request(3) is not None  # somebody may still take it
    requests.boundary(4)
    assert requests.request(3) is None
