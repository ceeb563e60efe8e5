"""One of several ranks fails while a checkpoint is saved: all hear the same of it, at once, and the next save goes on.

The scenarios run in ``workers/checkpoint_ranks.py``; those of one process in ``workers/checkpoint_process.py``.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkpoint_process
import checkpoint_ranks as script
import pytest
from programs import Program
from ranks import run_scenarios

_NUM_RANKS = 3
_TIMEOUT_S = 240
_TOGETHER = (
    *("passing", "refused_root", "invisible_root", "invisible_step", "poisoned", "stale"),
    *("killed_writer", "killed_while_writing", "differing_settings", "busy", "stopped_rank_0", "killed_rank_2"),
)
"""In all but the last one all ranks live on."""
_WITHIN_S = 2.0
"""How soon all ranks have to know; what waits for a deadline instead takes `script.TIMEOUT_S`."""
_MACHINE_FACTOR = 3.0
"""For a test machine with fewer cores than processes."""
_POLL_S = 0.01

pytestmark = pytest.mark.timeout(_TIMEOUT_S + 30)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each rank reported of a scenario; starting the ranks takes longer than most scenarios do."""
    reports: dict[str, list[Any]] = {}

    def run(scenario: str) -> list[Any]:
        if scenario not in reports:
            scenarios = _TOGETHER if scenario in _TOGETHER else (scenario,)
            directory = tmp_path_factory.mktemp(scenario)
            found = run_scenarios(script.__file__, directory, _NUM_RANKS, *scenarios, timeout_s=_TIMEOUT_S)
            reports.update({each: [report.get(each) for report in found] for each in scenarios})
        return reports[scenario]

    return run


def _the_same(errors: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks raised, which is the same on each."""
    facts = ("type", "text", "cause", "rank", "ranks", "phase", "cause_type", "errno")
    first = {name: errors[0][name] for name in facts}
    assert [{name: error[name] for name in facts} for error in errors] == [first] * len(errors)
    return first


# --------------------------------------------------------------------------------------------- one rank fails, in turn


@pytest.mark.slow
@pytest.mark.parametrize("phase", [*script.PHASES, *script.EXCHANGES])
def test_a_failure_of_one_rank_is_one_error_on_all_and_the_next_save_succeeds(ran: Any, phase: str) -> None:
    """Where it fails in an exchange, the others' waits end because of it: that is no failure of theirs."""
    seen = [report[phase] for report in ran("phases")]
    victim = script.victim_of(phase)
    error = _the_same([each["error"] for each in seen])
    assert f"rank {victim}" in error["text"]
    if phase == "snapshot":
        assert error["type"] == "UnsupportedLeafError"
        assert "own.unsupported" in error["text"]
    else:
        assert (error["type"], error["rank"], error["cause_type"]) == ("RankFailedError", victim, "OSError")
    if phase in script.PHASES[1:]:
        assert (error["phase"], error["cause"]) == ({"copy": "snapshot"}.get(phase, phase), "OSError")
        assert error["errno"] == errno.ENOSPC
    assert max(each["error"]["at_s"] for each in seen) - seen[victim]["failed_s"] < _WITHIN_S * _MACHINE_FACTOR
    assert [each["is_next_loaded"] for each in seen] == [True] * _NUM_RANKS
    assert [each["is_failed_one_there"] for each in seen] == [False] * _NUM_RANKS
    assert seen[0]["left"] == []


def test_what_ranks_are_told_differently_is_named_at_once(ran: Any) -> None:
    seen = ran("differing_settings")
    for name in ("busy", "read", "max_failed_saves", "keep", "consolidate", "read_only"):
        error = _the_same([each[name] for each in seen])
        assert error["type"] == "ConfigurationError"
        assert f"expected the same {name} on all ranks" in error["text"]
    refused = _the_same([each["refused"] for each in seen])
    assert "expected a whole number as keep, got str 'x'" in refused["text"]
    assert [each["is_loaded"] for each in seen] == [True] * _NUM_RANKS


@pytest.mark.parametrize(("call", "name"), [("verify", "step"), ("load", "step"), ("prune", "keep")])
def test_arguments_that_differ_between_ranks_are_refused_on_all(ran: Any, call: str, name: str) -> None:
    """Rank 0 asks for the sound step 2, the others for step 1, which is damaged."""
    seen = ran("differing_settings")
    error = _the_same([each[call] for each in seen])
    assert error["type"] == "ConfigurationError"
    assert f"expected the same {name} on all ranks, got 2 on rank 0 and 1 on rank 1" in error["text"]
    assert [each["steps"] for each in seen] == [[1, 2]] * _NUM_RANKS


@pytest.mark.parametrize(
    ("case", "expected"),
    [("refused step", "expected a step, or 'latest', got 'first'"), ("refused keep", "keep of at least 1, got 0")],
)
def test_an_argument_that_one_rank_cannot_use_is_refused_on_all(ran: Any, case: str, expected: str) -> None:
    error = _the_same([each[case] for each in ran("differing_settings")])
    assert (error["type"], error["text"].startswith("rank 1, compare the arguments: ")) == ("ConfigurationError", True)
    assert expected in error["text"]


def test_checkpoints_that_are_not_kept_are_gone_on_every_rank_when_its_handle_is_done(ran: Any) -> None:
    for report in ran("differing_settings"):
        assert report["kept"] == [["step-1"], ["step-2"], ["step-3"]]


# ------------------------------------------------------------------------------------------------ failures that pass


@pytest.mark.parametrize(("case", "attempts"), [("once", 2), ("twice", 3)])
def test_failures_that_pass_are_tried_again_by_all(ran: Any, case: str, attempts: int) -> None:
    seen = [report[case] for report in ran("passing")]
    assert [each["error"]["type"] for each in seen] == ["NoneType"] * _NUM_RANKS
    assert [(each["attempts"], each["is_loaded"]) for each in seen] == [(attempts, True)] * _NUM_RANKS


# ------------------------------------------------------------------------------------------------- at construction


def test_a_root_that_the_first_rank_cannot_make_is_the_same_error_on_all(ran: Any) -> None:
    seen = ran("refused_root")
    error = _the_same([report["error"] for report in seen])
    assert (error["type"], error["rank"], error["phase"]) == ("RankFailedError", 0, "set up the root")
    assert (error["cause_type"], error["cause"]) == ("NotADirectoryError", "NotADirectoryError")
    assert error["errno"] == errno.ENOTDIR
    assert max(report["took_s"] for report in seen) < _WITHIN_S * _MACHINE_FACTOR


@pytest.mark.parametrize("scenario", ["invisible_root", "invisible_step"])
def test_a_rank_that_does_not_see_the_directory_is_named_on_all(ran: Any, scenario: str) -> None:
    seen = ran(scenario)
    error = _the_same([report["error"] for report in seen])
    last = _NUM_RANKS - 1
    assert error["rank"] == last
    assert f"rank {last}" in error["text"]
    for report in seen:
        assert report["took_s"] >= script.VISIBLE_TIMEOUT_S
        assert report["took_s"] < script.VISIBLE_TIMEOUT_S + _WITHIN_S * _MACHINE_FACTOR
    if scenario == "invisible_step":
        assert [report["steps"] for report in seen] == [[]] * _NUM_RANKS


def test_a_writer_that_cannot_be_started_is_the_same_error_on_all(ran: Any) -> None:
    seen = ran("poisoned")
    error = _the_same([report["error"] for report in seen])
    assert (error["type"], error["rank"]) == ("WriterFailedError", 1)
    assert error["text"].startswith("rank 1, start the writer: ")
    assert max(report["took_s"] for report in seen) < script.TIMEOUT_S / 2
    assert [report["is_loaded_afterwards"] for report in seen] == [True] * _NUM_RANKS


# ------------------------------------------------------------------------------------------------------ the directory


def test_what_an_earlier_save_has_left_is_not_in_a_later_one(ran: Any) -> None:
    """Rank 0 is late: the others must not take the old directory for the new one."""
    for report in ran("stale"):
        assert report["took_s"] >= report["delayed_s"]
        assert report["unlisted"] == []
        assert report["is_loaded"]
        assert report["left"] == ["step-5"]


@contextmanager
def _process(role: str, root: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A process in a role, and the first line that it said; it is ended by the end of its input."""
    with Program(
        [sys.executable, checkpoint_process.__file__, role, str(root / "root")],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, f"{role} said nothing"
            yield process, json.loads(line)
            process.stdin.close()
            process.wait(_TIMEOUT_S)
        finally:
            process.kill()


def _has_ended(process_id: int, within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while script.is_running(process_id):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def test_a_killed_trainer_leaves_no_writer_and_no_claim_although_a_child_lives_on(tmp_path: Path) -> None:
    with _process("hold", tmp_path) as (trainer, said):
        try:
            with _process("want", tmp_path) as (_, wanted):
                assert wanted["error"] == "CheckpointInUseError"
                assert f'"process": {trainer.pid}' in wanted["text"]
            assert script.is_running(said["writer"])
            trainer.kill()
            trainer.wait(_TIMEOUT_S)
            assert _has_ended(said["writer"], _WITHIN_S * _MACHINE_FACTOR)
            assert script.is_running(said["child"])
            with _process("want", tmp_path) as (_, wanted):
                assert wanted == {"error": None, "steps": [1, 2]}
        finally:
            os.kill(said["child"], signal.SIGKILL)


# --------------------------------------------------------------------------------------------------------- the writer


@pytest.mark.parametrize("when", ["at once", "after it was replaced"])
def test_a_writer_that_was_killed_is_named_on_all_ranks_within_one_further_call(ran: Any, when: str) -> None:
    for report in ran("killed_writer"):
        assert report["before"] == [[], [], []]
        assert [1] in report[when]
        # And it is told once, not for ever.
        assert report[f"{when}, later"] == [[]]


def test_a_writer_that_was_killed_is_replaced_and_the_next_save_succeeds(ran: Any) -> None:
    assert [report["is_loaded"] for report in ran("killed_writer")] == [True] * _NUM_RANKS


def test_a_save_whose_writer_is_killed_while_it_writes_is_done_again(ran: Any) -> None:
    seen = ran("killed_while_writing")
    (size,) = seen[1]["sizes"]
    assert 0 < size < script.LARGE_BYTES  # It was in the middle.
    assert [report["error"]["type"] for report in seen] == ["NoneType"] * _NUM_RANKS
    assert [report["attempts"] for report in seen] == [2] * _NUM_RANKS
    assert [report["is_replaced"] for report in seen] == [False, True, False]
    assert [report["is_loaded"] for report in seen] == [True] * _NUM_RANKS


# ---------------------------------------------------------------------------------------------------- a rank that goes


@pytest.mark.parametrize(
    ("scenario", "victim"),
    [
        pytest.param("stopped_rank_2", 2, marks=pytest.mark.long),
        ("stopped_rank_0", 0),
        ("killed_rank_2", 2),
        pytest.param("killed_rank_0", 0, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_gone_is_named_by_the_others_in_bounded_time(ran: Any, scenario: str, victim: int) -> None:
    seen = [report for rank, report in enumerate(ran(scenario)) if rank != victim]
    error = _the_same([report["error"] for report in seen])
    assert (error["type"], error["rank"], error["ranks"]) == ("RankGoneError", victim, [victim])
    assert f"rank {victim}" in error["text"]
    for report in seen:
        assert report["took_s"] >= script.GONE_TIMEOUT_S
        assert report["took_s"] < script.GONE_TIMEOUT_S + _WITHIN_S * _MACHINE_FACTOR
        # Nor does the end wait for it.
        assert report["close_s"] < _WITHIN_S * _MACHINE_FACTOR
        assert not report["writer_runs"]


@pytest.mark.parametrize("scenario", [pytest.param("stopped_rank_2", marks=pytest.mark.long), "stopped_rank_0"])
def test_a_rank_that_was_given_up_and_goes_on_takes_part_again(ran: Any, scenario: str) -> None:
    """A machine that was suspended for a moment. One more save may fail; not all from then on."""
    seen = ran(scenario)
    assert [report["later"][-1]["type"] for report in seen] == ["NoneType"] * _NUM_RANKS


# ------------------------------------------------------------------------------------------------------- a busy store


def test_a_save_is_skipped_on_all_ranks_if_one_is_busy(ran: Any) -> None:
    seen = [report["skip"] for report in ran("busy")]
    assert [each["was_done"] for each in seen] == [True, False, True]
    assert [each["is_skipped"] for each in seen] == [True] * _NUM_RANKS
    assert [(each["is_next_skipped"], each["steps"]) for each in seen] == [(False, [1, 3])] * _NUM_RANKS


def test_a_save_is_refused_on_all_ranks_if_one_is_busy(ran: Any) -> None:
    seen = [report["error"] for report in ran("busy")]
    assert [each["was_done"] for each in seen] == [True, False, True]
    assert _the_same([each["error"] for each in seen])["type"] == "SaveInProgressError"
    assert [(each["is_next_skipped"], each["steps"]) for each in seen] == [(False, [1, 3])] * _NUM_RANKS


# ------------------------------------------------------------------------------------------------------- many tensors


def test_thousands_of_tensors_cost_no_descriptors_and_are_saved_as_they_were(tmp_path: Path) -> None:
    """xtuner's hand-over: one descriptor for each tensor, 256 of which are all there are here."""
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong module')")
    with _process("many_leaves", tmp_path) as (trainer, said):
        assert said["writer_limit"] == checkpoint_process.MAX_DESCRIPTORS
        # The snapshot is one, the file to write another.
        assert 1 <= said["writer_grew"] <= 4
        assert said["trainer_grew"] <= 4
        assert not said["was_done"]  # The tensors were changed while it was being saved.
        assert said["is_as_saved"]
        # This writer is no fork: it has imported nothing from the current directory, and ends with its trainer as well.
        trainer.kill()
        trainer.wait(_TIMEOUT_S)
        assert _has_ended(said["writer"], _WITHIN_S * _MACHINE_FACTOR)
