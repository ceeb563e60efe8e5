"""Sharded replicas with managers: recovery while the sources train, and collectives in state functions."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sharded_managers as script
from ranks import run_ranks

_TIMEOUT_S = 150


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("reports")
    num_processes = script.NUM_TRAINING + script.NUM_RECOVERING
    run_ranks(script.__file__, num_processes, str(directory), timeout_s=_TIMEOUT_S)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(num_processes)]


@pytest.mark.timeout(_TIMEOUT_S + 30)
def test_ranks_that_train_are_recovered_from_at_one_step(reports: list[dict[str, Any]]) -> None:
    recovering = reports[script.NUM_TRAINING :]
    assert [report["wrong"] for report in recovering] == [[]] * script.NUM_RECOVERING
    for report in recovering:
        assert len(report["recovered"]) == script.NUM_RECOVERIES
        # The sources went on meanwhile: each recovery shows a later step.
        assert report["recovered"] == sorted(set(report["recovered"]))
        # And the same one for all ranks that recover together, which cannot be had without their agreement.
        assert report["recovered"] == recovering[0]["recovered"]
        assert "expected process_group=..., or a step" in report["refused"]
    assert {report["steps"] for report in reports[: script.NUM_TRAINING]} == {reports[0]["steps"]}


def test_if_one_rank_cannot_recover_none_trains_on(reports: list[dict[str, Any]]) -> None:
    *others, last = reports[script.NUM_TRAINING :]
    assert "RestoreError: expected sources that" in last["together"]
    for report in others:
        assert "StateTornError" in report["together"]
        assert f"rank {script.NUM_RECOVERING - 1}: RestoreError: expected sources that" in report["together"]


def test_a_collective_in_a_state_function_is_refused_on_every_rank(reports: list[dict[str, Any]]) -> None:
    for report in reports[: script.NUM_TRAINING]:
        assert "expected state_dict of 'whole' to return its state, got CollectiveRefusedError" in report["collective"]
        assert "in which the other ranks take no part" in report["collective"]
