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
"""``tcpi_bytes_acked`` in ``struct tcp_info`` (``linux/tcp.h``, since Linux 4.1)."""

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
    except ConnectionError as error:
        logger.info("receiver %s left before the end: %s", request.remote, error)
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
    # With a descriptor of its own, the thread can never write to a connection that came after this one.
    connected = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
    transport.pause_reading()
    try:
        await _send_on_thread(
            request, connected, snapshot.descriptor, position, file_end, stall_timeout_s=stall_timeout_s
        )
    finally:
        connected.close()
        transport.resume_reading()


async def _send_on_thread(
    request: web.Request, connected: socket.socket, descriptor: int, start: int, end: int, *, stall_timeout_s: float
) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[OSError | None] = loop.create_future()

    def run() -> None:
        error: OSError | None = None
        try:
            _send(connected, descriptor, start, end)
        except OSError as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop was closed by a shutdown at the same moment.
            loop.call_soon_threadsafe(ended.set_result, error)

    acked = _acked_bytes(connected)
    all_acked = acked + end - start
    threading.Thread(target=run, name="ft-transport-send", daemon=True).start()
    try:
        while not (await asyncio.wait({ended}, timeout=stall_timeout_s))[0]:
            before, acked = acked, _acked_bytes(connected)
            expected = max(1, min(_LEAST_BYTES, all_acked - before))
            if acked - before < expected:
                raise _stalled(request, expected, stall_timeout_s)
    finally:
        # Whatever ended the wait: the thread uses the socket and the memory file, which belong to the caller.
        while not ended.done():
            _cut_off(connected)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({ended})
    error = ended.result()
    if error is not None:
        raise error


def _send(connected: socket.socket, descriptor: int, start: int, end: int) -> None:
    # The flag belongs to the connection, not to its descriptor: the event loop needs it back.
    os.set_blocking(connected.fileno(), True)
    try:
        while start < end:
            sent = os.sendfile(connected.fileno(), descriptor, start, min(end - start, _PIECE_BYTES))
            if not sent:
                raise ConnectionAbortedError(f"the memory file ends at {start}, expected {end}")
            start += sent
    finally:
        os.set_blocking(connected.fileno(), False)


def _cut_off(connected: socket.socket) -> None:
    """Wakes the thread that is sending; its call fails. What is unsent is dropped when the connection is closed."""
    with contextlib.suppress(OSError):  # The receiver was faster.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_UNSENT)
        connected.shutdown(socket.SHUT_RDWR)


def _acked_bytes(connected: socket.socket) -> int:
    """How much of what was sent the receiver's system has acknowledged since the connection was made."""
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_BYTES.size)
    return int(_ACKED_BYTES.unpack(info)[0])


def _stalled(request: web.Request, num_bytes: int, stall_timeout_s: float) -> ConnectionResetError:
    logger.warning(
        "receiver %s took less than %d bytes in %.0f s and was cut off", request.remote, num_bytes, stall_timeout_s
    )
    # send_range aborts: only that frees the socket of a peer that does not read; a close would wait for it.
    return ConnectionResetError("it stalled")
