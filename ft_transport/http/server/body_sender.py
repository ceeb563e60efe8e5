"""Sends a part of a snapshot's file as the body of a response, from memory straight to the socket.

One thread per body lets the kernel send in large pieces and wait for the receiver by itself: an event loop would wake
up for each megabyte or so that the receiver takes, and would take the interpreter from the training thread each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from typing import Final

from aiohttp import web

from ft_transport.http.server.bodies import Body, FileRange, acked_bytes
from ft_transport.http.server.throttle import BodySocket, RateLimiter
from ft_transport.http.server.tls_protocol import TLSTransport
from ft_transport.runtime.signal_safe import SafeThread
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.snapshot import MemoryFile

logger = logging.getLogger(__name__)

_FEW_BYTES: Final = 64 << 10
_NO_LIMIT: Final = struct.pack("ll", 0, 0)
_FLUSH_TICK_S: Final = 0.005
_LEAST_SHARE: Final = 0.1
"""Share of the stall timeout; a receiver that had bytes to take for less than this share is not judged."""
_DROP_UNSENT: Final = struct.pack("ii", 1, 0)


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
    memory = body.memory if isinstance(body, FileRange) else None
    if is_plain and isinstance(memory, MemoryFile) and limiter is None and body.end - body.position <= _FEW_BYTES:
        await _send_few(request, transport, body, memory, stall_timeout_s)
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
