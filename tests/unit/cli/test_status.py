from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
import torch
from scripted_peer import answering, scripted
from typer.testing import CliRunner

from ft_transport import HTTPTransport, TransportSettings
from ft_transport.cli.main import app

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


def test_the_demo_takes_the_arguments_of_the_demo() -> None:
    pytest.importorskip("torchft")
    result = CliRunner().invoke(app, ["demo", "--width", "wide"])
    assert result.exit_code == 2
    assert "invalid int value: 'wide'" in result.output
