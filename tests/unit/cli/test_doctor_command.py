import json

import pytest
from typer.testing import CliRunner

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


def test_what_is_no_url_is_said() -> None:
    result = CliRunner().invoke(app, ["doctor", "nonsense"])
    assert result.exit_code != 0
    assert "expected a URL like" in str(result.exception)
