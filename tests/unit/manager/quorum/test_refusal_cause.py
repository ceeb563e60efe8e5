from __future__ import annotations

import pytest

from manager import ReportedError
from manager.quorum.round import refusal_cause


@pytest.mark.parametrize(
    ("error", "has_enough", "was_silent", "expected"),
    [
        (ConnectionError("lost"), False, True, "ConnectionError"),
        (None, False, True, "TooFewReplicas"),
        (None, True, True, "MissedHeartbeats"),
        (None, True, False, "AnotherRank"),
    ],
)
def test_a_refused_step_has_one_cause(
    error: Exception | None, has_enough: bool, was_silent: bool, expected: str
) -> None:
    reported = ReportedError(error) if error is not None else None
    assert refusal_cause(reported, has_enough=has_enough, was_silent=was_silent) == expected
