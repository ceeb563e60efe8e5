"""The command that prints the watch token."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ft_transport.cli.main import app
from ft_transport.keys import TOKEN_VARIABLE, Keys


def test_it_prints_what_servers_of_the_same_job_token_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "the-job-token")
    expected = Keys.of("the-job-token").watch_tokens()[0]

    assert CliRunner().invoke(app, ["watch-token"]).stdout == f"{expected}\n"
    assert json.loads(CliRunner().invoke(app, ["watch-token", "--json"]).stdout) == {"watch_token": expected}
    assert "the-job-token" not in expected


def test_without_a_job_token_it_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)

    assert CliRunner().invoke(app, ["watch-token"]).exit_code == 1
