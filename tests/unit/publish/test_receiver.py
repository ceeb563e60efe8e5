"""What is posted to a receiver of weights, and is no request, is refused as such."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
import torch

from ft_transport import WeightReceiver


def test_a_body_that_names_no_address_is_a_bad_request() -> None:
    with WeightReceiver({"w": torch.zeros(3)}, host="127.0.0.1") as receiver:
        for body, kind in (
            (b"", ""),
            (b"[" * 60_000, ""),
            (b'{"address":' * 5_000, ""),
            (b"\xff\xfe", ""),
            (b'{"address": 5}', ""),
            (b'{"address": ' + b"1" * 50_000 + b"}", ""),
            (b'{"address": "\\ud800"}', ""),
            (b'{"address": "x"}garbage', "; charset=nobody-knows"),
            (b"[]", "; charset=utf-16"),
        ):
            headers = {"Content-Type": f"application/json{kind}"}
            request = urllib.request.Request(f"{receiver.url}/weights/1", body, headers)
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request, timeout=30)
            with caught.value as answer:
                assert answer.code == 400
                assert b"malformed" in answer.read()
        assert receiver.version is None
