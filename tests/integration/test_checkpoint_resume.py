"""A run that is killed and resumed ends as one that was not, bit for bit, and has seen the same data in one order."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from programs import run as run_program

_SCRIPT = Path(__file__).parents[1] / "workers" / "checkpoint_resume.py"
_TIMEOUT_S = 100
_NUM_STEPS = 25
_SAVE_EVERY = 3


def run(root: Path, *, killed_in: int = -1) -> tuple[int, list[str]]:
    command = [sys.executable, str(_SCRIPT), str(root), str(_NUM_STEPS), str(killed_in), str(_SAVE_EVERY)]
    ended = run_program(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=_TIMEOUT_S)
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr[-5000:]
    return ended.returncode, ended.stdout.splitlines()


@pytest.mark.timeout(3 * _TIMEOUT_S + 30)
def test_a_run_that_was_killed_twice_ends_as_one_that_was_not(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        straight = pool.submit(run, tmp_path / "straight")
        # The second is killed in another epoch; a save is complete one step before the kill.
        kills = [run(tmp_path / "killed", killed_in=killed_in) for killed_in in (7, 16)]
        status, last = run(tmp_path / "killed")
        straight_status, expected = straight.result()
    assert [status for status, _ in kills] == [-signal.SIGKILL] * 2
    assert status == straight_status == 0
    assert len(expected) == _NUM_STEPS + 1
    assert expected[-1].startswith("state ")
    first, second = (lines for _, lines in kills)
    # Each begins where the newest checkpoint was made: the steps behind it are done again, with the same data.
    assert first == expected[:7]
    assert second == expected[6:16]
    assert last == expected[15:]
    assert len(set(expected[:-1])) == _NUM_STEPS
