"""A real Prometheus scrapes the demo while its replicas die and heal, and what it knows is what the demo counted."""

from __future__ import annotations

import bisect
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import counting_demo
import pytest
from certificates import HOST, issue
from programs import Program
from prometheus_server import Prometheus, needs_prometheus, prometheus

from ft_transport import HTTPTransport, TransportSettings
from ft_transport.credentials import Keys

pytestmark = [pytest.mark.slow, needs_prometheus]

_TOKEN = "a-job-token-of-some-length"
_TIMEOUT = timedelta(seconds=20)
_LONG_S = 60.0
_DEMO_S = 200.0
_LATE_S = 5.0
"""An event may come so much later than the step that it tells of, on a busy machine."""
_POLL_S = 0.2


def until(condition: Callable[[], bool], what: str) -> None:
    """Prometheus tells nobody when it has scraped."""
    deadline_s = time.monotonic() + _LONG_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(_POLL_S)


def _listen(lines: IO[str], told: queue.SimpleQueue[str]) -> None:
    with lines:
        for line in lines:
            told.put(line)
    told.put("")


@pytest.mark.timeout(300)
def test_prometheus_knows_what_the_demo_counted(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    targets = tmp_path / "demo.json"
    targets.write_text("[]")
    job = {"job_name": "demo", "file_sd_configs": [{"files": [str(targets)]}]}
    command = [counting_demo.__file__, "--steps", "30", "--width", "64", "--num-layers", "1", "--targets", str(targets)]
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with (
        prometheus(tmp_path, [job]) as server,
        (tmp_path / "demo.log").open("wb") as log,
        Program(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as demo,
    ):
        assert demo.stdout is not None
        assert demo.stdin is not None
        listening = threading.Thread(target=_listen, args=(demo.stdout, told))
        listening.start()
        try:
            counted = []
            deadline_s = time.monotonic() + _DEMO_S
            while (line := told.get(timeout=max(0.0, deadline_s - time.monotonic()))) != counting_demo.COUNTS + "\n":
                assert line, (tmp_path / "demo.log").read_text()[-3000:]
                if line.startswith(counting_demo.KILLS):
                    # Prometheus reads new targets after up to five seconds: some would die before it knows them.
                    doomed = set(json.loads(line.removeprefix(counting_demo.KILLS)))
                    until(lambda: doomed <= _scraped(server), "the replicas that are about to die are scraped")  # noqa: B023
                    demo.stdin.write("\n")
                    demo.stdin.flush()
                else:
                    counted.append(json.loads(line.removeprefix(counting_demo.COUNTS)))
            at_rest_s = counting_demo.unix_s(time.monotonic())
            running = {each["process"] for each in counted if each["is_running"]}
            until(lambda: _scraped(server, at_rest_s) == running, "the replicas that run are scraped once more")
            _compare(server, counted)
        finally:
            demo.stdin.close()
            demo.wait(_LONG_S)
            listening.join(_LONG_S)
        assert demo.returncode == 0, (tmp_path / "demo.log").read_text()[-3000:]


def _scraped(server: Prometheus, after_s: float = 0.0) -> set[str]:
    scraped = server.values("timestamp(ft_transport_step)", "process")
    return {process for process, scraped_s in scraped.items() if scraped_s > after_s}


def _compare(server: Prometheus, counted: list[dict[str, Any]]) -> None:
    running = {each["process"]: each for each in counted if each["is_running"]}
    assert len(counted) == 6
    assert len(running) == 3
    # Those that run stand still: each number is that of the demo.
    steps = server.values("ft_transport_steps_committed_total", "process")
    assert steps == {process: len(each["committed_unix_s"]) for process, each in running.items()}
    recoveries = server.values("ft_transport_recoveries_total", "process")
    assert recoveries == {process: each["recoveries"] for process, each in running.items()}
    assert all(recoveries.values())
    received = server.values("sum by (process) (ft_transport_transfer_bytes_total)", "process")
    assert received == {process: each["received_bytes"] for process, each in running.items()}
    assert all(received.values())
    assert server.query("ft_transport_unreadable_sources != 0") == []
    # Of each process, those that were killed too, each number that was scraped is the demo's of that moment.
    found = {
        each["metric"]["process"]: [(at_s, float(value)) for at_s, value in each["values"]]
        for each in server.query("ft_transport_steps_committed_total[1h]")
    }
    assert len(found) == 6
    for each in counted:
        samples, committed_s = found.get(each["process"], []), each["committed_unix_s"]
        assert [value for _, value in samples] == sorted(value for _, value in samples)
        for at_s, value in samples:
            least = bisect.bisect_right(committed_s, at_s)
            most = bisect.bisect_right(committed_s, at_s + _LATE_S) + 1
            assert least <= value <= most, (each["replica"], at_s, least, value, most)
    # Nobody was scraped and could not answer, but for those that had been killed.
    down = server.query('up{job="demo"} == 0')
    assert not {each["metric"]["process"] for each in down} & set(running)


@pytest.mark.timeout(120)
def test_prometheus_scrapes_with_the_watch_token_over_tls_and_without_it_gets_nothing(tmp_path: Path) -> None:
    files = issue(tmp_path / "issued").files
    token_file = tmp_path / "watch-token"
    token_file.write_text(Keys.of(_TOKEN).watch_tokens()[0])
    common: dict[str, Any] = {"host": HOST, "advertise": HOST, "token": _TOKEN}
    transports: dict[str, HTTPTransport[Any]] = {
        "plain": HTTPTransport(_TIMEOUT, settings=TransportSettings(**common)),
        "tls": HTTPTransport(_TIMEOUT, settings=TransportSettings(**common, tls=files)),
    }
    tls = {
        "scheme": "https",
        "tls_config": {
            "ca_file": str(files.authority),
            "cert_file": str(files.certificate),
            "key_file": str(files.key),
        },
    }
    shows = {"authorization": {"credentials_file": str(token_file)}}
    at = {name: [{"targets": [urlsplit(transport.metadata()).netloc]}] for name, transport in transports.items()}
    jobs = [
        {"job_name": "bearer", "static_configs": at["plain"], **shows},
        {
            "job_name": "password",
            "static_configs": at["plain"],
            "basic_auth": {"username": "prometheus", "password_file": str(token_file)},
        },
        {"job_name": "tls", "static_configs": at["tls"], **shows, **tls},
        {"job_name": "no token", "static_configs": at["plain"]},
        {"job_name": "job token", "static_configs": at["plain"], "authorization": {"credentials": _TOKEN}},
        {"job_name": "no token, tls", "static_configs": at["tls"], **tls},
    ]
    try:
        with prometheus(tmp_path, jobs) as server:
            until(lambda: len(server.values("up", "job")) == len(jobs), "all are scraped")
            assert server.values("up", "job") == {
                **dict.fromkeys(("bearer", "password", "tls"), 1),
                **dict.fromkeys(("no token", "job token", "no token, tls"), 0),
            }
            assert server.values("ft_transport_build_info", "job").keys() == {"bearer", "password", "tls"}
            errors = {each["labels"]["job"]: each["lastError"] for each in server.targets()}
            assert "401" in errors["no token"]
    finally:
        for transport in transports.values():
            transport.shutdown()
