"""``fetch(known="into")``: what the receiver holds already does not cross the network, and is not harmed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faulty_transports import (
    CHUNK_BYTES,
    STATE_BYTES,
    TIMEOUT,
    blank,
    holds,
    is_poisoned,
    network,
    spread_out,
    state_of,
)
from proxy import corrupt, cut

from ft_transport import FetchFailedError

HEADS_BYTES = 64 << 10


def changed_in(chunks: set[int]) -> dict[str, Any]:
    """The state that is served, with one element of each of these chunks changed."""
    state = state_of(1)
    for chunk in chunks:
        position = chunk * CHUNK_BYTES // 4
        name, index = ("a", position) if position < state["a"].numel() else ("b", position - state["a"].numel())
        state[name][index] += 1
    return state


@pytest.mark.parametrize("chunks", [set(), {5, 6, 7, 63}, set(range(0, 64, 2)), set(range(64))])
@pytest.mark.parametrize("is_in_place", [True, False])
def test_just_the_chunks_that_differ_are_fetched(is_in_place: bool, chunks: set[int]) -> None:
    into = changed_in(chunks) if is_in_place else spread_out(changed_in(chunks))
    with network(4) as net:
        received = net.receiver.fetch(net.proxy.url, 1, into=into, known="into")
        assert received.num_bytes_fetched == len(chunks) * CHUNK_BYTES
        assert net.proxy.num_bytes <= len(chunks) * CHUNK_BYTES + HEADS_BYTES
    assert received.state["a"] is into["a"]
    assert holds(into, 1)


def test_a_tensor_that_is_copied_to_at_the_end_is_not_if_none_of_it_differs() -> None:
    into = spread_out(changed_in({63}))
    versions = {name: into[name]._version for name in "ab"}
    with network() as net:
        net.receiver.fetch(net.proxy.url, 1, into=into, known="into")
    assert holds(into, 1)
    assert [into[name]._version - versions[name] for name in "ab"] == [0, 1]


def test_of_two_tensors_that_were_one_at_the_sender_each_gets_it() -> None:
    shared = state_of(1)["a"]
    into = {**spread_out({"a": shared}), **spread_out({"b": shared + 1})}
    with network() as net:
        net.sender.send_checkpoint([], 2, {"a": shared, "b": shared}, TIMEOUT)
        received = net.receiver.fetch(net.proxy.url, 2, into=into, known="into")
    assert not received.num_bytes_fetched
    assert torch.equal(into["a"], shared)
    assert torch.equal(into["b"], shared)


def test_what_the_receiver_does_not_have_is_fetched() -> None:
    with network() as net:
        received = net.receiver.fetch(net.proxy.url, 1, into={"a": state_of(1)["a"]}, known="into")
        assert received.num_bytes_fetched == STATE_BYTES // 2
        assert holds(received.state, 1)
        whole = net.receiver.fetch(net.proxy.url, 1, known="into")
        assert whole.num_bytes_fetched == STATE_BYTES
        assert holds(whole.state, 1)


def test_one_that_fails_before_anything_landed_leaves_the_receiver_as_it_was() -> None:
    into = blank()
    with network(max_failures=2) as net:
        net.proxy.inject(cut(0), times=100)
        with pytest.raises(FetchFailedError) as caught:
            net.receiver.fetch(net.proxy.url, 1, into=into, known="into")
        assert not caught.value.destination_touched
    assert not into["a"].any()


def test_one_that_fails_on_its_way_leaves_nothing_to_train_on() -> None:
    into = changed_in({3, 40})
    with network(max_failures=2) as net:
        net.proxy.inject(corrupt(CHUNK_BYTES // 2), times=100)
        with pytest.raises(FetchFailedError) as caught:
            net.receiver.fetch(net.proxy.url, 1, into=into, known="into")
        assert caught.value.destination_touched
    assert is_poisoned(into)
