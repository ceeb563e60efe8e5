"""Nothing on the path of a step waits for the cyclic collector: see ``tests/workers/step_garbage.py``.

Those tests look at every object of their process and turn its collector off, so they get a process of their own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from programs import run

pytest.importorskip("torchft")

_NAME = "test_gradients_and_works_go_away_with_the_collector_off"
_TESTS = Path(__file__).parents[1] / "workers" / "step_garbage.py"


# A process for each: in one, some runs find the manager of an earlier case, which torchft's DDP keeps in C++.
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "use_async_quorum"), [("own", True), ("own, failing", False), ("ddp", True)])
def test_gradients_and_works_go_away_with_the_collector_off(kind: str, use_async_quorum: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = run(
        [*command, f"{_TESTS}::{_NAME}[{kind}-{use_async_quorum}]"],
        cwd=_TESTS.parents[1],
        env=environment,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
