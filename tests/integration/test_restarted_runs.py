"""A run that torchrun has started again finds the keys of the earlier run in its store, and takes none for its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import restarted_ranks
from programs import Program
from ranks import served_store

NUM_RANKS = 2
LONG_S = 60.0


def test_ranks_of_later_runs_agree_in_the_store_of_the_earlier_ones(tmp_path: Path) -> None:
    with served_store() as port:
        for step in range(1, 3):
            environment = {**os.environ, "MASTER_PORT": str(port), "WORLD_SIZE": str(NUM_RANKS)}
            ranks = [
                Program(
                    [sys.executable, restarted_ranks.__file__, str(tmp_path), str(step)],
                    env={**environment, "RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank in range(NUM_RANKS)
            ]
            answers = [each.communicate(timeout=LONG_S) for each in ranks]
            assert [answer for answer, _ in answers] == [f"{step}\n"] * NUM_RANKS, answers
