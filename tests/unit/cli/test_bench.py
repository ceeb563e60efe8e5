from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ft_transport.cli import bench
from ft_transport.cli.bench import BenchFailedError
from ft_transport.cli.main import app


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_QUICK_BYTES", 8 << 20)


@pytest.mark.slow
@pytest.mark.usefixtures("_small")
def test_everything_is_measured_beside_its_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_TRANSPORT_TOKEN", "a-token-of-the-job-long-enough-for-one")
    result = CliRunner().invoke(app, ["bench", "--quick", "--json"])
    assert result.exit_code == 0, result.exception
    told: dict[str, Any] = json.loads(result.stdout)
    rates = {each["name"]: each for each in told["rates"]}
    assert {name: each["ceiling"] for name, each in rates.items()} == {
        "memory copy": "",
        "clone": "memory copy",
        "bare socket loop": "",
        "fetch, not verified": "bare socket loop",
        "fetch, verified": "bare socket loop",
    }
    assert all(0 < each["low"] <= each["median"] <= each["high"] for each in rates.values())


@pytest.mark.usefixtures("_small")
def test_a_receiver_that_fails_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.sys, "executable", "/bin/false")
    result = CliRunner().invoke(app, ["bench", "--quick"])
    assert isinstance(result.exception, BenchFailedError)
    assert "ended with exit code 1" in str(result.exception)
