"""Profiles and structured log records have torchft's names."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from programs import run
from quorum_threads import lighthouse, make_manager, run_replicas
from torchft_records import LOGGERS, fields, train

from manager.quorum.telemetry import span

pytest.importorskip("torchft")

pytestmark = pytest.mark.usefixtures("quorum_ready")

_PROGRAM = Path(__file__).parents[1] / "workers" / "torchft_records.py"


def test_quorums_commits_and_errors_are_logged_as_torchft_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = run([sys.executable, str(_PROGRAM)], timeout=100)
    assert upstream.returncode == 0, upstream.stderr[-4000:]

    monkeypatch.setenv("JOB_ID", "job 1")
    with caplog.at_level(logging.INFO), lighthouse(min_replicas=2) as address:
        managers = run_replicas(
            *(lambda i=i: train(make_manager(address, f"replica_{i}", min_replica_size=2)) for i in range(2))
        )
        ours = caplog.records[:]
        for manager in managers:
            manager.shutdown()
    theirs = json.loads(upstream.stdout.splitlines()[-1])
    # An error in torchft-nightly has the quorum's number under another name.
    theirs = {logger: sorted(name.replace("uuid", "quorum_id") for name in names) for logger, names in theirs.items()}
    assert fields(ours) == theirs
    assert set(fields(ours)) == set(LOGGERS)

    of_one = [vars(record) for record in ours if vars(record).get("replica_id") == managers[0].replica_id()]
    assert {record["job_id"] for record in of_one} == {"job 1"}
    assert len({record["quorum_id"] for record in of_one}) == 1
    commits = [record for record in of_one if record["name"] == "torchft_commits"]
    assert [record["commit_result"] for record in commits] == [True, True, False]
    assert [record["step"] for record in commits] == [0, 1, 2]
    errors = [record["error"] for record in of_one if record["name"] == "torchft_errors"]
    assert errors == ["ConnectionError: lost"]
    assert len([record for record in of_one if record["name"] == "torchft_quorums"]) == 1


def test_a_profile_shows_the_parts_of_a_step_under_torchfts_names() -> None:
    with lighthouse() as address, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        manager = make_manager(address, "replica_0", has_part=True)
        # The first quorum is formed on this thread, and a profile has what happens on threads that it knows.
        manager.start_quorum()
        manager.wait_quorum()
        manager.allreduce(torch.ones(1)).wait()
        assert manager.should_commit()
        manager.shutdown()
    names = {event.key for event in profile.key_averages() if event.key.startswith("torchft::")}
    assert names == {
        f"torchft::manager::{name}"
        for name in ("allreduce", "should_commit", "wait_quorum", "_async_quorum", "_client::_quorum", "_pg::configure")
    }


def test_without_a_profiler_a_span_is_nothing() -> None:
    assert span("allreduce") is span("should_commit")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert span("allreduce") is not span("should_commit")
    assert span("allreduce") is span("should_commit")
