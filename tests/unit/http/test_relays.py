"""What is passed on: each chunk when it has landed, and of those that are there the one that is wanted most."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import cast

import pytest

from ft_transport.errors import ConfigurationError, PeerNotReadyError, RestoreError
from ft_transport.http.relays import Relay, Relays, Views
from ft_transport.http.server.bodies import RelayedChunks
from ft_transport.http.server.body_sender import ENCRYPTED_PIECE_BYTES, BodySocket
from ft_transport.http.tls_channel import TLSChannel
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.manifest import ContentId
from ft_transport.wire.routes import CHUNK_HEADER

_CHUNK_BYTES = 1 << 16
_DATA = bytes(range(256)) * (5 * _CHUNK_BYTES // 256)
_CONTENT = ContentId("0" * 32)


def _views(start: int, end: int) -> list[memoryview]:
    return [memoryview(_DATA)[start:end]]


def _relay(missing: Collection[int], views: Views = _views) -> Relay:
    chunks = ChunkTable(data_bytes=len(_DATA), chunk_bytes=_CHUNK_BYTES)
    return Relay(_CONTENT, step=1, chunks=chunks, views=views, missing=missing)


@contextmanager
def _connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    far.settimeout(20)
    with near, far:
        yield near, far


class _Sending:
    """An answer on a thread."""

    def __init__(self, relay: Relay, near: socket.socket, chunks: Sequence[int], *, pause_s: float) -> None:
        self._error: BaseException | None = None
        self._content = RelayedChunks(relay.follow(chunks, _nothing), pause_s=pause_s)
        self.connected = BodySocket(near, None)
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        try:
            self._content.send_to(self.connected)
        except BaseException as error:
            self._error = error

    def result(self) -> int:
        """How much it has sent; raises what ended it early."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._content.position


def _nothing() -> None:
    pass


def _received(far: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes and (part := far.recv(num_bytes - len(received))):
        received += part
    return bytes(received)


def _chunk(far: socket.socket) -> tuple[int, int]:
    """The next one of an answer, and how many the furthest receiver has received."""
    start, furthest = CHUNK_HEADER.unpack(_received(far, CHUNK_HEADER.size))
    assert _received(far, _CHUNK_BYTES) == _DATA[start : start + _CHUNK_BYTES]
    return start // _CHUNK_BYTES, furthest


def test_an_answer_goes_on_with_chunks_as_they_land_in_whatever_order() -> None:
    relay = _relay([2, 3, 4])
    with _connection() as (near, far):
        sending = _Sending(relay, near, [1, 2, 3, 4], pause_s=20)
        assert _chunk(far) == (1, 0)
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        far.settimeout(20)
        relay.landed(4)
        assert _chunk(far) == (4, 1)
        relay.report_progress(3)
        relay.landed(2)
        assert _chunk(far) == (2, 3)
        relay.landed(3)
        assert _chunk(far) == (3, 3)
        assert sending.result() == 4 * (CHUNK_HEADER.size + _CHUNK_BYTES)


def test_of_the_chunks_that_are_there_the_one_that_was_asked_for_first_goes_first() -> None:
    relay = _relay([0, 1, 2])
    follower, closed = relay.follow([3, 1, 4, 2, 0], _nothing), relay.follow([0], _nothing)
    closed.close()
    for chunk in (0, 2, 1):
        relay.landed(chunk)
    assert [follower.next(0.0) for _ in range(6)] == [3, 1, 4, 2, 0, None]
    assert closed.next(0.0) is None
    # One that is taken back is sent when it has landed again.
    follower = relay.follow([0, 1], _nothing)
    relay.landed_except([0])
    assert [follower.next(0.0) for _ in range(3)] == [None, 1, None]
    relay.landed(0)
    assert follower.next(0.0) == 0


def test_each_chunk_is_told_of_once_whoever_lands_it() -> None:
    relay = _relay(range(5))
    followers = [relay.follow(range(5), _nothing) for _ in range(8)]
    threads = [threading.Thread(target=relay.landed, args=(chunk,)) for chunk in range(5) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for follower in followers:
        assert sorted(follower.next(0.0) for _ in range(5)) == list(range(5))
        assert follower.next(0.0) is None


def test_a_chunk_that_does_not_land_in_time_ends_it() -> None:
    with _connection() as (near, far):
        sending = _Sending(_relay([1]), near, [0, 1], pause_s=0.05)
        assert _chunk(far) == (0, 0)
        with pytest.raises(ConnectionAbortedError, match="has landed within"):
            sending.result()
        # Nobody takes the receiver for one that stalls.
        assert sending.connected.waited_s() >= 0.05


@pytest.mark.parametrize("end", ["the relay", "the receiver"])
def test_a_waiting_receiver_gets_the_end(end: str) -> None:
    relay = _relay([1])
    with _connection() as (near, far):
        sending = _Sending(relay, near, [0, 1], pause_s=600)
        _chunk(far)
        if end == "the relay":
            relay.close()
        else:
            far.close()
        with pytest.raises(ConnectionError, match="relay is closed" if end == "the relay" else "closed the connection"):
            sending.result()


def test_a_relay_whose_memory_was_freed_is_closed_for_all_its_followers() -> None:
    def freed(start: int, end: int) -> list[memoryview]:
        raise RestoreError("expected memory of 'w', it was freed")

    relay = _relay([1], freed)
    with _connection() as (near, _), _connection() as (other, _):
        waiting = _Sending(relay, other, [1], pause_s=600)
        with pytest.raises(ConnectionAbortedError, match="'w'"):
            _Sending(relay, near, [0], pause_s=20).result()
        with pytest.raises(ConnectionAbortedError, match="relay is closed"):
            waiting.result()
    with pytest.raises(PeerNotReadyError):
        relay.views()


class _NoTLS:
    """Stands for a TLSChannel, and encrypts nothing."""

    def __init__(self) -> None:
        self._written = b""

    def write(self, data: memoryview) -> None:
        self._written += bytes(data)

    def take(self) -> bytes:
        taken, self._written = self._written, b""
        return taken


def test_what_is_encrypted_is_looked_up_piece_by_piece_because_it_may_be_freed_meanwhile() -> None:
    data = bytes(4 * ENCRYPTED_PIECE_BYTES)
    looked_up: list[tuple[int, int]] = []

    def freed_after_one_piece(start: int, end: int) -> list[memoryview]:
        if looked_up:
            raise RestoreError("expected memory of 'w', it was freed")
        looked_up.append((start, end))
        return [memoryview(data)[start:end]]

    chunks = ChunkTable(data_bytes=len(data), chunk_bytes=len(data))
    relay = Relay(_CONTENT, step=1, chunks=chunks, views=freed_after_one_piece, missing=())
    content = RelayedChunks(relay.follow([0], _nothing), pause_s=20)
    with _connection() as (near, far):
        receiving = threading.Thread(
            target=_received, args=(far, CHUNK_HEADER.size + ENCRYPTED_PIECE_BYTES), daemon=True
        )
        receiving.start()
        with pytest.raises(ConnectionAbortedError, match="'w'"):
            content.send_to(BodySocket(near, None, cast(TLSChannel, _NoTLS())))
        receiving.join(20)
        assert not receiving.is_alive()
    assert looked_up == [(0, ENCRYPTED_PIECE_BYTES)]
    assert content.position == CHUNK_HEADER.size + ENCRYPTED_PIECE_BYTES
    assert relay.is_closed


async def _found(relays: Relays, start: int, end: int, *, wait_s: float = 20.0) -> int | None:
    """The first of these chunks that is there."""
    follower = await relays.follow(_CONTENT, [(start * _CHUNK_BYTES, end * _CHUNK_BYTES)], wait_s=wait_s)
    with closing(follower):
        return follower.next(0.0)


def _on_loop(run: Callable[[Relays], Awaitable[None]]) -> None:
    async def main() -> None:
        relays = Relays(asyncio.get_running_loop())
        try:
            await run(relays)
        finally:
            relays.close_all()
            relays._close_idle()

    asyncio.run(main())


def test_a_request_is_held_until_any_of_its_chunks_lands() -> None:
    async def run(relays: Relays) -> None:
        relay = _relay([0, 1, 2, 3, 4])
        relays.open(relay)
        first, second = asyncio.create_task(_found(relays, 0, 3)), asyncio.create_task(_found(relays, 3, 5))
        await asyncio.sleep(0)
        await asyncio.to_thread(relay.landed, 4)
        assert await second == 4
        assert not first.done()
        await asyncio.to_thread(relay.landed, 1)
        assert await first == 1
        # Nobody is told who has gone.
        assert not relay._followers

    _on_loop(run)


def test_a_request_waits_for_a_content_that_is_yet_to_begin() -> None:
    async def run(relays: Relays) -> None:
        waiting = asyncio.create_task(_found(relays, 0, 2))
        await asyncio.sleep(0)
        await asyncio.to_thread(relays.open, _relay([1]))
        assert await waiting == 0

    _on_loop(run)


def test_a_request_goes_on_with_who_receives_the_content_again() -> None:
    async def run(relays: Relays) -> None:
        relays.open(_relay([0, 1]))
        waiting = asyncio.create_task(_found(relays, 0, 2))
        await asyncio.sleep(0)
        relays.close_all()
        await asyncio.to_thread(relays.open, _relay([0]))
        assert await waiting == 1

    _on_loop(run)


@pytest.mark.parametrize(("begins", "what"), [(True, "none of the requested"), (False, "receives no such content")])
def test_what_does_not_come_in_time_is_told(begins: bool, what: str) -> None:
    async def run(relays: Relays) -> None:
        relay = _relay([0])
        if begins:
            relays.open(relay)
        began_s = time.monotonic()
        with pytest.raises(PeerNotReadyError, match=what):
            await _found(relays, 0, 1, wait_s=0.05)
        assert time.monotonic() - began_s >= 0.05
        assert not relay._followers

    _on_loop(run)


def test_a_range_of_parts_of_chunks_is_refused() -> None:
    async def run(relays: Relays) -> None:
        relays.open(_relay([]))
        with pytest.raises(ConfigurationError, match="whole chunks"):
            await relays.follow(_CONTENT, [(1, _CHUNK_BYTES)], wait_s=0.0)

    _on_loop(run)
