from __future__ import annotations

import importlib.metadata
import json
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from quorum_threads import lighthouse
from scripted_peer import answering, scripted
from typer.testing import CliRunner

from ft_transport import ConfigurationError, HTTPTransport, TransportSettings
from ft_transport.cli import doctor
from ft_transport.cli.keepers import FoundKeeper
from ft_transport.cli.main import app


@pytest.fixture(autouse=True)
def _at_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_TRANSPORT_ADVERTISE", "127.0.0.1")


def test_a_host_that_tells_an_address_which_nobody_reaches_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_TRANSPORT_ADVERTISE", "no-such-interface")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    (found,) = (check for check in json.loads(result.output) if check["name"] == "advertised")
    assert result.exit_code == 1
    assert found["verdict"] == "bad"
    assert "no-such-interface" in found["found"]
    assert "FT_TRANSPORT_ADVERTISE" in found["remedy"]


def test_a_peer_that_is_not_there_is_bad_and_the_rest_is_looked_at() -> None:
    result = CliRunner().invoke(app, ["doctor", "http://127.0.0.1:9", "--json"])
    assert result.exit_code == 1
    checks = {check["name"]: check for check in json.loads(result.output)}
    assert checks["127.0.0.1:9"]["verdict"] == "bad"
    assert "PeerUnreachableError" in checks["127.0.0.1:9"]["found"]
    assert {"versions", "memory file", "open files", "advertised"} <= set(checks)


def advertised() -> dict[str, str]:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    (found,) = (check for check in json.loads(result.output) if check["name"] == "advertised")
    return found


def test_without_a_token_the_loopback_is_said_to_be_all_that_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "FT_TRANSPORT_ADVERTISE",
        "FT_TRANSPORT_TOKEN",
        "FT_TRANSPORT_TOKEN_FILE",
        "FT_TRANSPORT_ALLOW_ANYONE",
    ):
        monkeypatch.delenv(name, raising=False)
    found = advertised()
    assert found["verdict"] == "warn"
    assert "listen on the loopback alone" in found["found"]
    assert "FT_TRANSPORT_TOKEN" in found["remedy"]


def test_an_address_that_a_transport_would_refuse_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    """What doctor says and what a transport does are the same."""
    monkeypatch.setenv("FT_TRANSPORT_ADVERTISE", "192.0.2.7")
    monkeypatch.delenv("FT_TRANSPORT_TOKEN", raising=False)
    with pytest.raises(ConfigurationError, match="listens on"):
        HTTPTransport()
    found = advertised()
    assert found["verdict"] == "bad"
    assert "FT_TRANSPORT_TOKEN" in found["remedy"]


@pytest.mark.parametrize("installed", ["torchft", "torchft-nightly", None])
def test_either_distribution_of_torchft_is_found(monkeypatch: pytest.MonkeyPatch, installed: str | None) -> None:
    def version(name: str) -> str:
        if name.startswith("torchft") and name != installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    (found,) = (check for check in json.loads(result.output) if check["name"] == "versions")

    assert found["found"].endswith(f", {installed} 1.2.3" if installed else ", no torchft")
    assert found["verdict"] == ("ok" if installed else "warn")
    assert ("Python 3.10 to 3.13" in found["remedy"]) == (installed is None)


TIMEOUT = timedelta(seconds=20)
TOKEN = "a-token-of-the-job-long-enough-for-one"
NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize("token", [None, TOKEN])
def test_each_replica_is_told_of_and_one_that_is_not_there_is_an_error(
    token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token is not None:
        monkeypatch.setenv("FT_TRANSPORT_TOKEN", token)
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1", replica="r\x1b[2J7")
    source = HTTPTransport[Any](TIMEOUT, settings=settings)
    try:
        empty = CliRunner().invoke(app, ["status", source.metadata()])
        assert "has no snapshot now" in empty.output
        source.send_checkpoint([], 8, {"w": torch.zeros(1 << 18)}, TIMEOUT)
        result = CliRunner().invoke(app, ["status", source.metadata()])
        assert result.exit_code == 0
        assert "step 8, 1.1 MB, 0 receive it" in result.output
        assert "\x1b" not in result.output
        both = CliRunner().invoke(app, ["status", NOBODY, source.metadata(), "--json"])
    finally:
        source.shutdown()
    assert both.exit_code == 1
    gone, there = json.loads(both.output)
    assert "PeerUnreachableError" in gone["error"]
    assert (there["step"], there["replica"]) == (8, "r\x1b[2J7")


@pytest.mark.parametrize(
    "body",
    [
        b'{"step": 1, "more": ' + b"[" * 9_000,
        b'{"replica": "\xff"}',
        b'{"step": 1, "snapshot_bytes": ' + b"9" * 400 + b"}",
        b'{"clients": -1}',
        b"{",
        b"[]",
    ],
    ids=range(6),
)
def test_what_is_no_status_is_said_to_be_none(body: bytes) -> None:
    with scripted(answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))) as port:
        result = CliRunner().invoke(app, ["status", f"http://127.0.0.1:{port}"])
    assert result.exit_code == 1
    assert "expected the status of a server" in result.output


@pytest.mark.usefixtures("torchft_ready")
@pytest.mark.parametrize(("timeout_ms", "verdict"), [(1000, "ok"), (5000, "warn")])
def test_a_lighthouse_that_waits_long_for_a_dead_host_is_named(
    monkeypatch: pytest.MonkeyPatch, timeout_ms: int, verdict: str
) -> None:
    with lighthouse(heartbeat_timeout_ms=timeout_ms) as address:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
        result = CliRunner().invoke(app, ["doctor", "--json"])
    (found,) = (check for check in json.loads(result.output) if check["name"] == "lighthouse")
    assert found["verdict"] == verdict
    assert ("--heartbeat_timeout_ms 1000" in found["remedy"]) == (verdict == "warn")


@pytest.mark.usefixtures("torchft_ready")
def test_a_lighthouse_that_is_not_there_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:9")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    (found,) = (check for check in json.loads(result.output) if check["name"] == "lighthouse")
    assert (result.exit_code, found["verdict"]) == (1, "bad")


def test_memory_that_is_held_for_dead_processes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeper(held_bytes: int) -> FoundKeeper:
        return FoundKeeper(pid=1, trainer_pid=2, is_trainer_alive=False, num_snapshots=2, held_bytes=held_bytes)

    for held_bytes, verdict in ((1 << 20, "ok"), (1 << 60, "warn")):
        monkeypatch.setattr(doctor, "find_keepers", partial(list, [keeper(held_bytes)]))
        result = CliRunner().invoke(app, ["doctor", "--json"])
        (found,) = (check for check in json.loads(result.output) if check["name"] == "keepers")
        assert found["verdict"] == verdict
        assert "1 hold" in found["found"]
        assert ("ft-transport keepers --end" in found["remedy"]) == (verdict == "warn")
