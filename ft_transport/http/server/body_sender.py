"""Sends the bodies of responses, from memory straight to the socket, within the server's share of the network.

One thread per body lets the kernel send in large pieces and wait for the receiver by itself: an event loop would wake
up for each megabyte or so that the receiver takes, and would take the interpreter from the training thread each time.

A trainer shares the machine with the threads that send its state: the kernel copies each byte on the trainer's cores,
and sends it over the network that its gradients need. One rate limit covers all bodies, for any receiver and any way of
sending. Pieces of 25 milliseconds enforce it: it holds over any short interval too, and the sending threads take the
interpreter from the trainer only a few times in each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from aiohttp import web

from ft_transport.http.server.tls_protocol import TLSTransport
from ft_transport.http.tls_channel import TLSChannel
from ft_transport.runtime.signal_safe import SafeThread
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.snapshot import MemoryFile

logger = logging.getLogger(__name__)

ENCRYPTED_PIECE_BYTES: Final = 256 << 10
"""Bytes encrypted at once; they stay in the processor's cache until the kernel has taken them."""
_PIECE_S: Final = 0.025
_LEAST_PIECE_BYTES: Final = 4 << 10
_CREDIT_S: Final = 0.04
"""Sleeping threads wake up late: after a pause, a thread may catch up by this much."""
_UNLIMITED_PIECE_BYTES: Final = 1 << 62
_CLOSED_BY_PEER: Final = getattr(select, "POLLRDHUP", 0)
_ACKED_BYTES: Final = struct.Struct("=120xQ")
"""``tcpi_bytes_acked`` in ``struct tcp_info`` (``linux/tcp.h``, since Linux 4.1); the handshake counts as one."""
_FEW_BYTES: Final = 64 << 10
_NO_LIMIT: Final = struct.pack("ll", 0, 0)
_FLUSH_TICK_S: Final = 0.005
_LEAST_SHARE: Final = 0.1
"""Share of the stall timeout; a receiver that had bytes to take for less than this share is not judged."""
_DROP_UNSENT: Final = struct.pack("ii", 1, 0)


class RateLimiter:
    """Grants bytes at a rate. Thread-safe.

    Args:
        bytes_per_s: The rate.
        clock: Monotonic seconds.

    Attributes:
        piece_bytes: Maximum size of one grant.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._free_s = float("-inf")
        self.piece_bytes: int = max(_LEAST_PIECE_BYTES, min(CHUNK_BYTES, int(bytes_per_s * _PIECE_S)))

    def grant(self, num_bytes: int) -> float:
        """Return the seconds until ``num_bytes`` may be sent; callers are served in order."""
        now_s = self._clock()
        with self._mutex:
            start_s = max(self._free_s, now_s - _CREDIT_S)
            self._free_s = start_s + num_bytes / self._bytes_per_s
        return start_s - now_s

    def take_back(self, num_bytes: int) -> None:
        """Return unused bytes to the budget."""
        with self._mutex:
            self._free_s -= num_bytes / self._bytes_per_s


class BodySocket:
    """A blocking socket to which one body is sent under a rate limit. Used only by one thread, except `waited_s`.

    Args:
        raw: The socket to the receiver.
        limiter: Limit for all bodies of the server; ``None`` for none.
        channel: The server's end of a TLS connection, lent to this thread; ``None`` without TLS.

    Attributes:
        raw: The socket.
        is_encrypted: Whether the body is sent over TLS.
        piece_bytes: Maximum number of bytes to `admit` at once.
    """

    def __init__(self, raw: socket.socket, limiter: RateLimiter | None, channel: TLSChannel | None = None) -> None:
        self.raw = raw
        self.is_encrypted = channel is not None
        self.piece_bytes: int = limiter.piece_bytes if limiter is not None else _UNLIMITED_PIECE_BYTES
        self._limiter = limiter
        self._channel = channel
        self._waits: tuple[float, float | None] = (0.0, None)
        """Total wait so far, and start of the current wait; one value, because other threads read it."""
        self._poll = select.poll()

    def sendall(self, data: memoryview) -> None:
        """Send all of ``data``; blocks."""
        if self._channel is None:
            self._send(data)
            return
        for start in range(0, len(data), ENCRYPTED_PIECE_BYTES):
            self.encrypt([data[start : start + ENCRYPTED_PIECE_BYTES]])
            self.flush()

    def encrypt(self, views: Sequence[memoryview]) -> None:
        """Encrypt the views for a later `flush`; does not wait."""
        assert self._channel is not None, "without TLS, sendall suffices"
        for view in views:
            self._channel.write(view)

    def flush(self) -> None:
        """Send the encrypted bytes; blocks."""
        assert self._channel is not None, "without TLS, sendall suffices"
        self._send(memoryview(self._channel.take()))

    def _send(self, data: memoryview) -> None:
        for start in range(0, len(data), self.piece_bytes):
            piece = data[start : start + self.piece_bytes]
            self.admit(len(piece))
            self.raw.sendall(piece)

    def send_file(self, descriptor: int, position: int, num_bytes: int) -> int:
        """Send the beginning of a part of a file, without TLS; return the bytes sent, 0 at the end of the file."""
        num_bytes = min(num_bytes, self.piece_bytes)
        self.admit(num_bytes)
        sent = os.sendfile(self.raw.fileno(), descriptor, position, num_bytes)
        self.unsent(num_bytes - sent)
        return sent

    def admit(self, num_bytes: int) -> None:
        """Wait until ``num_bytes``, at most ``piece_bytes``, may be sent; no memory may be pinned meanwhile.

        Raises:
            ConnectionResetError: The connection ended meanwhile.
        """
        if self._limiter is None:
            return
        left_s = self._limiter.grant(num_bytes)
        if left_s <= 0:
            return
        until_s = time.monotonic() + left_s
        with self.waiting():
            while left_s > 0:
                # Not time.sleep: the thread that ends the connection waits for this one.
                if self.has_ended(left_s):
                    self._limiter.take_back(num_bytes)
                    raise ConnectionResetError("the connection has ended")
                left_s = until_s - time.monotonic()

    def unsent(self, num_bytes: int) -> None:
        """Return admitted but unsent bytes to the budget."""
        if self._limiter is not None and num_bytes:
            self._limiter.take_back(num_bytes)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the time of the block to `waited_s`: the receiver has nothing to take meanwhile."""
        self._waits = self._waits[0], time.monotonic()
        try:
            yield
        finally:
            self._waits = self.waited_s(), None

    def waited_s(self) -> float:
        """Return the seconds of waiting so far. Called by any thread."""
        waited_s, began_s = self._waits
        return waited_s + (time.monotonic() - began_s if began_s is not None else 0.0)

    def has_ended(self, within_s: float) -> bool:
        """Wait at most ``within_s`` for either side to end the connection; return whether it ended."""
        self._poll.register(self.raw, _CLOSED_BY_PEER)
        return bool(self._poll.poll(within_s * 1e3))


class Body(Protocol):
    """A body of which bytes ``[position, end)`` have yet to be sent.

    Attributes:
        position: Bytes sent so far, or where they begin.
        end: End of the bytes.
    """

    position: int
    end: int

    @property
    def file(self) -> MemoryFile | None:
        """The memory file whose bytes ``[position, end)`` the body is; ``None`` for any other body."""

    def send_to(self, connected: BodySocket) -> None:
        """Sends the rest and advances ``position``; blocks."""


async def send(
    request: web.Request,
    response: web.StreamResponse,
    body: Body,
    *,
    stall_timeout_s: float,
    limiter: RateLimiter | None,
) -> web.StreamResponse:
    """Send a part of the snapshot as the response, or only the head if the request was for the head.

    A receiver that disconnects or stalls loses its connection; that is no error of the server.
    """
    response.content_length = body.end - body.position
    try:
        await response.prepare(request)
        if request.method != "HEAD":
            await _send_body(request, body, stall_timeout_s, limiter)
        await response.write_eof()
    except OSError as error:
        logger.info("the answer to receiver %s ended early: %s", request.remote, error)
        if request.transport is not None:
            request.transport.abort()
    return response


async def _send_body(request: web.Request, body: Body, stall_timeout_s: float, limiter: RateLimiter | None) -> None:
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("it closed the connection")
    is_plain = not isinstance(transport, TLSTransport)
    if is_plain and body.file is not None and limiter is None and body.end - body.position <= _FEW_BYTES:
        await _send_few(request, transport, body, body.file, stall_timeout_s)
        return
    await _flushed(request, transport, stall_timeout_s)
    if transport.is_closing():
        raise ConnectionResetError("it closed the connection")
    # With its own descriptor, the thread can never write to a later connection.
    connected = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    was_reading = transport.is_reading()
    transport.pause_reading()
    # A thread that writes to the socket directly would send plain text.
    channel = transport.lend() if isinstance(transport, TLSTransport) else None
    try:
        sending = _Sending(BodySocket(connected, limiter, channel), body)
        await _send_on_thread(request, sending, stall_timeout_s)
    finally:
        connected.close()
        if isinstance(transport, TLSTransport):
            transport.give_back()
        if was_reading:
            transport.resume_reading()


async def _send_few(
    request: web.Request, transport: asyncio.Transport, body: Body, memory: MemoryFile, stall_timeout_s: float
) -> None:
    """Send a small body from the event loop: a thread would cost more than sending it."""
    num_bytes = body.end - body.position
    with open(memory.descriptor, "rb", buffering=0, closefd=False) as file:
        # The loop's sendfile waits until the head of the response has left its buffers.
        sending = asyncio.get_running_loop().sendfile(transport, file, memory.start + body.position, num_bytes)
        try:
            await asyncio.wait_for(sending, timeout=stall_timeout_s)
        except asyncio.TimeoutError:
            raise _stalled(request, num_bytes, stall_timeout_s) from None
        except RuntimeError:
            # asyncio raises it if the connection was closed just before; it would be logged with all its references.
            if not transport.is_closing():
                raise
            raise ConnectionResetError("it closed the connection") from None
    body.position += num_bytes


class _Sending:
    """The body that one thread sends, and the receiver's progress."""

    def __init__(self, connected: BodySocket, body: Body) -> None:
        self.connected = connected
        self._body = body
        self._num_acked_before = acked_bytes(connected.raw)
        self._num_bytes = body.end - body.position

    def send(self) -> None:
        """Send everything; blocks."""
        raw = self.connected.raw
        # The flag is the connection's, not the descriptor's: the event loop needs it restored.
        raw.settimeout(None)
        try:
            # asyncio sets TCP_NODELAY; a body is better sent in full segments, until its end.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
            self._body.send_to(self.connected)
        finally:
            os.set_blocking(raw.fileno(), False)
            with contextlib.suppress(OSError):  # The receiver disconnected.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _NO_LIMIT)
                # This sends the rest (man 7 tcp).
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def remaining_bytes(self) -> int:
        """Return the bytes that the receiver has yet to take, less those in flight when the body began."""
        if self._num_acked_before:
            return self._num_bytes - (acked_bytes(self.connected.raw) - self._num_acked_before)
        return self._body.end - self._body.position


async def _flushed(request: web.Request, transport: asyncio.WriteTransport, stall_timeout_s: float) -> None:
    """Wait until the head of the response has left the event loop's buffers; usually it has at once."""
    deadline_s = time.monotonic() + stall_timeout_s
    while num_bytes := transport.get_write_buffer_size():
        if time.monotonic() > deadline_s:
            raise _stalled(request, num_bytes, stall_timeout_s)
        await asyncio.sleep(_FLUSH_TICK_S)


async def _send_on_thread(request: web.Request, sending: _Sending, stall_timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    def run() -> None:
        error: BaseException | None = None
        try:
            sending.send()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # A shutdown closed the loop at the same moment.
            loop.call_soon_threadsafe(ended.set_result, error)

    remaining, waited_s = sending.remaining_bytes(), 0.0
    SafeThread(target=run, name="ft-transport-send", daemon=True).start()
    try:
        while not (await asyncio.wait({ended}, timeout=stall_timeout_s))[0]:
            before, remaining = remaining, sending.remaining_bytes()
            waited_before_s, waited_s = waited_s, sending.connected.waited_s()
            # While the thread waited for the limiter or the next chunk, there was nothing to take.
            share = min(1.0, 1.0 - (waited_s - waited_before_s) / stall_timeout_s)
            expected = max(1, int(share * min(CHUNK_BYTES, before)))
            # The last bytes sent may still be in flight.
            if before - remaining < expected and share > _LEAST_SHARE:
                raise _stalled(request, expected, stall_timeout_s)
    finally:
        # However the wait ended, the thread must end first: it uses the caller's socket and memory file.
        while not ended.done():
            _cut_off(sending.connected.raw)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({ended})
    error = ended.result()
    if error is not None:
        raise error


def drop_connection(transport: asyncio.Transport) -> None:
    """Abort a connection with all unreceived data, including a body that a thread is sending."""
    connected = transport.get_extra_info("socket")
    if connected is not None and not transport.is_closing():
        _cut_off(connected)
    transport.abort()


def _cut_off(connected: socket.socket) -> None:
    """Wake the sending thread; its call fails. Unsent bytes are dropped when the connection is closed."""
    with contextlib.suppress(OSError):  # The receiver disconnected first.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
        connected.shutdown(socket.SHUT_RDWR)


def _stalled(request: web.Request, num_bytes: int, stall_timeout_s: float) -> ConnectionResetError:
    logger.warning(
        "receiver %s took less than %d bytes in %.0f s and was cut off", request.remote, num_bytes, stall_timeout_s
    )
    # `send` aborts: only an abort frees the socket of a peer that does not read; a close would wait for the peer.
    return ConnectionResetError("it stalled")


def acked_bytes(connected: socket.socket) -> int:
    """Return the bytes that the receiver's system has acknowledged on the connection; 0 if unknown."""
    if sys.platform != "linux":
        return 0
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_BYTES.size)
    return int(_ACKED_BYTES.unpack(info)[0]) if len(info) == _ACKED_BYTES.size else 0
