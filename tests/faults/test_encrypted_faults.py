"""What networks do to encrypted connections costs what was in flight, as it does to those in the clear."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from certificates import Issued, issue
from encrypted_transports import TIMEOUT, Tap, port_of, tapped, transport
from faulty_transports import fetching_threads
from proxy import Fault, corrupt, cut, stall, trickle

from ft_transport import HTTPTransport, TransportError

CHUNK_BYTES = 1 << 18
STATE = {"layer": torch.arange(1 << 20, dtype=torch.int32)}
MIDDLE = 2 << 20


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(Path(tmp_path_factory.mktemp("certificates")) / "peer")


@pytest.fixture
def network(issued: Issued) -> Iterator[tuple[Tap, HTTPTransport[Any]]]:
    with transport(issued, chunk_bytes=CHUNK_BYTES) as source, tapped(port_of(source)) as tap:
        source.send_checkpoint([], 1, STATE, TIMEOUT)
        yield tap, source


@pytest.mark.parametrize(
    "fault",
    [cut(MIDDLE), cut(MIDDLE, reset=True), corrupt(MIDDLE), stall(MIDDLE), trickle(MIDDLE, pause_s=0.02), cut(700)],
    ids=["cut", "reset", "changed byte", "stall", "trickle", "cut in the handshake"],
)
def test_a_fault_in_the_middle_costs_what_was_in_flight(
    network: tuple[Tap, HTTPTransport[Any]], issued: Issued, fault: Fault
) -> None:
    tap, source = network
    # The first connection has the manifest.
    tap.proxy.inject(fault, on="", skip=1)
    slow: dict[str, Any] = {"stall_timeout": timedelta(seconds=0.5), "min_bytes_per_s": 1e5}
    with transport(issued, num_connections=3, **slow) as receiver:
        into = {"layer": torch.zeros(1 << 20, dtype=torch.int32)}
        got = receiver.fetch(tap.address(source), 1, into=into).state
        assert torch.equal(got["layer"], STATE["layer"])
    assert tap.proxy.num_faulty == 1
    assert fetching_threads() == []


@pytest.mark.parametrize(
    "fault", [stall(0), stall(700), trickle(700, pause_s=0.02)], ids=["silent", "stall", "trickle"]
)
def test_a_handshake_that_does_not_end_is_given_up_in_time(
    network: tuple[Tap, HTTPTransport[Any]], issued: Issued, fault: Fault
) -> None:
    tap, source = network
    tap.proxy.inject(fault, on="", times=1000)
    with transport(issued) as receiver:
        started_s = time.monotonic()
        with pytest.raises(TransportError):
            receiver.fetch(tap.address(source), 1, timeout=timedelta(seconds=1))
        assert time.monotonic() - started_s < 5


def test_a_record_that_trickles_does_not_defeat_the_deadline(
    network: tuple[Tap, HTTPTransport[Any]], issued: Issued
) -> None:
    tap, source = network
    tap.proxy.inject(trickle(MIDDLE + 5000, pause_s=0.02), on="", times=1000)
    with transport(issued, num_connections=1) as receiver:
        started_s = time.monotonic()
        with pytest.raises(TransportError):
            receiver.fetch(tap.address(source), 1, timeout=timedelta(seconds=1.5))
        assert time.monotonic() - started_s < 6
