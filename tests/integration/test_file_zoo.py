"""Files of every kind and fault: ``ft-transport verify`` says of each what the library says that reads such files."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from huggingface_hub import load_torch_model, save_torch_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from state_equality import exact
from torch import nn
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from typer.testing import CliRunner

from ft_transport import Publisher
from ft_transport.cli.contents import UnreadableError
from ft_transport.cli.dcp_metadata import read_dcp
from ft_transport.cli.main import app
from ft_transport.cli.safetensors_files import read_file
from ft_transport.cli.verify import RecordSums

pytestmark = [pytest.mark.timeout(120)]

Entries = list[tuple[str, str, list[int], tuple[int, int]]]
"""Name, dtype, shape, and where in the data it is."""


def verified(thing: Path) -> tuple[bool, list[str], list[str]]:
    """Whether it is found good, what is wrong, and the notes."""
    result = CliRunner().invoke(app, ["verify", str(thing), "--json"])
    if isinstance(result.exception, UnreadableError):
        return False, [str(result.exception)], []
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    told = json.loads(result.output)
    assert bool(told["troubles"]) is bool(result.exit_code)
    return not told["troubles"], told["troubles"], told["notes"]


# ----------------------------------------------------------------------------------------------- one safetensors file


def library_opens(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 # it is no mapping
                file.get_slice(name).get_shape()
    except SafetensorError:
        return False
    return True


def reader_opens(path: Path) -> bool:
    """What the command goes by, without the time that the command takes."""
    try:
        return not read_file(path).troubles
    except UnreadableError:
        return False


def library_dtypes(path: Path) -> list[str]:
    """Those that the library itself names when it is given another one."""
    write_file(path, encoded([("a", "NONE", [1], (0, 1))]), b"1")
    with pytest.raises(SafetensorError) as error, safe_open(path, framework="pt"):
        pass
    return re.findall(r"`(\w+)`", str(error.value).partition("expected one of")[2])


def encoded(entries: Entries, *more: str) -> bytes:
    """The header, in which a name may come twice."""
    fields = [
        f"{json.dumps(name)}:{json.dumps({'dtype': dtype, 'shape': shape, 'data_offsets': offsets})}"
        for name, dtype, shape, offsets in entries
    ]
    return f"{{{','.join([*more, *fields])}}}".encode()


def write_file(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


A = ("a", "U8", [2], (0, 2))
TEXT = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]%s}}'
FILES: dict[str, tuple[bytes, bytes]] = {
    "one range of two names": (encoded([A, ("b", "U8", [2], (0, 2))]), b"12"),
    "an empty tensor inside another one": (encoded([A, ("b", "U8", [0], (1, 1))]), b"12"),
    "an empty tensor before": (encoded([A, ("b", "U8", [0], (0, 0))]), b"12"),
    "an empty tensor behind": (encoded([A, ("b", "U8", [0], (2, 2))]), b"12"),
    "an empty tensor past the end": (encoded([A, ("b", "U8", [0], (3, 3))]), b"12"),
    "nothing but empty tensors": (encoded([("a", "U8", [0], (0, 0)), ("b", "F32", [3, 0], (0, 0))]), b""),
    "an empty shape with bytes": (encoded([("a", "U8", [0], (0, 2))]), b"12"),
    "a doubled __metadata__": (encoded([A], '"__metadata__":{}', '"__metadata__":{}'), b"12"),
    "one with an escape": (encoded([A], '"__metadata__":{}', r'"\u005f_metadata__":{}'), b"12"),
    "null as __metadata__": (encoded([A], '"__metadata__":null'), b"12"),
    "null in __metadata__": (encoded([A], '"__metadata__":{"a":null}'), b"12"),
    "a number in __metadata__": (encoded([A], '"__metadata__":{"a":1}'), b"12"),
    "a key twice in __metadata__": (encoded([A], '"__metadata__":{"a":"1","a":"2"}'), b"12"),
    "a list as __metadata__": (encoded([A], '"__metadata__":[]'), b"12"),
    "a tensor twice": (encoded([A, A]), b"12"),
    "a tensor twice, and in two places": (encoded([A, ("a", "U8", [2], (2, 4))]), b"1234"),
    "a doubled field": (TEXT % b',"dtype":"U8"', b"12"),
    "another field": (TEXT % b',"x":[{}]', b"12"),
    "a field too few": (b'{"a":{"dtype":"U8","shape":[2]}}', b"12"),
    "a comma too many": (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},}', b"12"),
    "a float as length": (b'{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}', b"12"),
    "a negative length": (encoded([("a", "U8", [-2], (0, 2))]), b"12"),
    "reversed offsets": (encoded([("a", "U8", [2], (2, 0))]), b"12"),
    "three offsets": (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2,2]}}', b"12"),
    "spaces around": (b" " + encoded([A]) + b"   ", b"12"),
    "zeros behind": (encoded([A]) + b"\0\0", b"12"),
    "no tensor": (b"{}", b""),
    "no tensor, and bytes": (b"{}", b"12"),
    "null": (b"null", b""),
    "a list": (b"[]", b""),
    "no UTF-8": (b'{"\xff":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"12"),
    "half of a surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"12"),
    "an empty name": (encoded([("", "U8", [2], (0, 2))]), b"12"),
    "a scalar": (encoded([("a", "F32", [], (0, 4))]), b"1234"),
    "half bytes": (encoded([("a", "F4", [3], (0, 2))]), b"12"),
    "whole bytes of halves": (encoded([("a", "F4", [2, 2], (0, 2))]), b"12"),
    "a product above 64 bits": (encoded([("a", "F32", [1 << 62], (0, 0))]), b""),
    "one with 0 at its end": (encoded([("a", "U8", [1 << 62, 8, 0], (0, 0))]), b""),
    "one with 0 at its beginning": (encoded([("a", "U8", [0, 1 << 62, 8], (0, 0))]), b""),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_good_where_the_library_opens_it(name: str, tmp_path: Path) -> None:
    write_file(tmp_path / "m", *FILES[name])
    assert verified(tmp_path / "m")[0] is library_opens(tmp_path / "m")


@pytest.mark.parametrize("content", [b"", b"1234567", bytes(8), struct.pack("<Q", 100) + b"{}", b"\xff" * 99])
def test_so_is_what_has_no_header(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(content)
    assert verified(tmp_path / "m")[0] is library_opens(tmp_path / "m") is False


def test_a_header_above_the_limit_of_the_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(struct.pack("<Q", 100_000_001))
    os.truncate(tmp_path / "m", 200_000_000)
    assert not library_opens(tmp_path / "m")
    assert "a header of at most 100000000 bytes" in verified(tmp_path / "m")[1][0]


def test_the_dtypes_of_the_library_are_known_and_no_others(tmp_path: Path) -> None:
    names = library_dtypes(tmp_path / "m")
    assert {"F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "F4", "C64"} <= {*names}
    for name in (*names, "C128", "I4", "f32", "F8_E8M0FNU"):
        found = set()
        for num_bytes in (4, 6, 8, 16, 32, 64):
            write_file(tmp_path / "m", encoded([("a", name, [8], (0, num_bytes))]), bytes(num_bytes))
            assert reader_opens(tmp_path / "m") is library_opens(tmp_path / "m"), (name, num_bytes)
            found.add(library_opens(tmp_path / "m"))
        assert (True in found) is (name in names)


def test_generated_files_are_good_where_the_library_opens_them(tmp_path: Path) -> None:
    draw, path, counts = random.Random(7), tmp_path / "m", {True: 0, False: 0}
    for number in range(600):
        header, data = generated(draw)
        write_file(path, header, data)
        expected = library_opens(path)
        assert (number, reader_opens(path)) == (number, expected), path.read_bytes()
        counts[expected] += 1
    assert min(counts.values()) > 100


def generated(draw: random.Random) -> tuple[bytes, bytes]:
    """A good file, with none, one or two faults."""
    entries: Entries = []
    at = 0
    for number in range(draw.randint(0, 4)):
        dtype, bits = draw.choice([("U8", 8), ("F32", 32), ("BF16", 16), ("F8_E5M2FNUZ", 8), ("F4", 4), ("C64", 64)])
        shape = [draw.choice((0, 1, 2, 4)) for _ in range(draw.randint(0, 3))]
        end = at + torch.Size(shape).numel() * bits // 8
        entries.append((f"t{number}", dtype, shape, (at, end)))
        at = end
    data, more = draw.randbytes(at), list[str]()
    for _ in range(draw.choice((0, 0, 1, 2))):
        fault = draw.randrange(7)
        if fault == 0:
            data = data[: -draw.randint(1, 4)]
        elif fault == 1:
            data += bytes(draw.randint(1, 4))
        elif fault == 2:
            more.append(f'"__metadata__":{draw.choice(("null", "{}", "1"))}')
        elif entries:
            chosen = draw.randrange(len(entries))
            name, dtype, shape, (start, end) = entries[chosen]
            moved = draw.choice((-2, -1, 0, 1))
            entries[chosen] = {
                3: (name, dtype, shape, (start + moved, end + moved)),
                4: (name, dtype, shape, (start, max(0, end + moved))),
                5: (name, draw.choice(("I8", "F64", "X")), shape, (start, end)),
                6: (draw.choice(entries)[0], dtype, [*shape, draw.randint(0, 2)], (start, end)),
            }[fault]
    draw.shuffle(entries)
    return encoded(entries, *more), data


def test_a_file_behind_links_is_one_as_in_a_cache_of_hugging_face(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "0f")
    link = tmp_path / "snapshots" / "model.safetensors"
    link.symlink_to("../blobs/0f")
    assert verified(link)[0]
    assert verified(tmp_path / "snapshots")[0]
    (tmp_path / "blobs" / "0f").unlink()
    assert "No such file" in verified(link)[1][0]
    link.unlink()
    link.symlink_to(link.name)
    assert "got a link" in verified(link)[1][0]


# --------------------------------------------------------------------------------------------------- shards and index


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """As ``huggingface_hub`` divides a model."""
    save_torch_state_dict(Model().state_dict(), tmp_path, max_shard_size=600)
    return tmp_path


INDEX = "model.safetensors.index.json"


def hub_loads(directory: Path) -> bool:
    try:
        load_torch_model(Model(), directory, strict=True)
    except (RuntimeError, OSError, ValueError, SafetensorError):
        return False
    return True


def changed_shard(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # it is no mapping
    change(tensors)
    save_file(tensors, path)


def test_a_sharded_model_is_verified_by_its_directory_and_by_its_index(sharded: Path) -> None:
    assert len([*sharded.glob("*.safetensors")]) == 2
    for thing in (sharded, sharded / INDEX):
        assert (verified(thing)[:2], hub_loads(sharded)) == ((True, []), True)
        told = json.loads(CliRunner().invoke(app, ["inspect", str(thing), "--json"]).output)
        assert {each["path"] for each in told["tensors"]} == Model().state_dict().keys()
    assert CliRunner().invoke(app, ["diff", str(sharded), str(sharded / INDEX)]).exit_code == 0


def test_a_shard_that_is_missing_or_cut_off_is_named(sharded: Path) -> None:
    shard = max(sharded.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 4)
    assert f"{shard.name}: a tensor is in bytes" in verified(sharded)[1][0]
    assert CliRunner().invoke(app, ["inspect", str(sharded)]).exit_code == 1
    shard.unlink()
    _, (trouble,), _ = verified(sharded)
    assert trouble.startswith(f"{shard.name}: expected a file at")
    result = CliRunner().invoke(app, ["inspect", str(sharded)])
    assert (result.exit_code, f"✗ {shard.name}: expected a file at" in result.output) == (1, True)
    assert not hub_loads(sharded)


def test_a_tensor_too_many_or_too_few_is_named(sharded: Path) -> None:
    shard = min(sharded.glob("*.safetensors"))
    changed_shard(shard, lambda tensors: tensors.update(more=torch.ones(2)))
    assert verified(sharded)[1] == [f"more: the tensor is in {shard.name}, but not in the index"]
    assert not hub_loads(sharded)
    changed_shard(shard, lambda tensors: (tensors.pop("more"), tensors.pop("layers.0.bias")))
    assert verified(sharded)[1] == [f"layers.0.bias: expected in {shard.name}, as the index says; found in no file"]
    assert not hub_loads(sharded)


def test_a_tensor_in_another_shard_than_the_index_says_is_named(sharded: Path) -> None:
    """Whoever reads every shard gets it all the same; whoever looks up one tensor does not."""
    first, second = sorted(sharded.glob("*.safetensors"))
    moved = dict[str, torch.Tensor]()
    changed_shard(first, lambda tensors: moved.update(a=tensors.pop("layers.0.bias")))
    changed_shard(second, lambda tensors: tensors.update({"layers.0.bias": moved["a"]}))
    said = f"layers.0.bias: expected in {first.name}, as the index says; found in {second.name}"
    assert verified(sharded)[1] == [said]
    changed_shard(first, lambda tensors: tensors.update({"layers.0.bias": moved["a"]}))
    assert f"found in {first.name}, {second.name}" in verified(sharded)[1][0]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"weight_map":{"a":1}}', b'{"weight_map":{"a":"../m"}}'])
def test_an_index_that_is_none_is_refused(content: bytes, sharded: Path) -> None:
    (sharded / INDEX).write_bytes(content)
    assert not verified(sharded)[0]


def test_a_file_beside_the_index_is_said_not_to_have_been_looked_at(sharded: Path) -> None:
    save_file({"a": torch.ones(2)}, sharded / "other.safetensors")
    good, _, notes = verified(sharded)
    assert good
    assert "other.safetensors: not examined, because the index does not name them" in notes


def test_a_file_beside_numbered_directories_does_not_stand_for_them(tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "step-3", {"w": torch.ones(5)})
    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    told = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"]).output)
    assert told["tensors"][0]["path"] == "w"


def test_the_versions_that_we_publish_are_good(tmp_path: Path) -> None:
    weights = {"a": torch.randn(30, 4), "b": torch.randn(3, dtype=torch.bfloat16)}
    with Publisher([], tmp_path) as publisher:
        for version in (1, 2):
            assert verified(publisher.publish(version, weights).directory)[:2] == (True, [])
    assert verified(tmp_path)[:2] == (True, [])


# ---------------------------------------------------------------------------------------------------------------- DCP


STATE = {
    "w": torch.arange(60_000, dtype=torch.float32).reshape(300, 200),
    "half": torch.ones(5).bfloat16(),
    "n": "text",
}


def save_with_dcp(directory: Path, state: dict[str, Any], writer: Any = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.save(state, checkpoint_id=directory, storage_writer=writer, no_dist=True)


def loaded_by_dcp(directory: Path, state: dict[str, Any], reader: Any = None) -> dict[str, Any]:
    into = {name: torch.empty_like(value) if isinstance(value, torch.Tensor) else "" for name, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(into, checkpoint_id=directory, storage_reader=reader, no_dist=True)
    return into


@contextmanager
def without_crc32() -> Iterator[None]:
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


def quantized(dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it will go one day
        if dtype is torch.quint8:
            return torch.quantize_per_channel(torch.rand(8, 4), torch.ones(8), torch.zeros(8), 0, dtype)
        return torch.quantize_per_tensor(torch.rand(8, 4), 0.1, 3, dtype)


DTYPES = [
    *(torch.float4_e2m1fn_x2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.complex32, torch.uint64, torch.bool),
    *(torch.qint8, torch.quint8, torch.qint32),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checkpoint_of_a_dtype_that_dcp_saves_is_good(dtype: torch.dtype, tmp_path: Path) -> None:
    is_quantized = str(dtype).startswith("torch.q")
    tensor = quantized(dtype) if is_quantized else torch.zeros(64, dtype=torch.uint8).view(dtype)
    save_with_dcp(tmp_path, {"a": tensor, "empty": torch.empty(0, 3)})
    assert verified(tmp_path)[:2] == (True, [])


def test_of_a_quantized_tensor_without_its_scale_nothing_is_said_to_be_equal(tmp_path: Path) -> None:
    save_with_dcp(tmp_path, {"a": quantized(torch.qint8)})
    result = CliRunner().invoke(app, ["diff", str(tmp_path), str(tmp_path)])
    assert "scales cannot be compared" in result.output


def test_metadata_of_torch_up_to_2_2_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.checkpoint.metadata.TensorProperties", TensorProperties)
    monkeypatch.setattr("torch.distributed.checkpoint.planner_helpers.TensorProperties", TensorProperties)
    save_with_dcp(tmp_path, STATE)
    assert b"sharded_tensor.metadata" in (tmp_path / ".metadata").read_bytes()
    assert exact(loaded_by_dcp(tmp_path, STATE)) == exact(STATE)
    assert verified(tmp_path)[:2] == (True, [])


def test_what_zstandard_compresses_is_looked_into(tmp_path: Path) -> None:
    save_with_dcp(tmp_path, STATE, dcp.FileSystemWriter(tmp_path, _extensions=[ZStandard()]))
    assert exact(loaded_by_dcp(tmp_path, STATE)) == exact(STATE)
    assert verified(tmp_path)[:2] == (True, [])
    save_with_dcp(tmp_path / "plain", STATE)
    assert CliRunner().invoke(app, ["diff", str(tmp_path), str(tmp_path / "plain")]).exit_code == 0
    (data,) = tmp_path.glob("*.distcp")
    overwrite(data, data.stat().st_size // 2, b"\x55" * 40)
    assert not verified(tmp_path)[0]


def test_what_expands_to_more_than_its_tensor_is_refused(tmp_path: Path) -> None:
    save_with_dcp(tmp_path, {"w": torch.ones(4)}, dcp.FileSystemWriter(tmp_path, _extensions=[ZStandard()]))
    (data,) = tmp_path.glob("*.distcp")
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    data.write_bytes(bomb)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = len(bomb)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    _, (trouble,), _ = verified(tmp_path)
    assert f"{data.name}: w: expected at most" in trouble


def test_a_checkpoint_behind_links_is_good(tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "blobs", STATE)
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{path.name}")
    assert verified(tmp_path / "snapshot")[:2] == (True, [])


def test_the_newest_complete_step_in_the_folder_of_torchtitan_is_verified(tmp_path: Path) -> None:
    for step in (5, 10):
        save_with_dcp(tmp_path / f"step-{step}", {"w": torch.ones(step)})
    (tmp_path / "step-15").mkdir()
    (tmp_path / "step-15" / "__0_0.distcp").write_bytes(b"begun")
    assert verified(tmp_path)[:2] == (True, [])
    told = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"]).output)
    assert told["tensors"][0]["shape"] == [10]


@pytest.mark.parametrize("is_distributed", [False, True])
def test_directories_that_dcp_writes_for_hugging_face_are_good(is_distributed: bool, tmp_path: Path) -> None:
    state = {name: value for name, value in STATE.items() if isinstance(value, torch.Tensor)}
    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=is_distributed)
    save_with_dcp(tmp_path, state, writer)
    assert exact(loaded_by_dcp(tmp_path, state, HuggingFaceStorageReader(str(tmp_path)))) == exact(state)
    assert verified(tmp_path)[:2] == (True, [])


def test_the_shards_of_a_tensor_that_dcp_writes_for_hugging_face_are_put_together(tmp_path: Path) -> None:
    whole = torch.randn(7, 4)
    for number, (start, end) in enumerate(((0, 3), (3, 5), (5, 7)), 1):
        info = json.dumps({"w": {"saved_offsets": [start, 0]}})
        file = tmp_path / f"shard-{number:05}-model-00001-of-00001.safetensors"
        save_file({"w": whole[start:end].clone()}, file, metadata={"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"})
    reader = HuggingFaceStorageReader(str(tmp_path))
    assert exact(loaded_by_dcp(tmp_path, {"w": whole}, reader)) == exact({"w": whole})
    assert verified(tmp_path)[:2] == (True, [])
    save_with_dcp(tmp_path / "dcp", {"w": whole})
    assert CliRunner().invoke(app, ["diff", str(tmp_path), str(tmp_path / "dcp")]).exit_code == 0
    next(tmp_path.glob("shard-00002*")).unlink()
    assert verified(tmp_path)[1] == ["w: its parts have 20 of 28 elements"]


# ----------------------------------------------------------------------------------------------- CRC-32s of torch.save


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def test_a_range_of_a_tensor_that_was_overwritten_is_named(tmp_path: Path) -> None:
    save_with_dcp(tmp_path, STATE)
    good, _, notes = verified(tmp_path)
    assert good
    assert notes == ["the structure was checked, and all bytes were compared with the CRC-32s of torch.save"]
    (data,) = tmp_path.glob("*.distcp")
    overwrite(data, data.read_bytes().index(STATE["w"].numpy().tobytes()) + 999, bytes(64 << 10))  # type: ignore[attr-defined]
    _, (trouble,), _ = verified(tmp_path)
    assert trouble.startswith(f"{data.name}: w: its record data/0, in bytes [")
    assert trouble.endswith("differs from the CRC-32 that torch.save has written")


def test_a_checkpoint_without_crc32s_is_said_to_have_none(tmp_path: Path) -> None:
    with without_crc32():
        save_with_dcp(tmp_path, STATE)
    good, _, (note,) = verified(tmp_path)
    assert good
    assert note == "only the structure was checked: the files have no digests to compare their bytes with"


def test_a_checkpoint_with_some_crc32s_is_said_to_have_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save, calls = torch.save, list[int]()

    def save_some(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) > 1:
            return save(*arguments, **options)
        with without_crc32():
            return save(*arguments, **options)

    monkeypatch.setattr(torch, "save", save_some)
    save_with_dcp(tmp_path, STATE)
    good, _, (note,) = verified(tmp_path)
    assert good
    assert "2 stored parts were compared with the CRC-32s of torch.save, 1 parts have none" in note


def test_what_is_found_good_is_loaded_as_it_was_wherever_it_was_overwritten(tmp_path: Path) -> None:
    state = {"w": torch.randn(30, 20), "b": torch.randn(7), "n": "text"}
    save_with_dcp(tmp_path, state)
    (data,) = tmp_path.glob("*.distcp")
    contents = read_dcp(tmp_path, with_positions=True)
    whole, draw, num_found = data.read_bytes(), random.Random(5), 0
    for _ in range(300):
        damaged = io.BytesIO(whole)
        damaged.seek(draw.randrange(len(whole)))
        damaged.write(draw.choice((b"\0", b"\xff", draw.randbytes(1))) * draw.choice((1, 8, 600)))
        data.write_bytes(damaged.getvalue()[: len(whole)])
        if [*RecordSums().damages(tmp_path, contents)]:
            num_found += 1
        else:
            assert exact(loaded_by_dcp(tmp_path, state)) == exact(state)
    assert num_found > 150
