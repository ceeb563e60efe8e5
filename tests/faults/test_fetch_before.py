"""``fetch(before=...)``: of a state that was received before, what changes with each step comes in few requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from faulty_transports import TIMEOUT, port_of, transport
from proxy import Proxy, corrupt, cut, proxied

from ft_transport import HTTPTransport, Received, ReceivedBefore

NUM_LAYERS = 300
WIDTH = 64
RANK = 2
ADAPTER_BYTES = NUM_LAYERS * WIDTH * RANK * 4
NUM_CONNECTIONS = 4


def layers(seed: int) -> dict[str, Any]:
    """Adapters between the weights that they belong to."""
    frozen, trained = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    return {
        f"{number:03}": [
            torch.randn(WIDTH, WIDTH, generator=frozen),
            torch.randn(WIDTH, RANK, generator=trained),
        ]
        for number in range(NUM_LAYERS)
    }


def is_adapter(tensor: torch.Tensor) -> bool:
    return tensor.shape[-1] == RANK


def holds(state: dict[str, Any], seed: int) -> bool:
    expected = layers(seed)
    return all(torch.equal(a, b) for key in expected for a, b in zip(state[key], expected[key], strict=True))


class Joined:
    """A receiver that has step 1 of a source, which has step 2 now."""

    def __init__(self, source: HTTPTransport[Any], receiver: HTTPTransport[Any], proxy: Proxy) -> None:
        self._receiver = receiver
        self.proxy = proxy
        self.into = layers(7)
        self.requests: list[bytes] = []
        source.send_checkpoint([], 1, layers(1), TIMEOUT)
        self._before = receiver.fetch(proxy.url, 1, into=self.into)
        source.send_checkpoint([], 2, layers(2), TIMEOUT)
        proxy.watch = lambda data: self.requests.extend([data] if data[:4] in (b"GET ", b"POST") else [])

    def fetch(self) -> Received[Any]:
        before = ReceivedBefore(received=self._before, is_changing=is_adapter)
        return self._receiver.fetch(self.proxy.url, 2, into=self.into, before=before)


@contextmanager
def joined(**settings: Any) -> Iterator[Joined]:
    with (
        transport() as source,
        transport(NUM_CONNECTIONS, **settings) as receiver,
        proxied(port_of(source)) as proxy,
    ):
        yield Joined(source, receiver, proxy)


@pytest.mark.parametrize("verify", [True, False])
def test_hundreds_of_ranges_come_in_a_few_requests(verify: bool) -> None:
    with joined(verify=verify) as replica:
        received = replica.fetch()
        assert holds(replica.into, 2)
        assert received.state["000"][1] is replica.into["000"][1]
        assert received.num_bytes_fetched == ADAPTER_BYTES
        assert len(replica.requests) < 10


def test_a_damaged_answer_is_noticed_and_asked_for_again() -> None:
    with joined() as replica:
        replica.proxy.inject(corrupt(ADAPTER_BYTES // 2), on="/slices")
        replica.fetch()
        assert replica.proxy.num_faulty == 1
        assert holds(replica.into, 2)


def test_an_answer_that_is_cut_short_is_asked_for_again() -> None:
    with joined() as replica:
        replica.proxy.inject(cut(ADAPTER_BYTES // 2), on="/slices")
        replica.fetch()
        assert replica.proxy.num_faulty == 1
        assert holds(replica.into, 2)
