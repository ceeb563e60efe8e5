"""The command's own ways; what it draws: test_top_screen.py."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from ft_transport.cli import top
from ft_transport.cli.main import app


def test_without_a_terminal_each_look_is_printed_below_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    result = CliRunner().invoke(app, ["top", "http://127.0.0.1:9"])

    assert result.exit_code == 1
    assert result.output.count("THE LIGHTHOUSE DOES NOT ANSWER") == 2
