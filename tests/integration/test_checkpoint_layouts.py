"""Checkpoints saved in HSDP over four ranks: each byte written and read once, in whatever layout it is loaded."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import checkpoint_layouts as script
import pytest
from programs import run
from ranks import run_ranks

_TIMEOUT_S = 240

pytestmark = pytest.mark.timeout(2 * _TIMEOUT_S + 30)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By rank; and of a process that knows of no group, and loads what four have saved."""
    directory = tmp_path_factory.mktemp("reports")
    arguments = (str(directory / "root"), str(directory))
    run_ranks(script.__file__, script.NUM_RANKS, *arguments, timeout_s=_TIMEOUT_S)
    alone = [sys.executable, script.__file__, *arguments]
    ended = run(alone, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=_TIMEOUT_S)
    assert ended.returncode == 0, ended.stderr[-5000:]
    names = [*map(str, range(script.NUM_RANKS)), "one"]
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in names}


@pytest.fixture
def ranks(reports: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [reports[str(rank)] for rank in range(script.NUM_RANKS)]


def test_each_byte_is_written_once_and_every_rank_writes_its_part(ranks: list[dict[str, Any]]) -> None:
    """Two replicas of two shards: a rank that wrote all that it holds would make twice the files."""
    state_bytes = ranks[0]["state_bytes"]
    assert state_bytes >= 9_000_000
    assert state_bytes <= ranks[0]["file_bytes"] <= 1.02 * state_bytes
    for report in ranks:
        assert 0.9 * state_bytes / script.NUM_RANKS <= report["own_file_bytes"] <= 1.1 * state_bytes / script.NUM_RANKS


def test_plain_tensors_that_all_ranks_have_are_written_once(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["plain_bytes"] <= ranks[0]["plain_file_bytes"] <= 1.02 * ranks[0]["plain_bytes"]
    assert all(report["is_plain_equal"] for report in ranks)
    assert [report["plain_own"] for report in ranks] == list(range(script.NUM_RANKS))


def test_ranks_write_only_what_has_changed_and_any_layout_loads_it(ranks: list[dict[str, Any]]) -> None:
    for report in ranks:
        shared = report["shared"]
        assert shared["differences"] == shared["dcp"] == []
        # Beside the tensor, each save writes its small files again.
        assert shared["tensor_bytes"] <= shared["new_bytes"] <= shared["tensor_bytes"] + 200_000


@pytest.mark.parametrize("layout", [*script.LOADED_AS, "nothing to load into"])
def test_a_layout_is_loaded_bit_for_bit_and_each_byte_read_once(ranks: list[dict[str, Any]], layout: str) -> None:
    loaded = [report["loaded"][layout] for report in ranks]
    assert [each["differences"] for each in loaded] == [[]] * script.NUM_RANKS
    assert [each["read"] for each in loaded] == [each["said_to_be_read"] for each in loaded]
    state_bytes = ranks[0]["state_bytes"]
    assert state_bytes <= sum(each["read"] for each in loaded) <= 1.05 * state_bytes
    # No rank reads for all of them.
    assert max(each["read"] for each in loaded) <= state_bytes / 2


def test_one_process_loads_what_four_have_saved(reports: dict[str, dict[str, Any]]) -> None:
    assert (reports["one"]["differences"], reports["one"]["replaced"]) == ([], [])


@pytest.mark.parametrize("who", ["0", "1", "2", "3", "one"])
def test_dcp_loads_it_under_its_own_names(reports: dict[str, dict[str, Any]], who: str) -> None:
    report = reports[who]["dcp"]
    assert report["differences"] == []
    assert report["num_names"] >= 7 * 5
    assert report["are_names_equal"]
    assert report["are_paths_equal"]


@pytest.mark.parametrize(
    ("what", "path", "ranks_named"),
    [
        ("a shard", "optimizer.state.up.weight.exp_avg", "ranks [1, 3]"),
        ("a plain tensor", "plain.t", "ranks [0, 2]"),
        ("a value", "plain.n.2", "from rank 0 and 1.0 from rank 1"),
        ("a shape", "plain", "on rank 0 and float32[3] of [3] on rank 1"),
    ],
)
def test_ranks_that_have_diverged_are_refused_with_their_numbers(
    ranks: list[dict[str, Any]], what: str, path: str, ranks_named: str
) -> None:
    first = ranks[0]["diverged"][what]
    assert first is not None
    assert (first["kind"], first["path"]) == ("ReplicasDivergedError", path)
    assert ranks_named in first["text"]
    assert [report["diverged"][what] for report in ranks] == [first] * script.NUM_RANKS


def test_a_save_that_was_refused_leaves_nothing_and_the_next_one_succeeds(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["diverged"]["left"] == [".owner", f"step-{script.STEP}"]
    assert [report["diverged"]["steps"] for report in ranks] == [[script.STEP, script.STEP + 1]] * script.NUM_RANKS


def test_parts_that_one_rank_alone_has_are_loaded_by_all(ranks: list[dict[str, Any]]) -> None:
    assert [report["stages"] for report in ranks] == [[]] * script.NUM_RANKS


def test_ranks_put_their_parts_of_whole_tensors_in_place(ranks: list[dict[str, Any]]) -> None:
    assert [report["consolidated"] for report in ranks] == [[[], []]] * script.NUM_RANKS
