"""Versions in a directory of deltas: each is restored bit by bit, or the error says why it cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from served_memory import until
from trained_weights import Weights, first_weights, num_bytes, same_bits, stepped

from ft_transport import DeltaDirectory, IntegrityError, ManifestError, Publisher, RestoreError

SOON = timedelta(seconds=30)


@contextmanager
def publishing(tmp_path: Path, *, anchor_every: int = 4) -> Iterator[tuple[Publisher, DeltaDirectory]]:
    deltas = DeltaDirectory(tmp_path / "bucket", anchor_every=anchor_every)
    with Publisher([deltas], tmp_path / "versions") as publisher:
        yield publisher, deltas


def publish(tmp_path: Path, versions: range) -> dict[int, Weights]:
    """Publishes versions, each a step after the one before, and says what they are."""
    published: dict[int, Weights] = {}
    weights = first_weights()
    with publishing(tmp_path) as (publisher, _):
        for version in versions:
            weights = published[version] = stepped(weights, version)
            publisher.publish(version, weights).result(SOON)
    return published


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
    with pytest.raises(RestoreError, match=r"all deltas up to version 4, version 3 is missing; .* has \[1, 2, 4\]"):
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
    with pytest.raises(RestoreError, match=r"a delta to version 3 in .*, got one to 2"):
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
    with pytest.raises(IntegrityError, match=r"a file is not that of version 3: .*at model\.safetensors, step 3"):
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
