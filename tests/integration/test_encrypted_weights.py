"""An engine of a job with certificates pulls its weights over TLS."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from certificates import issue

from ft_transport import HTTPTransport, TransportSettings, WeightReceiver

TIMEOUT = timedelta(seconds=20)


def test_a_weight_receiver_fetches_over_tls(tmp_path: Path) -> None:
    issued = issue(tmp_path / "peer")
    weights, own = {"layer": torch.arange(1000.0)}, {"layer": torch.zeros(1000)}
    settings = TransportSettings(host="127.0.0.1", tls=issued.files)
    source: HTTPTransport[Any] = HTTPTransport(TIMEOUT, settings=settings)
    try:
        source.send_checkpoint([], 1, {"weights": weights}, TIMEOUT)
        body = json.dumps({"address": source.metadata()}).encode()
        with WeightReceiver(own, host="127.0.0.1", tls=issued.files) as receiver:
            request = Request(f"{receiver.url}/weights/1", body, {"Content-Type": "application/json"})
            with urlopen(request, timeout=20) as answer:
                assert json.load(answer) == {"version": 1}
    finally:
        source.shutdown()
    assert torch.equal(own["layer"], weights["layer"])
