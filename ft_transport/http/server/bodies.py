"""The kinds of response bodies: a part of a snapshot's file, slices of tensors, a buffer, and relayed chunks.

A body is sent directly from memory, on the thread that ``body_sender`` starts for it.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final

from ft_transport.errors import RestoreError, SnapshotError
from ft_transport.http.relays import Follower
from ft_transport.http.server.body_sender import ENCRYPTED_PIECE_BYTES, BodySocket, acked_bytes
from ft_transport.wire import slices
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.routes import CHUNK_HEADER, relayed_bytes
from ft_transport.wire.slices import FRAME_DIGEST_BYTES, Slice, SliceFrame, frame_context
from ft_transport.wire.snapshot import MemoryFile, ServedMemory, SharedFile, Snapshot, copy_out

_PIECE_BYTES: Final = 64 << 20
_MAX_VIEWS_PER_SEND: Final = 512
"""Maximum number of views in one ``sendmsg``; less than IOV_MAX, which is 1024 on Linux (``man 2 writev``)."""
_LONGEST_WAIT: Final = struct.pack("ll", 0, 20_000)
"""A ``struct timeval`` of 20 ms: the longest time for which one call waits for the receiver, with memory pinned."""
_LEAST_SENDFILE_BYTES: Final = 64 << 10
"""Minimum size of a slice for ``sendfile``: a copy of a smaller slice costs less than a separate system call."""
_LOOK_S: Final = 0.1
"""Interval at which a response that waits for its next chunk checks whether the receiver is still connected."""


class FileRange:
    """A body of bytes ``[position, end)`` of a snapshot's file."""

    def __init__(self, memory: ServedMemory, position: int, end: int) -> None:
        self.file = memory if isinstance(memory, MemoryFile) else None
        self._memory = memory
        self.position = position
        self.end = end

    def send_to(self, connected: BodySocket) -> None:
        """Send the rest of the body, and advance ``position``; blocks."""
        try:
            if connected.is_encrypted:
                self._send_encrypted(connected)
            elif isinstance(self._memory, MemoryFile):
                start = self._memory.start
                for sent in _send_file(connected, self._memory, start + self.position, start + self.end):
                    self.position += sent
            else:
                self._send_shared(connected, self._memory)
        except SnapshotError as error:
            raise ConnectionAbortedError(str(error)) from error

    def _send_encrypted(self, connected: BodySocket) -> None:
        while self.position < self.end:
            end = min(self.end, self.position + CHUNK_BYTES)
            if isinstance(self._memory, MemoryFile):
                for view in _views(self._memory, self.position, end):
                    connected.sendall(view)
            else:
                with self._memory.pin(self.position, end) as views:
                    connected.encrypt(views)
                # The memory is no longer pinned, so its owner need not wait for the receiver.
                connected.flush()
            self.position = end

    def _send_shared(self, connected: BodySocket, file: SharedFile) -> None:
        """Send shared memory in pieces; pin each piece only during the system call that copies it into the kernel.

        So the owner of the memory waits for at most one system call, and never for a receiver.
        """
        connected.raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _LONGEST_WAIT)
        while self.position < self.end:
            # Small pieces: pinning digests a piece, which is then still in the processor's cache when it is sent.
            end = min(self.end, self.position + min(CHUNK_BYTES, connected.piece_bytes))
            # Before the pin, because the owner of the memory has to wait until a pin ends.
            connected.admit(end - self.position)
            sent = 0
            try:
                with file.pin(self.position, end) as views:
                    sent = connected.raw.sendmsg(views[:_MAX_VIEWS_PER_SEND])
            except BlockingIOError:
                pass
            finally:
                connected.unsent(end - self.position - sent)
            self.position += sent


class Slices:
    """A body that consists of frames of tensor slices, each frame followed by its digest (``wire.slices``).

    Args:
        snapshot: The snapshot that contains the slices.
        frames: The requested frames; they lie within the snapshot's data.
    """

    file = None

    def __init__(self, snapshot: Snapshot, frames: Sequence[SliceFrame]) -> None:
        self._snapshot = snapshot
        self._frames = frames
        self.position = 0
        self.end = slices.answer_bytes(frames)

    def send_to(self, connected: BodySocket) -> None:
        """Send the rest of the body, and advance ``position``; blocks."""
        largest = max(sum(piece.num_bytes for piece in frame) for frame in self._frames)
        staging = memoryview(bytearray(largest + FRAME_DIGEST_BYTES))
        try:
            for frame in self._frames:
                self._send_frame(connected, frame, staging)
        except SnapshotError as error:
            raise ConnectionAbortedError(str(error)) from error

    def _send_frame(self, connected: BodySocket, frame: SliceFrame, staging: memoryview) -> None:
        snapshot, memory = self._snapshot, self._snapshot.memory
        context = frame_context(snapshot.snapshot_id, frame) if snapshot.digester.is_keyed else b""
        hasher = snapshot.digester.hasher(context)
        filled = 0
        only = frame[0]
        if (
            isinstance(memory, MemoryFile)
            and len(frame) == 1
            and not only.loops
            and only.block_bytes >= _LEAST_SENDFILE_BYTES
        ):
            # Digested first, which loads the data into the processor's cache; then the kernel sends the pages.
            hasher.update(memory.data[only.start : only.end])
            for sent in _send_data(connected, memory, only):
                self.position += sent
        else:
            for piece in frame:
                _gather(memory, piece, staging[filled : filled + piece.num_bytes])
                filled += piece.num_bytes
            hasher.update(staging[:filled])
        end = filled + FRAME_DIGEST_BYTES
        staging[filled:end] = hasher.intdigest().to_bytes(FRAME_DIGEST_BYTES, "big")
        connected.sendall(staging[:end])
        self.position += end


class Buffer:
    """A body of bytes in memory, such as a delta.

    Args:
        data: The bytes of the body.
    """

    file = None

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0
        self.end = len(data)

    def send_to(self, connected: BodySocket) -> None:
        """Send the rest of the body, and advance ``position``; blocks."""
        for start in range(0, self.end, CHUNK_BYTES):
            piece = self._data[start : start + CHUNK_BYTES]
            connected.sendall(piece)
            self.position += len(piece)


class RelayedChunks:
    """A body of chunks that this process is still receiving; each chunk is sent as soon as it has landed.

    Args:
        follower: Reports landed chunks; the caller closes the follower.
        pause_s: Longest wait for the next chunk, in seconds. After that, the body ends early.
    """

    file = None

    def __init__(self, follower: Follower, *, pause_s: float) -> None:
        self.position = 0
        self.end = relayed_bytes(follower.relay.chunks, follower.chunks)
        self._follower = follower
        self._relay = follower.relay
        self._views_of = follower.relay.views()
        self._pause_s = pause_s

    def send_to(self, connected: BodySocket) -> None:
        """Send the rest of the body, and advance ``position``; blocks."""
        while self.position < self.end:
            chunk = self._follower.next(0.0)
            if chunk is None:
                chunk = self._await_chunk(connected)
            start, end = self._relay.chunks.range_of(chunk, chunk + 1)
            header = memoryview(CHUNK_HEADER.pack(start, self._relay.furthest))
            if connected.is_encrypted:
                self._send_encrypted(connected, header, start, end)
            else:
                self._send_plain(connected, header, start, end)

    def _send_plain(self, connected: BodySocket, header: memoryview, start: int, end: int) -> None:
        while header or start < end:
            views = self._views(start, min(end, start + connected.piece_bytes - CHUNK_HEADER.size))
            views = [*([header] if header else ()), *views][:_MAX_VIEWS_PER_SEND]
            num_bytes = sum(map(len, views))
            connected.admit(num_bytes)
            sent = connected.raw.sendmsg(views)
            connected.unsent(num_bytes - sent)
            self.position += sent
            of_header = min(sent, len(header))
            header = header[of_header:]
            start += sent - of_header

    def _send_encrypted(self, connected: BodySocket, header: memoryview, start: int, end: int) -> None:
        connected.sendall(header)
        self.position += len(header)
        # Requests new views for each piece. While a slow receiver delays this loop, the trainer may free the memory,
        # and encrypting freed memory would crash. Without TLS the kernel reads the memory, which is safe.
        for at in range(start, end, ENCRYPTED_PIECE_BYTES):
            for view in self._views(at, min(end, at + ENCRYPTED_PIECE_BYTES)):
                connected.sendall(view)
                self.position += len(view)

    def _await_chunk(self, connected: BodySocket) -> int:
        until_s = time.monotonic() + self._pause_s
        # Sends the end of the previous chunk, which would otherwise wait for an acknowledgement (man 7 tcp).
        connected.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connected.waiting():
            while (chunk := self._follower.next(min(_LOOK_S, until_s - time.monotonic()))) is None:
                if self._relay.is_closed:
                    raise ConnectionAbortedError("the relay is closed")
                if connected.has_ended(0.0):
                    raise ConnectionResetError("the receiver has closed the connection")
                if time.monotonic() >= until_s:
                    raise ConnectionAbortedError(f"no further chunk has landed within {self._pause_s:g} s")
        connected.raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        return chunk

    def _views(self, start: int, end: int) -> Sequence[memoryview]:
        if self._relay.is_closed:
            raise ConnectionAbortedError("the relay is closed")
        try:
            return self._views_of(start, end)
        except RestoreError as error:
            # The trainer has freed the received data. The relay closes, so that it refuses further requests at once.
            self._relay.close()
            raise ConnectionAbortedError(str(error)) from error


def _views(file: MemoryFile, start: int, end: int) -> Iterator[memoryview]:
    """Yield views of bytes ``[start, end)`` of the file. Reads the header; the data is already mapped."""
    num_header_bytes = file.data_start - file.start
    if start < num_header_bytes:
        yield memoryview(os.pread(file.descriptor, min(end, num_header_bytes) - start, file.start + start))
    if end > num_header_bytes:
        yield file.data[max(0, start - num_header_bytes) : end - num_header_bytes]


def _send_file(connected: BodySocket, file: MemoryFile, position: int, end: int) -> Iterator[int]:
    """Send bytes ``[position, end)`` of the file; after each system call, yield the number of bytes that it sent."""
    # Smaller pieces where the system does not report acknowledged bytes: a stall is then detected by sent bytes.
    piece_bytes = _PIECE_BYTES if acked_bytes(connected.raw) else CHUNK_BYTES
    while position < end:
        sent = connected.send_file(file.descriptor, position, min(end - position, piece_bytes))
        if not sent:
            raise ConnectionAbortedError(f"expected a memory file of {end} bytes or more, got one of {position} bytes")
        position += sent
        yield sent


def _send_data(connected: BodySocket, memory: MemoryFile, piece: Slice) -> Iterator[int]:
    """Send a contiguous part of the data in pieces; after each piece, yield its number of bytes."""
    if not connected.is_encrypted:
        yield from _send_file(connected, memory, memory.data_start + piece.start, memory.data_start + piece.end)
        return
    for start in range(piece.start, piece.end, ENCRYPTED_PIECE_BYTES):
        view = memory.data[start : min(piece.end, start + ENCRYPTED_PIECE_BYTES)]
        connected.sendall(view)
        yield len(view)


def _gather(memory: ServedMemory, piece: Slice, into: memoryview) -> None:
    """Copy the bytes of a slice into a contiguous buffer."""
    with memory.pin_data(piece.start, piece.end) as views:
        if len(views) == 1:
            copy_out(views[0], piece, into)
            return
        if piece.loops:
            raise SnapshotError(f"expected a slice inside one tensor, got {piece}")
        position = 0
        for view in views:
            copy_out(view, Slice(0, len(view)), into[position : position + len(view)])
            position += len(view)
