"""A recovery over the slow one of two networks, and what tells so. Network namespaces, real HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
    way = next(finding for finding in told["findings"] if "times as fast" in finding["text"])
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


def test_the_doctor_names_the_fast_interface_of_a_peer_that_tells_its_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FT_TRANSPORT_TOKEN", TOKEN)
    with two_networks() as (source_at, receiver_at), source_that_tells(SLOW, source_at) as source:
        began_s = time.monotonic()
        result = run_in(receiver_at, lambda: CliRunner().invoke(app, ["doctor", source.metadata(), "--json"]))
        assert time.monotonic() - began_s < 10
    assert result.exit_code == 1, result.output
    checks = {check["name"]: check for check in json.loads(result.output)}
    slow, fast = (checks[f"{SOURCE[SLOW]}:{source_port(source)}: rate over {name}"] for name in (SLOW, FAST))
    assert (slow["verdict"], fast["verdict"]) == ("bad", "ok")
    assert f"{RECEIVER[SLOW]} → {SOURCE[SLOW]}" in slow["found"]
    assert f"{RECEIVER[FAST]} → {SOURCE[FAST]}" in fast["found"]
    rate = fast["found"].partition("/s")[0]
    assert f"over {FAST} {rate}/s" in slow["found"]
    assert f"FT_TRANSPORT_ADVERTISE={FAST}" in slow["remedy"]


def source_port(source: HTTPTransport[Any]) -> int:
    port = urlsplit(source.metadata()).port
    assert port is not None
    return port
