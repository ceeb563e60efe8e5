"""What is passed on: in order, each chunk when it has landed, and no further than what is waited for."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

import pytest

from ft_transport.errors import ConfigurationError, PeerNotReadyError
from ft_transport.http.relays import Relay, RelayedRange, Relays
from ft_transport.http.send_cap import Pace, PacedSocket
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.content import ContentId

_CHUNK_BYTES = 1 << 16
_DATA = bytes(range(256)) * (5 * _CHUNK_BYTES // 256)
_CONTENT = ContentId("0" * 32)


def _relay(missing: Collection[int]) -> Relay:
    return Relay(
        _CONTENT,
        step=1,
        chunks=ChunkTable(data_bytes=len(_DATA), chunk_bytes=_CHUNK_BYTES),
        views=lambda start, end: [memoryview(_DATA)[start:end]],
        missing=missing,
    )


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

    def __init__(self, relay: Relay, near: socket.socket, start: int, end: int, *, pause_s: float) -> None:
        self._error: BaseException | None = None
        self._content = RelayedRange(relay, start, end, pause_s=pause_s)
        self.pace = Pace(near, None)
        self._thread = threading.Thread(target=self._send, args=(near,), daemon=True)
        self._thread.start()

    def _send(self, near: socket.socket) -> None:
        try:
            self._content.send_to(PacedSocket(near, self.pace))
        except BaseException as error:
            self._error = error

    def result(self) -> int:
        """How far it has come; raises what ended it early."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._content.position


def _received(far: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes and (part := far.recv(num_bytes - len(received))):
        received += part
    return bytes(received)


def test_an_answer_goes_on_as_chunks_land_in_whatever_order() -> None:
    relay = _relay([2, 3, 4])
    with _connection() as (near, far):
        sending = _Sending(relay, near, _CHUNK_BYTES, len(_DATA), pause_s=20)
        assert _received(far, _CHUNK_BYTES) == _DATA[_CHUNK_BYTES : 2 * _CHUNK_BYTES]
        relay.landed(4)
        relay.landed(2)
        assert _received(far, _CHUNK_BYTES) == _DATA[2 * _CHUNK_BYTES : 3 * _CHUNK_BYTES]
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        far.settimeout(20)
        relay.landed(3)
        assert _received(far, 2 * _CHUNK_BYTES) == _DATA[3 * _CHUNK_BYTES :]
        assert sending.result() == len(_DATA)


def test_a_chunk_that_does_not_land_in_time_ends_it() -> None:
    with _connection() as (near, far):
        sending = _Sending(_relay([1]), near, 0, len(_DATA), pause_s=0.05)
        assert _received(far, _CHUNK_BYTES) == _DATA[:_CHUNK_BYTES]
        with pytest.raises(ConnectionAbortedError, match="in time"):
            sending.result()
        # Nobody takes the receiver for one that stalls.
        assert sending.pace.waited_s() >= 0.05


@pytest.mark.parametrize("end", ["the relay", "the receiver"])
def test_whoever_waits_is_told_of_the_end(end: str) -> None:
    relay = _relay([1])
    with _connection() as (near, far):
        sending = _Sending(relay, near, 0, len(_DATA), pause_s=600)
        _received(far, _CHUNK_BYTES)
        if end == "the relay":
            relay.end()
        else:
            far.close()
        with pytest.raises(ConnectionError, match="not passed on" if end == "the relay" else "closed the connection"):
            sending.result()


async def _found(relays: Relays, start: int, end: int, *, wait_s: float = 20.0) -> int:
    _, landed_end = await relays.find(_CONTENT, start * _CHUNK_BYTES, end * _CHUNK_BYTES, wait_s=wait_s)
    return landed_end // _CHUNK_BYTES


def _on_loop(run: Callable[[Relays], Awaitable[None]]) -> None:
    async def main() -> None:
        relays = Relays(asyncio.get_running_loop())
        try:
            await run(relays)
        finally:
            relays.end_all()
            relays._end_idle()

    asyncio.run(main())


def test_a_request_is_held_until_its_first_chunk_lands_and_is_woken_by_no_other() -> None:
    async def run(relays: Relays) -> None:
        relay = _relay([0, 1, 2, 3, 4])
        relays.begin(relay)
        first, second = asyncio.create_task(_found(relays, 0, 3)), asyncio.create_task(_found(relays, 3, 5))
        await asyncio.sleep(0)
        num_calls = 0
        num_landed_from = relay.num_landed_from

        def counted(first_chunk: int, end: int) -> int:
            nonlocal num_calls
            num_calls += 1
            return num_landed_from(first_chunk, end)

        relay.num_landed_from = counted  # type: ignore[method-assign]
        for chunk in (1, 2, 4):
            await asyncio.to_thread(relay.landed, chunk)
        await asyncio.to_thread(relay.landed, 0)
        assert await first == 3
        assert num_calls == 1
        await asyncio.to_thread(relay.landed, 3)
        assert await second == 5

    _on_loop(run)


def test_a_request_waits_for_a_content_that_is_yet_to_begin() -> None:
    async def run(relays: Relays) -> None:
        waiting = asyncio.create_task(_found(relays, 0, 2))
        await asyncio.sleep(0)
        await asyncio.to_thread(relays.begin, _relay([1]))
        assert await waiting == 1

    _on_loop(run)


@pytest.mark.parametrize(("begins", "what"), [(True, "none of these"), (False, "nothing of this content")])
def test_what_does_not_come_in_time_is_told(begins: bool, what: str) -> None:
    async def run(relays: Relays) -> None:
        if begins:
            relays.begin(_relay([0]))
        began_s = time.monotonic()
        with pytest.raises(PeerNotReadyError, match=what):
            await _found(relays, 0, 2, wait_s=0.05)
        assert time.monotonic() - began_s >= 0.05
        assert not relays._waiting

    _on_loop(run)


def test_a_range_of_parts_of_chunks_is_refused() -> None:
    async def run(relays: Relays) -> None:
        relays.begin(_relay([]))
        with pytest.raises(ConfigurationError, match="whole chunks"):
            await relays.find(_CONTENT, 1, _CHUNK_BYTES, wait_s=0.0)

    _on_loop(run)
