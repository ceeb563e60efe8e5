"""A directory of deltas that others may write to, that hangs, or that two publishers write to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from odd_files import put_directory, put_fifo, put_socket
from programs import run
from safetensors.torch import load_file

from ft_transport import DeltaDirectory, ManifestError, Publisher, PublishError, RestoreError
from ft_transport.checkpoint.claim import RootClaim

_SOON = timedelta(seconds=30)


def publish(tmp_path: Path) -> DeltaDirectory:
    deltas = DeltaDirectory(tmp_path / "bucket")
    with Publisher([deltas], tmp_path / "versions") as publisher:
        for version in (1, 2):
            weights = torch.arange(10_000).float()
            weights[:8] = version
            publisher.publish(version, {"w": weights}, files={"config.json": "{}"}).result(_SOON)
    assert (tmp_path / "bucket" / "version-2" / ".delta").exists()
    return deltas


def put_link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", [put_link, put_fifo, put_socket, put_directory])
@pytest.mark.parametrize(
    "name", ["version-2/config.json", "version-2/.delta", "version-2/.digests.json", "version-1/model.safetensors"]
)
def test_what_is_no_file_is_not_restored(tmp_path: Path, name: str, put: Callable[[Path], None]) -> None:
    deltas = publish(tmp_path)
    path = tmp_path / "bucket" / name
    path.unlink()
    put(path)
    # Without the anchor's bytes a delta is larger than what it changes.
    with pytest.raises((RestoreError, ManifestError)):
        deltas.restore(tmp_path / "local")
    assert list((tmp_path / "local").glob("version-*")) == []


def test_a_link_beside_the_files_is_not_followed(tmp_path: Path) -> None:
    deltas = publish(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("precious")
    (tmp_path / "bucket" / "version-2" / "tokenizer.json").symlink_to(secret)
    with pytest.raises(RestoreError, match="link"):
        deltas.restore(tmp_path / "local")
    assert not any(path.read_text() == "precious" for path in (tmp_path / "local").rglob("*.json"))


def test_a_version_that_is_a_link_is_none(tmp_path: Path) -> None:
    deltas = publish(tmp_path)
    (tmp_path / "bucket" / "version-3").symlink_to(tmp_path / "bucket" / "version-1")
    assert deltas.versions() == [1, 2]


def test_a_local_version_is_compared_before_it_is_returned(tmp_path: Path) -> None:
    deltas = publish(tmp_path)
    path = deltas.restore(tmp_path / "local")
    inode = path.stat().st_ino
    assert deltas.restore(tmp_path / "local").stat().st_ino == inode, "one that is good is not made again"
    file = path / "model.safetensors"
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert load_file(deltas.restore(tmp_path / "local") / "model.safetensors")["w"][:8].tolist() == [2.0] * 8


def test_while_another_publisher_writes_there_nothing_is_written(tmp_path: Path) -> None:
    deltas = DeltaDirectory(tmp_path / "bucket")
    other = RootClaim(tmp_path / "bucket")
    other.take("another publisher", 0)
    try:
        with Publisher([deltas], tmp_path / "versions", engine_timeout=timedelta(seconds=0.5)) as publisher:
            with pytest.raises(PublishError, match="another publisher"):
                publisher.publish(1, {"w": torch.ones(3)}).result(_SOON)
            assert deltas.versions() == []
            other.release()
            publisher.publish(2, {"w": torch.ones(3)}).result(_SOON)
            assert deltas.versions() == [2]
    finally:
        other.release()


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_a_tensor_s_name_is_text(tmp_path: Path, name: str) -> None:
    with Publisher([], tmp_path) as publisher, pytest.raises(PublishError, match="name of each tensor"):
        publisher.publish(1, {name: torch.ones(3), "w": torch.ones(3)})


_HANGING = """
import sys, threading, torch
from datetime import timedelta
from pathlib import Path
from ft_transport import DeltaDirectory, Publisher, PublishError
from ft_transport.publish import delta_directory
delta_directory._EXIT_S = 0.2
delta_directory.copy_file = lambda *_args, **_more: threading.Event().wait()
root = Path(sys.argv[1])
publisher = Publisher([DeltaDirectory(root / "bucket")], root / "versions", engine_timeout=timedelta(seconds=0.3))
try:
    publisher.publish(1, {"w": torch.ones(3)}).result(timedelta(seconds=20))
except PublishError as error:
    print("not delivered", flush=True)
publisher.close(timedelta(seconds=1))
"""


def test_a_directory_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    """What copies a file there never returns, as on a file server that is gone."""
    done = run([sys.executable, "-c", _HANGING, str(tmp_path)], ends_as_interpreter=True, timeout=60)
    assert done.stdout == "not delivered\n"
    assert done.returncode == 0, done.stderr
