"""Trainers and writers that are killed at every step of a save: at any instant there is one whole checkpoint."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import checkpoint_crashes as script
import pytest
from programs import run as run_program

_TIMEOUT_S = 240
_SAVING = {"mkdir", "open", "writev", "fsync", "unlink"}
_WRITING = {"open", "writev", "fsync"}
_DELETING = {"rename", "fsync", "unlink", "rmdir"}

pytestmark = pytest.mark.timeout(_TIMEOUT_S + 30)


def run(name: str, directory: Path) -> list[dict[str, Any]]:
    """The cases of a scenario in which somebody was killed."""
    command = [sys.executable, script.__file__, name, str(directory)]
    ended = run_program(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=_TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr[-5000:]
    cases = json.loads(ended.stdout)
    scenario = script.SCENARIOS[name]
    if scenario.chosen is not None:
        assert all(case["killed_at"] for case in cases)
        return cases
    num_sides = len(scenario.sides)
    *killed, last = (cases[at : at + num_sides] for at in range(0, len(cases), num_sides))
    # So no step is left out: each was killed at, and the first number that is no step let the save through.
    assert all(case["killed_at"] for each in killed for case in each)
    assert not any(case["killed_at"] for case in last)
    assert len(killed) >= 7
    return [case for each in killed for case in each]


def steps_of(cases: list[dict[str, Any]]) -> set[str]:
    return {case["killed_at"] for case in cases}


def outcomes_of(cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Step and value of the newest checkpoint after each kill, which every look at it and every rank agree on."""
    outcomes = []
    for case in cases:
        first, *others = case["found"]
        assert all(other == first for other in others), case
        assert first["value"] is not None, case
        # What a reader sees before anything is cleared is what there is afterwards.
        assert (first["latest_before"], first["value_before"]) == (first["latest"], first["value"]), case
        assert first["names"] == [".owner", *(f"step-{step}" for step in first["steps"])], case
        assert (first["next_latest"], first["next_value"]) == (script.NEXT, script.NEXT), case
        outcomes.append((first["latest"], first["value"]))
    return outcomes


@pytest.mark.parametrize(
    ("name", "step", "steps"),
    [
        pytest.param("new", 2, _SAVING | {"rename"}, marks=pytest.mark.long),
        ("new, deleting the old", 2, _SAVING | _DELETING),
        pytest.param("replacing", 1, _SAVING | {"exchange"} | _DELETING, marks=pytest.mark.long),
        pytest.param("replacing without exchange", 1, _SAVING | _DELETING, marks=pytest.mark.long),
    ],
)
def test_a_trainer_killed_at_any_step_leaves_the_old_or_the_new_whole(
    tmp_path: Path, name: str, step: int, steps: set[str]
) -> None:
    cases = run(name, tmp_path)
    assert steps_of(cases) == steps
    assert all(case["ended"] == [None] for case in cases)
    outcomes = outcomes_of(cases)
    num_old = outcomes.count((1, script.OLD))
    assert num_old
    assert outcomes == [(1, script.OLD)] * num_old + [(step, script.NEW)] * (len(outcomes) - num_old)
    assert outcomes[-1] == (step, script.NEW)
    assert any(name.startswith("step-") and "." in name for case in cases for name in case["left"])
    # The old one is there, too, unless it was to be replaced or deleted.
    kept = {"new": [1, 2], "new, deleting the old": [2]}.get(name, [1])
    assert (cases[0]["found"][0]["steps"], cases[-1]["found"][0]["steps"]) == ([1], kept)


@pytest.mark.parametrize(
    "name",
    [
        "writer of new",
        pytest.param("writer of replacing", marks=pytest.mark.long),
        pytest.param("writer of new, after", marks=pytest.mark.long),
        pytest.param("writer of new, shared", marks=pytest.mark.long),
    ],
)
def test_a_writer_killed_at_any_step_is_replaced_and_the_save_succeeds(tmp_path: Path, name: str) -> None:
    cases = run(name, tmp_path)
    assert steps_of(cases) == (_WRITING | {"link"} if script.SCENARIOS[name].is_shared else _WRITING)
    assert [case["ended"][0]["failure"] for case in cases] == [""] * len(cases)
    assert outcomes_of(cases) == [(script.SCENARIOS[name].step, script.NEW)] * len(cases)


@pytest.mark.parametrize("name", [pytest.param("recovering", marks=pytest.mark.long), "recovering without exchange"])
def test_a_recovery_killed_at_any_step_costs_nothing(tmp_path: Path, name: str) -> None:
    cases = run(name, tmp_path)
    assert steps_of(cases) == _DELETING | {"mkdir", "open"}
    assert outcomes_of(cases) == [(1, script.OLD)] * len(cases)


@pytest.mark.parametrize(
    "name",
    [
        "two ranks, the first",
        pytest.param("two ranks, every step of the first", marks=pytest.mark.long),
        pytest.param("two ranks, every step of the second", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_killed_is_named_by_the_other_and_one_checkpoint_is_whole(tmp_path: Path, name: str) -> None:
    scenario = script.SCENARIOS[name]
    cases = run(name, tmp_path)
    allowed = {(1, script.OLD), (scenario.step, script.NEW)}
    assert set(outcomes_of(cases)) <= allowed
    for case in cases:
        assert case["ended"][scenario.victim_rank] is None
        failure = case["ended"][1 - scenario.victim_rank]["failure"]
        assert failure.startswith("RankGoneError")
        assert f"from rank {scenario.victim_rank}" in failure


@pytest.mark.long
def test_one_rank_s_writer_that_is_killed_costs_no_rank_the_save(tmp_path: Path) -> None:
    name = "two ranks, every step of a writer"
    cases = run(name, tmp_path)
    assert [rank["failure"] for case in cases for rank in case["ended"]] == [""] * 2 * len(cases)
    assert outcomes_of(cases) == [(script.SCENARIOS[name].step, script.NEW)] * len(cases)
