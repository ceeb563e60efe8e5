"""The loop of the page "A real training loop", killed at random moments: the run is the one that nobody killed."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from example_runs import example_replicas
from quorum_threads import lighthouse

pytest.importorskip("torchft")

pytestmark = [pytest.mark.usefixtures("torchft_ready"), pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_KILLS = int(os.environ.get("FT_TRANSPORT_KILLS", "2"))
"""20 by hand."""
STEPS_BETWEEN = 3
"""At least so many steps are made between two kills."""
WAIT_S = 90.0
LONGEST_STEP_S = 0.2
SCRIPT = "train_loop.py"


def test_alone_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    num_steps = STEPS_BETWEEN * (NUM_KILLS + 2)
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)
    arguments = ["--steps", str(num_steps), "--workers", "2", "--checkpoints"]
    with lighthouse() as address:
        with example_replicas(SCRIPT, address) as undisturbed:
            undisturbed.start("alone", *arguments, str(tmp_path / "undisturbed"), environment={})
            undisturbed.wait_for_end(WAIT_S)
        with example_replicas(SCRIPT, address) as killed:
            for kill in range(NUM_KILLS):
                ranks = killed.start("alone", *arguments, str(tmp_path / "killed"), environment={})
                killed.wait_for_step(ranks, STEPS_BETWEEN * (kill + 1), WAIT_S)
                time.sleep(moments.uniform(0.0, LONGEST_STEP_S))  # the moment is what is drawn
                killed.kill("alone")
            killed.start("alone", *arguments, str(tmp_path / "killed"), environment={})
            killed.wait_for_end(WAIT_S)
    expected = undisturbed.digests()
    assert set(expected) == set(range(1, num_steps + 1))
    assert killed.digests() == expected, f"seed {seed}"


def test_two_replicas_stay_equal_bit_for_bit() -> None:
    num_steps = STEPS_BETWEEN * (NUM_KILLS + 2)
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)
    with lighthouse() as address, example_replicas(SCRIPT, address) as replicas:
        arguments = ["--steps", str(100 * num_steps), "--replicas", "2"]

        def start(replica: int) -> None:
            ranks = replicas.start(str(replica), *arguments, "--replica", str(replica), environment={})
            replicas.wait_for_step(ranks, STEPS_BETWEEN, WAIT_S)

        start(0)
        start(1)
        for _ in range(NUM_KILLS):
            time.sleep(moments.uniform(0.0, LONGEST_STEP_S))  # the moment is what is drawn
            victim = moments.randrange(2)
            replicas.kill(str(victim))
            start(victim)
        common = [step for step, digests in replicas.digests().items() if len(digests) != 1]
        assert not common, f"seed {seed}: the replicas differ at steps {common}"
        numbers = [
            number
            for starts in replicas.starts.values()
            for ranks in starts
            for number in ranks[0].num_replicas.values()
        ]
        assert numbers.count(2) >= 2 * NUM_KILLS
