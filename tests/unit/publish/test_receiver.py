"""What is posted to a receiver of weights, and is no request, is refused as such."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
import torch

from ft_transport import WeightReceiver


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "application/json"),
        (b"[" * 60_000, "application/json"),
        (b'{"address":' * 5_000, "application/json"),
        (b"\xff\xfe", "application/json"),
        (b'{"address": 5}', "application/json"),
        (b'{"address": ' + b"1" * 50_000 + b"}", "application/json"),
        (b'{"address": "\\ud800"}', "application/json"),
        (b'{"address": "x"}garbage', "application/json; charset=nobody-knows"),
        (b"[]", "application/json; charset=utf-16"),
    ],
)
def test_a_body_that_names_no_address_is_a_bad_request(body: bytes, kind: str) -> None:
    with WeightReceiver({"w": torch.zeros(3)}, host="127.0.0.1") as receiver:
        request = urllib.request.Request(f"{receiver.url}/weights/1", body, {"Content-Type": kind})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        with caught.value as answer:
            assert answer.code == 400
            assert b"malformed" in answer.read()
        assert receiver.version is None
