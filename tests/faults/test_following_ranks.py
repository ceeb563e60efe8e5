"""Replicas of two FSDP2 ranks follow the others when they come back, and have their state."""

from __future__ import annotations

import join_replicas
import pytest


@pytest.mark.slow
@pytest.mark.usefixtures("quorum_ready")
def test_killed_replicas_of_fsdp_ranks_follow() -> None:
    joined, followed = join_replicas.run(1, seed=0)
    # Two of the three that start join the first one.
    assert len(joined) >= 3
    assert len(followed) >= 1
