"""Published versions in a bucket: the publisher pushes versions and deltas, an engine's host restores them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import buckets
import pytest
from buckets import BUCKET, Bucket, used_bucket
from programs import Program
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


def publish(tmp_path: Path, versions: range, weights: Weights | None = None, url: str = _URL) -> dict[int, Weights]:
    published: dict[int, Weights] = {}
    weights = weights if weights is not None else first_weights()
    deltas = DeltaDirectory(tmp_path / "deltas", anchor_every=4, bucket=url)
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
    assert [each.name for each in (tmp_path / "engine").iterdir()] == [".owner"]  # the lock
    with pytest.raises(RestoreError, match="version 7"):
        DeltaDirectory(_URL).restore(tmp_path / "engine", 7)


def test_with_a_job_token_only_signed_versions_are_restored(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (weights,) = publish(tmp_path, range(1, 2)).values()
    monkeypatch.setenv(TOKEN_VARIABLE, "a-token-that-is-long-enough-to-be-one")
    with pytest.raises(CheckpointUntrustedError):
        DeltaDirectory(_URL).restore(tmp_path / "engine")
    with pytest.raises(PublishError, match="use another prefix"):
        publish(tmp_path, range(2, 3), weights)
    (weights,) = publish(tmp_path, range(3, 4), weights, url=f"{_URL}/signed").values()
    assert same_bits(loaded(DeltaDirectory(f"{_URL}/signed").restore(tmp_path / "engine")), weights)


class TestOtherPublishers:
    def test_a_publisher_that_lost_its_disk_goes_on_with_higher_numbers_only(
        self, bucket: Bucket, tmp_path: Path
    ) -> None:
        published = publish(tmp_path / "lost", range(1, 5))
        with pytest.raises(PublishError, match="got version 2 of another run; use another prefix"):
            publish(tmp_path / "lower", range(2, 3), published[4])
        remote = DeltaDirectory(_URL)
        assert remote.versions() == [1, 2, 3, 4]
        assert same_bits(loaded(remote.restore(tmp_path / "engine", 4)), published[4])
        (weights,) = publish(tmp_path / "higher", range(5, 6), published[4]).values()
        assert remote.versions() == [5]
        assert same_bits(loaded(remote.restore(tmp_path / "engine")), weights)

    def test_a_publisher_whose_prefix_another_one_has_taken_is_refused(self, bucket: Bucket, tmp_path: Path) -> None:
        first = DeltaDirectory(tmp_path / "first", bucket=_URL)
        with Publisher([first], tmp_path / "versions") as publisher:
            publisher.publish(1, first_weights()).result(SOON)
            (weights,) = publish(tmp_path / "second", range(10, 11)).values()
            with pytest.raises(PublishError, match="got version 10 of another run"):
                publisher.publish(2, stepped(first_weights(), 2)).result(SOON)
        assert same_bits(loaded(DeltaDirectory(_URL).restore(tmp_path / "engine")), weights)


def test_a_name_that_a_bucket_cannot_have_is_refused_before_it_is_written(bucket: Bucket, tmp_path: Path) -> None:
    deltas = DeltaDirectory(tmp_path / "deltas", bucket=_URL)
    with (
        Publisher([deltas], tmp_path / "versions") as publisher,
        pytest.raises(PublishError, match=r"'chat template\.jinja'"),
    ):
        publisher.publish(1, first_weights(), files={"chat template.jinja": b"x"}).result(SOON)
    assert deltas.versions() == []


def test_a_claim_whose_end_failed_does_not_keep_its_own_process_out(bucket: Bucket, tmp_path: Path) -> None:
    requests = iter(range(1000))

    def fault(method: str, path: str) -> str | None:
        # The claim, the commit, and the end of the claim.
        return "denied" if method == "PUT" and path.endswith("versions.json") and next(requests) == 2 else None

    deltas = DeltaDirectory(tmp_path / "deltas", bucket=_URL)
    weights = first_weights()
    with Publisher([deltas], tmp_path / "versions", engine_timeout=timedelta(seconds=10)) as publisher:
        bucket.fault = fault
        for version in (1, 2):
            weights = stepped(weights, version)
            publisher.publish(version, weights).result(SOON)
    assert DeltaDirectory(_URL).versions() == [1, 2]


def test_copies_that_a_killed_process_left_are_deleted(bucket: Bucket, tmp_path: Path) -> None:
    publish(tmp_path, range(1, 2))
    (tmp_path / "engine" / ".pulled-of-another").mkdir(parents=True)
    DeltaDirectory(_URL).restore(tmp_path / "engine")
    assert sorted(each.name for each in (tmp_path / "engine").iterdir()) == [".owner", "version-1"]


def test_a_forked_child_gets_an_error_instead_of_waiting_for_ever(bucket: Bucket) -> None:
    remote = DeltaDirectory(_URL)
    assert remote.versions() == []
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            try:
                remote.versions()
            except ConfigurationError as error:
                os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as said:
        assert b"spawn" in said.read()
    os.waitpid(child, 0)


def test_ctrl_c_ends_a_wait_for_a_bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {**os.environ, **Bucket(silent.getsockname()[1]).environment()}
        script = f"from ft_transport import DeltaDirectory; DeltaDirectory({_URL!r}).restore({str(tmp_path)!r})"
        program = Program([sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
        connection, _ = silent.accept()
        program.send_signal(signal.SIGINT)
        _, said = program.communicate(timeout=10)
        connection.close()
    assert said.splitlines()[-1] == "KeyboardInterrupt"


def test_a_bucket_is_published_to_through_a_directory(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="bucket="):
        DeltaDirectory(_URL, bucket=_URL)
    with (
        Publisher([DeltaDirectory(_URL)], tmp_path / "versions") as publisher,
        pytest.raises(PublishError, match="bucket="),
    ):
        publisher.publish(1, first_weights()).result(SOON)
