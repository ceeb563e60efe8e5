"""Receivers that hold snapshots without need: a trainer's newer ones are taken all the same, each in bounded time."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from served_memory import MemorySnapshot, Serving, serving

from ft_transport.errors import SnapshotLimitError

DATA = bytes(1 << 20) * 8
LEASE_S = 0.05
BYTES_PER_S = 160 << 20
BOUND_S = LEASE_S + len(DATA) / BYTES_PER_S
SLACK_S = 1.0
"""A boundary comes after the bound, and a busy machine takes its time to cut a connection."""


def ask_again(request: bytes, sock: socket.socket, is_over: threading.Event) -> None:
    while not is_over.wait(LEASE_S / 5):
        sock.sendall(request)
        if not sock.recv(1 << 16):
            return


def read_slowly(request: bytes, sock: socket.socket, is_over: threading.Event) -> None:
    sock.sendall(request)
    while sock.recv(1 << 10) and not is_over.wait(0.01):
        pass


ATTACKS: dict[str, tuple[Callable[[bytes, socket.socket, threading.Event], None], str]] = {
    "head": (ask_again, "HEAD /checkpoint/latest/full HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "one byte": (ask_again, "GET /checkpoint/latest/full HTTP/1.1\r\nHost: localhost\r\nRange: bytes=0-0\r\n\r\n"),
    "slow": (read_slowly, "GET /checkpoint/latest/full HTTP/1.1\r\nHost: localhost\r\n\r\n"),
}


@contextlib.contextmanager
def attacking(served: Serving, attack: str) -> Iterator[None]:
    """Four connections on what is served, made anew when they are cut off."""
    act, request = ATTACKS[attack]
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(0.01):
            with contextlib.suppress(OSError), contextlib.closing(socket.socket()) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
                sock.settimeout(20)
                sock.connect(("127.0.0.1", served.server.port))
                act(request.encode(), sock, is_over)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("attack", ATTACKS)
def test_each_newer_snapshot_is_taken_within_the_bound(attack: str) -> None:
    with serving(max_snapshots=1, lease_s=LEASE_S, contended_bytes_per_s=BYTES_PER_S) as served:
        newest = served.put(1, DATA)
        taken_s: list[float] = []
        with attacking(served, attack):
            for step in itertools.islice(itertools.count(2), 20):
                newest, took_s = take(served, step)
                taken_s.append(took_s)
        assert len(taken_s) == 20
        assert max(taken_s) <= BOUND_S + SLACK_S
        assert attack == "head" or max(taken_s) >= BOUND_S / 2, "the attack held nothing"
        assert served.ask(f"/checkpoint/{newest.step}/full").body == newest.content


def take(served: Serving, step: int) -> tuple[MemorySnapshot, float]:
    """As a trainer does at its step boundaries."""
    began_s = time.monotonic()
    while True:
        try:
            place = served.cache.reserve()
            break
        except SnapshotLimitError:
            assert time.monotonic() - began_s < 20, "no newer snapshot is ever taken"
            time.sleep(0.005)
    took_s = time.monotonic() - began_s
    snapshot = MemorySnapshot(step, DATA)
    served.cache.put(snapshot, place)
    served.server.wake()
    threading.Event().wait(LEASE_S / 2)  # A step, in which who was cut off comes back.
    return snapshot, took_s
