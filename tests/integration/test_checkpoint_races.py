"""Ranks that set one directory up at the same moment, and groups that want the same one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_race
import pytest
from checkpoint_ranks import run_scenarios
from ranks import run_ranks

_TIMEOUT_S = 150
_NUM_PROCESSES = 8
_NUM_ITERATIONS = 50


def _race(directory: Path) -> list[dict[str, Any]]:
    run_ranks(checkpoint_race.__file__, _NUM_PROCESSES, str(directory), str(_NUM_ITERATIONS), timeout_s=_TIMEOUT_S)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(_NUM_PROCESSES)]


@pytest.mark.timeout(_TIMEOUT_S + 30)
def test_no_rank_clears_what_another_has_written_after_set_up(tmp_path: Path) -> None:
    """openpi's PR 969: eight processes, fifty times over the same directory."""
    reports = _race(tmp_path)
    guarded, unguarded = ([report[name] for report in reports] for name in ("guarded", "unguarded"))
    # The race is there: without an agreement, some ranks fail, or lose what they wrote.
    assert sum(len(each["errors"]) for each in unguarded) + max(each["num_lost"] for each in unguarded) > 0
    assert [each["errors"] for each in guarded] == [[]] * _NUM_PROCESSES
    assert [each["num_lost"] for each in guarded] == [0] * _NUM_PROCESSES
    # And each iteration did begin anew.
    assert [each["num_left"] for each in guarded] == [0] * _NUM_PROCESSES


@pytest.mark.timeout(_TIMEOUT_S + 30)
def test_two_groups_that_save_to_one_place_are_refused(tmp_path: Path) -> None:
    reports = [report["two_groups"] for report in run_scenarios(tmp_path, 4, "two_groups")]
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
