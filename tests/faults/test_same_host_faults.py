"""Fetches between processes of one host: out of the source's memory where that can be, and never less exact for it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
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
    send_when_free,
    state_of,
    transport,
)
from keepers import wait_until
from other_users import NOBODY, acting_as, as_root
from programs import Program, run
from same_host import listen_to, open_snapshots, taken_from_memory

from ft_transport import DeadlineExceededError, FetchProgress, FetchTimeout, SnapshotLimitError, TransportError
from ft_transport.http import shared_memory
from ft_transport.http.client import same_host as same_host_client
from ft_transport.http.server import same_host as same_host_server
from ft_transport.state.snapshot import Taking

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="abstract unix sockets are Linux's")]

WORKERS = Path(__file__).parents[1] / "workers"
ALL = STATE_BYTES // CHUNK_BYTES
_CLONE_NEWNET = 0x40000000  # include/uapi/linux/sched.h
HEADS_BYTES = 64 << 10


@pytest.fixture(autouse=True)
def _listening(caplog: pytest.LogCaptureFixture) -> None:
    listen_to(caplog)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("step", [1, "latest"])
def test_the_data_comes_from_memory_and_not_through_the_network(
    step: Any, verify: bool, caplog: pytest.LogCaptureFixture
) -> None:
    into = blank()
    with network(sender={"same_host": True}, same_host=True, verify=verify) as net:
        assert is_state(net.fetch(step, into=into), 1)
        assert net.proxy.num_bytes < HEADS_BYTES
        assert taken_from_memory(caplog) == [(ALL, ALL)]
        assert is_state(net.fetch(step), 1)
    assert holds(into, 1)
    assert open_snapshots() == []


@pytest.mark.parametrize("at", ["source", "receiver"])
def test_turned_off_at_either_side_it_comes_through_the_network(at: str, caplog: pytest.LogCaptureFixture) -> None:
    with network(sender={"same_host": at != "source"}, same_host=at != "receiver") as net:
        assert is_state(net.fetch(), 1)
        wait_until(lambda: net.proxy.num_bytes > STATE_BYTES)  # the proxy counts bytes after it has sent them
    assert taken_from_memory(caplog) == []


@pytest.mark.parametrize("place", [0, 1, 2])
def test_of_several_sources_the_one_on_this_host_is_found(place: int, caplog: pytest.LogCaptureFixture) -> None:
    into = blank()
    with (
        transport(same_host=False) as far,
        transport(same_host=False) as farther,
        transport(same_host=True) as near,
        transport(same_host=True) as receiver,
    ):
        for source in (far, farther, near):
            source.send_checkpoint([], 1, state_of(1), TIMEOUT)
        addresses = [far.metadata(), farther.metadata()]
        addresses.insert(place, near.metadata())
        assert is_state(receiver.fetch(addresses, 1, into=into).state, 1)
    assert holds(into, 1)
    assert taken_from_memory(caplog) == [(ALL, ALL)]


def test_only_what_has_changed_is_copied(caplog: pytest.LogCaptureFixture) -> None:
    into = state_of(1)
    into["b"][-1] += 1
    with transport(same_host=True) as source, transport(same_host=True) as receiver:
        source.send_checkpoint([], 1, state_of(1), TIMEOUT)
        received = receiver.fetch(source.metadata(), 1, into=into, known="into")
    assert holds(into, 1)
    assert received.num_bytes_fetched == CHUNK_BYTES
    assert taken_from_memory(caplog) == [(1, 1)]


def test_progress_is_told_as_in_any_fetch() -> None:
    told: list[FetchProgress] = []
    with transport(same_host=True) as source, transport(same_host=True, on_progress=told.append) as receiver:
        source.send_checkpoint([], 1, state_of(1), TIMEOUT)
        receiver.fetch(source.metadata(), 1)
    assert [each.done_bytes for each in told] == [CHUNK_BYTES * number for number in range(1, ALL + 1)]
    assert {each.total_bytes for each in told} == {STATE_BYTES}


def test_a_receiver_that_fails_itself_is_told_so_and_left_poisoned() -> None:
    def fail(progress: FetchProgress) -> None:
        if progress.done_bytes > STATE_BYTES // 2:
            raise RuntimeError("of the caller's own")

    into = blank()
    with transport(same_host=True) as source, transport(same_host=True, on_progress=fail) as receiver:
        source.send_checkpoint([], 1, state_of(1), TIMEOUT)
        with pytest.raises(TransportError, match=r"the receiver failed: RuntimeError: of the caller's own") as caught:
            receiver.fetch(source.metadata(), 1, into=into)
    assert caught.value.destination_touched
    assert is_poisoned(into)


@contextlib.contextmanager
def lending_process(seed: int, host: str = "127.0.0.1") -> Iterator[tuple[Program, str]]:
    script = str(WORKERS / "lending_process.py")
    with Program(
        [sys.executable, script, str(seed), host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as source:
        assert source.stdout is not None
        try:
            yield source, source.stdout.readline().strip()
        finally:
            source.kill()
            source.communicate(timeout=20)


@pytest.mark.parametrize("verify", [True, False])
def test_a_source_that_dies_in_the_middle(
    verify: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # as many threads
    """What has a digest is whole all the same; without one, nobody says that the memory was kept."""
    into = blank()
    with lending_process(3) as (source, address):

        def kill(progress: FetchProgress) -> None:
            if progress.done_bytes == STATE_BYTES // 2:
                source.kill()
                source.wait(20)

        with transport(same_host=True, verify=verify, on_progress=kill) as receiver:
            if verify:
                assert is_state(receiver.fetch(address, 1, into=into).state, 3)
            else:
                with pytest.raises(TransportError) as caught:
                    receiver.fetch(address, 1, into=into)
                assert caught.value.destination_touched
    assert holds(into, 3) if verify else is_poisoned(into)
    assert taken_from_memory(caplog) == [(ALL if verify else 0, ALL)]
    assert open_snapshots() == []


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_snapshot_that_is_replaced_in_the_middle_is_fetched_anew(
    num_threads: int, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: num_threads)
    into = blank()
    done = threading.Event()
    # One place, whose memory the next snapshot takes as soon as it may.
    hasty = {"max_snapshots": 1, "contended_bytes_per_s": 1e12, "same_host": True}

    def replace(progress: FetchProgress) -> None:
        if done.is_set() or progress.done_bytes < STATE_BYTES // 4:
            return
        done.set()
        send_when_free(source, 1, state_of(2))

    with (
        transport(**hasty) as source,
        transport(same_host=True, verify=verify, on_progress=replace) as receiver,
    ):
        source.send_checkpoint([], 1, state_of(1), TIMEOUT)
        received = receiver.fetch(source.metadata(), 1, into=into)
    assert done.is_set()
    assert is_state(received.state, 2)
    assert holds(into, 2)


def test_a_snapshot_is_not_replaced_while_it_is_copied() -> None:
    refused: list[SnapshotLimitError] = []

    def replace(_progress: FetchProgress) -> None:
        if not refused:
            with pytest.raises(SnapshotLimitError) as caught:
                source.send_checkpoint([], 2, state_of(2), TIMEOUT)
            refused.append(caught.value)

    with (
        transport(max_snapshots=1, same_host=True) as source,
        transport(same_host=True, on_progress=replace) as receiver,
    ):
        source.send_checkpoint([], 1, state_of(1), TIMEOUT)
        assert is_state(receiver.fetch(source.metadata(), 1).state, 1)
    assert refused


def test_a_chunk_that_was_damaged_in_memory_comes_through_the_network(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = threading.Event()

    read = shared_memory.LentMemory.read

    def damage(lent: shared_memory.LentMemory, buffers: Sequence[memoryview], start: int) -> None:
        read(lent, buffers, start)
        if not damaged.is_set():
            damaged.set()
            buffers[0][0] ^= 1

    monkeypatch.setattr(shared_memory.LentMemory, "read", damage)
    into = blank()
    with network(sender={"same_host": True}, same_host=True) as net:
        assert is_state(net.fetch(into=into), 1)
        assert CHUNK_BYTES < net.proxy.num_bytes < CHUNK_BYTES + HEADS_BYTES
    assert holds(into, 1)
    assert taken_from_memory(caplog) == [(ALL - 1, ALL)]


def test_a_source_that_lends_nothing_in_time_is_asked_in_the_ordinary_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_host_client, "_WAIT_S", 0.1)
    monkeypatch.setattr(same_host_server._Lending, "_lend", lambda *_: None)
    with network(sender={"same_host": True}, same_host=True) as net:
        assert is_state(net.fetch(), 1)
        wait_until(lambda: net.proxy.num_bytes > STATE_BYTES)  # the proxy counts bytes after it has sent them


def test_a_source_that_lends_nothing_does_not_defeat_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_host_server._Lending, "_lend", lambda *_: None)
    began_s = time.monotonic()
    with network(sender={"same_host": True}, same_host=True) as net, pytest.raises(DeadlineExceededError):
        net.fetch(timeout_s=0.3)
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize("verify", [True, False])
def test_the_deadline_ends_a_copy_in_the_middle(verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    into = blank()
    over = threading.Event()

    def wait(progress: FetchProgress) -> None:
        if progress.done_bytes == STATE_BYTES // 2:
            over.wait(1)

    with (
        transport(same_host=True) as source,
        transport(same_host=True, on_progress=wait, verify=verify) as receiver,
    ):
        source.send_checkpoint([], 1, state_of(1), TIMEOUT)
        with pytest.raises(DeadlineExceededError, match=f"{STATE_BYTES // 2} of {STATE_BYTES} bytes") as caught:
            receiver.fetch(source.metadata(), 1, into=into, timeout=timedelta(seconds=0.5))
    assert caught.value.destination_touched
    assert is_poisoned(into)


def test_no_descriptor_left_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_args: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(shared_memory.socket, "recv_fds", none)
    with network(sender={"same_host": True}, same_host=True) as net:
        assert is_state(net.fetch(), 1)
        wait_until(lambda: net.proxy.num_bytes > STATE_BYTES)  # the proxy counts bytes after it has sent them


@as_root
def test_a_receiver_of_another_user_fetches_in_the_ordinary_way(caplog: pytest.LogCaptureFixture) -> None:
    with lending_process(3) as (_source, address), acting_as(NOBODY), transport(same_host=True) as receiver:
        assert is_state(receiver.fetch(address, 1).state, 3)
    assert taken_from_memory(caplog) == []


@contextlib.contextmanager
def namespace() -> Iterator[tuple[str, Path]]:
    """A network namespace at the other end of a link: the address of this end, and the namespace's file."""
    name, outer, inner = (f"fts{kind}{os.getpid()}" for kind in ("n", "o", "i"))
    here, there = (f"10.214.{os.getpid() % 250}.{number}" for number in (1, 2))

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)

    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
        ip("addr", "add", f"{here}/24", "dev", outer)
        ip("link", "set", outer, "up")
        ip("-n", name, "addr", "add", f"{there}/24", "dev", inner)
        ip("-n", name, "link", "set", inner, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield here, Path("/run/netns", name)
    finally:
        ip("netns", "del", name)


@as_root
def test_in_another_network_namespace_it_comes_through_the_network(caplog: pytest.LogCaptureFixture) -> None:
    """As between two containers of a host."""

    def fetch(address: str) -> None:
        with transport(same_host=True) as receiver:
            assert is_state(receiver.fetch(address, 1).state, 3)

    def fetch_inside(path: Path, address: str) -> None:
        with path.open() as file:  # the threads of a fetch are in the namespace of the thread that starts them
            assert not ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET)
        fetch(address)

    with namespace() as (here, path), lending_process(3, here) as (_source, address), ThreadPoolExecutor(1) as pool:
        pool.submit(fetch_inside, path, address).result(60)
        assert taken_from_memory(caplog) == []
        fetch(address)
        assert taken_from_memory(caplog) == [(ALL, ALL)]


def test_a_child_that_is_forked_meanwhile_keeps_nothing() -> None:
    with lending_process(3) as (_source, address):
        found = run([sys.executable, str(WORKERS / "forking_receiver.py"), address], timeout=60, check=True)
    assert json.loads(found.stdout) == {"during": 1, "child": 0, "sockets": 0, "after": 0}


def test_a_source_that_leaves_children_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has no end of the socket, so that a receiver sees that the source is gone."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    script = str(WORKERS / "serving_process.py")
    with Program([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as source:
        assert source.stdin is not None
        assert source.stdout is not None
        address = source.stdout.readline().strip()
        lost: list[float] = []

        def fork_and_kill(progress: FetchProgress) -> None:
            if not lost:
                source.stdin.write("\n")
                source.stdin.flush()
                assert source.stdout.readline() == "forked\n"
                os.kill(source.pid, signal.SIGKILL)
                lost.append(time.monotonic())

        with transport(same_host=True, verify=False, on_progress=fork_and_kill) as receiver:
            with pytest.raises(TransportError):
                receiver.fetch(address, 1, timeout=FetchTimeout(total=TIMEOUT, unreachable=timedelta(seconds=1)))
            assert time.monotonic() - lost[0] < 10
        source.stdin.close()
        source.wait(20)


@pytest.mark.parametrize("verify", [True, False])
def test_many_fetches_at_once_while_snapshots_change(verify: bool) -> None:
    stopping = threading.Event()
    failures: list[BaseException] = []
    with transport(same_host=True, max_snapshots=3, contended_bytes_per_s=1e9) as source:
        source.send_checkpoint([], 0, state_of(0), TIMEOUT)

        def fetch() -> None:
            try:
                with transport(same_host=True, verify=verify) as receiver:
                    into = blank()
                    for _ in range(10):
                        received = receiver.fetch(source.metadata(), "latest", into=into)
                        assert is_state(received.state, received.step)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=fetch) for _ in range(4)]
        for thread in threads:
            thread.start()
        step = 0
        while any(thread.is_alive() for thread in threads):
            with contextlib.suppress(SnapshotLimitError):
                source.send_checkpoint([], step + 1, state_of(step + 1), TIMEOUT)
                step += 1
            stopping.wait(0.02)
        for thread in threads:
            thread.join()
    assert failures == []
    assert step > 1
    assert open_snapshots() == []


def test_live_memory_that_is_shared_comes_through_the_network_and_is_not_copied(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = state_of(1)
    with transport(same_host=True) as source, transport(same_host=True) as receiver:
        held = source.server.hold(Taking(step=1, state=state, deferrable=lambda _tensor: True))
        assert held is not None
        begun = source.server.take(held, share=True)
        begun.copy_deferred()
        begun.publish()
        assert is_state(receiver.fetch(source.metadata(), 1).state, 1)
        assert source.server._stager._pool.num_taken() == 0
    assert taken_from_memory(caplog) == []


def test_small_tensors_and_empty_ones_come_whole(caplog: pytest.LogCaptureFixture) -> None:
    state = {
        "none": torch.empty(0, 3),
        "small": [torch.tensor(number, dtype=torch.float64) for number in range(300)],
        "odd": torch.arange(12345, dtype=torch.uint8),
        "fresh": torch.randn(100, 7).to(torch.bfloat16),
    }
    with transport(same_host=True, chunk_bytes=1000) as source, transport(same_host=True) as receiver:
        source.send_checkpoint([], 1, state, TIMEOUT)
        received = receiver.fetch(source.metadata(), 1).state
    assert torch.equal(received["odd"], state["odd"])
    assert torch.equal(received["fresh"], state["fresh"])
    assert [each.item() for each in received["small"]] == list(range(300))
    assert taken_from_memory(caplog)


def test_a_state_without_data_asks_for_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    with transport(same_host=True) as source, transport(same_host=True) as receiver:
        source.send_checkpoint([], 1, {"lr": 0.1}, TIMEOUT)
        assert receiver.fetch(source.metadata(), 1).state == {"lr": 0.1}
    assert taken_from_memory(caplog) == []
