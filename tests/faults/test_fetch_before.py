"""``fetch(known=received)``: of a state that was received before, what changes with each step comes in few requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from faulty_transports import CHUNK_BYTES, TIMEOUT, port_of, transport
from proxy import Fault, Proxy, corrupt, cut, proxied

from ft_transport import HTTPTransport, Received

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


def laid_out_otherwise(state: dict[str, Any]) -> dict[str, Any]:
    """The same values in tensors that nothing is received into in place: like those on a device, they are copied to."""
    return {key: [tensor.t().contiguous().t() for tensor in tensors] for key, tensors in state.items()}


class Joined:
    """A receiver that has step 1 of a source, which has step 2 now."""

    def __init__(
        self, source: HTTPTransport[Any], receiver: HTTPTransport[Any], proxy: Proxy, is_in_place: bool
    ) -> None:
        self._receiver = receiver
        self.proxy = proxy
        self.into = layers(7) if is_in_place else laid_out_otherwise(layers(7))
        self.requests: list[bytes] = []
        source.send_checkpoint([], 1, layers(1), TIMEOUT)
        self._before = receiver.fetch(proxy.url, 1, into=self.into)
        source.send_checkpoint([], 2, layers(2), TIMEOUT)
        proxy.watch = lambda data: self.requests.extend([data] if data[:4] in (b"GET ", b"POST") else [])

    def fetch(self) -> Received[Any]:
        return self._receiver.fetch(self.proxy.url, 2, into=self.into, known=self._before.but_for(is_adapter))


@contextmanager
def joined(*, is_in_place: bool = True, **settings: Any) -> Iterator[Joined]:
    with (
        transport() as source,
        transport(NUM_CONNECTIONS, **settings) as receiver,
        proxied(port_of(source)) as proxy,
    ):
        yield Joined(source, receiver, proxy, is_in_place)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("is_in_place", [True, False])
def test_hundreds_of_ranges_come_in_a_few_requests(is_in_place: bool, verify: bool) -> None:
    with joined(is_in_place=is_in_place, verify=verify) as replica:
        received = replica.fetch()
        assert holds(replica.into, 2)
        assert received.state["000"][1] is replica.into["000"][1]
        assert received.num_bytes_fetched == ADAPTER_BYTES
        assert len(replica.requests) < 10


@pytest.mark.parametrize("is_in_place", [True, False])
def test_of_the_rest_chunks_that_differ_come_and_what_is_beside_them_stays(is_in_place: bool) -> None:
    num_rows = CHUNK_BYTES // 16  # a tensor of four chunks
    state = {name: [torch.randn(num_rows, 16)] for name in "xyz"}
    adapter = [torch.randn(num_rows, RANK)]
    into = {name: [torch.zeros_like(tensor) for tensor in state[name]] for name in "xyz"}
    into = into if is_in_place else laid_out_otherwise(into)
    own_adapter = [torch.zeros_like(adapter[0])]
    with transport() as source, transport() as receiver:
        source.send_checkpoint([], 1, {**state, "adapter": adapter}, TIMEOUT)
        whole: Received[Any] = receiver.fetch(source.metadata(), 1, into={**into, "adapter": own_adapter})
        adapter[0] += 1
        state["y"][0][num_rows // 2] += 1
        source.send_checkpoint([], 2, {**state, "adapter": adapter}, TIMEOUT)
        versions = {name: into[name][0]._version for name in "xyz"}
        before = whole.but_for(is_adapter)
        received = receiver.fetch(source.metadata(), 2, into={**into, "adapter": own_adapter}, known=before)
        assert not received.differences({**into, "adapter": own_adapter})
    assert received.num_bytes_fetched == adapter[0].nbytes + CHUNK_BYTES
    assert all(torch.equal(into[name][0], state[name][0]) for name in "xyz")
    assert [name for name in "xyz" if into[name][0]._version != versions[name]] == ([] if is_in_place else ["y"])


@pytest.mark.parametrize("is_in_place", [True, False])
def test_what_came_before_is_passed_on_if_it_lies_in_the_hosts_memory(is_in_place: bool) -> None:
    state = {"base": torch.randn(4 * CHUNK_BYTES // 16, 16), "none": torch.zeros(0, 2)}
    into = {"base": torch.zeros_like(state["base"]), "none": torch.zeros(0, 2)}
    if not is_in_place:
        into["base"] = into["base"].t().contiguous().t()
    with transport() as source, transport() as first, transport() as second:
        source.send_checkpoint([], 1, state, TIMEOUT)
        whole: Received[Any] = first.fetch(source.metadata(), 1, into=into)
        source.send_checkpoint([], 2, state, TIMEOUT)
        relays = [first.metadata(), second.metadata()]
        assert not first.fetch(source.metadata(), 2, into=into, relays=relays, known=whole).num_bytes_fetched
        assert first.server.http.relays.num_open == is_in_place
        received: Received[Any] = second.fetch(source.metadata(), 2, relays=relays)
        assert torch.equal(received.state["base"], state["base"])
    assert torch.equal(into["base"], state["base"])


def test_a_view_of_what_is_not_received_again_shows_what_is_there() -> None:
    base = torch.arange(3.0 * CHUNK_BYTES).view(-1, 4)
    with transport() as source, transport() as receiver:
        into = {"base": torch.zeros(4, len(base)).t(), "view": torch.zeros(2, 4), "seed": torch.zeros(3)}
        received: Received[Any] | None = None
        for step in range(1, 4):
            state = {"base": base, "view": base[1:3], "seed": torch.full((3,), float(step))}
            source.send_checkpoint([], step, state, TIMEOUT)
            known = received and received.but_for(lambda own: len(own) == 3)
            received = receiver.fetch(source.metadata(), step, into=into, known=known)
            assert torch.equal(received.state["view"], base[1:3])
            assert torch.equal(into["base"], base)
            assert into["seed"][0] == step
        assert received is not None
        assert received.num_bytes_fetched == 3 * 4


@pytest.mark.parametrize("fault", [corrupt(ADAPTER_BYTES // 2), cut(ADAPTER_BYTES // 2)], ids=["damaged", "cut short"])
def test_an_answer_that_is_damaged_or_cut_short_is_asked_for_again(fault: Fault) -> None:
    with joined() as replica:
        replica.proxy.inject(fault, on="/slices")
        replica.fetch()
        assert replica.proxy.num_faulty == 1
        assert holds(replica.into, 2)
