"""A recovery over the slow one of two networks, and what tells so. Network namespaces, real HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quorum_threads import TIMEOUT
from two_networks import FAST, RECEIVER, SLOW, SOURCE, run_in, two_networks, why_no_networks
from typer.testing import CliRunner

from ft_transport import HTTPTransport, TransportSettings
from ft_transport.cli.main import app

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(bool(why_no_networks()), reason=str(why_no_networks()))]

TOKEN = "a-token-of-the-job-long-enough-for-one"
STATE = {"w": torch.arange(6 << 20, dtype=torch.float32)}


@contextmanager
def source_that_tells(interface: str, namespace: str) -> Iterator[HTTPTransport[Any]]:
    """A source that listens everywhere, and tells peers its address on this interface."""
    settings = TransportSettings(host="0.0.0.0", advertise=interface, token=TOKEN)
    source = run_in(namespace, lambda: HTTPTransport[Any](TIMEOUT, settings=settings))
    try:
        run_in(namespace, lambda: source.send_checkpoint([], 1, STATE, TIMEOUT))
        yield source
    finally:
        source.shutdown()


def recover(namespace: str, address: str, records: Path) -> None:
    def fetch() -> None:
        settings = TransportSettings(host="0.0.0.0", advertise=FAST, token=TOKEN, records=records)
        receiver = HTTPTransport[Any](TIMEOUT, settings=settings)
        try:
            received = receiver.fetch(address, 1)
            assert torch.equal(received.state["w"], STATE["w"])
        finally:
            receiver.shutdown()

    run_in(namespace, fetch)


def test_a_recovery_over_the_slow_interface_is_explained(tmp_path: Path) -> None:
    records = tmp_path / "records"
    with two_networks() as (source_at, receiver_at):
        for interface in (FAST, SLOW):
            with source_that_tells(interface, source_at) as source:
                recover(receiver_at, source.metadata(), records)
    runner = CliRunner()
    began_s = time.monotonic()
    result = runner.invoke(app, ["explain", str(records), "--json"])
    assert time.monotonic() - began_s < 10
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    way = next(finding for finding in told["findings"] if "times as much" in finding["text"])
    slow, fast = (
        each["num_bytes"] / each["length_s"]
        for each in (told["record"]["transfers"][0], json.loads(records.read_text().splitlines()[0])["transfers"][0])
    )
    assert fast > 10 * slow
    assert f"over {SLOW} ({RECEIVER[SLOW]} → {SOURCE[SLOW]}:" in way["text"]
    assert f"over {FAST} ({RECEIVER[FAST]} → {SOURCE[FAST]}:" in way["text"]
    assert f"{slow / 1e6:.1f} MB/s" in way["text"]
    assert f"{fast / 1e6:.1f} MB/s" in way["text"]
    assert "FT_TRANSPORT_ADVERTISE" in way["remedy"]
    assert FAST in way["remedy"]
    assert way["cost_s"] > 0.9 * told["record"]["transfers"][0]["length_s"]
    as_text = runner.invoke(app, ["explain", str(records)]).output
    assert way["text"] in as_text
    assert "transfer" in as_text
