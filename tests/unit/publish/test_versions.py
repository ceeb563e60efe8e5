"""Versions on disk: what engines are told of them, and which go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.publish.adapter import CONFIG_NAME
from ft_transport.publish.versions import StoredVersion, StoredVersions, expired


@pytest.fixture
def directory(tmp_path: Path) -> NumberedDirectory:
    return NumberedDirectory(tmp_path, "version", None)


def write(directory: NumberedDirectory, number: int, *, is_adapter: bool, written_s: float = 0.0) -> Path:
    path = directory.begin(number)
    if is_adapter:
        (path / CONFIG_NAME).write_text("{}")
    os.utime(path, (written_s, written_s))
    return directory.commit(number)


def stored_in(directory: NumberedDirectory) -> StoredVersions:
    return StoredVersions(directory, None, keep_for_s=100.0)


@pytest.mark.parametrize(("is_adapter", "kind"), [(True, "adapter"), (False, "weights")])
def test_engines_are_told_of_the_newest(directory: NumberedDirectory, is_adapter: bool, kind: str) -> None:
    assert stored_in(directory).newest() is None
    write(directory, 1, is_adapter=not is_adapter)
    path = write(directory, 2, is_adapter=is_adapter)
    newest = stored_in(directory).newest()
    assert newest is not None
    assert (newest.version, newest.kind, newest.directory, newest.address) == (2, kind, path, None)


def test_an_adapter_stays_for_as_long_as_a_request_runs(directory: NumberedDirectory) -> None:
    for number in range(1, 6):
        write(directory, number, is_adapter=True, written_s=60.0 * number)
    stored_in(directory).delete_expired(set())
    assert directory.numbers() == [3, 4, 5], "version 3 was replaced 60 seconds before the newest came"


def test_a_disk_that_cannot_be_written_is_logged(
    directory: NumberedDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 4):
        write(directory, number, is_adapter=False)

    def refuse(_number: int) -> list[Path]:
        raise PermissionError("expected a disk that can be written")

    monkeypatch.setattr(directory, "retire", refuse)
    stored_in(directory).delete_expired(set())
    assert "old versions could not be deleted: expected a disk" in caplog.text
    assert directory.numbers() == [1, 2, 3]


def stored(is_adapter: bool) -> list[StoredVersion]:
    """Versions 1 to 5, written at 10, 20, … seconds."""
    return [StoredVersion(number, is_adapter, 10.0 * number) for number in range(1, 6)]


@pytest.mark.parametrize(
    ("is_adapter", "keep_for_s", "used", "expected"),
    [
        (True, 0.0, set(), [1, 2, 3]),
        (True, 0.0, {2, 4}, [1, 3]),
        (True, 15.0, set(), [1, 2]),  # 3 was replaced 10 s before the newest was written
        (True, 1000.0, set(), []),
        (False, 1000.0, set(), [1, 2, 3]),  # weights are not read again
        (False, 0.0, {1}, [2, 3]),
    ],
)
def test_what_expires(is_adapter: bool, keep_for_s: float, used: set[int], expected: list[int]) -> None:
    assert expired(stored(is_adapter), used, keep_for_s=keep_for_s) == expected


@pytest.mark.parametrize("num_versions", [0, 1, 2])
def test_the_newest_two_never_expire(num_versions: int) -> None:
    assert expired(stored(is_adapter=False)[:num_versions], set(), keep_for_s=0.0) == []
