"""``ft-transport diff``: what is the same, however it is stored, and what is said of what is not."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import struct
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from quorum_threads import TIMEOUT
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from typer.testing import CliRunner

from ft_transport import CheckpointStore, HTTPTransport, TransportSettings
from ft_transport.cli import snapshot_files
from ft_transport.cli.contents import NotFoundError
from ft_transport.cli.main import app


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "w": torch.rand(300, 40, generator=generator),
        "turned": torch.rand(6, 4, generator=generator).t(),
        "half": torch.rand(70, generator=generator).to(torch.bfloat16),
        "wide": torch.rand(3, generator=generator).to(torch.complex128),
        "flag": torch.ones((), dtype=torch.bool),
        "count": torch.arange(9),
        "empty": torch.ones(0, 3),
    }


def save_with_dcp(tensors: dict[str, Any], directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.save(tensors, checkpoint_id=directory, no_dist=True)
    return directory


def save_in_boxes(name: str, tensor: torch.Tensor, boxes: list[tuple[int, int, int, int]], directory: Path) -> Path:
    """One tensor, each box (row, column, rows, columns) of it a tensor that DCP has saved, as ranks do."""
    parts = {
        f"{number}": tensor[row : row + rows, column : column + columns].clone()
        for number, (row, column, rows, columns) in enumerate(boxes)
    }
    save_with_dcp(parts, directory)
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    stored = {index.fqn: info for index, info in metadata.storage_data.items()}
    whole = metadata.state_dict_metadata["0"]
    whole.size = tensor.shape
    whole.chunks = [
        ChunkStorageMetadata(torch.Size((row, column)), torch.Size((rows, columns)))
        for row, column, rows, columns in boxes
    ]
    index_type = type(next(iter(metadata.storage_data)))
    metadata.state_dict_metadata = {name: whole}
    metadata.storage_data = {
        index_type(name, chunk.offsets): stored[f"{number}"] for number, chunk in enumerate(whole.chunks)
    }
    path.write_bytes(pickle.dumps(metadata))
    return directory


def differ(*arguments: object) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["diff", *map(str, arguments), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


def test_the_same_state_is_the_same_however_it_is_saved(tmp_path: Path) -> None:
    own = state()
    del own["wide"]  # a dtype that safetensors files do not have
    save_file({name: tensor.contiguous() for name, tensor in own.items()}, tmp_path / "a.safetensors")
    save_with_dcp(own, tmp_path / "dcp")
    with CheckpointStore(tmp_path / "ours") as store:
        store.save(3, own, wait=True)
    for one, other in (("a.safetensors", "dcp"), ("dcp", "ours"), ("ours", "ours/step-3"), ("ours", "a.safetensors")):
        code, told = differ(tmp_path / one, tmp_path / other)
        assert (code, told["identical"], told["differences"]) == (0, True, [])
        assert told["num_tensors"] == len(own)
        assert told["num_bytes"] == sum(tensor.nbytes for tensor in own.values())
    assert "✓ bit-identical: 6 tensors" in CliRunner().invoke(app, ["diff", *[str(tmp_path / "dcp")] * 2]).stdout


def test_each_tensor_that_differs_is_named_with_how_much(tmp_path: Path) -> None:
    own, changed = state(), state()
    changed["w"][7, 3] += 0.5
    changed["turned"][1, 2] = -changed["turned"][1, 2]
    changed["half"][5:8] = 2.0
    changed["wide"][1] = 0
    changed["flag"] = torch.zeros((), dtype=torch.bool)
    changed["count"] = torch.arange(9, dtype=torch.int32)
    changed["new\x1b[2J"] = changed.pop("empty")
    save_with_dcp({**own, "note": "a"}, tmp_path / "a")
    save_with_dcp({**changed, "note": "b"}, tmp_path / "b")
    code, told = differ(tmp_path / "a", tmp_path / "b")
    found = {each["name"]: each for each in told["differences"]}
    assert code == 1
    assert set(found) == {"w", "turned", "half", "wide", "flag", "count", "empty", "new\x1b[2J", "note"}
    assert (found["w"]["num_elements_different"], found["w"]["num_elements"]) == (1, 12_000)
    assert found["w"]["largest_difference"] == pytest.approx(0.5, abs=1e-6)
    assert (found["turned"]["num_elements_different"], found["turned"]["num_bytes_different"]) == (1, 1)
    expected = (own["half"][5:8].float() - 2).abs().max().item()
    assert (found["half"]["num_elements_different"], found["half"]["largest_difference"]) == (3, expected)
    assert found["wide"]["num_elements_different"] == found["flag"]["num_elements_different"] == 1
    assert (found["count"]["a"], found["count"]["b"]) == ("int64 9", "int32 9")
    assert [found[name]["kind"] for name in ("empty", "new\x1b[2J", "note")] == ["only in A", "only in B", "value"]
    text = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")]).stdout
    assert "✗ w: 1 of 12,000 elements differ" in text
    assert "at most by 0.5" in text
    assert "\x1b" not in text


def test_nan_and_signed_zero_are_bits(tmp_path: Path) -> None:
    save_file({"x": torch.tensor([float("nan"), 0.0, float("inf")])}, tmp_path / "a")
    save_file({"x": torch.tensor([float("nan"), -0.0, 1.0])}, tmp_path / "b")
    assert differ(tmp_path / "a", tmp_path / "a")[0] == 0
    (found,) = differ(tmp_path / "a", tmp_path / "b")[1]["differences"]
    assert (found["num_elements_different"], found["largest_difference"]) == (2, 0.0)


ROWS = [(0, 0, 100, 30), (100, 0, 50, 30)]
COLUMNS = [(0, 0, 150, 7), (0, 7, 150, 23)]
PINWHEEL = [(0, 0, 100, 20), (0, 20, 60, 10), (60, 20, 90, 10), (100, 0, 50, 20)]


def test_another_division_over_ranks_is_the_same_tensor(tmp_path: Path) -> None:
    tensor = torch.rand(150, 30)
    changed = tensor.clone()
    changed[149, 29] += 1
    divisions = {"whole": [(0, 0, 150, 30)], "rows": ROWS, "columns": COLUMNS, "pinwheel": PINWHEEL}
    for name, boxes in divisions.items():
        save_in_boxes("w", tensor, boxes, tmp_path / name)
        save_in_boxes("w", changed, boxes, tmp_path / f"changed {name}")
    for one, other in itertools.pairwise([*divisions, "whole"]):
        assert differ(tmp_path / one, tmp_path / other)[0] == 0
        (found,) = differ(tmp_path / one, tmp_path / f"changed {other}")[1]["differences"]
        assert (found["num_elements_different"], found["num_elements"]) == (1, 4500)


def test_large_tensors_in_other_divisions_are_compared_block_by_block(tmp_path: Path) -> None:
    tensor = torch.rand(3000, 1000)
    save_in_boxes("w", tensor, [(0, 0, 3000, 1000)], tmp_path / "a")
    tensor[2999] += 1
    save_in_boxes("w", tensor, [(0, 0, 3000, 300), (0, 300, 3000, 700)], tmp_path / "b")
    (found,) = differ(tmp_path / "a", tmp_path / "b")[1]["differences"]
    assert found["num_elements_different"] == 1000


# --------------------------------------------------------------------------------------------------------- replicas


@pytest.fixture
def replicas() -> Iterator[list[HTTPTransport[Any]]]:
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
    transports = [HTTPTransport[Any](TIMEOUT, settings=settings) for _ in range(2)]
    yield transports
    for each in transports:
        each.shutdown()


def large(change: float) -> dict[str, Any]:
    first = torch.arange(1 << 20, dtype=torch.float32)
    return {"model": {"first": first, "second": torch.ones(3 << 20).index_fill_(0, torch.tensor(5), change)}, "lr": 0.1}


def test_of_two_replicas_only_what_differs_is_fetched(
    replicas: list[HTTPTransport[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_files, "_LEAST_WAIT_S", 0.2)
    urls = [each.metadata() for each in replicas]
    for each, change in zip(replicas, (1.0, 3.5), strict=True):
        each.send_checkpoint([], 8, large(change), TIMEOUT)
    code, told = differ(*urls)
    (found,) = told["differences"]
    assert (code, found["name"], found["num_elements_different"]) == (1, "model.second", 1)
    assert found["largest_difference"] == 2.5
    assert told["num_bytes_fetched"] == 2 << 20
    assert told["num_bytes_equal_by_digest"] == told["num_bytes"] - (1 << 20)
    replicas[1].send_checkpoint([], 9, large(1.0), TIMEOUT)
    told = differ(*urls)[1]
    assert (told["a"]["step"], told["b"]["step"]) == (8, 8)
    replicas[0].send_checkpoint([], 11, large(1.0), TIMEOUT)
    code, told = differ(*urls)
    assert (code, told["num_bytes_fetched"], told["identical"], told["steps_differ"]) == (1, 0, True, True)
    assert (told["a"]["step"], told["b"]["step"]) == (11, 9)
    text = CliRunner().invoke(app, ["diff", *urls]).stdout
    assert text.startswith("✗ different steps: A has step 11, B has step 9")
    result = CliRunner().invoke(app, ["diff", *urls, "--step", "7"])
    assert result.exit_code == 2
    assert "expected step 7, but this replica serves" in result.output


@contextlib.contextmanager
def training(replicas: list[HTTPTransport[Any]], *newest_steps: int) -> Iterator[None]:
    """Each replica takes a snapshot of a step to come when it is asked for one, or of its next step."""
    with ThreadPoolExecutor(2) as pool:

        def train(replica: HTTPTransport[Any], newest_step: int) -> None:
            def fresh(step: int | None) -> int | None:
                nonlocal newest_step
                if step is not None and step <= newest_step:
                    return None
                newest_step = newest_step + 1 if step is None else step
                sequence = replica.server.newest_sequence()
                pool.submit(replica.send_checkpoint, [], newest_step, {"w": torch.full((9,), newest_step)}, TIMEOUT)
                return sequence

            replica.serve_fresh(fresh)

        for replica, newest_step in zip(replicas, newest_steps, strict=True):
            train(replica, newest_step)
        yield


def test_two_replicas_that_train_on_are_compared_at_one_step(replicas: list[HTTPTransport[Any]]) -> None:
    urls = [each.metadata() for each in replicas]
    with training(replicas, 3, 5):
        for options in ((), (), ("--step", 20)):
            code, told = differ(*urls, *options)
            assert (code, told["identical"], told["steps_differ"]) == (0, True, False)
            assert told["a"]["step"] == told["b"]["step"]
        assert told["a"]["step"] == 20
        result = CliRunner().invoke(app, ["diff", *urls, "--step", "19"])
        assert result.exit_code == 2
        assert "this replica is past step 19" in result.output


def test_replicas_in_other_layouts_are_fetched_whole(replicas: list[HTTPTransport[Any]]) -> None:
    own = large(1.0)
    replicas[0].send_checkpoint([], 8, own, TIMEOUT)
    replicas[1].send_checkpoint([], 8, {"other": {"x": torch.ones(4)}, **own}, TIMEOUT)
    code, told = differ(*(each.metadata() for each in replicas))
    assert code == 1
    assert {each["name"]: each["kind"] for each in told["differences"]} == {
        "other.x": "only in B",
        "ft_transport.tree": "value",
    }
    text = CliRunner().invoke(app, ["diff", *(each.metadata() for each in replicas)]).stdout
    assert "✗ the part of the state that is not tensors (names, order, numbers and texts): diff" in text


def test_a_file_that_was_cut_off_is_named_with_its_directory(tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        save_file({"x": torch.ones(4000)}, tmp_path / name / "m")
    os.truncate(tmp_path / "cut" / "m", 9000)
    result = CliRunner().invoke(app, ["diff", str(tmp_path / "whole" / "m"), str(tmp_path / "cut" / "m")])
    assert f"in {tmp_path / 'cut' / 'm'}, got a file of 9000 bytes" in result.output


@pytest.mark.parametrize("options", [(), ("--digests",)])
def test_a_replica_and_the_file_that_was_fetched_from_it(
    options: tuple[str, ...], replicas: list[HTTPTransport[Any]], tmp_path: Path
) -> None:
    replicas[0].send_checkpoint([], 8, large(1.0), TIMEOUT)
    url, path = replicas[0].metadata(), tmp_path / "m"
    assert CliRunner().invoke(app, ["fetch", url, "-o", str(path)]).exit_code == 0
    code, told = differ(url, path, *options)
    assert (code, told["num_bytes_fetched"]) == (0, 0 if options else told["num_bytes"])
    assert told["num_bytes_equal_by_digest"] == (told["num_bytes"] if options else 0)
    assert differ(path, path, *options)[0] == 0
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\xff")
    # What was changed behind its digests is found by those alone who read it.
    assert differ(url, path, *options)[0] == (0 if options else 1)


# ------------------------------------------------------------------------------------------------------------ wrong


def test_what_cannot_be_compared_is_said_to_be_so(tmp_path: Path) -> None:
    save_file({"x": torch.ones(4)}, tmp_path / "a")
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}).encode()
    (tmp_path / "long").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "short").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "none").mkdir()
    for name, error in (
        ("long", SystemExit),
        ("short", SystemExit),
        ("fifo", NotFoundError),
        ("missing", NotFoundError),
        ("none", NotFoundError),
    ):
        for pair in ((tmp_path / "a", tmp_path / name), (tmp_path / name, tmp_path / "a")):
            assert isinstance(CliRunner().invoke(app, ["diff", *map(str, pair)]).exception, error)
    assert CliRunner().invoke(app, ["diff", str(tmp_path / "a")]).exit_code == 2


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([(0, 0, 100, 30)], "its parts have 3000 of 4500 elements"),
        ([(0, 0, 100, 30), (50, 0, 100, 30)], "overlap"),
        ([(0, 0, 150, 30), (0, 0, 1, 1)], "overlap"),
    ],
)
def test_a_tensor_with_a_hole_or_twice_is_not_compared(boxes: Any, said: str, tmp_path: Path) -> None:
    save_in_boxes("w", torch.rand(150, 30), boxes, tmp_path / "a")
    result = CliRunner().invoke(app, ["diff", *[str(tmp_path / "a")] * 2])
    assert result.exit_code == 2
    assert said in result.output
