"""One line for each receiver and fetch."""

from __future__ import annotations

import logging
import re
from contextlib import closing
from datetime import timedelta

import pytest
from served_memory import Serving, serving, until

from ft_transport import HTTPTransport, TransportSettings

DATA = bytes(1 << 18)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "ft_transport.audit"]


def fetch(served: Serving, num_requests: int, **headers: str) -> int:
    """Over two connections, as a receiver does; returns how many bytes came."""
    num_bytes = 0
    with closing(served.connect()) as first, closing(served.connect()) as second:
        first.request("GET", "/checkpoint/5/metadata", headers=headers)
        num_bytes += len(first.getresponse().read())
        for index in range(num_requests):
            second.request("GET", "/checkpoint/5/full", headers={"Range": f"bytes={index}-{index + 999}", **headers})
            num_bytes += len(second.getresponse().read())
    return num_bytes


def test_a_fetch_of_many_requests_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ft_transport.audit")
    with serving() as served:
        snapshot = served.put(5, DATA)
        num_bytes = fetch(served, 20, **{"FT-Replica": "replica-3"})
        until(lambda: bool(lines(caplog)))
        fetch(served, 2)
        until(lambda: len(lines(caplog)) == 2)
        served.ask("/status")
    first, second = lines(caplog)
    assert re.fullmatch(
        rf"fetch peer=127\.0\.0\.1 replica=replica-3 step=5 snapshot={snapshot.snapshot_id} routes=metadata,full "
        rf"requests=21 bytes={num_bytes} seconds=\d+\.\d+ end=done",
        first,
    )
    assert "replica=- " in second


def test_a_delta_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ft_transport.audit")
    with serving() as served:
        served.server.deltas.keep(4, DATA)
        with closing(served.connect()) as http:
            http.request("GET", "/checkpoint/4/delta", headers={"FT-Replica": "replica-3"})
            assert http.getresponse().read() == DATA
        until(lambda: bool(lines(caplog)))
    (line,) = lines(caplog)
    assert re.fullmatch(
        rf"fetch peer=127\.0\.0\.1 replica=replica-3 step=4 snapshot=- routes=delta requests=1 bytes={len(DATA)} "
        r"seconds=\d+\.\d+ end=done",
        line,
    )


def test_what_ended_early_is_told_and_a_name_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ft_transport.audit")
    with serving() as served:
        served.put(5, bytes(1 << 20) * 48)
        with closing(served.connect()) as http:
            http.putrequest("GET", "/checkpoint/5/full")
            http.putheader("FT-Replica", b"x\xe2\x80\xae end=done" + b"y" * 100)
            http.endheaders()
            assert http.getresponse().read(1)
        until(lambda: bool(lines(caplog)))
    (line,) = lines(caplog)
    assert line.endswith("end=cut short")
    assert line.isprintable()
    assert len(line) < 400


def test_a_receiver_says_which_replica_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ft_transport.audit")
    timeout = timedelta(seconds=20)
    source, receiver = (
        HTTPTransport[dict[str, int]](timeout, settings=TransportSettings(host="127.0.0.1", replica=f"{name}\n ü"))
        for name in ("source", "receiver")
    )
    try:
        source.send_checkpoint([], 5, {"a": 1}, timeout)
        receiver.fetch(source.metadata(), 5)
        until(lambda: bool(lines(caplog)))
    finally:
        receiver.shutdown()
        source.shutdown()
    assert "replica=receiver??? step=5" in lines(caplog)[0]
