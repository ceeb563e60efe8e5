"""What ``ft-transport inspect`` and ``verify`` say of what torch, safetensors and a transport have written."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage import flip_bit
from programs import run
from quorum_threads import TIMEOUT
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from typer.testing import CliRunner

from ft_transport import CheckpointStore, HTTPTransport, TransportSettings
from ft_transport.checkpoint import stored_files
from ft_transport.cli import verify
from ft_transport.cli.contents import NotFoundError, UnreadableError
from ft_transport.cli.main import app
from ft_transport.http.client import manifests
from ft_transport.wire.manifest import Manifest

pytestmark = [pytest.mark.timeout(120)]

STATE = {
    "model": {
        "w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "flag": torch.ones((), dtype=torch.bool),
    },
    "note": "text",
}
EXPECTED = {"w": ("float32", [3, 4], 48), "half": ("bfloat16", [5], 10), "flag": ("bool", [], 1)}


def inspected(thing: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["inspect", str(thing), "--json"])
    assert result.exit_code == 0, result.exception
    return json.loads(result.output)  # type: ignore[no-any-return]


def tensors(told: dict[str, Any]) -> dict[str, Any]:
    described = {each["path"]: (each["dtype"], each["shape"], each["num_bytes"]) for each in told["tensors"]}
    return {path.rpartition(".")[2]: each for path, each in described.items()}


def save_with_dcp(directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.save(STATE, checkpoint_id=directory, no_dist=True)


def test_a_directory_that_dcp_wrote(tmp_path: Path) -> None:
    save_with_dcp(tmp_path)
    told = inspected(tmp_path)
    assert told["kind"] == "DCP checkpoint"
    assert tensors(told) == EXPECTED
    assert told["values"] == ["note"]
    assert told["num_bytes"] == 59


def test_a_checkpoint_of_ours_by_its_directory_and_by_that_of_all(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        for step in (3, 11):
            store.save(step, STATE, wait=True)
    for thing, step in ((tmp_path, 11), (tmp_path / "step-3", 3)):
        told = inspected(thing)
        assert (told["kind"], told["step"]) == ("checkpoint of ft_transport", step)
        assert tensors(told) == EXPECTED


def test_a_safetensors_file(tmp_path: Path) -> None:
    save_file(STATE["model"], tmp_path / "m.safetensors")  # type: ignore[arg-type]
    told = inspected(tmp_path / "m.safetensors")
    assert tensors(told) == EXPECTED


def test_a_safetensors_file_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(STATE["model"], path)  # type: ignore[arg-type]
    os.truncate(path, path.stat().st_size - 20)
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exit_code == 1
    assert "✗ the file is truncated: 20 bytes of the tensors are missing" in result.stdout
    result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    assert (result.exit_code, json.loads(result.stdout)["num_bytes_missing"]) == (1, 20)


@pytest.mark.parametrize("token", [None, "a-token-of-the-job-long-enough-for-one"])
def test_the_newest_snapshot_of_a_replica(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if token is not None:
        monkeypatch.setenv("FT_TRANSPORT_TOKEN", token)
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
    source = HTTPTransport[Any](TIMEOUT, settings=settings)
    try:
        result = CliRunner().invoke(app, ["inspect", source.metadata()])
        assert "got none; the replica takes one" in str(result.exception)
        source.send_checkpoint([], 8, STATE, TIMEOUT)
        told = inspected(source.metadata())
        assert (told["step"], tensors(told)) == (8, EXPECTED)
    finally:
        source.shutdown()


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("evil", [Evil(), {"a": [Evil()]}])
def test_a_pickle_that_would_run_a_command_is_refused_by_name(
    evil: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(evil))
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert isinstance(result.exception, UnreadableError)
    assert "posix.system" in str(result.exception)
    assert not (tmp_path / "ran").exists()


def test_nothing_beside_a_checkpoint_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write there waits for somebody who looks into it from within."""
    save_with_dcp(tmp_path)
    code = "open('ran', 'w').close()"
    for name in ("msgspec", "pickle", "resource", "torch", "typing_extensions"):
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "ft_transport").mkdir()
    (tmp_path / "ft_transport" / "__init__.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    assert inspected(".")["num_bytes"] == 59
    assert verified(".") == (0, [])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04]",
        pickle.dumps([1, 2]),
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x80\x04" + b"(" * 9999,
    ],
)
def test_what_is_no_metadata_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert isinstance(result.exception, UnreadableError)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**62] * 60_000, "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [10**4000] * 2, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 10**3000]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [-(10**3000), 0]},
    ],
    ids=["so many dimensions", "such lengths", "such an end", "such a beginning"],
)
@pytest.mark.parametrize("command", ["inspect", "verify", "diff"])
def test_numbers_that_no_file_has_are_refused_at_once(command: str, entry: dict[str, Any], tmp_path: Path) -> None:
    path = write_header(tmp_path / "m", {"a": entry})
    result = CliRunner().invoke(app, [command, path, path] if command == "diff" else [command, path])
    if command == "verify":
        assert "✗ expected the header of a safetensors file" in result.output
    else:
        assert isinstance(result.exception, UnreadableError | SystemExit), result.exception


def test_a_long_shape_makes_no_line_longer_than_a_name_does(tmp_path: Path) -> None:
    long = {"dtype": "F32", "shape": [2**62] * 63 + [0], "data_offsets": [0, 0]}
    short = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path = write_header(tmp_path / "m", {"long": long, **{f"{index}": short for index in range(100)}})
    output = CliRunner().invoke(app, ["inspect", path]).output
    assert len(output.splitlines()) > 100
    assert max(map(len, output.splitlines())) < 300


def write_header(path: Path, header: dict[str, Any]) -> str:
    """A safetensors file of four bytes."""
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"data")
    return str(path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"}" + b")" + b"\x85" * 3_000_000 + b"Ns.", id="a tuple that ends who hashes it"),
        pytest.param(b"Nr\xff\xff\xff\x0f.", id="a memo of gigabytes"),
    ],
)
def test_a_pickle_that_would_end_its_reader_or_take_all_memory_does_neither(content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert isinstance(result.exception, UnreadableError)


@pytest.mark.parametrize("shape", [(-1,), (1 << 64,), (1,) * 65, (1 << 62,) * 64])
def test_a_shape_that_no_tensor_has_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    save_with_dcp(tmp_path)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    object.__setattr__(next(iter(metadata.state_dict_metadata.values())), "size", shape)
    path.write_bytes(pickle.dumps(metadata))
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert isinstance(result.exception, UnreadableError)
    assert "the shape of a tensor" in str(result.exception)


def test_names_do_not_move_the_terminal(tmp_path: Path) -> None:
    save_file({"a\x1b[2Jb": torch.ones(1)}, tmp_path / "m")
    output = CliRunner().invoke(app, ["inspect", str(tmp_path / "m")]).output
    of_dtypes = write_header(tmp_path / "n", {"a": {"dtype": "\x1b[2J", "shape": [1], "data_offsets": [0, 4]}})
    for command in (["inspect"], ["verify"], ["diff", of_dtypes]):
        output += CliRunner().invoke(app, [*command, of_dtypes]).output
    assert "\x1b" not in output
    assert "1 tensors" in output


# ---------------------------------------------------------------------------------------------------------- verify


def verified(thing: object) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["verify", str(thing), "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.output)["troubles"]


def test_what_is_whole_is_found_so(tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "dcp")
    save_file(STATE["model"], tmp_path / "m.safetensors")  # type: ignore[arg-type]
    with CheckpointStore(tmp_path / "ours") as store:
        store.save(3, STATE, wait=True)
    for name in ("dcp", "m.safetensors", "ours", "ours/step-3"):
        assert verified(tmp_path / name) == (0, [])


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(3, STATE, wait=True)
    read = stored_files.read_manifest

    def deleted_then(*arguments: Any) -> Any:
        manifest = read(*arguments)
        (tmp_path / "step-3").rename(tmp_path / "retired")
        return manifest

    monkeypatch.setattr(stored_files, "read_manifest", deleted_then)
    result = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert isinstance(result.exception, NotFoundError)
    assert "was deleted or replaced" in str(result.exception)


def test_a_checkpoint_that_is_completed_meanwhile_is_not_mixed_with_the_one_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(3, STATE, wait=True)
        read = verify.open_source

        def and_another(*arguments: Any, **keywords: Any) -> Any:
            contents = read(*arguments, **keywords)
            store.save(4, STATE, wait=True)
            return contents

        monkeypatch.setattr(verify, "open_source", and_another)
        assert verified(tmp_path) == (0, [])


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "dcp")
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    os.truncate(data, data.stat().st_size - 100)
    code, troubles = verified(tmp_path / "dcp")
    assert code == 1
    assert all(data.name in trouble and "but the file has" in trouble for trouble in troubles)
    data.unlink()
    assert verified(tmp_path / "dcp") == (1, [f"{data.name}: expected a file at {data}: No such file or directory"])
    save_file(STATE["model"], tmp_path / "m")  # type: ignore[arg-type]
    os.truncate(tmp_path / "m", (tmp_path / "m").stat().st_size - 1)
    assert verified(tmp_path / "m")[0] == 1


@pytest.mark.parametrize(
    ("entries", "num_bytes", "said"),
    [
        (
            {"a": ("U8", [6], [0, 6]), "b": ("U8", [6], [4, 10])},
            10,
            "m: a tensor in bytes [4, 10) overlaps another one, which ends at 6",
        ),
        ({"a": ("U8", [4], [0, 4]), "b": ("U8", [4], [6, 10])}, 10, "m: bytes [4, 6) belong to no tensor"),
        ({"a": ("U8", [4], [0, 4])}, 7, "m: 3 bytes after the last tensor belong to no tensor"),
        ({}, 7, "m: 7 bytes after the last tensor belong to no tensor"),
        ({"a": ("F32", [4], [0, 12])}, 12, "a: float32 of [4] takes 16 bytes, but 12 are stored"),
        ({"a": ("F32", [1 << 62], [0, 12])}, 12, "a: its number of bits does not fit into 64 bits"),
        ({"a": ("X9", [1], [0, 4])}, 4, "a: its dtype X9 is unknown"),
        ({"a": ("F4", [3], [0, 1])}, 1, "a: F4 of [3] takes 1 bytes and 4 bits, but 1 are stored"),
    ],
)
def test_what_is_wrong_with_a_safetensors_file_is_said(
    entries: dict[str, Any], num_bytes: int, said: str, tmp_path: Path
) -> None:
    table = {name: dict(zip(("dtype", "shape", "data_offsets"), each, strict=True)) for name, each in entries.items()}
    header = json.dumps(table).encode()
    (tmp_path / "m").write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))
    code, troubles = verified(tmp_path / "m")
    assert code == 1
    assert said in troubles


def changed_metadata(directory: Path, change: Callable[[Any], None]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def _set_chunks(name: str, *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[name].chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
        ]

    return change


def _forget_places(metadata: Any) -> None:
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "model.w"}


def _lie_about_places(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length = 1 << 62


def _point_outside(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../../etc/passwd"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set_chunks("model.w", ((0, 0), (2, 4))), "model.w: its parts have 8 of 12 elements"),
        (_set_chunks("model.w", ((0, 0), (3, 4)), ((2, 0), (1, 4))), "model.w: its parts at 0×0 and 2×0 overlap"),
        (_set_chunks("model.w", ((0, 0), (3, 5))), "model.w: a part of 3×5 at 0×0 lies outside of 3×4"),
        (_set_chunks("model.w", ((0,), (12,))), "model.w: a part has 1 dimensions, the tensor 2"),
        (_set_chunks("model.w"), "model.w: its parts have 0 of 12 elements"),
        (_set_chunks("model.w", *[((0, 0), (1 << 60, 1 << 60))] * 3), "lies outside of 3×4"),
        (_forget_places, "model.w: its part at [0, 0] is not stored"),
        (_lie_about_places, "but the file has"),
        (_point_outside, "which is outside of it"),
    ],
)
def test_what_is_wrong_with_a_dcp_checkpoint_is_said(change: Callable[[Any], None], said: str, tmp_path: Path) -> None:
    save_with_dcp(tmp_path)
    changed_metadata(tmp_path, change)
    code, troubles = verified(tmp_path)
    assert code == 1
    assert any(said in trouble for trouble in troubles)


def test_the_envelope_of_a_tensor_is_looked_into(tmp_path: Path) -> None:
    save_with_dcp(tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    content = data.read_bytes()
    data.write_bytes(content.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9", 1))
    code, troubles = verified(tmp_path)
    assert code == 1
    assert any("expected a plain tensor" in trouble for trouble in troubles)


@pytest.mark.parametrize("token", [None, "a-token-of-the-job-long-enough-for-one"])
def test_a_file_that_was_fetched_is_compared_with_its_digests(
    token: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token is not None:
        monkeypatch.setenv("FT_TRANSPORT_TOKEN", token)
    source = HTTPTransport[Any](TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1"))
    try:
        source.send_checkpoint([], 8, STATE, TIMEOUT)
        assert CliRunner().invoke(app, ["fetch", source.metadata(), "-o", str(tmp_path / "m")]).exit_code == 0
    finally:
        source.shutdown()
    assert verified(tmp_path / "m") == (0, [])
    flip_bit(tmp_path / "m", (tmp_path / "m").stat().st_size - 1)
    assert verified(tmp_path / "m") == (1, ["m: bytes [0, 59) of the data differ from their digest"])
    monkeypatch.delenv("FT_TRANSPORT_TOKEN", raising=False)
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "m")])
    assert result.exit_code == (1 if token is None else 0)
    assert ("its digests were not compared" in result.stdout) is (token is not None)


def test_exit_codes_tell_what_is_wrong_from_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").write_bytes(b"\x08\x00")
    os.mkfifo(tmp_path / "fifo")
    command = [sys.executable, "-c", "from ft_transport.cli.main import main; main()", "verify"]
    for name, code in (("missing", 2), ("empty", 2), ("fifo", 2), ("cut", 1)):
        done = run([*command, str(tmp_path / name)], timeout=60)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr


def test_a_checkpoint_of_ours_without_its_list_of_digests_is_not_whole(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(3, STATE, wait=True)
    (tmp_path / "step-3").rename(tmp_path / "copy")
    assert verified(tmp_path / "copy") == (0, [])
    data = tmp_path / "copy" / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    code, (trouble,) = verified(tmp_path / "copy")
    assert code == 1
    assert "__0_0.distcp" in trouble
    data.write_bytes(whole)
    (tmp_path / "copy").rename(tmp_path / "step-3")
    (tmp_path / "step-3" / "manifest.json").unlink()
    code, (trouble,) = verified(tmp_path / "step-3")
    assert code == 1
    assert "step-3: expected manifest.json" in trouble


def test_consolidated_files_do_not_stand_for_a_checkpoint_of_ours(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, consolidate="model") as store:
        store.save(3, STATE, wait=True)
    assert verified(tmp_path / "step-3") == (0, [])
    (tmp_path / "step-3" / ".metadata").unlink()
    code, (trouble,) = verified(tmp_path / "step-3")
    assert (code, "expected a DCP checkpoint in" in trouble) == (1, True)


def test_where_no_digests_are_it_is_said(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save_with_dcp(tmp_path / "dcp")
    finally:
        torch.serialization.set_crc32_options(True)
    save_file(STATE["model"], tmp_path / "m.safetensors")  # type: ignore[arg-type]
    for name in ("dcp", "m.safetensors"):
        said = "the files have no digests to compare their bytes with"
        assert said in CliRunner().invoke(app, ["verify", str(tmp_path / name)]).stdout
        (note,) = json.loads(CliRunner().invoke(app, ["verify", str(tmp_path / name), "--json"]).stdout)["notes"]
        assert said in note


def test_a_replica_is_verified_by_fetching_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FT_TRANSPORT_TOKEN", "a-token-of-the-job-long-enough-for-one")
    monkeypatch.setenv("FT_TRANSPORT_ADVERTISE", "127.0.0.1")
    source = HTTPTransport[Any](TIMEOUT, settings=TransportSettings(host="127.0.0.1"))
    try:
        source.send_checkpoint([], 8, STATE, TIMEOUT)
        with caplog.at_level("WARNING"):
            result = CliRunner().invoke(app, ["verify", source.metadata()])
        assert (result.exit_code, caplog.records) == (0, [])
        assert ", step 8: 3 tensors, 0.0 MB" in result.stdout
        decode = manifests.decode_header

        def with_other_digests(*arguments: Any, **options: Any) -> Manifest:
            manifest = decode(*arguments, **options)
            return replace(manifest, digests=[each ^ 1 for each in manifest.digests or ()])

        monkeypatch.setattr(manifests, "decode_header", with_other_digests)
        code, (trouble,) = verified(source.metadata())
        assert code == 1
        assert "expected digest" in trouble
    finally:
        source.shutdown()
