"""Fetching the data of a snapshot: its chunks over parallel connections, each byte into its place.

The decisions are those of ``wire.fetch``, the threads those of ``http.fetch_pool``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from ft_transport.errors import IntegrityError, PeerProtocolError
from ft_transport.http.connection import Connection
from ft_transport.http.fetch_pool import Fetch, FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.wire.fetch import ChunkVerified, FetchChunks, FetchMachine, WorkerIndex
from ft_transport.wire.integrity import Hasher
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import full_path

_IN_FLIGHT_BYTES: Final = 16 << 20
"""More than the buffers of both sockets grow to by Linux's defaults (``tcp_rmem``, ``tcp_wmem``)."""


class Destination(Protocol):
    """Memory for the data of one snapshot."""

    def buffers(self, start: int, end: int) -> list[memoryview]:
        """Writable uint8 views that cover bytes ``[start, end)`` of the data once, in order. Called by any thread."""


def fetch_data(
    sources: Sequence[PeerAddress],
    manifest: Manifest,
    destination: Destination,
    settings: FetchSettings,
    *,
    chunks: Sequence[int] | None = None,
) -> None:
    """Fetches the data of a snapshot into ``destination``; returns when every chunk landed.

    Each has been verified then, if that is asked for and the manifest has digests.

    Args:
        sources: Peers that serve this very snapshot.
        manifest: Its manifest.
        destination: Where the bytes go. After an error its content is undefined.
        settings: How to fetch.
        chunks: Only these, ascending.

    Raises:
        FetchFailedError: No source could deliver the rest; carries each failure.
        DeadlineExceededError: The deadline passed first.
    """
    ranges = _ranges_of(chunks) if chunks is not None else [(0, manifest.chunks.num_chunks)]
    _ChunkFetch(sources, manifest, destination, settings, ranges).run()


def _ranges_of(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """What ascending numbers cover, half-open."""
    ranges: list[tuple[int, int]] = []
    for chunk in chunks:
        if ranges and ranges[-1][1] == chunk:
            ranges[-1] = (ranges[-1][0], chunk + 1)
        else:
            ranges.append((chunk, chunk + 1))
    return ranges


class _ChunkFetch(Fetch[FetchChunks]):
    def __init__(
        self,
        sources: Sequence[PeerAddress],
        manifest: Manifest,
        destination: Destination,
        settings: FetchSettings,
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        num_workers = max(1, min(settings.num_connections, manifest.chunks.num_chunks))
        self._chunk_machine = FetchMachine(
            ranges=ranges,
            sources=[str(source) for source in sources],
            num_workers=num_workers,
            max_failures=settings.max_failures,
            num_in_flight=-(-_IN_FLIGHT_BYTES // manifest.chunks.chunk_bytes),
        )
        super().__init__(
            sources,
            self._chunk_machine,
            settings,
            num_workers=num_workers,
            step=manifest.step,
            total_bytes=manifest.data_bytes,
        )
        self._manifest = manifest
        self._destination = destination

    def perform(self, worker: WorkerIndex, connection: Connection, request: FetchChunks) -> None:
        """See ``http.fetch_pool``."""
        manifest, first, end = self._manifest, request.first, request.end
        start, stop = manifest.chunks.range_of(first, end)
        position = manifest.header_bytes
        response = connection.get(
            full_path(manifest.step, manifest.snapshot_id),
            headers={"Range": f"bytes={position + start}-{position + stop - 1}"},
            expected_status=206,
            answer_within_s=0.0,
        )
        content_range = response.headers.get("Content-Range")
        expected_range = f"bytes {position + start}-{position + stop - 1}/{manifest.total_bytes}"
        if response.length != stop - start or content_range != expected_range:
            raise PeerProtocolError(
                f"expected {expected_range!r}, got {str(content_range)[:100]!r} of {response.length} bytes",
                peer=str(connection.peer),
            )
        for chunk in range(first, end):
            num_bytes = self._receive_chunk(connection, chunk)
            with self.changed:
                if self._chunk_machine.stopped is not None:
                    connection.close()
                    return
                # First, because an error of the caller's own must end a fetch also at its last chunk.
                self.report_progress(num_bytes)
                self._chunk_machine.receive(ChunkVerified(worker))
                if self._chunk_machine.stopped is not None:
                    self.changed.notify_all()
                is_cut_short = chunk + 1 < end and not self._chunk_machine.has_request(worker)
            if is_cut_short:
                # Others fetch the rest; HTTP has no other way to say that it is not wanted any more.
                connection.close()
                return
        connection.end_response(response)

    def _receive_chunk(self, connection: Connection, chunk: int) -> int:
        """Returns its length."""
        start, stop = self._manifest.chunks.range_of(chunk, chunk + 1)
        digests = self._manifest.digests if self._settings.verify else None
        views = self._destination.buffers(start, stop)
        # All of it at once, and the digest afterwards: smaller parts would be digested from a nearer cache, but each
        # of them costs more than that saves.
        connection.read_into(views)
        if digests is None:
            return stop - start
        hasher = Hasher()
        for view in views:
            hasher.update(view)
        if hasher.intdigest() != digests[chunk]:
            raise IntegrityError(
                f"chunk {chunk} (data bytes [{start}, {stop})) was damaged",
                chunk=chunk,
                expected=digests[chunk],
                actual=hasher.intdigest(),
                peer=str(connection.peer),
                step=self._manifest.step,
            )
        return stop - start
