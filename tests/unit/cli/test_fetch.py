"""``ft-transport fetch``: what is in the file, and what an interruption, a disk or a stranger makes of it."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Program
from quorum_threads import TIMEOUT
from safetensors.torch import load_file
from served_memory import until
from transport_settings import settings_of
from typer.testing import CliRunner, Result

from ft_transport import HTTPTransport, TransportSettings
from ft_transport.cli.main import app
from ft_transport.errors import ConfigurationError, FileWriteError
from ft_transport.state.snapshot import Taking
from ft_transport.transfer import files
from ft_transport.transfer.files import PartFile
from ft_transport.wire.manifest import Manifest

NUM_BYTES = 24 << 20
STEP = 8


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {"model": {"w": torch.rand(NUM_BYTES // 4, generator=generator), "b": torch.ones(5)}, "lr": 0.1}


def serving(**settings: Any) -> HTTPTransport[Any]:
    source = HTTPTransport[Any](
        TIMEOUT, settings=settings_of(host="127.0.0.1", advertise="127.0.0.1", same_host=False, **settings)
    )
    source.send_checkpoint([], STEP, state(), TIMEOUT)
    return source


@pytest.fixture
def source() -> Iterator[HTTPTransport[Any]]:
    transport = serving()
    yield transport
    transport.shutdown()


def fetch(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["fetch", *map(str, arguments)])


def told(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def is_whole(path: Path) -> bool:
    tensors, expected = load_file(path), state()["model"]
    return all(torch.equal(tensors[f"model.{name}"], tensor) for name, tensor in expected.items())


def test_the_file_is_what_the_replica_serves(source: HTTPTransport[Any], tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"what was there before")
    done = told(fetch(source.metadata(), "-o", path, "--json"))
    with urllib.request.urlopen(f"{source.metadata()}{STEP}/full", timeout=20) as answer:
        assert path.read_bytes() == answer.read()
    assert (done["step"], done["num_bytes"], done["num_bytes_kept"]) == (STEP, path.stat().st_size, 0)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    text = fetch(source.metadata(), "-o", path, "--step", STEP).stdout
    assert f"✓ {path}: step {STEP}, 2 tensors, 25.2 MB, verified" in text


def test_several_sources_are_read_from_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_TRANSPORT_TOKEN", "a-token-of-the-job-long-enough-for-one")
    sources = [serving(), serving()]
    try:
        path = tmp_path / "m"
        urls = [each.metadata() for each in sources]
        done = told(fetch(*urls, *urls, "-o", path, "--json"))
        assert is_whole(path)
        assert {each["peer"] for each in done["sources"]} == {url.split("/")[2] for url in urls}
        monkeypatch.delenv("FT_TRANSPORT_TOKEN")
        refused = fetch(urls[0], "-o", path)
        assert refused.exit_code == 1
        assert "FT_TRANSPORT_TOKEN" in str(refused.exception)
    finally:
        for each in sources:
            each.shutdown()


def test_digests_that_come_after_the_data_are_in_the_file(tmp_path: Path) -> None:
    own = state()
    source = HTTPTransport[Any](TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1"))
    try:
        source.server.take(Taking(step=STEP, state=own, lasting=lambda _tensor: True)).publish()
        told(fetch(source.metadata(), "-o", tmp_path / "m", "--json"))
    finally:
        source.shutdown()
    assert is_whole(tmp_path / "m")
    header = (tmp_path / "m").read_bytes()[8:20_000]
    assert b'"ft_transport.digests":"later"' not in header
    assert b'"ft_transport.digests":"' in header


def test_a_full_disk_is_said_and_what_has_come_is_gone_on_with(
    source: HTTPTransport[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, num_written = tmp_path / "m", 0

    def pwrite(descriptor: int, data: memoryview, position: int) -> int:
        nonlocal num_written
        num_written += 1
        if num_written > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwritev(descriptor, [data], position)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "pwrite", pwrite)
        result = fetch(source.metadata(), "-o", path)
    assert result.exit_code == 1
    assert "No space left on device; the next fetch continues" in str(result.exception)
    assert not path.exists()
    done = told(fetch(source.metadata(), "-o", path, "--json"))
    assert done["num_bytes_kept"] > 0
    assert done["num_bytes_fetched"] + done["num_bytes_kept"] == NUM_BYTES + 20
    assert is_whole(path)
    assert not (tmp_path / "m.part").exists()


def test_a_part_is_not_believed(source: HTTPTransport[Any], tmp_path: Path) -> None:
    (tmp_path / "m.part").write_bytes(os.urandom(NUM_BYTES + 100_000))
    assert told(fetch(source.metadata(), "-o", tmp_path / "m", "--json"))["num_bytes_kept"] == 0
    assert is_whole(tmp_path / "m")


@pytest.mark.parametrize(
    "make",
    [
        lambda part, other: part.symlink_to(other),
        lambda part, other: part.hardlink_to(other),
        lambda part, _: os.mkfifo(part),
    ],
    ids=["link", "other name", "FIFO"],
)
def test_a_part_that_is_no_file_of_its_own_is_refused(
    make: Callable[[Path, Path], None], source: HTTPTransport[Any], tmp_path: Path
) -> None:
    (tmp_path / "else").write_bytes(b"precious")
    make(tmp_path / "m.part", tmp_path / "else")
    result = fetch(source.metadata(), "-o", tmp_path / "m")
    assert isinstance(result.exception, ConfigurationError), result.output
    assert (tmp_path / "else").read_bytes() == b"precious"
    assert not (tmp_path / "m").exists()


def test_ctrl_c_keeps_what_has_come(tmp_path: Path) -> None:
    source, path = serving(max_send_bytes_per_s=8e6), tmp_path / "m"
    command = [sys.executable, "-c", "from ft_transport.cli.main import main; main()"]
    command += ["fetch", source.metadata(), "-o", str(path), "--json"]
    running = Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stderr is not None
        assert "step 8 from 127.0.0.1" in running.stderr.readline()
        until(lambda: (tmp_path / "m.part").stat().st_blocks * 512 >= 4 << 20)
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=30)
    finally:
        running.kill()
        source.shutdown()
    assert running.returncode == 130
    assert "Traceback" not in errors
    assert f"interrupted; the received data is in {path}.part" in errors
    assert not output
    again = serving()
    try:
        assert told(fetch(again.metadata(), "-o", path, "--json"))["num_bytes_kept"] >= 2 << 20
    finally:
        again.shutdown()
    assert is_whole(path)


def test_ctrl_c_before_anything_comes_is_one_line(tmp_path: Path) -> None:
    source = HTTPTransport[Any](TIMEOUT, settings=TransportSettings(host="127.0.0.1", advertise="127.0.0.1"))
    source.serve_fresh(lambda _step: 0)
    command = [sys.executable, "-m", "ft_transport.cli", "fetch", source.metadata(), "-o", str(tmp_path / "m")]
    running = Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until((tmp_path / "m.part").exists)
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=30)
    finally:
        running.kill()
        source.shutdown()
    assert (running.returncode, output, errors) == (130, "", "interrupted; no data was received\n")
    assert not list(tmp_path.iterdir())


def test_the_rate_is_that_of_the_transfer(tmp_path: Path) -> None:
    source = serving(max_send_bytes_per_s=40e6)
    try:
        done = told(fetch(source.metadata(), "-o", tmp_path / "m", "--json"))
        text = fetch(source.metadata(), "-o", tmp_path / "m").stdout
    finally:
        source.shutdown()
    lengths = done["seconds_by_phase"]
    assert sum(lengths.values()) == pytest.approx(done["seconds"], rel=0.02)
    assert 0 < done["sources"][0]["seconds"] <= lengths["transfer"] + 0.01
    assert re.search(r"25\.2 MB in \d+\.\d\d s, .* MB/s; \d+\.\d\d s in total", text)


def test_two_do_not_write_to_one_file(
    source: HTTPTransport[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_LOCK_S", 0.05)
    with PartFile(tmp_path / "m"):
        result = fetch(source.metadata(), "-o", tmp_path / "m")
        assert result.exit_code == 1
        assert "another fetch is writing to" in str(result.exception)
    assert not list(tmp_path.iterdir())
    assert fetch(source.metadata(), "-o", tmp_path / "m").exit_code == 0


@pytest.mark.parametrize("instead", [None, b"of another fetch, and not whole"])
def test_what_was_not_verified_never_takes_the_name(
    instead: bytes | None, source: HTTPTransport[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").write_bytes(b"kept")
    finish = PartFile.finish

    def removed_before(part: PartFile, manifest: Manifest) -> None:
        part.part.unlink()
        if instead is not None:
            part.part.write_bytes(instead)
        finish(part, manifest)

    monkeypatch.setattr(PartFile, "finish", removed_before)
    result = fetch(source.metadata(), "-o", tmp_path / "m")
    assert isinstance(result.exception, FileWriteError), result.output
    assert "another process has moved or replaced" in str(result.exception)
    assert (tmp_path / "m").read_bytes() == b"kept"


def test_only_a_regular_file_is_replaced(source: HTTPTransport[Any], tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"kept")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("real")
    for place in (tmp_path / "fifo", tmp_path / "link", tmp_path, Path("/dev/full"), Path()):
        result = fetch(source.metadata(), "-o", place)
        assert result.exit_code == 1
        assert "expected the name of a regular file or of a new file" in str(result.exception)
    missing = fetch(source.metadata(), "-o", tmp_path / "no" / "m")
    assert "No such file or directory" in str(missing.exception)
    assert (tmp_path / "real").read_bytes() == b"kept"


def test_a_snapshot_that_has_no_room_is_not_begun(
    source: HTTPTransport[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        f_bavail, f_frsize = 3, 4096

    monkeypatch.setattr(files.os, "fstatvfs", lambda _descriptor: Full())
    result = fetch(source.metadata(), "-o", tmp_path / "m")
    assert result.exit_code == 1
    assert "got 12288" in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_wrong_usage_and_a_step_that_is_not_there(source: HTTPTransport[Any], tmp_path: Path) -> None:
    assert fetch("host-7", "-o", tmp_path / "m").exit_code == 2
    assert fetch().exit_code == 2
    assert fetch(source.metadata(), "--step", -1).exit_code == 2
    gone = fetch(source.metadata(), "--step", STEP - 1, "-o", tmp_path / "m")
    assert gone.exit_code == 1
    assert "expected step 7, but this replica serves [8]" in str(gone.exception)
