"""Fetches the data of a snapshot in chunks, over parallel connections, directly into the caller's memory.

``wire.fetch`` and ``wire.swarm_work`` decide which peer delivers which chunks; ``fetch_pool`` runs the threads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Final

from ft_transport.errors import (
    IntegrityError,
    MessageDamagedError,
    PeerNotReadyError,
    PeerSilentError,
    PeerUnreachableError,
)
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_pool import FetchPool
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.relays import Relay
from ft_transport.wire.chunks import runs_of
from ft_transport.wire.fetch import FetchMachine, Request
from ft_transport.wire.manifest import Manifest, SnapshotId
from ft_transport.wire.routes import CHUNK_HEADER, FULL_ROUTE, bound_path, format_ranges, relay_path, relayed_bytes
from ft_transport.wire.snapshot import Memory
from ft_transport.wire.swarm import Swarm
from ft_transport.wire.swarm_work import SwarmWork

logger = logging.getLogger(__name__)

_IN_FLIGHT_BYTES: Final = 16 << 20
"""Bytes to request at once from a source: more than fit into the buffers of both sockets with Linux's defaults
(``tcp_rmem``, ``tcp_wmem``)."""
_RELAY_WAIT_S: Final = 1.0
"""Shortest time for which a relay is asked to delay its response until it has a chunk."""
_LONGEST_RELAY_WAIT_S: Final = 15.0
_LONGEST_PAUSE_S: Final = 2.5
"""Longest pause between two chunks in a relay's response; at most half of the stall timeout."""
_LEAST_PAUSE_S: Final = 0.1
"""Pause before the next request to a relay that responded "not ready" earlier than it was asked to."""
_WAIT_IN_CHUNKS: Final = 2.0
"""Wait for a relay, as a multiple of the longest time of a chunk from a source: relays receive at about the same
rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """The file in which one source serves a snapshot.

    Attributes:
        peer: Address of the source.
        snapshot_id: Id of the snapshot at this source.
        header_bytes: Size of the file's header, after which the data begins.
    """

    peer: PeerAddress
    snapshot_id: SnapshotId
    header_bytes: int

    @classmethod
    def of(cls, peer: PeerAddress, manifest: Manifest) -> SourceFile:
        """Return the file that a peer's manifest describes."""
        return cls(peer=peer, snapshot_id=manifest.snapshot_id, header_bytes=manifest.header_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """The replicas that receive the same snapshot at the same time, and relay received chunks to each other.

    Attributes:
        peers: Addresses of all receivers, including this receiver, in an order that is the same on all receivers.
        own: Index of this receiver in ``peers``.
        relay: Serves the chunks that this receiver has received.
    """

    peers: Sequence[PeerAddress]
    own: int
    relay: Relay

    @property
    def others(self) -> Sequence[PeerAddress]:
        """Addresses of the other receivers."""
        return [*self.peers[: self.own], *self.peers[self.own + 1 :]]


def fetch_data(
    sources: Sequence[SourceFile],
    manifest: Manifest,
    destination: Memory,
    settings: FetchSettings,
    *,
    chunks: Sequence[int] | None = None,
    receivers: Receivers | None = None,
    on_landed: Callable[[int], None] | None = None,
) -> None:
    """Fetch the data of a snapshot into ``destination``; return when every chunk was received.

    Verifies each chunk if the manifest has digests, and if ``settings.verify`` is set or there are other receivers.

    Args:
        sources: Files of the sources, which all contain the same data.
        manifest: Manifest of the snapshot. It must have digests if there are several sources or other receivers.
        destination: Memory to fill. After an error, its content is undefined.
        settings: Settings of the fetch.
        chunks: Indices of the chunks to fetch, ascending; ``None`` for all.
        receivers: Replicas that relay received chunks to each other; ``None`` for none.
        on_landed: Called with the index of each received chunk, on the thread that received the chunk.

    Raises:
        FetchFailedError: No source could deliver the remaining chunks; the error has the failure of each source.
        DeadlineExceededError: The deadline passed.
    """
    num_chunks = manifest.chunks.num_chunks
    ranges = [(run.start, run.stop) for run in runs_of(chunks)] if chunks is not None else [(0, num_chunks)]
    others = receivers.others if receivers is not None else ()
    work = SwarmWork(
        ranges,
        num_chunks=num_chunks,
        swarm=Swarm(
            num_sources=len(sources),
            num_receivers=1 + len(others),
            own=receivers.own if receivers is not None else 0,
        ),
        num_connections=settings.num_connections,
        num_in_flight=-(-_IN_FLIGHT_BYTES // manifest.chunks.chunk_bytes),
    )
    peers = [source.peer for source in sources]
    FetchPool(
        [*peers, *others],
        FetchMachine(
            work,
            sources=[*map(str, peers), *(f"relay {peer}" for peer in others)],
            max_failures=settings.max_failures,
        ),
        _ChunkWire(
            manifest,
            destination,
            sources=sources,
            relay=receivers.relay if receivers is not None else None,
            on_landed=on_landed,
            on_progress=work.report_progress,
            is_verified=settings.verify or receivers is not None,
        ),
        settings,
        num_workers=work.num_workers,
        num_sources=len(sources),
        step=manifest.step,
        total_bytes=manifest.data_bytes,
    ).run()


class _ChunkWire:
    """Requests consecutive chunks from a source, or any chunks from a relay; see ``http.client.fetch_pool.Wire``."""

    def __init__(
        self,
        manifest: Manifest,
        destination: Memory,
        *,
        sources: Sequence[SourceFile],
        relay: Relay | None,
        on_landed: Callable[[int], None] | None,
        on_progress: Callable[[int], None],
        is_verified: bool,
    ) -> None:
        self._manifest = manifest
        self._destination = destination
        self._sources = sources
        self._relay = relay
        self._on_landed = on_landed
        self._on_progress = on_progress
        self._digests = manifest.digests if is_verified else None
        self._longest_chunk_s = 0.0

    def receive(self, connection: Connection, request: Request[int]) -> Iterator[tuple[int, int]]:
        """Send one request; yield each received chunk with its number of bytes."""
        if request.source < len(self._sources):
            return self._receive_from_source(connection, self._sources[request.source], request.units)
        return self._receive_relayed(connection, request.units)

    def _receive_from_source(
        self, connection: Connection, source: SourceFile, chunks: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        start, stop = self._manifest.chunks.range_of(chunks[0], chunks[-1] + 1)
        response = self._ask_source(connection, source, start, stop)
        for chunk in chunks:
            began_s = time.monotonic()
            num_bytes = self._receive_chunk(connection, chunk, is_steady=True)
            self._longest_chunk_s = max(self._longest_chunk_s, time.monotonic() - began_s)
            self._landed(chunk)
            yield chunk, num_bytes
        connection.end_response(response)

    def _receive_relayed(self, connection: Connection, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
        response = self._ask_relay(connection, chunks)
        left = set(chunks)
        while left:
            try:
                chunk = self._next_relayed(connection, left)
                num_bytes = self._receive_chunk(connection, chunk)
            except PeerSilentError:
                # A relay that waits too long for its next chunk ends its response. So a silent relay has failed.
                raise
            except PeerUnreachableError as error:
                if len(left) == len(chunks):
                    raise
                # The relay ended its response because it has no further chunks yet, or it exited. The next request
                # shows which of the two.
                logger.debug("%s ended its response without the last %d chunks: %s", connection.peer, len(left), error)
                return
            left.remove(chunk)
            self._landed(chunk)
            yield chunk, num_bytes
        connection.end_response(response)

    def _next_relayed(self, connection: Connection, left: Set[int]) -> int:
        """Read the header before the next chunk in a relay's response; return the index of the chunk."""
        header = bytearray(CHUNK_HEADER.size)
        connection.restart_throughput()
        connection.read_into([memoryview(header)])
        start, furthest = CHUNK_HEADER.unpack(header)
        chunk, rest = divmod(start, self._manifest.chunks.chunk_bytes)
        if rest or chunk not in left:
            chunk_bytes = self._manifest.chunks.chunk_bytes
            raise MessageDamagedError(
                f"expected the start of one of {len(left)} requested chunks of {chunk_bytes} bytes, got byte {start}",
                peer=str(connection.peer),
            )
        if self._relay is not None:
            self._relay.report_progress(furthest)
        self._on_progress(min(furthest, self._manifest.chunks.num_chunks))
        return int(chunk)

    def _landed(self, chunk: int) -> None:
        if self._relay is not None:
            self._relay.landed(chunk)
        if self._on_landed is not None:
            self._on_landed(chunk)

    def _ask_source(self, connection: Connection, source: SourceFile, start: int, stop: int) -> HTTPResponse:
        position = source.header_bytes
        asked = f"{position + start}-{position + stop - 1}"
        response = connection.get(
            bound_path(FULL_ROUTE, self._manifest.step, source.snapshot_id),
            headers={"Range": f"bytes={asked}"},
            expected_status=206,
            answer_within_s=0.0,
        )
        expected_range = f"bytes {asked}/{position + self._manifest.data_bytes}"
        content_range = response.headers.get("Content-Range")
        if response.length != stop - start or content_range != expected_range:
            raise _unexpected(connection, f"Content-Range {expected_range}", response)
        return response

    def _ask_relay(self, connection: Connection, chunks: Sequence[int]) -> HTTPResponse:
        assert self._relay is not None, "a receiver with relays is a relay itself"
        wait_s = min(_LONGEST_RELAY_WAIT_S, max(_RELAY_WAIT_S, _WAIT_IN_CHUNKS * self._longest_chunk_s))
        follow_s = min(wait_s, _LONGEST_PAUSE_S, connection.stall_timeout_s / 2)
        table = self._manifest.chunks
        began_s = time.monotonic()
        try:
            response = connection.get(
                relay_path(self._relay.content, format_ranges(table, chunks), wait_s=wait_s, follow_s=follow_s),
                headers={},
                expected_status=200,
                answer_within_s=wait_s,
            )
        except PeerNotReadyError as error:
            # The relay was asked to wait before such a response, so its Retry-After header is mostly ignored.
            is_early = time.monotonic() - began_s < wait_s / 2
            least_s = _LEAST_PAUSE_S if is_early else 0.0
            error.retry_after_s = min(_LONGEST_PAUSE_S, max(least_s, error.retry_after_s))
            raise
        expected_bytes = relayed_bytes(table, chunks)
        if response.length != expected_bytes:
            raise _unexpected(connection, f"a body of {len(chunks)} chunks in {expected_bytes} bytes", response)
        return response

    def _receive_chunk(self, connection: Connection, chunk: int, *, is_steady: bool = False) -> int:
        """Receive and verify a chunk; return its number of bytes."""
        start, stop = self._manifest.chunks.range_of(chunk, chunk + 1)
        views = self._destination.buffers(start, stop)
        # Reads the whole chunk before it is digested. Digests of smaller parts would read from a nearer cache, but each
        # part would cost more time than that saves.
        connection.read_into(views, is_steady=is_steady)
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


def _unexpected(connection: Connection, expected: str, response: HTTPResponse) -> MessageDamagedError:
    content_range = str(response.headers.get("Content-Range"))[:100]
    return MessageDamagedError(
        f"expected {expected}, got a body of {response.length} bytes with Content-Range {content_range}",
        peer=str(connection.peer),
    )
