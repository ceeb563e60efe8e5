"""By which names a server on the loopback is asked; a page that has led its own name there gets nothing."""

from __future__ import annotations

import json
import logging
import socket
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
import torch
from served_memory import serving

from ft_transport import WeightReceiver
from ft_transport.http.server.request_guard import HostCheck

FOREIGN = ["rebound.example", "rebound.example:80", "localhost.rebound.example", "127.0.0.1.rebound.example", ""]


def ask(port: int, host: str, method: str = "GET", path: str = "/status") -> int:
    with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as http:
        body = json.dumps({}) if method == "POST" else None
        http.request(method, path, body, {"Host": host, "Content-Type": "application/json"})
        return http.getresponse().status


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_name_reads_nothing(host: str) -> None:
    with serving() as served:
        served.put(5)
        for path in ("/status", "/checkpoint/5/full", "/checkpoint/5/metadata"):
            assert ask(served.server.port, host, path=path) == 421


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:1", "[::1]:1", "localhost", "LOCALHOST.:80", "own-name"])
def test_the_names_of_this_host_read(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "own-name")
    with serving() as served:
        assert ask(served.server.port, host) == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_name_orders_nothing(host: str) -> None:
    with WeightReceiver({"w": torch.zeros(4)}) as receiver:
        port = urlsplit(receiver.url).port
        assert port is not None
        assert ask(port, host, "POST", "/weights/1") == 421
        assert ask(port, host, "GET", "/weights") == 421
        assert ask(port, "localhost", "GET", "/weights") != 421


def test_with_a_token_the_proof_decides() -> None:
    with serving(token="a-secret-of-this-job") as served:
        assert ask(served.server.port, "rebound.example") == 401


def test_it_is_told_once_and_without_the_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), serving() as served:
        for _ in range(3):
            ask(served.server.port, "rebound.example")
    assert [each.getMessage() for each in caplog.records if "refused" in each.getMessage()] == [
        "127.0.0.1: a request was refused: expected an address, localhost or a name of this host in the Host header"
    ]


def test_a_request_that_names_no_host_is_from_no_browser() -> None:
    assert HostCheck([]).has(None)
    assert HostCheck(["forwarded.example:99"]).has("forwarded.example")
