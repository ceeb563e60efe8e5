"""Fetching what a receiver in another layout needs: planned reads from several sources, each byte into its place.

The decisions are those of ``wire.reshard`` and ``wire.slice_fetch``, the threads those of ``http.fetch_pool``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ft_transport.errors import IntegrityError, PeerProtocolError
from ft_transport.http.chunk_client import Destination
from ft_transport.http.connection import Connection
from ft_transport.http.fetch_pool import Fetch, FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.wire.fetch import WorkerIndex
from ft_transport.wire.integrity import Hasher
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.reshard import Planner, Wanted
from ft_transport.wire.routes import slices_path
from ft_transport.wire.slice_fetch import FetchFrames, FrameOfReads, FrameVerified, SliceFetchMachine
from ft_transport.wire.slices import FRAME_BYTES, FRAME_DIGEST_BYTES, Slice, answer_bytes, encode_request, joined
from ft_transport.wire.strided import put

_LEAST_DIRECT_BYTES: Final = 4 << 10
"""Smaller pieces are received together and copied: each piece of a read costs the system more than a copy of it."""


class Source(NamedTuple):
    """Who serves, and what."""

    peer: PeerAddress
    manifest: Manifest


def fetch_slices(
    sources: Sequence[Source],
    wanted: Iterable[Wanted],
    destination: Destination,
    settings: FetchSettings,
) -> None:
    """Fetches what is wanted into ``destination``; returns when every byte landed, and was verified if that is asked.

    Args:
        sources: What they serve is all of one step.
        wanted: What is needed, and who has it.
        destination: The receiver's data. After an error its content is undefined.
        settings: How to fetch.

    Raises:
        RestoreError: The sources do not have all that is wanted; nothing was fetched then.
        FetchFailedError: No source could deliver the rest; carries each failure.
        DeadlineExceededError: The deadline passed first.
    """
    _SliceFetch(sources, wanted, destination, settings).run()


class _SliceFetch(Fetch[FetchFrames]):
    def __init__(
        self,
        sources: Sequence[Source],
        wanted: Iterable[Wanted],
        destination: Destination,
        settings: FetchSettings,
    ) -> None:
        self._manifests = [source.manifest for source in sources]
        self._planner = Planner(self._manifests, [str(source.peer) for source in sources])
        reads = self._planner.plan(wanted)
        total_bytes = sum(read.num_bytes for planned in reads for read in planned)
        num_workers = max(1, min(settings.num_connections, -(-total_bytes // FRAME_BYTES)))
        self._slice_machine = SliceFetchMachine(
            reads=reads,
            sources=[str(source.peer) for source in sources],
            num_workers=num_workers,
            max_failures=settings.max_failures,
        )
        super().__init__(
            [source.peer for source in sources],
            self._slice_machine,
            settings,
            num_workers=num_workers,
            step=self._manifests[0].step,
            total_bytes=total_bytes,
        )
        self._destination = destination

    def perform(self, worker: WorkerIndex, connection: Connection, request: FetchFrames) -> None:
        """See ``http.fetch_pool``."""
        manifest = self._manifests[request.source]
        frames = [joined([self._planner.held(read, request.source) for read in frame]) for frame in request.frames]
        response = connection.get(
            slices_path(manifest.step, manifest.snapshot_id),
            headers={"Content-Type": "application/json"},
            expected_status=200,
            answer_within_s=0.0,
            body=encode_request(frames),
        )
        if response.length != answer_bytes(frames):
            raise PeerProtocolError(
                f"expected an answer of {answer_bytes(frames)} bytes, got {response.length}", peer=str(connection.peer)
            )
        staging = memoryview(bytearray(max(sum(read.num_bytes for read in frame) for frame in request.frames)))
        for frame in request.frames:
            self._receive_frame(connection, frame, staging)
            with self.changed:
                if self._slice_machine.stopped is not None:
                    connection.close()
                    return
                # First, because an error of the caller's own must end a fetch also at its last frame.
                self.report_progress(sum(read.num_bytes for read in frame))
                self._slice_machine.receive(FrameVerified(worker))
                if self._slice_machine.stopped is not None:
                    self.changed.notify_all()
        connection.end_response(response)

    def _receive_frame(self, connection: Connection, frame: FrameOfReads, staging: memoryview) -> None:
        views: list[memoryview] = []
        staged: list[tuple[memoryview, Slice]] = []
        filled = 0
        run_start: int | None = None
        for piece in joined([self._planner.destination(read) for read in frame]):
            if not piece.loops and piece.block_bytes >= _LEAST_DIRECT_BYTES:
                views += self._destination.buffers(piece.start, piece.end)
                run_start = None
                continue
            end = filled + piece.num_bytes
            staged.append((staging[filled:end], piece))
            if run_start is None:
                run_start = filled
                views.append(staging[run_start:end])
            else:  # What is staged side by side is received as one.
                views[-1] = staging[run_start:end]
            filled = end
        digest = bytearray(FRAME_DIGEST_BYTES)
        connection.read_into([*views, memoryview(digest)])
        if self._settings.verify:
            hasher = Hasher()
            for view in views:
                hasher.update(view)
            if hasher.digest() != bytes(digest):
                raise IntegrityError(
                    f"a frame with parts of {frame[0].wanted.path} was damaged",
                    chunk=None,
                    expected=int.from_bytes(digest, "big"),
                    actual=hasher.intdigest(),
                    peer=str(connection.peer),
                    step=self._step,
                )
        for data, piece in staged:
            put(data, self._destination, piece)
