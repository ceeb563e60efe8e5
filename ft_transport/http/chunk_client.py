"""Fetching the data of a snapshot: its chunks over parallel connections, each byte into its place.

What is asked of whom is decided by ``wire.fetch`` and ``wire.chunk_work``; the threads are those of
``http.fetch_pool``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ft_transport.errors import IntegrityError, MessageDamagedError
from ft_transport.http.connection import Connection
from ft_transport.http.fetch_pool import FetchPool, FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.wire.chunk_work import ChunkWork
from ft_transport.wire.fetch import FetchMachine, Request
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import FULL_ROUTE, bound_path
from ft_transport.wire.strided import Memory

_IN_FLIGHT_BYTES: Final = 16 << 20
"""More than the buffers of both sockets grow to by Linux's defaults (``tcp_rmem``, ``tcp_wmem``)."""


def fetch_data(
    sources: Sequence[PeerAddress],
    manifest: Manifest,
    destination: Memory,
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
    num_workers = max(1, min(settings.num_connections, manifest.chunks.num_chunks))
    num_in_flight = -(-_IN_FLIGHT_BYTES // manifest.chunks.chunk_bytes)
    FetchPool(
        sources,
        FetchMachine(
            ChunkWork(ranges, num_workers=num_workers, num_in_flight=num_in_flight),
            sources=[str(source) for source in sources],
            max_failures=settings.max_failures,
        ),
        _ChunkWire(manifest, destination, is_verified=settings.verify),
        settings,
        num_workers=num_workers,
        step=manifest.step,
        total_bytes=manifest.data_bytes,
    ).run()


def _ranges_of(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """What ascending numbers cover, half-open."""
    ranges: list[tuple[int, int]] = []
    for chunk in chunks:
        if ranges and ranges[-1][1] == chunk:
            ranges[-1] = (ranges[-1][0], chunk + 1)
        else:
            ranges.append((chunk, chunk + 1))
    return ranges


class _ChunkWire:
    """``Range`` requests for consecutive chunks of the file."""

    def __init__(self, manifest: Manifest, destination: Memory, *, is_verified: bool) -> None:
        self._manifest = manifest
        self._destination = destination
        self._digests = manifest.digests if is_verified else None

    def receive(self, connection: Connection, request: Request[int]) -> Iterator[int]:
        """See ``http.fetch_pool.Wire``."""
        manifest = self._manifest
        start, stop = manifest.chunks.range_of(request.units[0], request.units[-1] + 1)
        position = manifest.header_bytes
        response = connection.get(
            bound_path(FULL_ROUTE, manifest.step, manifest.snapshot_id),
            headers={"Range": f"bytes={position + start}-{position + stop - 1}"},
            expected_status=206,
            answer_within_s=0.0,
        )
        content_range = response.headers.get("Content-Range")
        expected_range = f"bytes {position + start}-{position + stop - 1}/{manifest.total_bytes}"
        if response.length != stop - start or content_range != expected_range:
            raise MessageDamagedError(
                f"expected {expected_range!r}, got {str(content_range)[:100]!r} of {response.length} bytes",
                peer=str(connection.peer),
            )
        for chunk in request.units:
            yield self._receive_chunk(connection, chunk)
        connection.end_response(response)

    def _receive_chunk(self, connection: Connection, chunk: int) -> int:
        """Returns its length."""
        start, stop = self._manifest.chunks.range_of(chunk, chunk + 1)
        views = self._destination.buffers(start, stop)
        # All of it at once, and the digest afterwards: smaller parts would be digested from a nearer cache, but each
        # of them costs more than that saves.
        connection.read_into(views)
        if self._digests is None:
            return stop - start
        actual = self._manifest.digester.digest_of(views)
        if actual != self._digests[chunk]:
            raise IntegrityError(
                f"chunk {chunk} (data bytes [{start}, {stop})) was damaged",
                chunk=chunk,
                expected=self._digests[chunk],
                actual=actual,
                peer=str(connection.peer),
                step=self._manifest.step,
            )
        return stop - start
