"""Sends slices of a snapshot to a receiver with another layout, frame by frame, each with its digest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ft_transport.errors import SnapshotError
from ft_transport.http.send_cap import PacedSocket
from ft_transport.http.tls_sender import PIECE_BYTES, EncryptedSocket
from ft_transport.wire.slices import FRAME_DIGEST_BYTES, Slice, SliceFrame, frame_context
from ft_transport.wire.snapshot import MemoryFile, ServedMemory, Snapshot, copy_out

_LEAST_SENDFILE_BYTES: Final = 64 << 10
"""Below this size, a copy costs less than a separate system call."""


def send_frames(
    connected: PacedSocket | EncryptedSocket, snapshot: Snapshot, frames: Sequence[SliceFrame]
) -> Iterator[int]:
    """Send the frames of a request; yield the number of bytes after each piece. Blocks.

    Args:
        connected: Socket to the receiver.
        snapshot: The snapshot.
        frames: The requested frames, inside the data.

    Raises:
        SnapshotError: The data is lost, or a slice reaches from one tensor into another.
        OSError: The receiver disconnected.
    """
    memory = snapshot.memory
    largest = max(sum(piece.num_bytes for piece in frame) for frame in frames)
    staging = memoryview(bytearray(largest + FRAME_DIGEST_BYTES))
    for frame in frames:
        context = frame_context(snapshot.snapshot_id, frame) if snapshot.digester.is_keyed else b""
        hasher = snapshot.digester.hasher(context)
        filled = 0
        only = frame[0]
        if isinstance(memory, MemoryFile) and len(frame) == 1 and _is_worth_sendfile(only):
            # The digest brings the data into the processor's cache; the kernel sends the pages themselves.
            hasher.update(memory.data[only.start : only.end])
            if isinstance(connected, EncryptedSocket):
                yield from _encrypt(connected, memory.data[only.start : only.end])
            else:
                yield from _send_file(connected, memory, only)
        else:
            for piece in frame:
                _gather(memory, piece, staging[filled : filled + piece.num_bytes])
                filled += piece.num_bytes
            hasher.update(staging[:filled])
        end = filled + FRAME_DIGEST_BYTES
        staging[filled:end] = hasher.intdigest().to_bytes(FRAME_DIGEST_BYTES, "big")
        connected.sendall(staging[:end])
        yield end


def _is_worth_sendfile(piece: Slice) -> bool:
    return not piece.loops and piece.block_bytes >= _LEAST_SENDFILE_BYTES


def _encrypt(encrypted: EncryptedSocket, data: memoryview) -> Iterator[int]:
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        encrypted.sendall(piece)
        yield len(piece)


def _send_file(connected: PacedSocket, memory: MemoryFile, piece: Slice) -> Iterator[int]:
    position, end = memory.data_start + piece.start, memory.data_start + piece.end
    while position < end:
        sent = connected.send_file(memory.descriptor, position, end - position)
        if not sent:
            raise ConnectionAbortedError(f"the memory file ends at {position}, expected {end}")
        position += sent
        yield sent


def _gather(memory: ServedMemory, piece: Slice, into: memoryview) -> None:
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
