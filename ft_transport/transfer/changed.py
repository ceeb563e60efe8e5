"""Fetches byte ranges of the data, many in one request.

Adapters lie between the weights that they belong to: a request for each would cost more than its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ft_transport.http.connection import Connection
from ft_transport.http.fetch_pool import FetchPool
from ft_transport.http.fetch_settings import FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.slice_frames import ask_for_frames, receive_frame
from ft_transport.state.restore import Range, Restore
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.fetch import FetchMachine, Request
from ft_transport.wire.fleet import Fleet
from ft_transport.wire.fleet_work import FleetWork
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.slices import MAX_REQUEST_BYTES, MAX_SLICES_PER_REQUEST, Slice, SliceFrame

_MAX_FRAMES_PER_REQUEST: Final = MAX_REQUEST_BYTES // CHUNK_BYTES
_MAX_SLICES_PER_FRAME: Final = MAX_SLICES_PER_REQUEST // _MAX_FRAMES_PER_REQUEST


def fetch_ranges(
    peer: PeerAddress, manifest: Manifest, ranges: Sequence[Range], restore: Restore, settings: FetchSettings
) -> None:
    """Fetch byte ranges of the data, many in one request; bytes between them stay unchanged.

    Raises:
        FetchFailedError: The peer could not deliver the rest; carries each failure.
        DeadlineExceededError: The deadline passed first.
    """
    frames = frames_of(ranges)
    work = FleetWork(
        [(0, len(frames))], num_chunks=len(frames), fleet=Fleet(), num_connections=settings.num_connections
    )
    FetchPool(
        [peer],
        FetchMachine(work, sources=[str(peer)], max_failures=settings.max_failures),
        _FrameWire(manifest, frames, restore, is_verified=settings.verify),
        settings,
        num_workers=work.num_workers,
        step=manifest.step,
        total_bytes=sum(end - start for start, end in ranges),
    ).run()


def frames_of(ranges: Sequence[Range]) -> list[SliceFrame]:
    """Return the same bytes in frames, each full or the last one, or of as many ranges as fit in one."""
    frames: list[SliceFrame] = []
    frame: list[Slice] = []
    left_bytes = CHUNK_BYTES
    for start, end in ranges:
        at = start
        while at < end:
            taken = Slice(at, min(end - at, left_bytes))
            frame.append(taken)
            at, left_bytes = taken.end, left_bytes - taken.block_bytes
            if not left_bytes or len(frame) == _MAX_SLICES_PER_FRAME:
                frames.append(tuple(frame))
                frame, left_bytes = [], CHUNK_BYTES
    if frame:
        frames.append(tuple(frame))
    return frames


class _FrameWire:
    """Requests for frames, as many as a request may have. A digest follows each frame of the answer."""

    def __init__(
        self, manifest: Manifest, frames: Sequence[SliceFrame], restore: Restore, *, is_verified: bool
    ) -> None:
        self._manifest = manifest
        self._frames = frames
        self._restore = restore
        self._is_verified = is_verified

    def receive(self, connection: Connection, request: Request[int]) -> Iterator[tuple[int, int]]:
        """See ``http.fetch_pool.Wire``."""
        for start in range(0, len(request.units), _MAX_FRAMES_PER_REQUEST):
            yield from self._receive(connection, request.units[start : start + _MAX_FRAMES_PER_REQUEST])

    def _receive(self, connection: Connection, units: Sequence[int]) -> Iterator[tuple[int, int]]:
        frames = [self._frames[unit] for unit in units]
        response = ask_for_frames(connection, self._manifest, frames)
        for unit, frame in zip(units, frames, strict=True):
            views = [view for piece in frame for view in self._restore.buffers(piece.start, piece.end)]
            what = f"a frame from byte {frame[0].start} of the data on"
            receive_frame(connection, self._manifest, frame, views, is_verified=self._is_verified, what=what)
            yield unit, sum(piece.num_bytes for piece in frame)
        connection.end_response(response)
