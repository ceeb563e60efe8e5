"""Versions in a directory of deltas: each is restored bit by bit, or the error says why it cannot be.

Also with other runs, other layouts, full disks, many restorers at once and kills.
"""

from __future__ import annotations

import json
import resource
import shutil
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
from served_memory import until
from trained_weights import Weights, first_weights, num_bytes, same_bits, stepped

from ft_transport import (
    CheckpointInUseError,
    ConfigurationError,
    DeltaDirectory,
    IntegrityError,
    ManifestError,
    Publisher,
    RestoreError,
    WeightFormat,
)
from ft_transport.publish.delta_directory import _Versions

SOON = timedelta(seconds=30)


@contextmanager
def publishing(tmp_path: Path, *, anchor_every: int = 4) -> Iterator[tuple[Publisher, DeltaDirectory]]:
    deltas = DeltaDirectory(tmp_path / "bucket", anchor_every=anchor_every)
    with Publisher([deltas], tmp_path / "versions") as publisher:
        yield publisher, deltas


def loaded(directory: Path) -> Weights:
    return load_file(directory / "model.safetensors")


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


def test_each_version_is_restored_bit_by_bit(tmp_path: Path) -> None:
    published = publish(tmp_path, range(1, 8))
    deltas = DeltaDirectory(tmp_path / "bucket")
    assert deltas.versions() == list(published)
    whole = num_bytes(published[1])
    sizes = {version: size_of(tmp_path / "bucket" / f"version-{version}") for version in published}
    assert [version for version, size in sizes.items() if size >= whole] == [1, 5]
    assert max(size for size in sizes.values() if size < whole) < 0.02 * whole
    for version, weights in published.items():
        assert same_bits(loaded(deltas.restore(tmp_path / f"from-anchor-{version}", version)), weights)
        assert same_bits(loaded(deltas.restore(tmp_path / "step-by-step", version)), weights)
    assert same_bits(loaded(deltas.restore(tmp_path / "step-by-step")), published[7])


def test_a_publisher_that_came_back_goes_on_with_deltas(tmp_path: Path) -> None:
    weights = first_weights()
    for version in (1, 2, 3):
        weights = stepped(weights, version)
        with publishing(tmp_path) as (publisher, deltas):
            publisher.publish(version, weights).result(SOON)
    assert size_of(tmp_path / "bucket" / "version-3") < 0.02 * num_bytes(weights)
    assert same_bits(loaded(deltas.restore(tmp_path / "local")), weights)


def test_a_directory_that_lost_the_newest_version_gets_it_again(tmp_path: Path) -> None:
    deltas = DeltaDirectory(tmp_path / "bucket")
    weights = first_weights()
    with Publisher([deltas], tmp_path / "versions", poll_interval=timedelta(milliseconds=50)) as publisher:
        publisher.publish(1, weights).result(SOON)
        shutil.rmtree(tmp_path / "bucket" / "version-1")
        until(lambda: deltas.versions() == [1])
    assert same_bits(loaded(deltas.restore(tmp_path / "local")), weights)


def test_old_versions_go_with_their_anchors(tmp_path: Path) -> None:
    published = publish(tmp_path, range(1, 14))
    deltas = DeltaDirectory(tmp_path / "bucket")
    assert deltas.versions() == list(range(9, 14))
    assert same_bits(loaded(deltas.restore(tmp_path / "local")), published[13])


def test_other_tensors_than_before_are_written_whole(tmp_path: Path) -> None:
    weights = first_weights()
    with publishing(tmp_path) as (publisher, deltas):
        publisher.publish(1, weights).result(SOON)
        more = {**stepped(weights, 2), "head.weight": torch.ones(5, dtype=torch.bfloat16)}
        publisher.publish(2, more).result(SOON)
    assert same_bits(loaded(deltas.restore(tmp_path / "local")), more)


def test_files_beside_the_weights_are_restored(tmp_path: Path) -> None:
    weights = first_weights()
    with publishing(tmp_path) as (publisher, deltas):
        for version in (1, 2):
            weights = stepped(weights, version)
            files = {"config.json": {"version": version}, "delta": f"of {version}", "digests.json": b"{}"}
            publisher.publish(version, weights, files=files).result(SOON)
    for version in (1, 2):
        restored = deltas.restore(tmp_path / f"local-{version}", version)
        assert json.loads((restored / "config.json").read_text()) == {"version": version}
        assert (restored / "delta").read_text() == f"of {version}"
        assert sorted(each.name for each in restored.iterdir()) == [
            "config.json", "delta", "digests.json", "model.safetensors"
        ]  # fmt: skip


def test_a_damaged_local_version_is_made_anew_from_the_anchor(tmp_path: Path) -> None:
    published = publish(tmp_path, range(1, 4))
    deltas = DeltaDirectory(tmp_path / "bucket")
    file = deltas.restore(tmp_path / "local", 2) / "model.safetensors"
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    assert same_bits(loaded(deltas.restore(tmp_path / "local", 3)), published[3])


def test_a_lost_delta_is_noticed(tmp_path: Path) -> None:
    publish(tmp_path, range(1, 5))
    shutil.rmtree(tmp_path / "bucket" / "version-3")
    with pytest.raises(RestoreError, match=r"version 4, but version 3 is missing; .* has \[1, 2, 4\]"):
        DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local")
    assert not list((tmp_path / "local").glob("version-*"))


def test_reordered_deltas_are_noticed(tmp_path: Path) -> None:
    publish(tmp_path, range(1, 5))
    second, third = (tmp_path / "bucket" / f"version-{version}" / ".delta" for version in (2, 3))
    kept = second.read_bytes()
    second.unlink()
    second.write_bytes(third.read_bytes())
    third.unlink()
    third.write_bytes(kept)
    with pytest.raises(RestoreError, match=r"a delta to version 3 in .*, got one to version 2"):
        DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local")


def test_a_delta_of_another_run_is_noticed(tmp_path: Path) -> None:
    publish(tmp_path, range(1, 4))
    weights = first_weights()
    with publishing(tmp_path / "other") as (publisher, _):
        for version in (1, 2):
            weights = stepped(weights, 10 * version)
            publisher.publish(version, weights).result(SOON)
    shutil.rmtree(tmp_path / "bucket" / "version-2")
    shutil.copytree(tmp_path / "other" / "bucket" / "version-2", tmp_path / "bucket" / "version-2")
    with pytest.raises(
        IntegrityError, match=r"of version 3, got one with other content: .*at model\.safetensors, step 3"
    ):
        DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local")


@pytest.mark.parametrize("name", [".delta", "model.safetensors"])
def test_a_damaged_file_is_noticed(tmp_path: Path, name: str) -> None:
    publish(tmp_path, range(1, 3))
    file = tmp_path / "bucket" / ("version-2" if name == ".delta" else "version-1") / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()
    file.write_bytes(data)
    with pytest.raises((IntegrityError, ManifestError)):
        DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local")
    with pytest.raises((IntegrityError, ManifestError)):
        DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local", 2 if name == ".delta" else 1)


def test_a_version_that_is_not_there_is_named(tmp_path: Path) -> None:
    publish(tmp_path, range(1, 3))
    deltas = DeltaDirectory(tmp_path / "bucket")
    with pytest.raises(RestoreError, match=r"expected version 7 in .*, which has \[1, 2\]"):
        deltas.restore(tmp_path / "local", 7)
    with pytest.raises(RestoreError, match=r"which has none"):
        DeltaDirectory(tmp_path / "empty").restore(tmp_path / "local")


def test_many_small_tensors_are_restored_from_a_delta(tmp_path: Path) -> None:
    weights = {f"bias.{at}": torch.randn(256) for at in range(200)}
    with publishing(tmp_path) as (publisher, deltas):
        for version in (1, 2):
            weights = {name: tensor.index_fill(0, torch.tensor(version), 7.0) for name, tensor in weights.items()}
            publisher.publish(version, weights).result(SOON)
    assert (tmp_path / "bucket" / "version-2" / ".delta").exists()
    assert all(
        torch.equal(tensor, weights[name]) for name, tensor in loaded(deltas.restore(tmp_path / "local")).items()
    )


def test_a_local_version_of_a_smaller_model_is_passed_over(tmp_path: Path) -> None:
    with Publisher([DeltaDirectory(tmp_path / "small")], tmp_path / "of another") as publisher:
        publisher.publish(1, {"x": torch.zeros(3)}).result(SOON)
    DeltaDirectory(tmp_path / "small").restore(tmp_path / "local")
    published = publish(tmp_path, range(2, 4))
    assert same_bits(loaded(DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local")), published[3])


def test_a_version_that_only_the_local_disk_has_is_not_trusted(tmp_path: Path) -> None:
    publish(tmp_path, range(1, 3))
    DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local", 1)
    shutil.rmtree(tmp_path / "bucket" / "version-1")
    with pytest.raises(RestoreError, match=r"expected version 1 in .*, which has \[2\]"):
        DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local", 1)


class TestDeletedMeanwhile:
    """The publisher deletes the version that is being restored."""

    @pytest.fixture
    def published(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, Weights]:
        published = publish(tmp_path, range(1, 2))
        digests = _Versions.digests

        def publish_and_delete(source: _Versions, version: int) -> dict[str, int]:
            if version == 1:
                published.update(publish(tmp_path, range(2, 14), weights=published[1]))
            return digests(source, version)

        monkeypatch.setattr(_Versions, "digests", publish_and_delete)
        return published

    def test_the_newest_is_restored(self, tmp_path: Path, published: dict[int, Weights]) -> None:
        restored = DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local")
        assert restored.name == "version-13"
        assert same_bits(loaded(restored), published[13])

    def test_a_version_by_number_is_reported_as_deleted(self, tmp_path: Path, published: dict[int, Weights]) -> None:
        with pytest.raises(RestoreError, match=r"expected version 1 in .*, but it was deleted while it was restored"):
            DeltaDirectory(tmp_path / "bucket").restore(tmp_path / "local", 1)


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


@pytest.mark.slow
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


@pytest.mark.slow
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
            assert "got a version 2 with other files" in str(handle.report(SOON))
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
