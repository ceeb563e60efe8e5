"""Somebody on the way changes tensors, and makes the digests that everybody can make."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import xxhash
from proxy import Fault, Link, proxied
from sharded_tools import mesh_of, part_of
from torch.distributed.tensor import Shard
from transport_settings import settings_of

from ft_transport import HTTPTransport, TransportError, TransportSettings

pytestmark = pytest.mark.usefixtures("one_rank_group")

TIMEOUT = timedelta(seconds=20)
WHOLE = torch.arange(64.0)


class _Forger:
    """Changes the first byte of what slices bring, and the digest behind it to match."""

    def __init__(self) -> None:
        self.num_forged = 0

    def fault(self) -> Fault:
        buffered = b""

        def forge(link: Link, data: bytes) -> bool:
            nonlocal buffered
            buffered += data
            while (end := buffered.find(b"\r\n\r\n")) >= 0:
                head = buffered[: end + 4]
                found = re.search(rb"Content-Length: (\d+)", head)
                length = int(found[1]) if found else 0
                if len(buffered) < end + 4 + length:
                    return True
                body, buffered = buffered[end + 4 : end + 4 + length], buffered[end + 4 + length :]
                if b"octet-stream" in head:
                    changed = bytes([body[0] ^ 1]) + body[1:-8]
                    body = changed + xxhash.xxh3_64_intdigest(changed).to_bytes(8, "big")
                    self.num_forged += 1
                link.send(head + body)
            return True

        return forge


@contextmanager
def forged(token: str | None) -> Iterator[tuple[_Forger, str, HTTPTransport[Any]]]:
    forger = _Forger()
    with proxied(0) as proxy:
        settings = settings_of(host="127.0.0.1", token=token, reached_at=[f"127.0.0.1:{proxy.port}"], max_failures=2)
        source, receiver = (HTTPTransport[Any](TIMEOUT, num_chunks=1, settings=settings) for _ in range(2))
        try:
            proxy.target_port = int(source.metadata().split(":")[2].split("/")[0])
            for _ in range(20):
                proxy.inject(forger.fault(), on="")
            source.send_checkpoint([], 1, {"w": part_of(WHOLE, mesh_of((1,), 0), [Shard(0)])}, TIMEOUT)
            yield forger, proxy.url, receiver
        finally:
            source.shutdown()
            receiver.shutdown()


def _fetch(url: str, receiver: HTTPTransport[Any]) -> torch.Tensor:
    into = {"w": part_of(torch.zeros_like(WHOLE), mesh_of((2,), 1), [Shard(0)])}
    found = receiver.fetch_sharded([url], 1, into=into, group_rank=1, timeout=TIMEOUT).state["w"].to_local()
    assert isinstance(found, torch.Tensor)
    return found


def test_without_a_token_forged_slices_are_taken() -> None:
    """Says what the keyed digests are for."""
    with forged(None) as (forger, url, receiver):
        assert not torch.equal(_fetch(url, receiver), WHOLE[32:])
        assert forger.num_forged == 1


def test_with_a_token_they_are_refused() -> None:
    with forged("right") as (forger, url, receiver):
        with pytest.raises(TransportError, match="damaged"):
            _fetch(url, receiver)
        assert forger.num_forged == 2


def test_what_is_right_is_taken() -> None:
    settings = TransportSettings(host="127.0.0.1", token="right")
    source, receiver = (HTTPTransport[Any](TIMEOUT, settings=settings) for _ in range(2))
    try:
        state = {"w": part_of(WHOLE, mesh_of((1,), 0), [Shard(0)]), "more": torch.ones(1 << 20)}
        source.send_checkpoint([], 1, state, TIMEOUT)
        assert torch.equal(_fetch(source.metadata(), receiver), WHOLE[32:])
        received = receiver.fetch(source.metadata(), 1)
        assert torch.equal(received.state["more"], state["more"])
        assert received.differences(received.state) == ()
        received.state["more"][7] = 2
        assert "more" in str(received.differences(received.state))
    finally:
        source.shutdown()
        receiver.shutdown()
