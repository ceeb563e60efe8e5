"""``fetch(spool=…)``: a receiver that is killed and started again fetches the rest, and believes no byte of a file."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_transports import (
    CHUNK_BYTES,
    STATE_BYTES,
    TIMEOUT,
    blank,
    holds,
    is_poisoned,
    is_state,
    network,
    state_of,
    transport,
)
from programs import Program
from proxy import Link, cut

from ft_transport import ConfigurationError, FetchFailedError
from ft_transport.transfer import spool as spool_module

RECEIVER = Path(__file__).parents[1] / "workers" / "spooling_receiver.py"
HEADS_BYTES = 64 << 10
MAX_BEHIND = 12
"""Chunks that the file may be behind the fetch when the process is killed."""
BYTES_PER_S = 4 << 20


def throttled(link: Link, data: bytes) -> bool:
    for start in range(0, len(data), 1 << 12):
        due_s = link.started_s + link.num_bytes / BYTES_PER_S
        if link.stopping.wait(max(0.0, due_s - time.monotonic())):
            return False
        link.send(data[start : start + (1 << 12)])
    return True


def data_of(seed: int) -> bytes:
    """The data as it is served."""
    state = state_of(seed)
    return b"".join(state[key].numpy().tobytes() for key in "ab")


@pytest.mark.parametrize("num_connections", [1, 3])
def test_a_receiver_that_is_killed_and_comes_back_fetches_the_rest(num_connections: int, tmp_path: Path) -> None:
    path, landed = tmp_path / "spool", 0
    with network() as net:
        net.proxy.inject(throttled, times=num_connections)
        command = [sys.executable, str(RECEIVER), net.proxy.url, str(path), str(num_connections)]
        with Program(command, stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout is not None
            while landed < STATE_BYTES // 2:
                landed = int(killed.stdout.readline())
            killed.kill()
        assert landed < STATE_BYTES
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        before = net.proxy.num_bytes
        with Program(command, stdout=subprocess.PIPE, text=True) as again:
            output, _ = again.communicate(timeout=30)
        assert again.returncode == 0
        assert "".join(output.split()[-1:]) == str(len(output.split()) * CHUNK_BYTES)
        fetched = net.proxy.num_bytes - before
        # The file is written behind the fetch: what had landed last may not have reached it.
        assert fetched <= STATE_BYTES - landed + (num_connections + MAX_BEHIND) * CHUNK_BYTES + HEADS_BYTES
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "num_good"),
    [
        (b"", 0),
        (b"x", 0),
        (os.urandom(STATE_BYTES), 0),
        (data_of(2), 0),
        (data_of(1), 64),
        (data_of(1)[: 20 * CHUNK_BYTES + 5], 20),
        (data_of(1) + b"more", 64),
        (bytes(CHUNK_BYTES) + data_of(1)[CHUNK_BYTES : 10 * CHUNK_BYTES] + data_of(2)[10 * CHUNK_BYTES :], 9),
        (data_of(1)[1:], 0),
    ],
    ids=["empty", "a byte", "garbage", "another state", "all", "too short", "too long", "parts", "shifted"],
)
@pytest.mark.parametrize("is_in_place", [True, False])
def test_what_lies_there_is_taken_where_it_has_the_right_digest(
    content: bytes, num_good: int, is_in_place: bool, tmp_path: Path
) -> None:
    path = tmp_path / "spool"
    path.write_bytes(content)
    into = blank() if is_in_place else None
    with network(2) as net:
        received = net.receiver.fetch(net.proxy.url, into=into, spool=path)
        assert received.num_bytes_fetched == STATE_BYTES - num_good * CHUNK_BYTES
        assert net.proxy.num_bytes <= received.num_bytes_fetched + HEADS_BYTES
    assert is_state(received.state, 1)
    assert not path.exists()


def _link(path: Path) -> None:
    (path.parent / "else").write_bytes(b"precious")
    path.symlink_to(path.parent / "else")


def _other_name(path: Path) -> None:
    (path.parent / "else").write_bytes(b"precious")
    path.hardlink_to(path.parent / "else")


@pytest.mark.parametrize(
    "make",
    [_link, _other_name, os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path.parent / "nothing")],
    ids=["link", "other name", "FIFO", "directory", "link to nothing"],
)
def test_what_is_no_file_of_its_own_is_refused_before_anything_comes(make: Any, tmp_path: Path) -> None:
    path, into = tmp_path / "spool", blank()
    make(path)
    before = path.lstat()
    with network() as net:
        with pytest.raises(ConfigurationError, match="spool"):
            net.receiver.fetch(net.proxy.url, into=into, spool=path)
        assert not net.proxy.requests
    assert path.lstat() == before
    assert not (tmp_path / "else").exists() or (tmp_path / "else").read_bytes() == b"precious"
    assert not (tmp_path / "nothing").exists()
    assert not into["a"].any()


def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    with network() as net, pytest.raises(ConfigurationError, match="spool"):
        net.receiver.fetch(net.proxy.url, spool=tmp_path / "missing" / "spool")


def test_what_others_could_read_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    path.touch(0o644)
    with network() as net:
        net.receiver.fetch(net.proxy.url, spool=str(path), keep_spool=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_kept_has_all_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    with network(3) as net:
        net.receiver.fetch(net.proxy.url, spool=path, keep_spool=True)
        assert path.read_bytes() == data_of(1)
        again = net.receiver.fetch(net.proxy.url, spool=path)
        assert again.num_bytes_fetched == 0
        assert is_state(again.state, 1)
    assert not path.exists()


def test_a_fetch_that_fails_leaves_what_had_landed_to_the_next(tmp_path: Path) -> None:
    path, into = tmp_path / "spool", blank()
    with network(max_failures=2) as net:
        net.proxy.inject(cut(20 * CHUNK_BYTES + CHUNK_BYTES // 2))
        net.proxy.inject(cut(0), times=100)
        with pytest.raises(FetchFailedError):
            net.receiver.fetch(net.proxy.url, into=into, spool=path)
        # The file was written before what it was written from was overwritten.
        assert is_poisoned(into)
        assert path.read_bytes()[: 20 * CHUNK_BYTES] == data_of(1)[: 20 * CHUNK_BYTES]
        with transport() as another:
            received = another.fetch(net.sender.metadata(), into=into, spool=path)
        assert received.num_bytes_fetched == STATE_BYTES - 20 * CHUNK_BYTES
    assert holds(into, 1)


def test_one_that_fails_before_anything_comes_leaves_no_file(tmp_path: Path) -> None:
    with network(max_failures=2) as net:
        net.proxy.inject(cut(0), times=100)
        with pytest.raises(FetchFailedError):
            net.receiver.fetch(net.proxy.url, spool=tmp_path / "spool")
    assert list(tmp_path.iterdir()) == []


def test_a_part_kept_in_memory_and_one_in_a_file_are_both_used(tmp_path: Path) -> None:
    path, into = tmp_path / "spool", blank()
    path.write_bytes(bytes(40 * CHUNK_BYTES) + data_of(1)[40 * CHUNK_BYTES : 50 * CHUNK_BYTES])
    with network(max_failures=2) as net:
        net.proxy.inject(cut(20 * CHUNK_BYTES + CHUNK_BYTES // 2))
        net.proxy.inject(cut(0), times=100)
        with pytest.raises(FetchFailedError) as caught:
            net.receiver.fetch(net.proxy.url, into=into, keep_partial=True)
        received = net.receiver.fetch(net.sender.metadata(), into=into, resume=caught.value.partial, spool=path)
        assert received.num_bytes_fetched == STATE_BYTES - 30 * CHUNK_BYTES
    assert holds(into, 1)


def test_a_full_disk_costs_the_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spool_module.os, "pwritev", full)
    with network() as net:
        assert is_state(net.receiver.fetch(net.proxy.url, spool=tmp_path / "spool").state, 1)
    assert [record for record in caplog.records if "No space left" in record.getMessage()]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def hanging_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes nothing until this is set."""
    works = threading.Event()

    def hang(descriptor: int, views: list[memoryview], position: int) -> int:
        works.wait(30)
        return os.pwrite(descriptor, b"".join(views), position)

    monkeypatch.setattr(spool_module.os, "pwritev", hang)
    yield works
    works.set()


def test_a_disk_that_hangs_does_not_hold_up_what_has_been_received(
    hanging_disk: threading.Event, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with network() as net:
        started_s = time.monotonic()
        assert is_state(net.receiver.fetch(net.proxy.url, spool=tmp_path / "spool").state, 1)
        assert time.monotonic() - started_s < 10
    assert [record for record in caplog.records if "does not return" in record.getMessage()]
    hanging_disk.set()


def test_only_one_fetch_uses_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spool"
    monkeypatch.setattr(spool_module, "_LOCK_S", 0.1)
    used = spool_module.Spool(path, is_kept=False)
    try:
        with network() as net, pytest.raises(ConfigurationError, match="no other fetch uses"):
            net.receiver.fetch(net.proxy.url, spool=path)
        assert path.exists()
    finally:
        used.close()
    assert not path.exists()


def test_tensors_that_are_many_and_small_come_back(tmp_path: Path) -> None:
    state = {f"w{index}": torch.full((7,), float(index)) for index in range(3000)}
    path = tmp_path / "spool"
    with transport() as sender, transport() as receiver:
        sender.send_checkpoint([], 1, state, TIMEOUT)
        receiver.fetch(sender.metadata(), spool=path, keep_spool=True)
        received = receiver.fetch(sender.metadata(), spool=path)
    assert received.num_bytes_fetched == 0
    assert all(torch.equal(received.state[key], state[key]) for key in state)
