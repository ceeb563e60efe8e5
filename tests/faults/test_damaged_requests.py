"""What is asked is damaged on its way: it is asked again, and never answered with bytes that were not asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from faulty_network import Fault, FaultyProxy, faulty_network
from faulty_transports import TIMEOUT, port_of, transport
from scripted_peer import Peer, scripted
from sharded_tools import mesh_of, part_of
from torch.distributed.tensor import Replicate

from ft_transport import (
    FetchFailedError,
    HTTPTransport,
    MessageDamagedError,
    PeerAuthenticationError,
    StepNotServedError,
    TransportError,
)

NUM_ITEMS = 4000
STALL = timedelta(seconds=0.3)
PLACES = range(0, 100, 6)


def state() -> dict[str, Any]:
    return {"w": torch.arange(NUM_ITEMS), "step": 1}


@contextmanager
def sender(content: Any, **settings: Any) -> Iterator[HTTPTransport[Any]]:
    with transport(stall_timeout=STALL, **settings) as made:
        made.send_checkpoint([], 1, content, TIMEOUT)
        yield made


@contextmanager
def network(content: Any, **settings: Any) -> Iterator[tuple[HTTPTransport[Any], FaultyProxy, list[Fault | None]]]:
    """A receiver, the proxy to the sender, and the faults that its next connections get."""
    faults: list[Fault | None] = []
    with ExitStack() as stack:
        sending = stack.enter_context(sender(content, **settings))
        receiving = stack.enter_context(transport(stall_timeout=STALL, min_bytes_per_s=1, max_failures=3))
        proxy = stack.enter_context(faulty_network(port_of(sending), lambda: faults.pop(0) if faults else None))
        yield receiving, proxy, faults


def fetch(receiver: HTTPTransport[Any], proxy: FaultyProxy, step: Any = 1) -> Any:
    return receiver.fetch(f"http://127.0.0.1:{proxy.port}/checkpoint/", step, timeout=timedelta(seconds=3)).state


@pytest.mark.parametrize("connection", [0, 1], ids=["manifest", "data"])
def test_a_request_with_one_wrong_byte_anywhere_is_made_again(connection: int) -> None:
    with network(state()) as (receiver, proxy, faults):
        for place in PLACES:
            faults[:] = [None] * connection + [Fault("flip", to_server=True, after=place, size=2)]
            received = fetch(receiver, proxy)
            assert torch.equal(received["w"], state()["w"])
        assert proxy.hurt["flip"] > len(PLACES) * 3 // 4


@pytest.mark.usefixtures("one_rank_group")
def test_a_wrong_number_in_a_request_for_slices_brings_no_wrong_bytes() -> None:
    """The body stays a request, for as many bytes of another place, and the answer has their digest."""
    first, second = torch.arange(NUM_ITEMS), torch.arange(NUM_ITEMS) + NUM_ITEMS

    def content(rank: int) -> dict[str, Any]:
        mesh = mesh_of((2,), rank)
        return {name: part_of(value, mesh, [Replicate()]) for name, value in (("a", first), ("b", second))}

    # Each is asked for one of the two; the request to the other one has a number that is not 0.
    with network(content(1)) as (receiver, proxy, faults), sender(content(0)) as other:
        urls = [other.metadata(), f"http://127.0.0.1:{proxy.port}/checkpoint/"]
        for place in range(150, 220):
            faults[:] = [None, Fault("byte", to_server=True, after=place, byte=ord("1"))]
            received: Any = receiver.fetch_sharded(urls, 1, timeout=timedelta(seconds=3)).state
            assert torch.equal(received["a"], first)
            assert torch.equal(received["b"], second)
        assert proxy.hurt["byte"] > 40


@pytest.mark.usefixtures("one_rank_group")
def test_a_body_that_seems_to_be_empty_is_not_one_that_was_not_read() -> None:
    mesh = mesh_of((1,), 0)
    content = {"w": part_of(torch.arange(NUM_ITEMS), mesh, [Replicate()])}
    with network(content) as (receiver, proxy, faults):
        url = f"http://127.0.0.1:{proxy.port}/checkpoint/"
        for place in range(70, 160):
            faults[:] = [None, Fault("byte", to_server=True, after=place, byte=ord("0"))]
            received: Any = receiver.fetch_sharded([url], 1, timeout=timedelta(seconds=3)).state
            assert torch.equal(received["w"], torch.arange(NUM_ITEMS))


@pytest.mark.parametrize("place", range(9, 200, 13))
def test_the_head_of_an_answer_with_a_wrong_byte_is_asked_for_again(place: int) -> None:
    with network(state()) as (receiver, proxy, faults):
        for connection in (0, 1):
            faults[:] = [None] * connection + [Fault("flip", to_server=False, after=place, size=1)]
            assert torch.equal(fetch(receiver, proxy)["w"], state()["w"])
        assert proxy.hurt["flip"] == 2


def test_a_refusal_that_is_meant_is_one_at_once() -> None:
    with network(state()) as (receiver, proxy, _):
        with pytest.raises(StepNotServedError) as caught:
            fetch(receiver, proxy, 0)
        assert caught.value.served == (1,)
        assert proxy.num_connections == 1
    with network(state(), token="right") as (receiver, proxy, _):
        with pytest.raises(PeerAuthenticationError):
            fetch(receiver, proxy)
        assert proxy.num_connections == 1


def test_requests_that_are_damaged_every_time_end_with_an_error_of_their_own() -> None:
    with network(state()) as (receiver, proxy, faults):
        faults += [None, *[Fault("byte", to_server=True, after=20, byte=ord("x"))] * 100]
        with pytest.raises(FetchFailedError) as caught:
            fetch(receiver, proxy)
        assert [type(failure) for failure in caught.value.failures] == [MessageDamagedError] * 3
        faults[:] = [Fault("byte", to_server=True, after=20, byte=ord("x"))] * 100
        with pytest.raises(StepNotServedError):
            fetch(receiver, proxy)
        assert len(faults) == 97


@pytest.mark.parametrize(
    ("status", "expected"), [("404 Not Found", StepNotServedError), ("401 Unauthorized", PeerAuthenticationError)]
)
def test_a_server_that_does_not_say_what_it_understood_is_believed_in_the_end(
    status: str, expected: type[TransportError]
) -> None:
    asked: list[str] = []

    def script(peer: Peer) -> None:
        while head := peer.request():
            asked.append(head)
            peer.send(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

    with scripted(script) as port, transport(max_failures=3) as receiver, pytest.raises(expected):
        receiver.fetch(f"http://127.0.0.1:{port}/checkpoint/", 1, timeout=timedelta(seconds=20))
    assert len(asked) == 3
