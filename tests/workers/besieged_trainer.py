"""A trainer that serves its state while hostile clients crowd in; prints JSON on what it cost.

``KIND COUNT SECONDS MEBIBYTES``, of ``hostile_clients.py``; by hand with 2,000. The process may have 1,024 open files,
as is usual. Each step opens files, as data loaders and loggers do. A receiver in a process of its own fetches the
state, one fetch after the other. All of it once in peace and once under attack.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from ft_transport import HTTPTransport, TransportSettings

_FILES_PER_STEP = 8
_TIMEOUT = timedelta(seconds=60)


def receive(url: str, num_bytes: int) -> None:
    """Fetches once for each line; prints the seconds that it took, or why it failed."""
    into = {"w": torch.zeros(num_bytes // 4)}
    for _ in sys.stdin:
        transport: HTTPTransport[Any] = HTTPTransport(_TIMEOUT, num_chunks=4)
        began_s = time.monotonic()
        try:
            transport.fetch(url, into=into)
            print(time.monotonic() - began_s, flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
        transport.shutdown()


@contextlib.contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, close_fds=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


def num_sockets() -> int:
    num_found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            num_found += os.readlink(f"/proc/self/fd/{name}").startswith("socket")
    return num_found


class Trainer:
    def __init__(self) -> None:
        self.weight = torch.randn(768, 768)
        self.step_s: list[float] = []
        self.num_opens = 0
        self.num_failed_opens = 0
        self.num_sockets = 0

    def step(self) -> None:
        began_s = time.monotonic()
        for _ in range(4):
            torch.mm(self.weight, self.weight)
        for _ in range(_FILES_PER_STEP):
            self.num_opens += 1
            try:
                Path("/proc/self/stat").read_text()
            except OSError:
                self.num_failed_opens += 1
        self.step_s.append(time.monotonic() - began_s)


def train(receiver: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Half of the time with a receiver, and half of it without, so that it is the attack that costs the steps."""
    assert receiver.stdin is not None
    assert receiver.stdout is not None
    trainer = Trainer()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        trainer.step()
        with contextlib.suppress(OSError):
            trainer.num_sockets = max(trainer.num_sockets, num_sockets())
    step_s = trainer.step_s[:]
    fetch_s: list[float] = []
    failures: list[str] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        print(file=receiver.stdin, flush=True)
        answer = receiver.stdout.readline().strip()
        try:
            fetch_s.append(float(answer))
        except ValueError:
            failures.append(answer[:300])
    return {
        "steps": len(step_s),
        "mean_step_ms": statistics.fmean(step_s) * 1e3,
        "median_step_ms": statistics.median(step_s) * 1e3,
        "fetches": len(fetch_s),
        "median_fetch_ms": statistics.median(fetch_s or [0.0]) * 1e3,
        "longest_fetch_ms": max(fetch_s, default=0.0) * 1e3,
        "failures": failures,
        "opens": trainer.num_opens,
        "failed_opens": trainer.num_failed_opens,
        "sockets": trainer.num_sockets,
    }


def main() -> None:
    kind, count, seconds, mebibytes = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    torch.set_num_threads(1)
    num_bytes = mebibytes << 20
    here = Path(__file__).parent
    transport: HTTPTransport[Any] = HTTPTransport(_TIMEOUT, settings=TransportSettings(host="127.0.0.1"))
    transport.send_checkpoint([], 1, {"w": torch.ones(num_bytes // 4)}, _TIMEOUT)
    url = transport.metadata()
    with program(__file__, "receive", url, str(num_bytes)) as receiver:
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        print(file=receiver.stdin, flush=True)
        receiver.stdout.readline()
        figures = {"peace": train(receiver, seconds)}
        port = str(urlsplit(url).port)
        request = "GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with program(str(here / "hostile_clients.py"), port, kind, count, request) as crowd:
            assert crowd.stdin is not None
            assert crowd.stdout is not None
            figures["burst"] = train(receiver, seconds)
            crowd.stdout.readline()
            figures["attack"] = train(receiver, seconds)
            crowd.stdin.close()
            figures["attack"]["opened"] = int(crowd.stdout.readline())
    transport.shutdown()
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2], int(sys.argv[3]))
    else:
        main()
