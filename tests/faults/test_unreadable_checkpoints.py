"""Checkpoints that cannot be read for a while: no step is lost to it, and what does not pass is raised.

Descriptors run out for real (RLIMIT_NOFILE), and permissions are missing for real (another user). What takes a file
server or a broken disk (ESTALE, EINTR, EIO) comes from a patched ``os.open`` or ``os.preadv``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from other_users import NOBODY, acting_as, as_root, open_directory

from ft_transport import CheckpointStore, RankFailedError, StoreSettings
from ft_transport.checkpoint.chunk_reader import ChunkReader, DataFiles
from ft_transport.checkpoint.digested_file import digested
from ft_transport.checkpoint.files import DirectoryFiles
from ft_transport.checkpoint.manifest import CHECKSUM
from ft_transport.checkpoint.stored_files import ReadRetries

_DATA, _MANIFEST = "__0_0.distcp", "manifest.json"
_FILES = (_DATA, "rank-0.json", ".metadata", _MANIFEST)


def settings(retry_s: float) -> StoreSettings:
    """Reads are retried for half of the timeout, and ten seconds at most."""
    return StoreSettings(timeout=timedelta(seconds=2 * retry_s))


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(value))}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template") / "root"
    with CheckpointStore(root) as store:
        for step in (1, 2):
            store.save(step, state(step), wait=True)
    return root


@pytest.fixture
def root(template: Path) -> Iterator[Path]:
    with open_directory() as above:
        yield Path(shutil.copytree(template, above / "root"))


def expect_step(root: Path, step: int, *, retry_s: float = 20) -> None:
    with CheckpointStore(root, read_only=True, settings=settings(retry_s)) as store:
        into = state(-1)
        loaded = store.load_newest_good(into=into)
        assert loaded is not None
        assert loaded.step == step
        assert torch.equal(into["w"], state(step)["w"])


def expect_raised(root: Path, number: int) -> None:
    """No older one is loaded in its place; what is loaded into is what it was, or says that it is not."""
    with CheckpointStore(root, read_only=True, settings=settings(0.1)) as store:
        for look in (lambda: store.load_newest_good(into=state(-1)), store.verify):
            with pytest.raises(RankFailedError) as caught:
                look()
            assert caught.value.errno == number
            assert os.strerror(number) in str(caught.value)


class Faults:
    """Has calls of ``os`` fail with a number, for files that a path names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.num_raised = 0

    def on(self, function: str, number: int, concerns: Callable[[str], bool], num_times: int = 1 << 30) -> None:
        real = getattr(os, function)

        def faulty(file: Any, *args: Any, **kwargs: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
            if concerns(path) and self.num_raised < num_times:
                self.num_raised += 1
                raise OSError(number, os.strerror(number), path)
            return real(file, *args, **kwargs)

        self._monkeypatch.setattr(os, function, faulty)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


@pytest.mark.parametrize("name", _FILES)
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_what_fails_once_on_opening_costs_no_step(root: Path, faults: Faults, name: str, number: int) -> None:
    faults.on("open", number, lambda path: path.endswith(f"step-2/{name}"), num_times=1)
    expect_step(root, 2)
    assert faults.num_raised == 1


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_what_fails_once_on_reading_costs_no_step(root: Path, faults: Faults, number: int) -> None:
    faults.on("preadv", number, lambda path: path.endswith(f"step-2/{_DATA}"), num_times=1)
    expect_step(root, 2)
    assert faults.num_raised == 1


@pytest.mark.parametrize("name", _FILES)
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EINTR])
def test_what_goes_on_failing_is_raised(root: Path, faults: Faults, name: str, number: int) -> None:
    faults.on("open", number, lambda path: path.endswith(f"step-2/{name}"))
    expect_raised(root, number)


@pytest.mark.parametrize("function", ["open", "preadv"])
def test_a_disk_that_cannot_read_is_damaged(root: Path, faults: Faults, function: str) -> None:
    faults.on(function, errno.EIO, lambda path: path.endswith(f"step-2/{_DATA}"))
    expect_step(root, 1, retry_s=0.1)


def test_a_stale_handle_is_not_used_again(root: Path, faults: Faults) -> None:
    """The descriptor stays stale, and only another one reads: as on a file server that was started anew."""
    stale: set[int] = set()
    real = os.preadv

    def preadv(descriptor: int, *args: Any) -> int:
        if not stale and os.readlink(f"/proc/self/fd/{descriptor}").endswith(f"step-2/{_DATA}"):
            stale.add(descriptor)
        if descriptor in stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(descriptor, *args)

    faults._monkeypatch.setattr(os, "preadv", preadv)
    expect_step(root, 2)
    assert stale


@contextmanager
def no_descriptors() -> Iterator[Callable[[], None]]:
    """No further file can be opened, until what this gives is called."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open("/dev/null", os.O_RDONLY)
    os.close(probe)

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, limits[1]))
    try:
        yield lift
    finally:
        lift()


def test_descriptors_that_have_run_out_are_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointStore(root, read_only=True, settings=settings(20)) as store, no_descriptors() as lift:
        real, pauses = time.sleep, []

        def sleep(pause_s: float) -> None:
            pauses.append(pause_s)
            if len(pauses) == 3:
                lift()
            real(0)

        monkeypatch.setattr(time, "sleep", sleep)
        loaded = store.load_newest_good()
        assert loaded is not None
        assert loaded.step == 2
        assert len(pauses) >= 3


def test_descriptors_that_do_not_come_back_are_an_error(root: Path) -> None:
    with CheckpointStore(root, read_only=True, settings=settings(0.1)) as store, no_descriptors():
        with pytest.raises(RankFailedError) as caught:
            store.load_newest_good(into=state(-1))
        assert caught.value.errno == errno.EMFILE


def test_as_many_files_as_ranks_have_written_are_not_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_files = 40
    opened: list[int] = []
    real = os.open

    def count(*args: Any, **kwargs: Any) -> int:
        opened.append(sum(each.startswith(str(tmp_path)) for each in _open_files()))
        return real(*args, **kwargs)

    files = []
    for number in range(num_files):
        path = tmp_path / f"__{number}_0.distcp"
        path.write_bytes(bytes([number]) * 10)
        files.append(digested(path, lambda: None))
    monkeypatch.setattr(os, "open", count)
    with ChunkReader(
        DataFiles.of(DirectoryFiles(tmp_path), files, CHECKSUM), range(num_files), ReadRetries(0)
    ) as reader:
        assert [reader.next()[0] for _ in range(num_files)] == list(range(num_files))
    assert max(opened) < 10


def _open_files() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            yield os.readlink(f"/proc/self/fd/{name}")


@as_root
@pytest.mark.parametrize("name", [*_FILES, "."])
def test_a_permission_that_is_missing_is_an_error(root: Path, name: str) -> None:
    os.chmod(root / "step-2" / name, 0)
    with acting_as():
        expect_raised(root, errno.EACCES)


@as_root
@pytest.mark.parametrize("name", [*_FILES, "."])
def test_a_permission_that_comes_back_is_waited_for(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "step-2" / name
    real, pauses = time.sleep, []

    def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 2:
            os.seteuid(0)
            os.chmod(path, 0o755)
            os.seteuid(NOBODY)
        real(0)

    os.chmod(path, 0)
    monkeypatch.setattr(time, "sleep", sleep)
    with acting_as():
        expect_step(root, 2)
    assert len(pauses) >= 2
