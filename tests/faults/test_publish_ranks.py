"""Four ranks whose collectives time out after two seconds publish to four engines that take longer.

The scenarios run in ``workers/publish_ranks.py``; the engines are stand-ins (``support/engine_servers.py``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import publish_ranks as script
import pytest
import torch
from engine_servers import BASE_MODEL, StandIn, VLLMStandIn, serving
from ranks import run_scenarios

_NUM_RANKS = 4
_FAN_OUT_S = 1.25 * script.COLLECTIVE_TIMEOUT_S
_REFUSED_AFTER_S = 1.0
REFUSAL = (500, "text/plain", "CUDA error: out of memory")
_WITHIN_S = 2.0
_RELEASED_WITHIN_S = 0.5
_MACHINE_FACTOR = 3.0
"""For a test machine with fewer cores than processes."""

pytestmark = pytest.mark.timeout(180)


def run(directory: Path, engines: dict[str, list[StandIn]]) -> dict[str, list[dict[str, Any]]]:
    """What each rank reported of each scenario."""
    with serving(*(each for several in engines.values() for each in several)):
        for scenario, several in engines.items():
            (directory / f"{scenario}.json").write_text(json.dumps([each.url for each in several]))
        found = run_scenarios(script.__file__, directory, _NUM_RANKS, *engines)
    return {scenario: [report.get(scenario, {}) for report in found] for scenario in engines}


def slow() -> list[StandIn]:
    return [VLLMStandIn(load_s=_FAN_OUT_S) for _ in range(4)]


@dataclass
class Ran:
    """Several scenarios of one run: starting four processes takes longer than most of them."""

    engines: dict[str, list[StandIn]]
    reports: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    engines: dict[str, list[StandIn]] = {
        "all_good": slow(),
        "one_refuses": slow(),
        "one_hangs": [VLLMStandIn(load_s=0.5) for _ in range(4)],
        "one_fails_to_export": [VLLMStandIn()],
        "sharded_weights": [VLLMStandIn()],
        "synchronizes_from_trl": [VLLMStandIn()],
    }
    engines["one_refuses"][2] = VLLMStandIn(load_s=_REFUSED_AFTER_S, refusal=REFUSAL)
    engines["one_hangs"][1].is_hanging = True
    return Ran(engines, run(tmp_path_factory.mktemp("publish"), engines))


def test_engines_may_take_longer_than_collectives(ran: Ran) -> None:
    ours = ran.reports["all_good"]
    assert [each["outcome"]["type"] for each in ours] == [None] * _NUM_RANKS
    assert [each["after"]["type"] for each in ours] == [None] * _NUM_RANKS
    for each in ours:
        assert each["released_s"] - each["written_s"] < _RELEASED_WITHIN_S * _MACHINE_FACTOR
        assert [outcome for outcome, _ in each["engines"]] == ["confirmed"] * 4
        assert all(_FAN_OUT_S <= seconds < _FAN_OUT_S + _WITHIN_S for _, seconds in each["engines"])
    for engine in ran.engines["all_good"]:
        (found,) = engine.tensors.values()
        assert all(torch.equal(found[name], value) for name, value in script.tensors(1.0).items())


def test_a_refusal_is_known_to_all_at_once_with_the_whole_report(ran: Ran) -> None:
    refusing = ran.engines["one_refuses"][2]
    for each in ran.reports["one_refuses"]:
        outcome = each["outcome"]
        assert outcome["type"] == "PublishError"
        for part in (f"POST {refusing.url}/v1/load_lora_adapter", "status 500", "CUDA error: out of memory"):
            assert part in outcome["text"]
        assert outcome["outcomes"] == ["pending", "pending", "refused", "pending"]
        assert outcome["at_s"] - each["written_s"] < _REFUSED_AFTER_S + _WITHIN_S * _MACHINE_FACTOR
        assert each["after"]["type"] is None
        assert [outcome for outcome, _ in each["engines"]] == ["confirmed", "confirmed", "refused", "confirmed"]


def test_one_that_hangs_is_bounded_by_its_deadline_and_holds_nobody_back(ran: Ran) -> None:
    engines = ran.engines["one_hangs"]
    for each in ran.reports["one_hangs"]:
        assert each["outcome"]["type"] == "PublishError"
        assert f"{engines[1].url}: late" in each["outcome"]["text"]
        assert [outcome for outcome, _ in each["engines"]] == ["confirmed", "late", "confirmed", "confirmed"]
        seconds = [seconds for _, seconds in each["engines"]]
        assert max(seconds[0], *seconds[2:]) < script.HANGING_TIMEOUT_S
        assert script.HANGING_TIMEOUT_S <= seconds[1] < script.HANGING_TIMEOUT_S + _WITHIN_S
        assert each["outcome"]["at_s"] - each["written_s"] < script.HANGING_TIMEOUT_S + _WITHIN_S * _MACHINE_FACTOR


def test_a_rank_0_that_died_is_noticed_long_before_the_deadline(tmp_path: Path) -> None:
    (reports,) = run(tmp_path, {"rank_0_dies": slow()}).values()
    for each in reports[1:]:
        assert each["outcome"]["type"] == "RankGoneError"
        assert "rank 0" in each["outcome"]["text"]
        assert each["outcome"]["at_s"] - each["died_s"] < script.ENGINE_TIMEOUT_S / 2


def test_a_failure_of_one_rank_in_the_export_is_the_same_error_on_all(ran: Ran) -> None:
    for each in ran.reports["one_fails_to_export"]:
        assert each["outcome"]["type"] == "RankFailedError"
        assert "rank 2" in each["outcome"]["text"]
        assert "Permission denied" in each["outcome"]["text"]
        assert each["outcome"]["at_s"] - each["started_s"] < _WITHIN_S * _MACHINE_FACTOR
        assert each["left"] == []
        assert each["again"]["type"] is None


def test_divided_weights_arrive_whole_and_what_cannot_be_published_is_refused_on_all(ran: Ran) -> None:
    (engine,) = ran.engines["sharded_weights"]
    found, expected = engine.tensors[BASE_MODEL], script.whole_weights()
    assert found.keys() == expected.keys()
    assert all(found[name].dtype is value.dtype and torch.equal(found[name], value) for name, value in expected.items())
    for each in ran.reports["sharded_weights"]:
        assert each["good"]["type"] is None
        assert each["stale"]["type"] == "StaleVersionError"
        assert "expected a version after 3" in each["stale"]["text"]
        assert each["diverged"]["type"] == "ReplicasDivergedError"
        assert "ranks [0, 1" in each["diverged"]["text"]
        assert each["incomplete"]["type"] == "PublishError"
        assert "missing: empty, replicated, rows" in each["incomplete"]["text"]
        assert "rank 1: 'snapshot of version 5'" in each["differing"]["text"]
        assert (each["latest"], each["names"]) == (3, ["version-3"])


def test_only_the_main_process_of_a_trl_trainer_publishes(ran: Ran) -> None:
    (engine,) = ran.engines["synchronizes_from_trl"]
    found, expected = engine.tensors[BASE_MODEL], script.whole_weights()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    first, *others = (each["versions"] for each in ran.reports["synchronizes_from_trl"])
    # Also if the same trainer trains again.
    assert first == [1, 2, 3, 4]
    assert others == [[None] * 4] * (_NUM_RANKS - 1)
