"""Sending a part of a snapshot's file as the body of an answer, from the memory file straight to the socket.

A thread per body lets the kernel send in large pieces while it waits for the receiver by itself: an event loop would
wake up for each megabyte or so that the receiver takes, and would ask the training thread for the interpreter each
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import sys
import threading
from typing import Final

from aiohttp import web

from ft_transport.net.shelf import Reading

logger = logging.getLogger(__name__)

_FIRST_BYTES: Final = 64 << 10
_PIECE_BYTES: Final = 64 << 20
_LEAST_BYTES: Final = 4 << 20
"""What a receiver has to take within ``stall_timeout_s``, unless less is left."""
_ACKED_BYTES: Final = struct.Struct("=120xQ")
"""``tcpi_bytes_acked`` in ``struct tcp_info`` (``linux/tcp.h``, since Linux 4.1); the handshake counts as one."""

_DROP_UNSENT: Final = struct.pack("ii", 1, 0)


async def send_range(
    request: web.Request,
    reading: Reading,
    response: web.StreamResponse,
    start: int,
    end: int,
    *,
    stall_timeout_s: float,
) -> web.StreamResponse:
    """Answers with bytes ``[start, end)`` of the file, or with the head alone if that was asked for.

    A receiver that goes away or stalls ends its connection; that is its own affair and no error of the server.
    """
    response.content_length = end - start
    try:
        await response.prepare(request)
        if request.method != "HEAD":
            await _send_body(request, reading, start, end, stall_timeout_s)
        await response.write_eof()
    except OSError as error:
        logger.info("the answer to receiver %s ended early: %s", request.remote, error)
        if request.transport is not None:
            request.transport.abort()
    return response


async def _send_body(request: web.Request, reading: Reading, start: int, end: int, stall_timeout_s: float) -> None:
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("it closed the connection")
    snapshot = reading.snapshot
    # The kernel holds pages of the memory file until the receiver has read them.
    reading.unread_s = stall_timeout_s
    position, file_end = snapshot.file_start + start, snapshot.file_start + end
    num_first = min(_FIRST_BYTES, end - start)
    with open(snapshot.descriptor, "rb", buffering=0, closefd=False) as file:
        # The event loop's own sendfile waits until the head of the answer has left its buffers.
        sending = asyncio.get_running_loop().sendfile(transport, file, position, num_first)
        try:
            await asyncio.wait_for(sending, timeout=stall_timeout_s)
        except asyncio.TimeoutError:
            raise _stalled(request, num_first, stall_timeout_s) from None
    position += num_first
    if position == file_end:
        return
    if transport.is_closing():
        raise ConnectionResetError("it closed the connection")
    # With a descriptor of its own, the thread can never write to a connection that came after this one.
    connected = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    was_reading = transport.is_reading()
    transport.pause_reading()
    try:
        body = _Body(connected, snapshot.descriptor, position, file_end)
        await _send_on_thread(request, body, stall_timeout_s)
    finally:
        connected.close()
        if was_reading:
            transport.resume_reading()


class _Body:
    """What one thread sends, and how far the receiver is."""

    def __init__(self, connected: socket.socket, descriptor: int, start: int, end: int) -> None:
        self.connected = connected
        self._descriptor = descriptor
        self._position = start
        self._end = end
        self._num_acked_before = _acked_bytes(connected)
        self._num_bytes = end - start

    def send(self) -> None:
        """Sends everything; blocks."""
        # Where nobody says what the receiver has acknowledged, what the kernel took has to stand for it.
        piece_bytes = _PIECE_BYTES if self._num_acked_before else _LEAST_BYTES
        # The flag belongs to the connection, not to its descriptor: the event loop needs it back.
        os.set_blocking(self.connected.fileno(), True)
        try:
            # asyncio has it send each part at once; a body is better sent in full segments, until its end.
            self.connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
            while self._position < self._end:
                num_bytes = min(self._end - self._position, piece_bytes)
                sent = os.sendfile(self.connected.fileno(), self._descriptor, self._position, num_bytes)
                if not sent:
                    raise ConnectionAbortedError(f"the memory file ends at {self._position}, expected {self._end}")
                self._position += sent
        finally:
            os.set_blocking(self.connected.fileno(), False)
            with contextlib.suppress(OSError):  # The receiver is gone.
                # Sends what is left (man 7 tcp).
                self.connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def remaining_bytes(self) -> int:
        """How much the receiver has yet to take; too little by what was on its way when the body began."""
        if self._num_acked_before:
            return self._num_bytes - (_acked_bytes(self.connected) - self._num_acked_before)
        return self._end - self._position


async def _send_on_thread(request: web.Request, body: _Body, stall_timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    def run() -> None:
        error: BaseException | None = None
        try:
            body.send()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop was closed by a shutdown at the same moment.
            loop.call_soon_threadsafe(ended.set_result, error)

    remaining = body.remaining_bytes()
    threading.Thread(target=run, name="ft-transport-send", daemon=True).start()
    try:
        while not (await asyncio.wait({ended}, timeout=stall_timeout_s))[0]:
            before, remaining = remaining, body.remaining_bytes()
            expected = max(1, min(_LEAST_BYTES, before))
            if before - remaining < expected:
                raise _stalled(request, expected, stall_timeout_s)
    finally:
        # Whatever ended the wait: the thread uses the socket and the memory file, which belong to the caller.
        while not ended.done():
            _cut_off(body.connected)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({ended})
    error = ended.result()
    if error is not None:
        raise error


def _cut_off(connected: socket.socket) -> None:
    """Wakes the thread that is sending; its call fails. What is unsent is dropped when the connection is closed."""
    with contextlib.suppress(OSError):  # The receiver was faster.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
        connected.shutdown(socket.SHUT_RDWR)


def _acked_bytes(connected: socket.socket) -> int:
    """How much of what was sent the receiver's system has acknowledged since the connection began; 0 if unknown."""
    if sys.platform != "linux":
        return 0
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_BYTES.size)
    return int(_ACKED_BYTES.unpack(info)[0]) if len(info) == _ACKED_BYTES.size else 0


def _stalled(request: web.Request, num_bytes: int, stall_timeout_s: float) -> ConnectionResetError:
    logger.warning(
        "receiver %s took less than %d bytes in %.0f s and was cut off", request.remote, num_bytes, stall_timeout_s
    )
    # send_range aborts: only that frees the socket of a peer that does not read; a close would wait for it.
    return ConnectionResetError("it stalled")
