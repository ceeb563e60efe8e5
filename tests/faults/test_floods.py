"""One stranger at full speed: it is answered a few times a second, and genuine peers beside it as ever."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
import torch
from served_memory import serving

from ft_transport import WeightReceiver
from ft_transport.credentials import Keys
from ft_transport.http.client.responses import make_challenge
from ft_transport.http.server import connection_slots
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.telemetry.recorder import Recorder
from ft_transport.wire.routes import CHALLENGE_ROUTE

WORKER = Path(__file__).parents[1] / "workers" / "flooding_clients.py"
TOKEN = "a-secret-of-this-job"
BURST = 16
_FOR_S = 0.5
REQUEST = "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n"


@pytest.fixture(autouse=True)
def small_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_slots, "_BURST", float(BURST))


@dataclass
class Made:
    """What a flood came to, once it is over."""

    began_s: float
    seconds: float = 0.0
    num_opened: int = 0
    num_asked: int = 0
    num_answers: int = 0

    def lasts(self) -> bool:
        return time.monotonic() < self.began_s + _FOR_S


@contextlib.contextmanager
def flood(port: int, kind: str, path: str = "/status", source: str = "127.0.0.1", headers: str = "") -> Iterator[Made]:
    command = [sys.executable, str(WORKER), str(port), kind, REQUEST.format(path=path, headers=headers), source]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        made = Made(time.monotonic())
        yield made
        process.stdin.close()
        made.num_opened, made.num_asked, made.num_answers = map(int, process.stdout.readline().split())
        made.seconds = time.monotonic() - made.began_s


@pytest.mark.parametrize(("kind", "source"), [("asking", "127.0.0.1"), ("reconnecting", "127.0.0.2")])
def test_without_the_token_it_is_answered_a_few_times_a_second(kind: str, source: str) -> None:
    with serving(token=TOKEN) as served:
        content = served.put(5, bytes(1 << 20)).content
        with flood(served.server.port, kind, source=source) as made:
            num_fetches = 0
            while made.lasts() or num_fetches <= BURST:
                assert served.ask_proved("/checkpoint/5/full") == content
                num_fetches += 1
    assert BURST <= made.num_answers <= BURST + 50 * made.seconds + 1


def test_where_nobody_proves_anything_small_requests_wait_and_data_does_not() -> None:
    with serving() as served:
        content = served.put(5, bytes(1 << 20)).content
        with flood(served.server.port, "asking", source="127.0.0.2") as made:
            while made.lasts():
                assert served.ask("/checkpoint/5/full").body == content
    assert BURST <= made.num_answers <= 8 * 8 + BURST + 300 * made.seconds + 8


@pytest.mark.parametrize(("path", "token"), [("/state", TOKEN), ("/metrics", None), ("/", TOKEN)])
def test_who_watches_is_answered_some_hundred_times_a_second(
    path: str, token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long answers are none that somebody fetches.
    monkeypatch.setattr(connection_slots, "_MOVING_BYTES", 1000)
    watch = ProcessStatus(Recorder())
    watch.set_part("much", lambda: "x" * 10_000)
    headers = f"Authorization: Bearer {Keys.of(TOKEN).watch_tokens()[0]}\r\n" if token is not None else ""
    with serving(token=token, process_status=watch) as served:
        content = served.put(5, bytes(1 << 20)).content
        with flood(served.server.port, "asking", path, "127.0.0.2", headers) as made:
            while made.lasts():
                fetched = served.ask_proved("/checkpoint/5/full") if token else served.ask("/checkpoint/5/full").body
                assert fetched == content
    assert BURST <= made.num_answers <= 8 * 8 + BURST + 300 * made.seconds + 8


def test_who_opens_and_closes_keeps_nobody_out() -> None:
    with serving(token=TOKEN) as served:
        content = served.put(5, bytes(1 << 20)).content
        with flood(served.server.port, "connecting") as made:
            while made.lasts():
                assert served.ask_proved("/checkpoint/5/full") == content
    assert made.num_opened > 100


@pytest.mark.parametrize(("kind", "path"), [("asking", "/weights"), ("reconnecting", "/nothing")])
def test_a_receiver_of_orders_answers_strangers_a_few_times_a_second(kind: str, path: str) -> None:
    with WeightReceiver({"w": torch.zeros(4)}, host="127.0.0.1", token=TOKEN) as receiver:
        port = urlsplit(receiver.url).port
        assert port is not None
        with flood(port, kind, path, "127.0.0.2") as made:
            while made.lasts():
                began_s = time.monotonic()
                assert _is_answered(port)
                assert time.monotonic() - began_s < 1
    assert BURST <= made.num_answers <= BURST + 50 * made.seconds + 1


def _is_answered(port: int) -> bool:
    """Whether somebody at another address is told what it has done wrong."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=10)) as http:
        http.request("POST", "/weights/1", "{}", {"Content-Type": "application/json"})
        return http.getresponse().status == 400


def test_a_refused_request_ends_its_connection() -> None:
    with serving(token=TOKEN) as served, closing(served.connect()) as http:
        http.request("GET", "/status")
        response = http.getresponse()
        assert (response.status, response.headers["Connection"]) == (401, "close")
        response.read()
        assert http.sock is None


def test_a_connection_is_challenged_once() -> None:
    with serving(token=TOKEN) as served, closing(served.connect()) as http:
        assert _challenge(http, served.server.port) == 200
        assert http.sock is not None
        assert _challenge(http, served.server.port) == 401
        assert http.sock is None


def _challenge(http: HTTPConnection, port: int) -> int:
    challenge = make_challenge(Keys.of(TOKEN), f"127.0.0.1:{port}")
    http.request("GET", f"{CHALLENGE_ROUTE}?{urlencode(challenge.query())}")
    response = http.getresponse()
    response.read()
    return response.status
