"""Fetches slices or byte ranges of the data, many in one request, directly into the caller's memory.

A receiver with another layout fetches slices from several sources. A receiver that has most of the data fetches byte
ranges. ``wire.reshard``, ``wire.fetch`` and ``wire.read_work`` decide which source delivers which bytes; ``fetch_pool``
runs the threads.
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
"""Size below which pieces are received together and then copied: receiving a small piece by itself costs more time
than a copy."""


class Source(NamedTuple):
    """A peer that serves a snapshot, and the manifest of the snapshot."""

    peer: PeerAddress
    manifest: Manifest


def fetch_slices(
    sources: Sequence[Source],
    wanted: Iterable[Wanted],
    destination: Memory,
    settings: FetchSettings,
) -> None:
    """Fetch the parts of a state that a receiver needs, from sources with another layout.

    Returns when every byte was received, and verified if ``settings.verify`` is set.

    Args:
        sources: Sources that serve the same step.
        wanted: The needed parts, each with the sources that have it.
        destination: Memory of the receiver's state. After an error, its content is undefined.
        settings: Settings of the fetch.

    Raises:
        RestoreError: The sources lack a needed part; nothing was fetched.
        FetchFailedError: No source could deliver the remaining parts; the error has the failure of each source.
        DeadlineExceededError: The deadline passed.
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
    """Fetch byte ranges of the data in few requests; all other bytes of the destination stay unchanged.

    Small changed tensors, such as adapters, lie between unchanged weights. A request for each of these tensors would
    cost more time than the transfer of its bytes.

    Args:
        source: Source of the data.
        ranges: The half-open ranges.
        destination: Memory of the receiver's state. After an error, its content is undefined.
        settings: Settings of the fetch.

    Raises:
        FetchFailedError: The source could not deliver the ranges.
        DeadlineExceededError: The deadline passed.
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
        num_sources=len(sources),
        step=step,
        total_bytes=total_bytes,
    )
    pool.run()
    logger.info("step %d: %s", step, pool.summary())


class _SliceWire:
    """Requests frames of slices. In the response, each frame is followed by its digest.

    Args:
        manifests: The manifest of each source.
        source_slice: Takes a read and the index of a source; returns the slice of the source's data to read.
        destination_slice: Takes a read; returns the slice of the receiver's data to fill.
        destination: Memory of the receiver's state.
        settings: Settings of the fetch.
    """

    def __init__(
        self,
        manifests: Sequence[Manifest],
        source_slice: Callable[[Any, int], Slice],
        destination_slice: Callable[[Any], Slice],
        destination: Memory,
        settings: FetchSettings,
    ) -> None:
        self._manifests = manifests
        self._source_slice = source_slice
        self._destination_slice = destination_slice
        self._destination = destination
        self._is_verified = settings.verify

    def receive(self, connection: Connection, request: Request[FrameOfReads]) -> Iterator[tuple[FrameOfReads, int]]:
        """Send one request; yield each received frame with its number of bytes."""
        manifest = self._manifests[request.source]
        frames = [joined([self._source_slice(read, request.source) for read in frame]) for frame in request.units]
        response = _ask_for_frames(connection, manifest, frames)
        staging = memoryview(bytearray(max(sum(read.num_bytes for read in frame) for frame in request.units)))
        for frame, requested in zip(request.units, frames, strict=True):
            self._receive_frame(connection, manifest, frame, requested, staging)
            yield frame, sum(read.num_bytes for read in frame)
        connection.end_response(response)

    def _receive_frame(
        self,
        connection: Connection,
        manifest: Manifest,
        frame: FrameOfReads,
        requested: SliceFrame,
        staging: memoryview,
    ) -> None:
        views: list[memoryview] = []
        staged: list[tuple[memoryview, Slice]] = []
        filled = 0
        run_start: int | None = None
        for piece in joined([self._destination_slice(read) for read in frame]):
            if not piece.loops and piece.block_bytes >= _LEAST_DIRECT_BYTES:
                views += self._destination.buffers(piece.start, piece.end)
                run_start = None
                continue
            end = filled + piece.num_bytes
            staged.append((staging[filled:end], piece))
            if run_start is None:
                run_start = filled
                views.append(staging[run_start:end])
            else:  # Receives adjacent staged pieces as one view.
                views[-1] = staging[run_start:end]
            filled = end
        digest = bytearray(FRAME_DIGEST_BYTES)
        connection.read_into([*views, memoryview(digest)])
        if self._is_verified:
            digester = manifest.digester
            hasher = digester.hasher(frame_context(manifest.snapshot_id, requested) if digester.is_keyed else b"")
            for view in views:
                hasher.update(view)
            expected, actual = int.from_bytes(digest, "big"), hasher.intdigest()
            if actual != expected:
                raise IntegrityError(
                    f"a frame with parts of {frame[0].path} was damaged",
                    chunk=None,
                    expected=expected,
                    actual=actual,
                    peer=str(connection.peer),
                    step=manifest.step,
                )
        for data, piece in staged:
            put(data, self._destination, piece)


def _ask_for_frames(connection: Connection, manifest: Manifest, frames: Sequence[SliceFrame]) -> HTTPResponse:
    """Request frames of a source's snapshot; return the response, whose body has the frames in this order."""
    response = connection.get(
        bound_path(SLICES_ROUTE, manifest.step, manifest.snapshot_id),
        headers={"Content-Type": "application/json"},
        expected_status=200,
        answer_within_s=0.0,
        body=encode_request(frames),
    )
    if response.length != answer_bytes(frames):
        raise MessageDamagedError(
            f"expected a response of {answer_bytes(frames)} bytes, got one of {response.length} bytes",
            peer=str(connection.peer),
        )
    return response
