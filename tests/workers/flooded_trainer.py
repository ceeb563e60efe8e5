"""A trainer that serves its state while one stranger floods it; prints JSON on what that cost.

``KIND SECONDS ROUNDS MEBIBYTES [TOKEN [FROM]]``, of ``flooding_clients.py`` or, with a number behind a colon
(``head+:2000``), of ``hostile_clients.py``. Phases take turns: peace, the same flood against ``bystander_server.py``,
the attack. In each the trainer counts in Python, then steps, both by itself, and then a receiver in a process of its
own fetches. ``server`` is the processor time of the server's thread for each second of the first two.
"""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from besieged_trainer import Trainer, program

from ft_transport import HTTPTransport, TransportSettings

_TIMEOUT = timedelta(seconds=60)
_REQUEST = "GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_BODY = "POST /checkpoint/1/slices HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999\r\n\r\n"
_HERE = Path(__file__).parent


def settings_of(token: str) -> TransportSettings:
    # Over the network: memory that is lent on one host would need hardly any request.
    return TransportSettings(host="127.0.0.1", token=token or None, same_host=False)


def receive(url: str, num_bytes: int, token: str) -> None:
    """Fetches once for each line; prints the seconds that it took, or why it failed."""
    into = {"w": torch.zeros(num_bytes // 4)}
    for _ in sys.stdin:
        transport: HTTPTransport[Any] = HTTPTransport(_TIMEOUT, num_chunks=4, settings=settings_of(token))
        began_s = time.monotonic()
        try:
            transport.fetch(url, into=into)
            print(time.monotonic() - began_s, flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        transport.shutdown()


def counted(seconds: float) -> float:
    """How often a loop of Python goes round in a second."""
    number = 0
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        number += 1
    return number / seconds


def phase(receiver: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    assert receiver.stdin is not None
    assert receiver.stdout is not None
    servers = [thread.ident for thread in threading.enumerate() if thread.name == "ft-transport-server"]
    clocks = [time.pthread_getcpuclockid(ident) for ident in servers if ident is not None]
    began_s, busy_s = time.monotonic(), sum(map(time.clock_gettime, clocks))
    rate = counted(seconds)
    trainer = Trainer()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        trainer.step()
    busy = (sum(map(time.clock_gettime, clocks)) - busy_s) / (time.monotonic() - began_s)
    fetch_s, failures = [], []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        print(file=receiver.stdin, flush=True)
        answer = receiver.stdout.readline().strip()
        try:
            fetch_s.append(float(answer))
        except ValueError:
            failures.append(answer[:300])
    return {
        "python": rate,
        "step_ms": statistics.fmean(trainer.step_s) * 1e3,
        "server": busy,
        "fetch_ms": statistics.median(fetch_s or [0.0]) * 1e3,
        "longest_ms": max(fetch_s, default=0.0) * 1e3,
        "failures": failures,
        "failed_opens": trainer.num_failed_opens,
    }


@contextlib.contextmanager
def flood(kind: str, port: str, source: str, made: list[str]) -> Iterator[None]:
    kind, _, count = kind.partition(":")
    request = _BODY if kind.startswith("body") else _REQUEST
    arguments = (
        ("hostile_clients.py", port, kind, count, request)
        if count
        else ("flooding_clients.py", port, kind, request, source)
    )
    with program(str(_HERE / arguments[0]), *arguments[1:]) as attacker:
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        if count:
            attacker.stdout.readline()
        time.sleep(0.5)
        yield
        attacker.stdin.close()
        made.append(attacker.stdout.readline().strip())


def main() -> None:
    kind, seconds, num_rounds, mebibytes = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    token, source = [*sys.argv[5:], "", ""][:2]
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    torch.set_num_threads(1)
    num_bytes = mebibytes << 20
    transport: HTTPTransport[Any] = HTTPTransport(_TIMEOUT, settings=settings_of(token))
    transport.send_checkpoint([], 1, {"w": torch.ones(num_bytes // 4)}, _TIMEOUT)
    url = transport.metadata()
    phases: dict[str, list[dict[str, Any]]] = {"peace": [], "control": [], "attack": []}
    made: dict[str, list[str]] = {"control": [], "attack": []}
    with (
        program(__file__, "receive", url, str(num_bytes), token) as receiver,
        program(str(_HERE / "bystander_server.py")) as bystander,
    ):
        assert bystander.stdout is not None
        ports = {"control": bystander.stdout.readline().strip(), "attack": str(urlsplit(url).port)}
        phase(receiver, 0.2)
        for _ in range(num_rounds):
            phases["peace"].append(phase(receiver, seconds))
            for name, port in ports.items():
                with flood(kind, port, source, made[name]):
                    phases[name].append(phase(receiver, seconds))
    transport.shutdown()
    names = ("python", "step_ms", "server", "fetch_ms", "longest_ms")
    medians = {
        which: {name: round(statistics.median(each[name] for each in rounds), 4) for name in names}
        for which, rounds in phases.items()
    }
    ratios = {
        f"{name} attack/{other}": round(statistics.median(
            attack[name] / max(against[name], 1e-9)
            for attack, against in zip(phases["attack"], phases[other], strict=True)
        ), 3)
        for name in ("python", "step_ms", "fetch_ms")
        for other in ("peace", "control")
    }  # fmt: skip
    failures = [failure for rounds in phases.values() for each in rounds for failure in each["failures"]]
    failed_opens = sum(each["failed_opens"] for rounds in phases.values() for each in rounds)
    print(json.dumps({**medians, "ratios": ratios, "failures": failures, "failed_opens": failed_opens, "made": made}))


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
