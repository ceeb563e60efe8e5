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
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from aiohttp import web

from ft_transport.errors import SnapshotError
from ft_transport.http.send_cap import Pace, PacedSocket, SendCap
from ft_transport.http.slice_sender import send_frames
from ft_transport.http.tls_channel import TLSChannel
from ft_transport.http.tls_protocol import TLSTransport
from ft_transport.http.tls_sender import EncryptedSocket
from ft_transport.runtime.handler_safety import SafeThread
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.slices import SliceFrame, answer_bytes
from ft_transport.wire.snapshot import MemoryFile, ServedMemory, SharedFile, Snapshot

logger = logging.getLogger(__name__)

_FEW_BYTES: Final = 64 << 10
_PIECE_BYTES: Final = 64 << 20
_ACKED_BYTES: Final = struct.Struct("=120xQ")
"""``tcpi_bytes_acked`` in ``struct tcp_info`` (``linux/tcp.h``, since Linux 4.1); the handshake counts as one."""

MAX_VIEWS_PER_SEND: Final = 512
"""Below IOV_MAX, which Linux puts at 1024 (``man 2 writev``)."""
_LONGEST_WAIT: Final = struct.pack("ll", 0, 20_000)
"""``struct timeval``, 20 ms: the longest wait of one call for the receiver while shared memory is pinned."""
_NO_LIMIT: Final = struct.pack("ll", 0, 0)
_FLUSH_TICK_S: Final = 0.005
_LEAST_SHARE: Final = 0.1
"""Share of the stall timeout; a receiver that had bytes to take for less than this share is not judged."""
_DROP_UNSENT: Final = struct.pack("ii", 1, 0)


async def send(
    request: web.Request,
    response: web.StreamResponse,
    content: Content,
    *,
    stall_timeout_s: float,
    cap: SendCap | None = None,
) -> web.StreamResponse:
    """Send a part of the snapshot as the response, or only the head if the request was for the head.

    A receiver that disconnects or stalls loses its connection; that is no error of the server.
    """
    response.content_length = content.end - content.position
    try:
        await response.prepare(request)
        if request.method != "HEAD":
            await _send_body(request, content, stall_timeout_s, cap)
        await response.write_eof()
    except OSError as error:
        logger.info("the answer to receiver %s ended early: %s", request.remote, error)
        if request.transport is not None:
            request.transport.abort()
    return response


async def _send_body(request: web.Request, content: Content, stall_timeout_s: float, cap: SendCap | None) -> None:
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("it closed the connection")
    is_plain = not isinstance(transport, TLSTransport)
    memory = content.memory if isinstance(content, FileRange) else None
    if is_plain and isinstance(memory, MemoryFile) and cap is None and content.end - content.position <= _FEW_BYTES:
        await _send_few(request, transport, content, memory, stall_timeout_s)
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
        body = _Body(connected, content, channel, Pace(connected, cap))
        await _send_on_thread(request, body, stall_timeout_s)
    finally:
        connected.close()
        if isinstance(transport, TLSTransport):
            transport.give_back()
        if was_reading:
            transport.resume_reading()


async def _send_few(
    request: web.Request, transport: asyncio.Transport, content: Content, memory: MemoryFile, stall_timeout_s: float
) -> None:
    """Send a small body from the event loop: a thread would cost more than sending it."""
    num_bytes = content.end - content.position
    with open(memory.descriptor, "rb", buffering=0, closefd=False) as file:
        # The loop's sendfile waits until the head of the response has left its buffers.
        sending = asyncio.get_running_loop().sendfile(transport, file, memory.start + content.position, num_bytes)
        try:
            await asyncio.wait_for(sending, timeout=stall_timeout_s)
        except asyncio.TimeoutError:
            raise _stalled(request, num_bytes, stall_timeout_s) from None
        except RuntimeError:
            # asyncio raises it if the connection was closed just before; it would be logged with all its references.
            if not transport.is_closing():
                raise
            raise ConnectionResetError("it closed the connection") from None
    content.position += num_bytes


class Content(Protocol):
    """A body of which bytes ``[position, end)`` have yet to be sent."""

    position: int
    end: int

    def send_to(self, connected: PacedSocket) -> None:
        """Sends the rest and advances ``position``; blocks."""

    def send_encrypted(self, encrypted: EncryptedSocket) -> None:
        """Sends the rest over TLS."""


class FileRange:
    """Bytes ``[position, end)`` of the snapshot's file."""

    def __init__(self, memory: ServedMemory, position: int, end: int) -> None:
        self.memory = memory
        self.position = position
        self.end = end

    def send_to(self, connected: PacedSocket) -> None:
        """See `Content`."""
        if isinstance(self.memory, MemoryFile):
            self._send_file(connected, self.memory)
        else:
            self._send_shared(connected, self.memory)

    def send_encrypted(self, encrypted: EncryptedSocket) -> None:
        """See `Content`."""
        while self.position < self.end:
            end = min(self.end, self.position + CHUNK_BYTES)
            if isinstance(self.memory, MemoryFile):
                for view in _views(self.memory, self.position, end):
                    encrypted.sendall(view)
            else:
                try:
                    with self.memory.pin(self.position, end) as views:
                        encrypted.encrypt(views)
                except SnapshotError as error:
                    raise ConnectionAbortedError(str(error)) from error
                # The owner waits for the encryption, but not for the receiver.
                encrypted.flush()
            self.position = end

    def _send_file(self, connected: PacedSocket, file: MemoryFile) -> None:
        # Where the system does not report acknowledged bytes, the bytes that the kernel took stand for them.
        piece_bytes = _PIECE_BYTES if _acked_bytes(connected.raw) else CHUNK_BYTES
        while self.position < self.end:
            num_bytes = min(self.end - self.position, piece_bytes)
            sent = connected.send_file(file.descriptor, file.start + self.position, num_bytes)
            if not sent:
                raise ConnectionAbortedError(f"the memory file ends at {self.position}, expected {self.end}")
            self.position += sent

    def _send_shared(self, connected: PacedSocket, file: SharedFile) -> None:
        """Send a pinned piece at a time; the kernel copies it, so the owner waits for one call and no receiver."""
        raw, pace = connected.raw, connected.pace
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _LONGEST_WAIT)
        while self.position < self.end:
            # Pinning digests the piece, so it is small enough to be in the processor's cache when it is sent.
            end = min(self.end, self.position + min(CHUNK_BYTES, pace.piece_bytes))
            # First, because the owner of the memory waits for a pin.
            pace.admit(end - self.position)
            sent = 0
            try:
                with file.pin(self.position, end) as views:
                    sent = raw.sendmsg(views[:MAX_VIEWS_PER_SEND])
            except BlockingIOError:
                pass
            except SnapshotError as error:
                raise ConnectionAbortedError(str(error)) from error
            finally:
                pace.unsent(end - self.position - sent)
            self.position += sent


def _views(file: MemoryFile, start: int, end: int) -> Iterator[memoryview]:
    """Yield bytes ``[start, end)`` of the file; only its data is mapped, so the header is read."""
    num_header_bytes = file.data_start - file.start
    if start < num_header_bytes:
        yield memoryview(os.pread(file.descriptor, min(end, num_header_bytes) - start, file.start + start))
    if end > num_header_bytes:
        yield file.data[max(0, start - num_header_bytes) : end - num_header_bytes]


class Slices:
    """The frames of a request for slices (``wire.slices``), each with its digest."""

    def __init__(self, snapshot: Snapshot, frames: Sequence[SliceFrame]) -> None:
        self._snapshot = snapshot
        self._frames = frames
        self.position = 0
        self.end = answer_bytes(frames)

    def send_to(self, connected: PacedSocket) -> None:
        """See `Content`."""
        self._send_frames(connected)

    def send_encrypted(self, encrypted: EncryptedSocket) -> None:
        """See `Content`."""
        self._send_frames(encrypted)

    def _send_frames(self, connected: PacedSocket | EncryptedSocket) -> None:
        try:
            for sent in send_frames(connected, self._snapshot, self._frames):
                self.position += sent
        except SnapshotError as error:
            raise ConnectionAbortedError(str(error)) from error


class _Body:
    """The body that one thread sends, and the receiver's progress."""

    def __init__(self, connected: socket.socket, content: Content, channel: TLSChannel | None, pace: Pace) -> None:
        self.connected = connected
        self.pace = pace
        self._channel = channel
        self._content = content
        self._num_acked_before = _acked_bytes(connected)
        self._num_bytes = content.end - content.position

    def send(self) -> None:
        """Send everything; blocks."""
        # The flag is the connection's, not the descriptor's: the event loop needs it restored.
        self.connected.settimeout(None)
        try:
            # asyncio sets TCP_NODELAY; a body is better sent in full segments, until its end.
            self.connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
            if self._channel is not None:
                self._content.send_encrypted(EncryptedSocket(self.connected, self._channel, self.pace))
            else:
                self._content.send_to(PacedSocket(self.connected, self.pace))
        finally:
            os.set_blocking(self.connected.fileno(), False)
            with contextlib.suppress(OSError):  # The receiver disconnected.
                self.connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _NO_LIMIT)
                # This sends the rest (man 7 tcp).
                self.connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def remaining_bytes(self) -> int:
        """Return the bytes that the receiver has yet to take, less those in flight when the body began."""
        if self._num_acked_before:
            return self._num_bytes - (_acked_bytes(self.connected) - self._num_acked_before)
        return self._content.end - self._content.position


async def _flushed(request: web.Request, transport: asyncio.WriteTransport, stall_timeout_s: float) -> None:
    """Wait until the head of the response has left the event loop's buffers; usually it has at once."""
    deadline_s = time.monotonic() + stall_timeout_s
    while num_bytes := transport.get_write_buffer_size():
        if time.monotonic() > deadline_s:
            raise _stalled(request, num_bytes, stall_timeout_s)
        await asyncio.sleep(_FLUSH_TICK_S)


async def _send_on_thread(request: web.Request, body: _Body, stall_timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    def run() -> None:
        error: BaseException | None = None
        try:
            body.send()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # A shutdown closed the loop at the same moment.
            loop.call_soon_threadsafe(ended.set_result, error)

    remaining, waited_s = body.remaining_bytes(), 0.0
    SafeThread(target=run, name="ft-transport-send", daemon=True).start()
    try:
        while not (await asyncio.wait({ended}, timeout=stall_timeout_s))[0]:
            before, remaining = remaining, body.remaining_bytes()
            waited_before_s, waited_s = waited_s, body.pace.waited_s()
            # While the thread waited for the cap or the next chunk, there was nothing to take.
            share = min(1.0, 1.0 - (waited_s - waited_before_s) / stall_timeout_s)
            expected = max(1, int(share * min(CHUNK_BYTES, before)))
            # The last bytes sent may still be in flight.
            if before - remaining < expected and share > _LEAST_SHARE:
                raise _stalled(request, expected, stall_timeout_s)
    finally:
        # However the wait ended, the thread must end first: it uses the caller's socket and memory file.
        while not ended.done():
            _cut_off(body.connected)
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


def _acked_bytes(connected: socket.socket) -> int:
    """Return the bytes that the receiver's system has acknowledged on the connection; 0 if unknown."""
    if sys.platform != "linux":
        return 0
    info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED_BYTES.size)
    return int(_ACKED_BYTES.unpack(info)[0]) if len(info) == _ACKED_BYTES.size else 0


def _stalled(request: web.Request, num_bytes: int, stall_timeout_s: float) -> ConnectionResetError:
    logger.warning(
        "receiver %s took less than %d bytes in %.0f s and was cut off", request.remote, num_bytes, stall_timeout_s
    )
    # `send` aborts: only an abort frees the socket of a peer that does not read; a close would wait for the peer.
    return ConnectionResetError("it stalled")
