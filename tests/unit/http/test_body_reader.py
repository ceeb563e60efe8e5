"""The body of an answer: what was read with the head comes first, and every byte lands where it belongs."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from ft_transport.http.client.deadline_socket import DeadlineSocket
from ft_transport.http.client.fetch_settings import Timeouts
from ft_transport.http.client.responses import BodyReader
from ft_transport.http.peer_address import PeerAddress

BODY = bytes(range(256)) * 4


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        yield near, far


def reader_of(
    near: socket.socket,
    *,
    ahead: bytes,
    deadline_s: float = 20.0,
    stall_timeout_s: float = 20.0,
    min_bytes_per_s: float = 1.0,
    length: int = len(BODY),
) -> BodyReader:
    body = BodyReader(
        DeadlineSocket(near),
        peer=PeerAddress(host="127.0.0.1", port=1),
        timeouts=Timeouts(
            deadline_s=time.monotonic() + deadline_s,
            connect_timeout_s=20.0,
            stall_timeout_s=stall_timeout_s,
            min_bytes_per_s=min_bytes_per_s,
        ),
        length=length,
    )
    body.ahead = ahead
    return body


@pytest.mark.parametrize("num_ahead", [0, 1, 100, 101, 500, len(BODY)])
@pytest.mark.parametrize("cuts", [(0, len(BODY)), (0, 100, 101, len(BODY)), (0, 0, 500, 500, len(BODY))])
def test_every_byte_lands_in_its_place(
    pair: tuple[socket.socket, socket.socket], num_ahead: int, cuts: tuple[int, ...]
) -> None:
    near, far = pair
    received = bytearray(len(BODY))
    far.sendall(BODY[num_ahead:])
    body = reader_of(near, ahead=BODY[:num_ahead])
    body.read_into([memoryview(received)[start:end] for start, end in pairwise(cuts) if end > start])
    assert bytes(received) == BODY
    assert body.num_bytes == len(BODY)


def test_what_was_read_with_the_head_is_left_for_the_next_read(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    first, second = bytearray(10), bytearray(len(BODY) - 10)
    body = reader_of(near, ahead=BODY[:300])
    body.read_into([memoryview(first)])
    far.sendall(BODY[300:])
    body.read_into([memoryview(second)])
    assert bytes(first + second) == BODY


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux wakes a read after a number of bytes")
def test_a_steady_body_wakes_a_read_late_while_enough_follows_and_needs_no_further_byte_to_end_it(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    num_bytes = 1 << 20
    part = BODY * (num_bytes // len(BODY))
    body = reader_of(near, ahead=b"", length=2 * num_bytes)
    for wakes_late in (True, False):
        received = bytearray(num_bytes)
        # Nothing follows before the read has returned.
        sending = threading.Thread(target=far.sendall, args=(part,), daemon=True)
        sending.start()
        began_s = time.monotonic()
        body.read_into([memoryview(received)], is_steady=True)
        assert time.monotonic() - began_s < 10.0
        sending.join()
        assert bytes(received) == part
        assert (near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) > 1) is wakes_late


def test_much_that_has_come_earns_the_rest_no_time_once_it_is_paced_anew(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    far.sendall(BODY)
    # At this rate all that has come is worth ten seconds, and the trickle below is too slow.
    body = reader_of(near, ahead=b"", stall_timeout_s=0.3, min_bytes_per_s=100.0)
    body.read_into([memoryview(bytearray(len(BODY)))])
    body.restart_throughput()
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.05):
            far.sendall(b"x")

    trickling = threading.Thread(target=trickle, daemon=True)
    trickling.start()
    begun_s = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            body.read_into([memoryview(bytearray(1000))])
    finally:
        stop.set()
        trickling.join()
    assert time.monotonic() - begun_s < 5.0
