"""Who may watch a process, and what that opens."""

from __future__ import annotations

import base64
import json
from contextlib import closing

import pytest
from served_memory import Answer, Serving, serving

from ft_transport.keys import Keys
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.telemetry.recorder import Recorder
from ft_transport.wire.routes import WATCH_ROUTES

TOKEN = "a-job-token-of-some-length"
WATCH_TOKEN = Keys.of(TOKEN).watch_tokens()[0]


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


def ask(served: Serving, path: str, authorization: str | None) -> Answer:
    with closing(served.connect()) as connection:
        connection.request("GET", path, headers={"Authorization": authorization} if authorization is not None else {})
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())


@pytest.mark.parametrize("path", sorted(WATCH_ROUTES))
@pytest.mark.parametrize("authorization", [f"Bearer {WATCH_TOKEN}", basic(WATCH_TOKEN), f"bearer {WATCH_TOKEN}"])
def test_the_watch_token_opens_what_is_watched(path: str, authorization: str) -> None:
    with serving(token=TOKEN) as served:
        assert ask(served, path, authorization).status == 200


@pytest.mark.parametrize("path", sorted(WATCH_ROUTES))
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        f"Bearer {TOKEN}",
        basic(TOKEN),
        basic(WATCH_TOKEN[:-1]),
        f"Bearer {WATCH_TOKEN[:-1]}",
        "Bearer é",
        "Basic !!!",
        "Basic " + "A" * 4000,
        f"Digest {WATCH_TOKEN}",
        "FT-HMAC-SHA256 number=1, mac=" + "0" * 64,
    ],
)
def test_without_it_a_browser_is_told_to_ask_for_it_and_nothing_else(path: str, authorization: str | None) -> None:
    with serving(token=TOKEN) as served:
        if authorization is not None:
            authorization = authorization.encode().decode("latin-1")
        answer = ask(served, path, authorization)

    assert answer.status == 401
    assert answer.headers["WWW-Authenticate"].startswith("Basic ")
    assert b"replica-7" not in answer.body
    assert WATCH_TOKEN.encode() not in answer.body


@pytest.mark.parametrize(
    "path", ["/status", "/checkpoint/latest/metadata", "/checkpoint/latest/full", "/relay/" + "0" * 32]
)
def test_it_opens_nothing_of_the_state(path: str) -> None:
    with serving(token=TOKEN) as served:
        served.put(5)
        answer = ask(served, path, f"Bearer {WATCH_TOKEN}")

    assert answer.status == 401
    assert b"state" not in answer.body


def test_while_the_job_token_is_replaced_both_watch_tokens_do() -> None:
    with serving(token="the-new-token the-old-token") as served:
        for token in ("the-new-token", "the-old-token"):
            assert ask(served, "/state", f"Bearer {Keys.of(token).watch_tokens()[0]}").status == 200


def test_a_peer_of_the_job_may_watch() -> None:
    with serving(token=TOKEN) as served:
        assert json.loads(served.ask_proved("/state"))["transport"]["replica"] == "replica-7"


def test_a_part_that_fails_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> object:
        raise RuntimeError("not now")

    watch = ProcessStatus(Recorder())
    watch.set_part("broken", broken)
    watch.set_part("whole", lambda: {"step": 7})
    with serving(process_status=watch) as served:
        told = json.loads(served.ask("/state").body)

    assert (told["broken"], told["whole"]) == (None, {"step": 7})
    assert "cannot read the part broken of this process's state" in caplog.text
