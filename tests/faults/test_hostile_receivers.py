"""A trainer's server among clients that open connections without end: its peers are served and its files open."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_memory import Serving, serving, until

from ft_transport.errors import PeerNotReadyError, PeerUnreachableError
from ft_transport.http.server import listener

WORKERS = Path(__file__).parents[1] / "workers"
MAX_CONNECTIONS = 64
TOKEN = "secret"
REQUEST = "GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = "POST /checkpoint/5/slices HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n"


@contextlib.contextmanager
def crowd(port: int, kind: str, count: int, request: str = REQUEST) -> Iterator[None]:
    command = [sys.executable, str(WORKERS / "hostile_clients.py"), str(port), kind, str(count), request]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield
        process.stdin.close()
        process.wait(20)


class Watch:
    """Counts this process's sockets, of which the server has all but a few, until it is closed."""

    def __init__(self) -> None:
        self.most = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(0.005):
            num_sockets = 0
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    num_sockets += os.readlink(f"/proc/self/fd/{name}").startswith("socket")
            self.most = max(self.most, num_sockets)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    monkeypatch.setattr(listener, "_MAX_CONNECTIONS", MAX_CONNECTIONS)
    with serving(token=TOKEN) as made:
        yield made


@pytest.mark.parametrize(("kind", "request_"), [("idle", ""), ("head", ""), ("asked", REQUEST), ("body", BODY)])
def test_a_crowd_takes_no_more_than_its_places_and_keeps_nobody_out(served: Serving, kind: str, request_: str) -> None:
    content = served.put(5, bytes(1 << 20)).content
    with contextlib.closing(Watch()) as watch, crowd(served.server.port, kind, 400, request_):
        for _ in range(5):
            assert ask_until_answered(served) == content
            assert Path("/proc/self/stat").read_text()
    assert 2 <= watch.most <= MAX_CONNECTIONS + 8
    until(lambda: served.server._slots.num_open == 0)


def ask_until_answered(served: Serving) -> bytes:
    """As a receiver does, which tries again where its connection broke."""
    for _ in range(8):
        with contextlib.suppress(PeerUnreachableError, PeerNotReadyError):
            return served.ask_proved("/checkpoint/5/full")
    raise AssertionError("nobody answered")
