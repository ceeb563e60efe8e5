"""Sending a part of a snapshot's file as the body of an answer, from the memory file straight to the socket."""

from __future__ import annotations

import asyncio
import logging
from typing import IO, Final

from aiohttp import web

from ft_transport.net.shelf import Reading

logger = logging.getLogger(__name__)

_SLICE_BYTES: Final = 4 << 20
"""What one deadline covers: a receiver has to take this much within ``stall_timeout_s``."""


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
    snapshot = reading.snapshot
    # The kernel holds pages of the memory file until the receiver has read them.
    reading.unread_s = stall_timeout_s
    with open(snapshot.descriptor, "rb", buffering=0, closefd=False) as file:
        while start < end:
            num_bytes = min(_SLICE_BYTES, end - start)
            await _send_slice(request, file, snapshot.file_start + start, num_bytes, stall_timeout_s)
            start += num_bytes


async def _send_slice(
    request: web.Request, file: IO[bytes], position: int, num_bytes: int, stall_timeout_s: float
) -> None:
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("it closed the connection")
    loop = asyncio.get_running_loop()
    try:
        await asyncio.wait_for(loop.sendfile(transport, file, position, num_bytes), timeout=stall_timeout_s)
    except asyncio.TimeoutError:
        logger.warning(
            "receiver %s took less than %d bytes in %.0f s and was cut off", request.remote, num_bytes, stall_timeout_s
        )
        # send_range aborts: only that frees the socket of a peer that does not read; a close would wait for it.
        raise ConnectionResetError("it stalled") from None
