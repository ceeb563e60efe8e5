"""Fetches planned reads of the data, many in a request, each byte into its final memory.

A receiver with another layout reads slices of several sources; one that has most of the data reads ranges of bytes.

``wire.reshard``, ``wire.fetch`` and ``wire.read_work`` decide which source to ask for what; ``fetch_pool`` runs the
threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.client import HTTPResponse
from typing import Any, Final, NamedTuple

from ft_transport.errors import IntegrityError, MessageDamagedError
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_pool import FetchPool
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.fetch import FetchMachine, Request
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.read_work import AnyRead, FrameOfReads, RangeRead, ReadWork
from ft_transport.wire.reshard import Planner, Wanted
from ft_transport.wire.routes import SLICES_ROUTE, bound_path
from ft_transport.wire.slices import (
    FRAME_DIGEST_BYTES,
    Slice,
    SliceFrame,
    answer_bytes,
    encode_request,
    frame_context,
    joined,
)
from ft_transport.wire.snapshot import Memory, put

logger = logging.getLogger(__name__)

_LEAST_DIRECT_BYTES: Final = 4 << 10
"""Smaller pieces are received together and copied: a separate piece of a read costs more than a copy."""


class Source(NamedTuple):
    """A serving peer and its manifest."""

    peer: PeerAddress
    manifest: Manifest


def fetch_slices(
    sources: Sequence[Source],
    wanted: Iterable[Wanted],
    destination: Memory,
    settings: FetchSettings,
) -> None:
    """Fetch ``wanted`` into ``destination``; return when every byte has landed, verified if the settings ask for it.

    Args:
        sources: Sources, all with the same step.
        wanted: The needed parts, and the sources that have each.
        destination: The receiver's data. After an error its content is undefined.
        settings: Settings of the fetch.

    Raises:
        RestoreError: The sources lack a part of ``wanted``; nothing was fetched.
        FetchFailedError: No source could deliver the rest; carries each failure.
        DeadlineExceededError: The deadline passed first.
    """
    manifests = [source.manifest for source in sources]
    names = [str(source.peer) for source in sources]
    planner = Planner(manifests, names)
    _fetch(
        sources,
        planner.plan(wanted),
        _SliceWire(manifests, planner.held, planner.destination, destination, settings),
        settings,
    )


def fetch_ranges(
    source: Source, ranges: Iterable[tuple[int, int]], destination: Memory, settings: FetchSettings
) -> None:
    """Fetch byte ranges of the data, half-open; bytes between them stay unchanged. Arguments as for `fetch_slices`.

    Adapters lie between the weights that they belong to: a request for each would cost more than its bytes.
    """
    wire = _SliceWire([source.manifest], RangeRead.slice, RangeRead.slice, destination, settings)
    _fetch([source], [RangeRead.of(ranges)], wire, settings)


def _fetch(
    sources: Sequence[Source], reads: Sequence[Sequence[AnyRead]], wire: _SliceWire, settings: FetchSettings
) -> None:
    names, step = [str(source.peer) for source in sources], sources[0].manifest.step
    total_bytes = sum(read.num_bytes for planned in reads for read in planned)
    num_workers = max(1, min(settings.num_connections, -(-total_bytes // CHUNK_BYTES)))
    pool = FetchPool(
        [source.peer for source in sources],
        FetchMachine(ReadWork(reads, num_workers=num_workers), sources=names, max_failures=settings.max_failures),
        wire,
        settings,
        num_workers=num_workers,
        step=step,
        total_bytes=total_bytes,
    )
    pool.run()
    logger.info("step %d: %s", step, pool.summary())


class _SliceWire:
    """Requests frames of slices; the response has each frame's digest after it.

    Args:
        manifests: The manifest of each source.
        held: Returns the slice of a read at a source.
        placed: Returns the slice of a read here.
        destination: The receiver's data.
        settings: Whether to verify the digests.
    """

    def __init__(
        self,
        manifests: Sequence[Manifest],
        held: Callable[[Any, int], Slice],
        placed: Callable[[Any], Slice],
        destination: Memory,
        settings: FetchSettings,
    ) -> None:
        self._manifests = manifests
        self._held = held
        self._placed = placed
        self._destination = destination
        self._is_verified = settings.verify

    def receive(self, connection: Connection, request: Request[FrameOfReads]) -> Iterator[tuple[FrameOfReads, int]]:
        """See ``http.client.fetch_pool.Wire``."""
        manifest = self._manifests[request.source]
        frames = [joined([self._held(read, request.source) for read in frame]) for frame in request.units]
        response = _ask_for_frames(connection, manifest, frames)
        staging = memoryview(bytearray(max(sum(read.num_bytes for read in frame) for frame in request.units)))
        for frame, asked in zip(request.units, frames, strict=True):
            self._receive_frame(connection, manifest, frame, asked, staging)
            yield frame, sum(read.num_bytes for read in frame)
        connection.end_response(response)

    def _receive_frame(
        self,
        connection: Connection,
        manifest: Manifest,
        frame: FrameOfReads,
        asked: SliceFrame,
        staging: memoryview,
    ) -> None:
        views: list[memoryview] = []
        staged: list[tuple[memoryview, Slice]] = []
        filled = 0
        run_start: int | None = None
        for piece in joined([self._placed(read) for read in frame]):
            if not piece.loops and piece.block_bytes >= _LEAST_DIRECT_BYTES:
                views += self._destination.buffers(piece.start, piece.end)
                run_start = None
                continue
            end = filled + piece.num_bytes
            staged.append((staging[filled:end], piece))
            if run_start is None:
                run_start = filled
                views.append(staging[run_start:end])
            else:  # Adjacent staged pieces are received as one.
                views[-1] = staging[run_start:end]
            filled = end
        what = f"a frame with parts of {frame[0].path}"
        _receive_verified(connection, manifest, asked, views, is_verified=self._is_verified, what=what)
        for data, piece in staged:
            put(data, self._destination, piece)


def _ask_for_frames(connection: Connection, manifest: Manifest, frames: Sequence[SliceFrame]) -> HTTPResponse:
    """Request frames of a source's snapshot.

    Returns:
        The response: receive each frame in turn, then call ``connection.end_response``.

    Raises:
        MessageDamagedError: The response's length differs from that of the frames.
        PeerError: The source refuses, or cannot be reached.
    """
    response = connection.get(
        bound_path(SLICES_ROUTE, manifest.step, manifest.snapshot_id),
        headers={"Content-Type": "application/json"},
        expected_status=200,
        answer_within_s=0.0,
        body=encode_request(frames),
    )
    if response.length != answer_bytes(frames):
        raise MessageDamagedError(
            f"expected an answer of {answer_bytes(frames)} bytes, got {response.length}", peer=str(connection.peer)
        )
    return response


def _receive_verified(
    connection: Connection,
    manifest: Manifest,
    frame: SliceFrame,
    views: Sequence[memoryview],
    *,
    is_verified: bool,
    what: str,
) -> None:
    """Receive the next frame of a response.

    Args:
        connection: The connection to the source.
        manifest: The source's manifest.
        frame: The frame as it was requested.
        views: Memory for its bytes, in order.
        is_verified: Whether to compare its digest.
        what: Description of the frame, for errors.

    Raises:
        IntegrityError: The frame has another digest. Its bytes are in ``views`` already.
    """
    told = bytearray(FRAME_DIGEST_BYTES)
    connection.read_into([*views, memoryview(told)])
    if not is_verified:
        return
    hasher = manifest.digester.hasher(frame_context(manifest.snapshot_id, frame) if manifest.digester.is_keyed else b"")
    for view in views:
        hasher.update(view)
    expected, actual = int.from_bytes(told, "big"), hasher.intdigest()
    if actual != expected:
        raise IntegrityError(
            f"{what} was damaged",
            chunk=None,
            expected=expected,
            actual=actual,
            peer=str(connection.peer),
            step=manifest.step,
        )
