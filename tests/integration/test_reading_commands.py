"""What ``ft-transport inspect`` and ``verify`` say of what torch, safetensors and a transport have written."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage import flip_bit
from quorum_threads import TIMEOUT
from safetensors.torch import save_file
from typer.testing import CliRunner

from ft_transport import CheckpointStore, HTTPTransport, TransportSettings
from ft_transport.cli.contents import UnreadableError
from ft_transport.cli.main import app

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


@pytest.mark.parametrize("token", [None, "a-token-of-the-job-long-enough-for-one"])
def test_the_newest_snapshot_of_a_replica(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if token is not None:
        monkeypatch.setenv("FT_TRANSPORT_TOKEN", token)
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
    source = HTTPTransport[Any](TIMEOUT, settings=settings)
    try:
        result = CliRunner().invoke(app, ["inspect", source.metadata()])
        assert "it has none now" in str(result.exception)
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
    "content",
    [b"", b"\x00" * 8, struct.pack("<Q", 1 << 60), struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 8) + b'{"a":{}}'],
)
def test_what_is_no_safetensors_file_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    assert isinstance(CliRunner().invoke(app, ["inspect", str(path)]).exception, UnreadableError)


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


@pytest.mark.parametrize("shape", [(-1,), (1 << 64,), (1,) * 65])
def test_a_shape_that_no_tensor_has_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    save_with_dcp(tmp_path)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    object.__setattr__(next(iter(metadata.state_dict_metadata.values())), "size", shape)
    path.write_bytes(pickle.dumps(metadata))
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert isinstance(result.exception, UnreadableError)
    assert "expected the shape of a tensor" in str(result.exception)


def test_names_do_not_move_the_terminal(tmp_path: Path) -> None:
    save_file({"a\x1b[2Jb": torch.ones(1)}, tmp_path / "m")
    output = CliRunner().invoke(app, ["inspect", str(tmp_path / "m")]).output
    assert "\x1b" not in output
    assert "1 tensors" in output


def test_nothing_of_torch_is_imported_for_a_checkpoint(tmp_path: Path) -> None:
    save_with_dcp(tmp_path)
    code = (
        "import sys; from ft_transport.cli.inspect import open_thing; "
        f"assert open_thing({str(tmp_path)!r}).num_bytes == 59; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


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


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    save_with_dcp(tmp_path / "dcp")
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    os.truncate(data, data.stat().st_size - 100)
    code, troubles = verified(tmp_path / "dcp")
    assert code == 1
    assert all(data.name in trouble and "are not in its" in trouble for trouble in troubles)
    data.unlink()
    assert verified(tmp_path / "dcp") == (1, [f"{data.name}: No such file or directory"])
    save_file(STATE["model"], tmp_path / "m")  # type: ignore[arg-type]
    os.truncate(tmp_path / "m", (tmp_path / "m").stat().st_size - 1)
    assert verified(tmp_path / "m")[0] == 1


def test_tensors_that_lie_over_each_other_are_found(tmp_path: Path) -> None:
    header = json.dumps(
        {name: {"dtype": "U8", "shape": [6], "data_offsets": [at, at + 6]} for name, at in (("a", 0), ("b", 4))}
    )
    (tmp_path / "m").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(10))
    assert verified(tmp_path / "m") == (1, ["m: bytes [4, 10) lie over others, which end at 6"])


def test_one_flipped_bit_of_a_checkpoint_of_ours_is_found(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(3, STATE, wait=True)
    (data,) = (tmp_path / "step-3").glob("*.distcp")
    data.chmod(0o600)
    flip_bit(data, data.stat().st_size // 2)
    code, (trouble,) = verified(tmp_path)
    assert code == 1
    assert data.name in trouble


def test_a_replica_is_verified_by_fetching_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_TRANSPORT_TOKEN", "a-token-of-the-job-long-enough-for-one")
    monkeypatch.setenv("FT_TRANSPORT_ADVERTISE", "127.0.0.1")
    source = HTTPTransport[Any](TIMEOUT, settings=TransportSettings(host="127.0.0.1"))
    try:
        source.send_checkpoint([], 8, STATE, TIMEOUT)
        assert verified(source.metadata()) == (0, [])
    finally:
        source.shutdown()
