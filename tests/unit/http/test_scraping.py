"""``/metrics`` and ``/state`` of a real server: crowds, parts that hang, clients that do not read, and the end."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path

import pytest
from served_memory import Answer, Serving, serving, until

from ft_transport.http.server import watch_routes
from ft_transport.http.server.watch_routes import Coalescer
from ft_transport.telemetry.metrics import METRICS, TEXT, Metric, Metrics, Reading, encode_metrics
from ft_transport.telemetry.process_status import ProcessStatus
from ft_transport.telemetry.recorder import Recorder

LONG_S = 20.0
MUCH_BYTES = 12 << 20
"""More than the buffers of a connection hold."""


def scrape(served: Serving, **headers: str) -> Answer:
    return served.ask("/metrics", **headers)


class Source:
    """Tells how often it was read; waits where it is told to."""

    def __init__(self) -> None:
        self.num_reads = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.begun = threading.Event()

    def __call__(self) -> Iterator[Reading]:
        self.num_reads += 1
        self.begun.set()
        assert self.may_go_on.wait(LONG_S)
        yield Reading("engines", self.num_reads)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def watch(source: Source) -> ProcessStatus:
    made = ProcessStatus(Recorder())
    made.metrics.collect(source)
    return made


def test_it_is_text_that_nobody_keeps(watch: ProcessStatus) -> None:
    with serving(process_status=watch) as served:
        plain = scrape(served)
        modern = scrape(served, Accept="application/openmetrics-text;version=1.0.0")
        head = served.ask("/metrics", method="HEAD")

    assert plain.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"\nft_transport_engines 1.0\n" in plain.body
    assert modern.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert modern.body.endswith(b"# EOF\n")
    assert plain.headers["Cache-Control"] == "no-store"
    assert (head.status, head.body) == (200, b"")


def test_what_was_sent_is_counted(watch: ProcessStatus) -> None:
    with serving(process_status=watch) as served:
        snapshot = served.put(5, b"x" * 100_000)
        for method in ("GET", "HEAD", "GET"):
            served.ask("/checkpoint/5/full", method=method)

        def num_sent() -> float:
            lines = scrape(served).body.decode().splitlines()
            (line,) = (line for line in lines if line.startswith('ft_transport_sent_bytes_total{route="full"'))
            return float(line.split()[1])

        # A receiver may have all of it before the server has counted it.
        until(lambda: num_sent() == 2 * snapshot.total_bytes)


def test_while_one_runs_all_others_share_the_next_one() -> None:
    source = Source()
    metrics = Metrics()
    metrics.collect(source)

    async def crowd() -> list[bytes]:
        scraping = Coalescer(partial(encode_metrics, metrics))
        source.may_go_on.clear()
        first = asyncio.ensure_future(scraping.scrape(TEXT))
        while not source.begun.is_set():
            await asyncio.sleep(0)
        others = [asyncio.ensure_future(scraping.scrape(TEXT)) for _ in range(50)]
        await asyncio.sleep(0)
        source.may_go_on.set()
        return [body for body, _ in await asyncio.gather(first, *others)]

    bodies = asyncio.run(crowd())
    assert source.num_reads == 2
    assert b"ft_transport_engines 1.0" in bodies[0]
    assert all(b"ft_transport_engines 2.0" in body for body in bodies[1:])


def test_a_crowd_that_asks_for_the_state_takes_one_thread() -> None:
    asked, may_go_on = threading.Semaphore(0), threading.Event()

    def part() -> int:
        asked.release()
        assert may_go_on.wait(LONG_S)
        return 1

    watch = ProcessStatus(Recorder())
    watch.set_part("part", part)
    with serving(process_status=watch) as served, ThreadPoolExecutor(30) as pool:
        answers = [pool.submit(served.ask, "/state") for _ in range(30)]
        assert asked.acquire(timeout=LONG_S)
        # What peers need of the same threads, such as the signature of a manifest, waits for nobody.
        assert not asked.acquire(timeout=0.2)
        may_go_on.set()
        assert {each.result(LONG_S).status for each in answers} == {200}
        assert asked.acquire(timeout=LONG_S)
        assert not asked.acquire(blocking=False)


def test_a_source_that_hangs_holds_one_thread_and_nobody_for_long(
    watch: ProcessStatus, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_routes, "Coalescer", partial(Coalescer, timeout_s=0.05))
    with serving(process_status=watch) as served:
        source.may_go_on.clear()
        for _ in range(5):
            answer = scrape(served)
            assert answer.status == 503
            assert b"did not collect its state in time" in answer.body
            assert served.ask("/status").status == 200
        assert source.num_reads == 1
        source.may_go_on.set()
        until(lambda: scrape(served).status == 200)


def test_a_part_that_hangs_holds_up_neither_the_server_nor_its_end() -> None:
    is_asked, may_end = threading.Event(), threading.Event()

    def hanging() -> None:
        is_asked.set()
        may_end.wait(LONG_S)

    def ask(served: Serving) -> None:
        with suppress(OSError, HTTPException):
            served.ask("/state")

    watch = ProcessStatus(Recorder())
    watch.set_part("part", hanging)
    try:
        with ThreadPoolExecutor(1) as pool, serving(process_status=watch) as served:
            asking = pool.submit(ask, served)
            assert is_asked.wait(LONG_S)
            assert served.ask("/status").status == 200
            began_s = time.monotonic()
            served.server.close(wait=True)
            assert time.monotonic() - began_s < 3.0
            asking.result(LONG_S)
    finally:
        may_end.set()


def is_established(*ports: int) -> bool:
    """Whether the server's end of a connection is open (state 01 of proc_pid_net(5)): its port and the client's."""
    ends = [f":{port:04X}" for port in ports]
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return any([row[1][-5:], row[2][-5:], row[3]] == [*ends, "01"] for row in rows)


@pytest.mark.parametrize("path", ["/state", "/metrics"])
def test_a_client_that_does_not_read_is_cut_off(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_routes, "_WRITE_S", 0.2)
    much = "x" * MUCH_BYTES
    watch = ProcessStatus(Recorder())
    watch.set_part("part", lambda: much)
    monkeypatch.setitem(METRICS, "engines", Metric("engines", much))
    watch.metrics.collect(lambda: [Reading("engines", 1)])
    with serving(process_status=watch) as served, socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.settimeout(LONG_S)
        stalled.connect(("127.0.0.1", served.server.port))
        stalled.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        ports = (served.server.port, stalled.getsockname()[1])
        until(lambda: is_established(*ports))
        until(lambda: not is_established(*ports))
        assert served.ask("/status").status == 200
        num_bytes = 0
        with suppress(ConnectionResetError):
            while received := stalled.recv(1 << 20):
                num_bytes += len(received)
        assert num_bytes < MUCH_BYTES
