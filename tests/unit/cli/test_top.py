"""The command's own ways; what it draws: test_top_screen.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from programs import Program
from typer.testing import CliRunner

from ft_transport.cli import top
from ft_transport.cli.main import app
from ft_transport.credentials import TOKEN_VARIABLE, Keys

NOBODY = "http://127.0.0.1:9"


@contextmanager
def top_serving(**environment: str) -> Iterator[str]:
    """The ``host:port`` of ``ft-transport top --serve``, which runs meanwhile, and ends with Ctrl-C."""
    command = [sys.executable, "-m", "ft_transport.cli", "top", NOBODY, "--serve"]
    with Program(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        try:
            assert process.stdout is not None
            yield urlsplit(process.stdout.readline().split()[-1]).netloc
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def ask(place: str, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    with closing(HTTPConnection(place, timeout=20)) as http:
        http.request(method, path, headers=headers)
        response = http.getresponse()
        return response.status, response.read()


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


def test_serve_gives_browsers_of_this_host_the_job_and_nothing_else() -> None:
    with top_serving() as place:
        assert place.startswith("127.0.0.1:")
        status, page = ask(place, "/")
        assert (status, b"<title>ft-transport</title>" in page) == (200, True)
        job = json.loads(ask(place, "/state")[1])["job"]
        assert (job["lighthouse"], job["processes"], job["is_lighthouse_read"]) == (NOBODY, [], False)
        assert ask(place, "/state", Host="rebound.example")[0] == 421
        assert ask(place, "/state", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"})[0] == 403
        assert ask(place, "/state", "POST")[0] == 405
        assert ask(place, "/checkpoint/latest/full")[0] == 503


def test_serve_asks_browsers_for_the_watch_token_where_there_is_a_job_token() -> None:
    token = "a-job-token-of-some-length"
    with top_serving(**{TOKEN_VARIABLE: token}) as place:
        assert ask(place, "/")[0] == ask(place, "/state")[0] == 401
        assert ask(place, "/state", Authorization=f"Bearer {token}")[0] == 401
        assert ask(place, "/state", Authorization=f"Bearer {Keys.of(token).watch_tokens()[0]}")[0] == 200


def test_serve_listens_on_the_loopback_unless_there_is_a_job_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    result = CliRunner().invoke(app, ["top", NOBODY, "--serve", "--host", "0.0.0.0"])
    assert result.exit_code != 0
    assert "expected a loopback address to listen on, because there is no job token" in str(result.exception)


def test_it_prints_what_servers_of_the_same_job_token_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "the-job-token")
    expected = Keys.of("the-job-token").watch_tokens()[0]

    assert CliRunner().invoke(app, ["watch-token"]).stdout == f"{expected}\n"
    assert json.loads(CliRunner().invoke(app, ["watch-token", "--json"]).stdout) == {"watch_token": expected}
    assert "the-job-token" not in expected


def test_without_a_job_token_it_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)

    assert CliRunner().invoke(app, ["watch-token"]).exit_code == 1
