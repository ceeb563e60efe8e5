"""Published versions in a bucket: the publisher pushes versions and deltas, an engine's host restores them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import buckets
import pytest
from buckets import BUCKET, Bucket, used_bucket
from safetensors.torch import load_file
from trained_weights import Weights, first_weights, num_bytes, same_bits, stepped

from ft_transport import (
    CheckpointDamagedError,
    CheckpointUntrustedError,
    ConfigurationError,
    DeltaDirectory,
    Publisher,
    PublishError,
    RestoreError,
)
from ft_transport.credentials import TOKEN_VARIABLE

SOON = timedelta(seconds=30)
_URL = f"s3://{BUCKET}/deltas"


@pytest.fixture
def bucket(obstore_ready: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with used_bucket(monkeypatch) as served:
        yield served


def publish(tmp_path: Path, versions: range, weights: Weights | None = None) -> dict[int, Weights]:
    published: dict[int, Weights] = {}
    weights = weights if weights is not None else first_weights()
    deltas = DeltaDirectory(tmp_path / "deltas", anchor_every=4, bucket=_URL)
    with Publisher([deltas], tmp_path / "versions") as publisher:
        for version in versions:
            weights = published[version] = stepped(weights, version)
            publisher.publish(version, weights).result(SOON)
    return published


def loaded(directory: Path) -> Weights:
    return load_file(directory / "model.safetensors")


def test_each_version_is_restored_bit_by_bit_and_a_delta_is_small(bucket: Bucket, tmp_path: Path) -> None:
    published = publish(tmp_path, range(1, 4))
    whole = num_bytes(published[1])
    assert sum(bucket.put_bytes.values()) < 1.2 * whole
    remote = DeltaDirectory(_URL)
    assert remote.versions() == [1, 2, 3]
    for version, weights in published.items():
        assert same_bits(loaded(remote.restore(tmp_path / f"engine-{version}", version)), weights)
    assert same_bits(loaded(remote.restore(tmp_path / "engine")), published[3])
    # With version 3 on its disk, the host of an engine reads the delta to version 4 alone.
    (newest,) = publish(tmp_path, range(4, 5), published[3]).values()
    before = dict(bucket.requests)
    assert same_bits(loaded(remote.restore(tmp_path / "engine")), newest)
    read = {path for (method, path), num in bucket.requests.items() if num > before.get((method, path), 0)}
    assert not any("/version-3/" in path and "safetensors" in path for path in read)


def test_a_version_that_is_there_is_not_copied_again_and_many_restorers_copy_once(
    bucket: Bucket, tmp_path: Path
) -> None:
    published = publish(tmp_path, range(1, 2))
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: DeltaDirectory(_URL).restore(tmp_path / "engine"), range(4)))
    assert len(set(paths)) == 1
    assert same_bits(loaded(paths[0]), published[1])
    read = sum(num for (method, path), num in bucket.requests.items() if method == "GET" and ".safetensors." in path)
    assert read <= -(-num_bytes(published[1]) // (4 << 20)) + 1
    (paths[0] / "model.safetensors").chmod(0o600)
    (paths[0] / "model.safetensors").write_bytes(b"damaged")
    assert same_bits(loaded(DeltaDirectory(_URL).restore(tmp_path / "engine")), published[1])


def test_old_versions_are_deleted_with_their_anchors(bucket: Bucket, tmp_path: Path) -> None:
    published = publish(tmp_path, range(1, 14))
    remote = DeltaDirectory(_URL)
    assert remote.versions() == list(range(9, 14))
    assert same_bits(loaded(remote.restore(tmp_path / "engine")), published[13])
    kept = {path.partition("/")[0] for path in bucket.objects(_URL)}
    assert kept == {"versions.json", *(f"version-{version}" for version in range(9, 14))}


def test_versions_that_could_not_be_copied_are_copied_with_the_next(bucket: Bucket, tmp_path: Path) -> None:
    publish(tmp_path, range(1, 2))
    deltas = DeltaDirectory(tmp_path / "deltas", anchor_every=4, bucket=_URL)
    weights = stepped(stepped(first_weights(), 1), 2)
    with Publisher([deltas], tmp_path / "versions", engine_timeout=timedelta(seconds=2)) as publisher:
        bucket.fault = lambda method, _path: "denied" if method == "PUT" else None
        with pytest.raises(PublishError):
            publisher.publish(2, weights).result(SOON)
        bucket.fault = buckets.no_fault
        weights = stepped(weights, 3)
        publisher.publish(3, weights).result(SOON)
    remote = DeltaDirectory(_URL)
    assert remote.versions() == [1, 2, 3]
    assert same_bits(loaded(remote.restore(tmp_path / "engine")), weights)


def test_a_damaged_object_is_named_and_nothing_is_restored(bucket: Bucket, tmp_path: Path) -> None:
    publish(tmp_path, range(1, 2))
    (path,) = (path for path in bucket.objects(_URL) if "model.safetensors.0" in path)
    client = bucket.client()
    content = bytearray(client.get_object(Bucket=BUCKET, Key=f"deltas/{path}")["Body"].read())
    content[-1] ^= 1
    client.put_object(Bucket=BUCKET, Key=f"deltas/{path}", Body=bytes(content))
    client.close()
    with pytest.raises(CheckpointDamagedError, match=r"model\.safetensors"):
        DeltaDirectory(_URL).restore(tmp_path / "engine")
    assert [each.name for each in (tmp_path / "engine").iterdir()] == [".pulling"]  # the lock
    with pytest.raises(RestoreError, match="version 7"):
        DeltaDirectory(_URL).restore(tmp_path / "engine", 7)


def test_with_a_job_token_only_signed_versions_are_restored(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsigned = publish(tmp_path, range(1, 2))
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-that-is-long-enough-to-be-one")
    with pytest.raises(CheckpointUntrustedError):
        DeltaDirectory(_URL).restore(tmp_path / "engine")
    (weights,) = publish(tmp_path, range(2, 3), unsigned[1]).values()
    with pytest.raises(CheckpointUntrustedError):
        DeltaDirectory(_URL).restore(tmp_path / "engine")  # version 2 is a delta to the unsigned version 1
    for version in range(3, 6):
        weights = stepped(weights, version)
        publish(tmp_path, range(version, version + 1), weights)
    assert DeltaDirectory(_URL).restore(tmp_path / "engine").name == "version-5"


def test_a_bucket_is_published_to_through_a_directory(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="bucket="):
        DeltaDirectory(_URL, bucket=_URL)
    with (
        Publisher([DeltaDirectory(_URL)], tmp_path / "versions") as publisher,
        pytest.raises(PublishError, match="bucket="),
    ):
        publisher.publish(1, first_weights()).result(SOON)
