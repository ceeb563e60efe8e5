"""A trouble that comes again at every step is logged once."""

from __future__ import annotations

import logging

import pytest

from ft_transport import SnapshotError, SnapshotLimitError
from manager.snapshots.run import FailureLog


def test_what_may_pass_is_said_once_until_a_snapshot_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    failures, passing = FailureLog(), SnapshotLimitError("all places are taken")
    assert failures.not_taken(1, passing)
    assert failures.not_taken(2, passing)
    failures.taken()
    assert failures.not_taken(3, passing)
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.partition(":")[0] for message in warned] == ["step 1", "step 3"]


def test_what_does_not_pass_shows_its_traceback_once(caplog: pytest.LogCaptureFixture) -> None:
    failures, may_pass = FailureLog(), []
    for step, text in enumerate(("no encoding", "no encoding", "another one")):
        try:
            raise SnapshotError(text)
        except SnapshotError as error:
            may_pass.append(failures.not_taken(step, error))
    assert may_pass == [False, False, False]
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, True]


def test_of_a_held_state_it_is_said_once_as_well(caplog: pytest.LogCaptureFixture) -> None:
    failures, passing = FailureLog(), SnapshotLimitError("all places are taken")
    for step in range(3):
        failures.held_not_taken(step, passing)
    failures.held_not_taken(3, SnapshotError("no encoding"))
    failures.held_not_taken(4, SnapshotError("no encoding"))
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [message.partition(":")[0] for message in warned] == ["step 0", "step 4"]
