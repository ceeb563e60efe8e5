"""A server's share of the network is bounded: over all bodies, over any short while, and by the number of receivers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import torch
from certificates import Issued
from clocks import Clock
from encrypted_transports import connection
from faulty_transports import STATE_BYTES, TIMEOUT, holds, is_state, port_of, state_of, transport
from lent_memory import lent
from proxy import proxied
from served_memory import serving

from ft_transport import HTTPTransport, PeerNotReadyError
from ft_transport.http.relays import Relay
from ft_transport.http.server.body_sender import BodySocket, RateLimiter
from ft_transport.http.server.snapshot_routes import ClientLimit
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.manifest import ContentId
from ft_transport.wire.routes import CHUNK_HEADER

RATE = 4 << 20
WINDOW_S = 0.05


@pytest.mark.parametrize("rate", [100e3, 1e6, 50e6, 1e9])
def test_no_short_while_has_more_than_its_share(rate: float) -> None:
    clock = Clock()
    cap = RateLimiter(rate, clock)
    sent: list[tuple[float, int]] = []
    for _ in range(1000):
        wait_s = cap.grant(cap.piece_bytes)
        # A thread that wakes up late, now and then.
        clock.now_s += max(0.0, wait_s) + (0.003 if len(sent) % 7 == 0 else 0.0)
        sent.append((clock.now_s, cap.piece_bytes))
    for first, (began_s, _) in enumerate(sent):
        within = sum(num_bytes for at_s, num_bytes in sent[first:] if at_s < began_s + WINDOW_S)
        assert within <= rate * (WINDOW_S + 0.04) + 2 * cap.piece_bytes
    assert sum(num_bytes for _, num_bytes in sent) / (clock.now_s - 100.0) == pytest.approx(rate, rel=0.05)


def test_after_a_pause_it_makes_up_for_little() -> None:
    clock = Clock()
    cap = RateLimiter(1e6, clock)
    cap.grant(1)
    clock.now_s += 60.0
    num_at_once = 0
    while cap.grant(1000) <= 0:
        num_at_once += 1
    assert num_at_once * 1000 <= 1e6 * WINDOW_S


def test_what_was_not_sent_is_not_counted() -> None:
    clock = Clock()
    cap = RateLimiter(1e6, clock)
    while cap.grant(1000) <= 0:
        pass
    before_s = cap.grant(0)
    cap.grant(500_000)
    cap.take_back(500_000)
    assert cap.grant(0) == pytest.approx(before_s)


def test_the_end_of_a_connection_ends_a_wait() -> None:
    near, far = socket.socketpair()
    with near, far:
        paced = BodySocket(near, RateLimiter(1.0))
        threading.Timer(0.2, near.shutdown, [socket.SHUT_RDWR]).start()
        started_s = time.monotonic()
        with pytest.raises(ConnectionResetError):
            paced.sendall(memoryview(bytes(64 << 10)))
        assert time.monotonic() - started_s < 5
        assert paced.waited_s() > 0.1


def _plain(sender: HTTPTransport[Any], receiver: HTTPTransport[Any]) -> Any:
    return receiver.fetch(sender.metadata(), 1).state


def _sliced(sender: HTTPTransport[Any], receiver: HTTPTransport[Any]) -> Any:
    return receiver.fetch_sharded([sender.metadata()], 1).state


@pytest.mark.parametrize(("fetch", "num_connections"), [(_plain, 1), (_plain, 4), (_sliced, 4)])
def test_all_connections_together_have_the_rate(fetch: Callable[..., Any], num_connections: int) -> None:
    with transport(max_send_bytes_per_s=RATE) as sender, transport(num_connections) as receiver:
        sender.send_checkpoint([], 1, state_of(1), TIMEOUT)
        started_s = time.monotonic()
        state = fetch(sender, receiver)
        took_s = time.monotonic() - started_s
    assert holds(state, 1)
    least_s = STATE_BYTES / RATE
    assert least_s - 0.06 <= took_s < 3 * least_s


def test_two_receivers_share_it() -> None:
    with transport(max_send_bytes_per_s=RATE) as sender, transport() as first, transport() as second:
        sender.send_checkpoint([], 1, state_of(1), TIMEOUT)
        states: list[Any] = []
        threads = [
            threading.Thread(target=lambda by=by: states.append(_plain(sender, by)))  # type: ignore[misc]
            for by in (first, second)
        ]
        started_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.monotonic() - started_s
    assert [is_state(state, 1) for state in states] == [True, True]
    assert took_s >= 2 * STATE_BYTES / RATE - 0.06


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_nobody_holds_shared_memory_while_it_waits(
    is_encrypted: bool, issued: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []
    admit = BodySocket.admit

    def watched(connected: BodySocket, num_bytes: int) -> None:
        pinned.append(memory.num_pinned)
        admit(connected, num_bytes)

    monkeypatch.setattr(BodySocket, "admit", watched)
    data = bytes(range(256)) * 4096
    chosen = issued if is_encrypted else None
    with (
        serving(tls=chosen.files if chosen is not None else None, max_send_bytes_per_s=RATE) as served,
        lent(served, data) as memory,
        closing(connection(served.server.port, chosen)) as http,
    ):
        started_s = time.monotonic()
        http.request("GET", "/checkpoint/5/full")
        assert http.getresponse().read().endswith(data)
        assert time.monotonic() - started_s >= len(data) / RATE - 0.06
    assert len(pinned) >= len(data) // RateLimiter(RATE).piece_bytes
    assert not any(pinned)


def test_a_relay_keeps_to_it_too() -> None:
    data = bytes(range(256)) * 4096
    chunks = ChunkTable(data_bytes=len(data), chunk_bytes=1 << 18)
    content = ContentId("0" * 32)
    with serving(max_send_bytes_per_s=RATE) as served:
        served.server.relays.open(
            Relay(content, step=1, chunks=chunks, views=lambda start, end: [memoryview(data)[start:end]], missing=())
        )
        started_s = time.monotonic()
        body = served.ask(f"/relay/{content}?ranges=0-{len(data)}").body
    assert time.monotonic() - started_s >= len(data) / RATE - 0.06
    frame_bytes = CHUNK_HEADER.size + chunks.chunk_bytes
    frames = [body[start : start + frame_bytes] for start in range(0, len(body), frame_bytes)]
    assert b"".join(frame[CHUNK_HEADER.size :] for frame in frames) == data


def test_a_receiver_is_not_taken_for_one_that_stalls_because_of_the_cap() -> None:
    with (
        transport(max_send_bytes_per_s=RATE, stall_timeout=timedelta(seconds=0.3)) as sender,
        transport(4, min_bytes_per_s=1) as receiver,
    ):
        sender.send_checkpoint([], 1, state_of(1), TIMEOUT)
        with proxied(port_of(sender)) as proxy:
            assert is_state(receiver.fetch(proxy.url, 1).state, 1)
            # Metadata, and a connection each: none was cut off.
            assert len([path for path in proxy.requests if "/full" in path]) <= 4


def test_a_receiver_that_stalls_is_cut_off_under_a_cap_too() -> None:
    with transport(max_send_bytes_per_s=64 << 20, stall_timeout=timedelta(seconds=0.3)) as sender:
        sender.send_checkpoint([], 1, {"w": torch.ones(16 << 20)}, TIMEOUT)
        address = sender.metadata().split("/")[2].split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=20) as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            stalled.sendall(b"GET /checkpoint/1/full HTTP/1.1\r\nHost: " + ":".join(address).encode() + b"\r\n\r\n")
            deadline_s = time.monotonic() + 20
            while sender.server._cache.num_readers() == 0:
                assert time.monotonic() < deadline_s
            while sender.server._cache.num_readers():
                assert time.monotonic() < deadline_s


def test_one_receiver_too_many_waits_and_gets_all() -> None:
    with (
        transport(max_clients=1, max_send_bytes_per_s=RATE) as sender,
        transport(2, replica="first") as first,
        transport(2, replica="second") as second,
    ):
        sender.send_checkpoint([], 1, state_of(1), TIMEOUT)
        with proxied(port_of(sender)) as proxy:
            answers = bytearray()
            proxy.watch_answers = lambda data: answers.extend(data[:500])
            begun = threading.Event()
            ends: dict[str, float] = {}

            def fetch() -> None:
                first.fetch(sender.metadata(), 1)
                ends["first"] = time.monotonic()

            thread = threading.Thread(target=fetch)
            thread.start()
            deadline_s = time.monotonic() + 20
            while not sender.server._cache.num_readers():
                assert time.monotonic() < deadline_s
                begun.wait(0.01)
            assert is_state(second.fetch(proxy.url, 1).state, 1)
            ends["second"] = time.monotonic()
            thread.join()
    assert b"503 Service Unavailable" in answers
    assert b"Retry-After: 1" in answers
    assert b"max_clients" in answers
    assert ends["first"] < ends["second"]


def test_a_receiver_keeps_its_place_for_a_moment() -> None:
    clock = Clock()
    limit = ClientLimit(2, clock)
    with limit.serving(("a", "x")), limit.serving(("a", "x")), limit.serving(("a", "y")):
        with pytest.raises(PeerNotReadyError, match="sends to 2 receivers") as caught, limit.serving(("b", "x")):
            pass
        assert caught.value.retry_after_s == 1.0
    clock.now_s += 0.5
    with pytest.raises(PeerNotReadyError), limit.serving(("b", "x")):
        pass
    with limit.serving(("a", "x")):
        clock.now_s += 0.6
        # The place of the other one is free by now, and this one is at it.
        with limit.serving(("b", "x")), pytest.raises(PeerNotReadyError), limit.serving(("c", "x")):
            pass
