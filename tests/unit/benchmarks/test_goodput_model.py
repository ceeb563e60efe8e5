"""The formula for the work that failures leave agrees with a simulation, and has the right limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.goodput_model import (
    Costs,
    Job,
    expected,
    expected_with_restarts,
    following,
    healing,
    simulated,
)
from benchmarks.picture import expected_goodputs, expected_picture

DAY_S = 86400.0
JOB = Job(num_replicas=1000, mtbf_s=DAY_S, step_s=1.0, state_bytes=20e9, bytes_per_s=25e9 / 8, restart_s=30.0)


@pytest.mark.parametrize("num_replicas", [10, 1000, 10_000])
@pytest.mark.parametrize("mtbf_days", [1, 30])
@pytest.mark.parametrize("num_bytes", [2e9, 80e9])
def test_formula_and_simulation_agree(num_replicas: int, mtbf_days: int, num_bytes: float) -> None:
    job = replace(JOB, num_replicas=num_replicas, mtbf_s=mtbf_days * DAY_S, state_bytes=num_bytes)
    for costs in (
        following(job, 0.2, copy_bytes_per_s=1e10, optimizer_share=0.1),
        healing(job, 0.2),
        healing(job, 5.1, overlapped_s=job.step_s),
    ):
        assert simulated(job, costs, num_deaths=4000, seed=1) == pytest.approx(expected(job, costs), rel=0.03, abs=0.01)


def test_without_standstills_only_the_absent_replicas_are_missing() -> None:
    costs = Costs(death_s=0.0, return_s=0.0, away_s=DAY_S)
    assert expected(JOB, costs) == pytest.approx(0.5)
    assert simulated(JOB, costs, num_deaths=20_000, seed=2) == pytest.approx(0.5, rel=0.1)


def test_a_transfer_that_overlaps_with_a_step_makes_nobody_wait() -> None:
    assert healing(JOB, 1.0).return_s == pytest.approx(6.4)
    assert healing(JOB, 1.0, overlapped_s=7.0).return_s == 0.0
    assert following(JOB, 1.0, copy_bytes_per_s=2e10, optimizer_share=0.5).return_s == 0.0
    assert following(JOB, 1.0, copy_bytes_per_s=1e10, optimizer_share=0.5).return_s == pytest.approx(2.0)
    # A recorded step takes as long as what is not the optimizer's: it is never caught up with any faster.
    assert following(JOB, 1.0, copy_bytes_per_s=1e10, optimizer_share=0.5).away_s == pytest.approx(30 + 6.4 + 6.4 + 3)


def test_restarts_without_failures_cost_only_the_saves() -> None:
    assert expected_with_restarts(replace(JOB, mtbf_s=1e9 * DAY_S), 5.0) == pytest.approx(1.0, abs=1e-3)
    few, many = (expected_with_restarts(replace(JOB, num_replicas=number), 5.0) for number in (10, 1000))
    assert 0.95 < few < 1.0
    assert many < 0.6


def test_who_follows_loses_least_in_the_picture() -> None:
    found = expected_goodputs(replace(JOB, num_replicas=5000, mtbf_s=7 * DAY_S, step_s=2.0))
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert expected_picture().count("<polyline") == 2 * len(found)
