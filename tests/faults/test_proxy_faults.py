"""Hundreds of faults drawn by a seed, in both directions of fetches from one to three sources (promises 2, 4 and 6)."""

from __future__ import annotations

import random

import proxy_faults
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("one_rank_group")]

NUM_FAULTS = 400
LEAST_EXACT = 0.9
"""Of fetches with one to three faults. The others have an error: sources that were out of reach for too long."""


def test_each_fetch_gives_the_exact_state_or_a_typed_error_in_time() -> None:
    seed = random.randrange(1000)
    tally = proxy_faults.run(NUM_FAULTS, seed, num_threads=8)
    how = f"make proxy-faults ARGS='--num {NUM_FAULTS} --seed {seed} --threads 8'"
    assert not tally.violations, f"{how}: {tally.violations[:5]}"
    assert tally.num_hurt >= NUM_FAULTS
    assert tally.outcomes["exact"] >= LEAST_EXACT * tally.num_fetches, f"{how}: {tally.outcomes}"
