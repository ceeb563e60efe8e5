"""Directories of deltas when something is in their way: other runs, other layouts, full disks, many at once, kills."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from few_threads import OnFewThreads
from safetensors.torch import load_file, save_file
from trained_weights import Weights, first_weights, num_bytes, same_bits, stepped

from ft_transport import (
    CheckpointInUseError,
    ConfigurationError,
    DeltaDirectory,
    IntegrityError,
    Publisher,
    RestoreError,
    WeightFormat,
)

pytestmark = pytest.mark.slow

SOON = timedelta(seconds=30)
NOW = timedelta(0)


def publish(
    tmp_path: Path,
    versions: range,
    *,
    weights: Weights | None = None,
    root: str = "versions",
    weight_format: WeightFormat | None = None,
    files: Mapping[str, str] | None = None,
) -> dict[int, Weights]:
    """Publishes versions, each a step after the one before, and says what they are."""
    published: dict[int, Weights] = {}
    weights = weights if weights is not None else first_weights()
    deltas = DeltaDirectory(tmp_path / "bucket", anchor_every=4)
    with Publisher([deltas], tmp_path / root, weight_format=weight_format) as publisher:
        for version in versions:
            weights = published[version] = stepped(weights, version)
            publisher.publish(version, weights, files=files).result(SOON)
    return published


def content_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("version-*"))


def loaded(directory: Path) -> Weights:
    return load_file(directory / "model.safetensors")


def change(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert data.count(old) >= 1
    file.unlink()
    file.write_bytes(data.replace(old, new, 1))


@contextmanager
def limited_files(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond a size, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class TestRestoring:
    def test_a_version_older_than_those_that_are_kept_is_there_when_it_is_returned(self, tmp_path: Path) -> None:
        published = publish(tmp_path, range(1, 5))
        deltas = DeltaDirectory(tmp_path / "bucket")
        for version in (3, 4, 1):
            path = deltas.restore(tmp_path / "local", version, keep=1)
            assert same_bits(loaded(path), published[version])

    @pytest.mark.parametrize("keep", [0, -1])
    def test_one_version_at_least_is_kept(self, tmp_path: Path, keep: int) -> None:
        with pytest.raises(ConfigurationError, match="keep"):
            DeltaDirectory(tmp_path).restore(tmp_path / "local", keep=keep)

    @pytest.mark.parametrize("kind", ["empty", "no file of tensors", "another model's", "tensors outside"])
    def test_a_local_version_that_is_of_no_use_is_passed_over(self, tmp_path: Path, kind: str) -> None:
        published = publish(tmp_path, range(1, 4))
        deltas = DeltaDirectory(tmp_path / "bucket")
        file = deltas.restore(tmp_path / "local", 2) / "model.safetensors"
        file.chmod(0o644)
        if kind == "empty":
            file.write_bytes(b"")
        elif kind == "no file of tensors":
            file.write_bytes(bytes(100))
        elif kind == "another model's":
            save_file({"x": torch.zeros(3)}, file)
        else:
            change(file, b'"data_offsets":[0,', b'"data_offsets":[-9,')
        assert same_bits(loaded(deltas.restore(tmp_path / "local", 3)), published[3])

    @pytest.mark.parametrize(
        ("name", "old", "new"),
        [
            ("model.safetensors", b'"BF16"', b'"I16" '),
            ("config.json", b"llama", b"lIama"),
            (".digests.json", b"{", b"["),
        ],
    )
    def test_damage_outside_of_the_tensors_is_noticed_and_nothing_is_left(
        self, tmp_path: Path, name: str, old: bytes, new: bytes
    ) -> None:
        publish(tmp_path, range(1, 2), files={"config.json": "llama"})
        change(tmp_path / "bucket" / "version-1" / name, old, new)
        with pytest.raises((IntegrityError, RestoreError), match="version"):
            DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local")
        assert left_in(tmp_path / "local") == []

    def test_several_who_restore_at_once_get_the_same(self, tmp_path: Path) -> None:
        published = publish(tmp_path, range(1, 5))

        def restore(_: int) -> Path:
            return DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local")

        with ThreadPoolExecutor(4) as pool:
            paths = set(pool.map(restore, range(8)))
        assert [path.name for path in paths] == ["version-4"]
        assert same_bits(loaded(paths.pop()), published[4])

    def test_the_root_of_a_publisher_is_not_restored_to(self, tmp_path: Path) -> None:
        publish(tmp_path, range(1, 3))
        with Publisher([], tmp_path / "own"):
            (tmp_path / "own" / "version-7.incomplete").mkdir()
            with pytest.raises(CheckpointInUseError, match="a publisher"):
                DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "own", timeout=NOW)
            assert left_in(tmp_path / "own") == ["version-7.incomplete"]

    def test_a_full_disk_leaves_nothing(self, tmp_path: Path) -> None:
        publish(tmp_path, range(1, 2))
        with limited_files(num_bytes(first_weights()) // 2), pytest.raises(OSError, match="File too large"):
            DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local")
        assert left_in(tmp_path / "local") == []


class TestWriting:
    def test_a_version_in_other_files_is_restored_in_these(self, tmp_path: Path) -> None:
        first = publish(tmp_path, range(1, 2))[1]
        publish(tmp_path, range(2, 4), weights=first, weight_format=WeightFormat(max_shard_bytes=5_000_000))
        deltas = DeltaDirectory(tmp_path / "bucket")
        for version in (2, 3):
            restored = deltas.restore(tmp_path / "local", version)
            assert content_of(restored) == content_of(tmp_path / "versions" / f"version-{version}")
        assert (tmp_path / "bucket" / "version-3" / ".delta").exists()

    def test_a_version_of_another_run_under_the_same_number_is_refused(self, tmp_path: Path) -> None:
        ours = publish(tmp_path, range(1, 3))
        deltas = DeltaDirectory(tmp_path / "bucket")
        with Publisher([deltas], tmp_path / "of another run") as publisher:
            handle = publisher.publish(2, stepped(ours[2], 9))
            assert "another version 2" in str(handle.report(SOON))
        assert same_bits(loaded(deltas.restore(tmp_path / "local")), ours[2])

    def test_no_delta_is_made_from_a_version_of_another_run(self, tmp_path: Path) -> None:
        publish(tmp_path, range(1, 3))
        weights = first_weights()
        with Publisher([], tmp_path / "of another run") as publisher:
            publisher.publish(2, stepped(weights, 8))
        third = publish(tmp_path, range(3, 4), weights=weights, root="of another run")[3]
        assert same_bits(loaded(DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local")), third)

    def test_what_was_written_is_confirmed_again(self, tmp_path: Path) -> None:
        publish(tmp_path, range(1, 2))
        deltas = DeltaDirectory(tmp_path / "bucket")
        with Publisher([deltas], tmp_path / "again") as publisher:
            publisher.publish(1, stepped(first_weights(), 1)).result(SOON)

    def test_a_users_files_may_have_any_name(self, tmp_path: Path) -> None:
        publish(tmp_path, range(1, 3), files={"delta": "mine", "digests.json": "mine"})
        restored = content_of(DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local"))
        assert restored == content_of(tmp_path / "versions" / "version-2")

    def test_a_disk_that_was_full_is_not_filled_with_parts_of_versions(self, tmp_path: Path) -> None:
        deltas = DeltaDirectory(tmp_path / "bucket")
        weights = first_weights()
        with Publisher([Limited(deltas)], tmp_path / "versions") as publisher:
            for version in (1, 2):
                report = publisher.publish(version, weights).report(SOON)
                assert "File too large" in str(report)
                assert left_in(tmp_path / "bucket") == []

    def test_what_a_killed_publisher_left_is_cleared(self, tmp_path: Path) -> None:
        for name in ("version-1.incomplete", "version-0.deleted"):
            (tmp_path / "bucket" / name).mkdir(parents=True)
        publish(tmp_path, range(2, 3))
        assert left_in(tmp_path / "bucket") == ["version-2"]

    def test_a_directory_that_hangs_holds_no_other_engine_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        goes_on = threading.Event()
        original = DeltaDirectory.versions

        def hanging(deltas: DeltaDirectory) -> list[int]:
            assert goes_on.wait(30)
            return original(deltas)

        monkeypatch.setattr(DeltaDirectory, "versions", hanging)
        engines = [OnFewThreads(), DeltaDirectory(tmp_path / "bucket")]
        soon = timedelta(seconds=0.2)
        with Publisher(engines, tmp_path / "versions", engine_timeout=soon) as publisher:
            try:
                for version in range(5):
                    report = publisher.publish(version, {"x": torch.zeros(3)}).report(timedelta(seconds=10))
                    assert [each.outcome for each in report.engines] == ["confirmed", "late"]
            finally:
                goes_on.set()
            while publisher.publish(version := version + 1, {"x": torch.zeros(3)}).report(SOON).verdict != "good":
                pass
        assert DeltaDirectory(tmp_path / "bucket").versions()[-1] == version


class Limited:
    """A directory of deltas on a disk that is full."""

    def __init__(self, deltas: DeltaDirectory) -> None:
        self._deltas = deltas
        self.url = deltas.url
        self.headers: Mapping[str, str] = {}

    async def deliver(self, connection: Any, delivery: Any) -> int:
        with limited_files(100_000):
            return await self._deltas.deliver(connection, delivery)
