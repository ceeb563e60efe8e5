"""Ranks that set one directory up at the same moment, and groups that want the same one."""

from __future__ import annotations

from typing import Any

import checkpoint_race
import pytest
from ranks import run_scenarios

_TIMEOUT_S = 150
_NUM_RANKS = 4

pytestmark = pytest.mark.timeout(_TIMEOUT_S + 30)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("races")
    return run_scenarios(checkpoint_race.__file__, directory, _NUM_RANKS, "race", "two_groups", timeout_s=_TIMEOUT_S)


def test_no_rank_clears_what_another_has_written_after_set_up(ran: list[dict[str, Any]]) -> None:
    """openpi's PR 969."""
    guarded, unguarded = ([report["race"][name] for report in ran] for name in ("guarded", "unguarded"))
    # The race is there: without an agreement, some ranks fail, or lose what they wrote.
    assert sum(len(each["errors"]) for each in unguarded) + max(each["num_lost"] for each in unguarded) > 0
    # With one, none does, and each iteration did begin anew.
    assert guarded == [{"errors": [], "num_lost": 0, "num_left": 0}] * _NUM_RANKS


def test_two_groups_that_save_to_one_place_are_refused(ran: list[dict[str, Any]]) -> None:
    reports = [report["two_groups"] for report in ran]
    first, second = reports[:2], reports[2:]
    for report in second:
        assert report["error"]["type"] == "CheckpointInUseError"
        # It says who is there.
        assert "ranks [0, 1] of a group of 2" in report["error"]["text"]
        assert report["error"]["text"] == second[0]["error"]["text"]
        assert report["steps_seen"] == []
    assert [report["is_loaded"] for report in first] == [True, True]
    # When the first has closed, the second may.
    assert [report["is_loaded"] for report in second] == [True, True]
    assert [report["steps_after"] for report in second] == [[1, 2], [1, 2]]
