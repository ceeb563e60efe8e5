"""Sends the bodies of responses, directly from memory to the socket, within the server's rate limit.

Each body has its own thread, so that the kernel sends large pieces and waits for the receiver. An event loop would wake
up about once for each megabyte that the receiver reads, and each time take the interpreter from the training thread.

Sending a state slows down the training: the kernel copies each byte on the trainer's cores, and sends it over the
network that the gradients need. So one rate limit covers all bodies together. A body is sent in pieces that take 25
milliseconds each. So the limit holds even in short intervals, and the sending threads rarely need the interpreter.
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
"""Number of bytes encrypted at once, so few that they are still in the processor's cache when the kernel copies them.
"""
_PIECE_S: Final = 0.025
_LEAST_PIECE_BYTES: Final = 4 << 10
_CREDIT_S: Final = 0.04
"""How much sending time a thread may catch up after a pause, because sleeping threads wake up late."""
_UNLIMITED_PIECE_BYTES: Final = 1 << 62
_CLOSED_BY_PEER: Final = getattr(select, "POLLRDHUP", 0)
_ACKED_BYTES: Final = struct.Struct("=120xQ")
"""``tcpi_bytes_acked`` in ``struct tcp_info`` (``linux/tcp.h``, since Linux 4.1); the handshake counts as one."""
_FEW_BYTES: Final = 64 << 10
_NO_LIMIT: Final = struct.pack("ll", 0, 0)
_FLUSH_TICK_S: Final = 0.005
_LEAST_SHARE: Final = 0.1
"""A receiver is not cut off if it had bytes to read during less than this share of the stall timeout."""
_DROP_UNSENT: Final = struct.pack("ii", 1, 0)


class RateLimiter:
    """Limits the rate at which all bodies together are sent. Thread-safe.

    Args:
        bytes_per_s: The maximum rate.
        clock: Returns monotonic seconds.

    Attributes:
        piece_bytes: Maximum number of bytes to pass to `grant` at once.
    """

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._free_s = float("-inf")
        self.piece_bytes: int = max(_LEAST_PIECE_BYTES, min(CHUNK_BYTES, int(bytes_per_s * _PIECE_S)))

    def grant(self, num_bytes: int) -> float:
        """Take ``num_bytes`` from the budget; return how many seconds the caller has to wait before sending."""
        now_s = self._clock()
        with self._mutex:
            start_s = max(self._free_s, now_s - _CREDIT_S)
            self._free_s = start_s + num_bytes / self._bytes_per_s
        return start_s - now_s

    def take_back(self, num_bytes: int) -> None:
        """Give unused bytes back to the budget."""
        with self._mutex:
            self._free_s -= num_bytes / self._bytes_per_s


class BodySocket:
    """A blocking socket to which one thread sends one body under a rate limit. Any thread may call `waited_s`.

    Args:
        raw: The socket to the receiver.
        limiter: The rate limit of all bodies together; ``None`` for no limit.
        channel: The TLS state of the connection, lent to this thread; ``None`` without TLS.

    Attributes:
        raw: The socket to the receiver.
        is_encrypted: Whether the body is sent over TLS.
        piece_bytes: Maximum number of bytes to pass to `admit` at once.
    """

    def __init__(self, raw: socket.socket, limiter: RateLimiter | None, channel: TLSChannel | None = None) -> None:
        self.raw = raw
        self.is_encrypted = channel is not None
        self.piece_bytes: int = limiter.piece_bytes if limiter is not None else _UNLIMITED_PIECE_BYTES
        self._limiter = limiter
        self._channel = channel
        self._waits: tuple[float, float | None] = (0.0, None)
        """Total seconds of ended waits, and the start of the current wait. One tuple, so that other threads always read
        values that belong together.
        """
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
        """Encrypt the views, to be sent by `flush`. Does not wait."""
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
        """Send at most ``num_bytes`` of a file, without TLS; return the number of bytes sent, 0 at the file's end."""
        num_bytes = min(num_bytes, self.piece_bytes)
        self.admit(num_bytes)
        sent = os.sendfile(self.raw.fileno(), descriptor, position, num_bytes)
        self.unsent(num_bytes - sent)
        return sent

    def admit(self, num_bytes: int) -> None:
        """Wait until the rate limit allows ``num_bytes``. The caller must not keep memory pinned during the wait.

        Raises:
            ConnectionResetError: The connection was closed meanwhile.
        """
        if self._limiter is None:
            return
        left_s = self._limiter.grant(num_bytes)
        if left_s <= 0:
            return
        until_s = time.monotonic() + left_s
        with self.waiting():
            while left_s > 0:
                # Not time.sleep: the event loop closes the connection and then waits for this thread.
                if self.has_ended(left_s):
                    self._limiter.take_back(num_bytes)
                    raise ConnectionResetError("the connection was closed")
                left_s = until_s - time.monotonic()

    def unsent(self, num_bytes: int) -> None:
        """Return to the budget ``num_bytes`` that `admit` allowed but that were not sent."""
        if self._limiter is not None and num_bytes:
            self._limiter.take_back(num_bytes)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Add the duration of the ``with`` block to `waited_s`: the receiver has nothing to read during that time."""
        self._waits = self._waits[0], time.monotonic()
        try:
            yield
        finally:
            self._waits = self.waited_s(), None

    def waited_s(self) -> float:
        """Return for how many seconds the receiver has had to wait for the sender. Called by any thread."""
        waited_s, began_s = self._waits
        return waited_s + (time.monotonic() - began_s if began_s is not None else 0.0)

    def has_ended(self, within_s: float) -> bool:
        """Wait at most ``within_s`` seconds for one side to close the connection; return whether it is closed."""
        self._poll.register(self.raw, _CLOSED_BY_PEER)
        return bool(self._poll.poll(within_s * 1e3))


class Body(Protocol):
    """The body of a response.

    Attributes:
        position: Start of the bytes that have yet to be sent.
        end: End of the bytes that have yet to be sent.
    """

    position: int
    end: int

    @property
    def file(self) -> MemoryFile | None:
        """The memory file, if the body consists of bytes ``[position, end)`` of one; else ``None``."""

    def send_to(self, connected: BodySocket) -> None:
        """Send the rest of the body, and advance ``position``; blocks."""


async def send(
    request: web.Request,
    response: web.StreamResponse,
    body: Body,
    *,
    stall_timeout_s: float,
    limiter: RateLimiter | None,
) -> web.StreamResponse:
    """Send a response with this body; or without it, if the method of the request is HEAD.

    If the receiver disconnects or stalls, closes the connection, and raises no error.
    """
    response.content_length = body.end - body.position
    try:
        await response.prepare(request)
        if request.method != "HEAD":
            await _send_body(request, body, stall_timeout_s, limiter)
        await response.write_eof()
    except OSError as error:
        logger.info("the response to receiver %s ended early: %s", request.remote, error)
        if request.transport is not None:
            request.transport.abort()
    return response


async def _send_body(request: web.Request, body: Body, stall_timeout_s: float, limiter: RateLimiter | None) -> None:
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the receiver closed the connection")
    is_plain = not isinstance(transport, TLSTransport)
    if is_plain and body.file is not None and limiter is None and body.end - body.position <= _FEW_BYTES:
        await _send_few(request, transport, body, body.file, stall_timeout_s)
        return
    await _flushed(request, transport, stall_timeout_s)
    if transport.is_closing():
        raise ConnectionResetError("the receiver closed the connection")
    # A separate descriptor: the event loop may close its own one, whose number a later connection may then get.
    connected = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    was_reading = transport.is_reading()
    transport.pause_reading()
    # With TLS, the thread needs the TLS state, because bytes that it wrote to the socket would be plain text.
    channel = transport.lend() if isinstance(transport, TLSTransport) else None
    try:
        await _send_on_thread(request, BodySocket(connected, limiter, channel), body, stall_timeout_s)
    finally:
        connected.close()
        if isinstance(transport, TLSTransport):
            transport.give_back()
        if was_reading:
            transport.resume_reading()


async def _send_few(
    request: web.Request, transport: asyncio.Transport, body: Body, memory: MemoryFile, stall_timeout_s: float
) -> None:
    """Send a small body on the event loop, because a thread would cost more than the sending."""
    num_bytes = body.end - body.position
    with open(memory.descriptor, "rb", buffering=0, closefd=False) as file:
        # The loop's sendfile waits until the head of the response has left its buffers.
        sending = asyncio.get_running_loop().sendfile(transport, file, memory.start + body.position, num_bytes)
        try:
            await asyncio.wait_for(sending, timeout=stall_timeout_s)
        except asyncio.TimeoutError:
            raise _stalled(request, num_bytes, stall_timeout_s) from None
        except RuntimeError:
            # asyncio raises RuntimeError if the receiver has just closed the connection.
            if not transport.is_closing():
                raise
            raise ConnectionResetError("the receiver closed the connection") from None
    body.position += num_bytes


async def _flushed(request: web.Request, transport: asyncio.WriteTransport, stall_timeout_s: float) -> None:
    """Wait until the event loop has sent the head of the response; usually it already has."""
    deadline_s = time.monotonic() + stall_timeout_s
    while num_bytes := transport.get_write_buffer_size():
        if time.monotonic() > deadline_s:
            raise _stalled(request, num_bytes, stall_timeout_s)
        await asyncio.sleep(_FLUSH_TICK_S)


async def _send_on_thread(request: web.Request, connected: BodySocket, body: Body, stall_timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    def run() -> None:
        error: BaseException | None = None
        try:
            _send_blocking(connected, body)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # A shutdown closed the loop at the same moment.
            loop.call_soon_threadsafe(ended.set_result, error)

    num_bytes, num_acked_before = body.end - body.position, acked_bytes(connected.raw)

    def remaining_bytes() -> int:
        """Return about how many bytes of the body the receiver's system has yet to acknowledge."""
        if num_acked_before:
            return num_bytes - (acked_bytes(connected.raw) - num_acked_before)
        return body.end - body.position

    remaining, waited_s = remaining_bytes(), 0.0
    SafeThread(target=run, name="ft-transport-send", daemon=True).start()
    try:
        while not (await asyncio.wait({ended}, timeout=stall_timeout_s))[0]:
            before, remaining = remaining, remaining_bytes()
            waited_before_s, waited_s = waited_s, connected.waited_s()
            # While the thread waited for the rate limit or the next chunk, the receiver had nothing to read.
            share = min(1.0, 1.0 - (waited_s - waited_before_s) / stall_timeout_s)
            expected = max(1, int(share * min(CHUNK_BYTES, before)))
            if before - remaining < expected and share > _LEAST_SHARE:
                raise _stalled(request, expected, stall_timeout_s)
    finally:
        # Even after an error or a cancellation, the thread must end first: it uses the caller's socket and memory file.
        while not ended.done():
            _cut_off(connected.raw)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({ended})
    error = ended.result()
    if error is not None:
        raise error


def _send_blocking(connected: BodySocket, body: Body) -> None:
    """Send the whole body; blocks."""
    raw = connected.raw
    # This changes the blocking mode of the event loop's descriptor as well, so `finally` restores it.
    raw.settimeout(None)
    try:
        # asyncio sets TCP_NODELAY; a body is better sent in full segments, until its end.
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        body.send_to(connected)
    finally:
        os.set_blocking(raw.fileno(), False)
        with contextlib.suppress(OSError):  # The receiver disconnected.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _NO_LIMIT)
            # TCP_NODELAY also sends the last, partial segment (man 7 tcp).
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def drop_connection(transport: asyncio.Transport) -> None:
    """Abort a connection, discard all unsent data, and interrupt a thread that is sending a body on it."""
    connected = transport.get_extra_info("socket")
    if connected is not None and not transport.is_closing():
        _cut_off(connected)
    transport.abort()


def _cut_off(connected: socket.socket) -> None:
    """Make the sending thread's current call fail, and let a later close of the connection discard unsent bytes."""
    with contextlib.suppress(OSError):  # The receiver has disconnected already.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
        connected.shutdown(socket.SHUT_RDWR)


def _stalled(request: web.Request, num_bytes: int, stall_timeout_s: float) -> ConnectionResetError:
    logger.warning(
        "receiver %s read less than %d bytes in %.0f s and was cut off", request.remote, num_bytes, stall_timeout_s
    )
    # `send` then aborts the connection: a mere close would wait until the receiver has read everything.
    return ConnectionResetError("the receiver stalled")


def acked_bytes(connected: socket.socket) -> int:
    """Return the number of bytes that the receiver's system has acknowledged on a connection; 0 if unknown."""
    if sys.platform != "linux":
        return 0
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_BYTES.size)
    return int(_ACKED_BYTES.unpack(info)[0]) if len(info) == _ACKED_BYTES.size else 0
