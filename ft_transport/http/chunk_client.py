"""Fetching the data of a snapshot: its chunks over parallel connections, each byte into its place.

What is asked of whom is decided by ``wire.fetch`` and ``wire.chunk_work``, or ``wire.fleet_work`` where there are
several sources or other receivers; the threads are those of ``http.fetch_pool``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPResponse
from typing import Final

from ft_transport.errors import IntegrityError, MessageDamagedError, PeerUnreachableError
from ft_transport.http.connection import Connection
from ft_transport.http.fetch_pool import FetchPool, FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.http.relays import Relay
from ft_transport.wire.chunk_work import ChunkWork
from ft_transport.wire.fetch import FetchMachine, Request, Work
from ft_transport.wire.fleet_work import Fleet, FleetWork, requests_at_once
from ft_transport.wire.manifest import Manifest, SnapshotId
from ft_transport.wire.routes import FULL_ROUTE, bound_path, relay_path
from ft_transport.wire.strided import Memory

logger = logging.getLogger(__name__)

_IN_FLIGHT_BYTES: Final = 16 << 20
"""More than the buffers of both sockets grow to by Linux's defaults (``tcp_rmem``, ``tcp_wmem``)."""
_RELAY_WAIT_S: Final = 1.0
"""How long a relay holds a request until something has landed there; longer where chunks take longer."""
_LONGEST_RELAY_WAIT_S: Final = 15.0
_LONGEST_PAUSE_S: Final = 2.5
"""How long a relay may pause within an answer, at most, and for no longer than half of the stall timeout."""
_WAIT_IN_CHUNKS: Final = 2.0
"""So many times as long as a chunk from a source has taken here: the relays get theirs at about the same rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """The file in which one source serves the content.

    Attributes:
        peer: The source.
        snapshot_id: Its own name for it.
        header_bytes: Where the data begins.
    """

    peer: PeerAddress
    snapshot_id: SnapshotId
    header_bytes: int

    @classmethod
    def of(cls, peer: PeerAddress, manifest: Manifest) -> SourceFile:
        """That of the manifest which the peer has sent."""
        return cls(peer=peer, snapshot_id=manifest.snapshot_id, header_bytes=manifest.header_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """Who receives the same content now.

    Attributes:
        peers: All of them, this one too, in an order that is the same for all.
        own: Which of them this one is.
        relay: What this one passes on.
    """

    peers: Sequence[PeerAddress]
    own: int
    relay: Relay

    @property
    def others(self) -> Sequence[PeerAddress]:
        """All but this one."""
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
    """Fetches the data of a snapshot into ``destination``; returns when every chunk landed.

    Each has been verified then, if that is asked for and the manifest has digests.

    Args:
        sources: Peers that serve this very content.
        manifest: Its manifest; with digests, if there are several sources or other receivers.
        destination: Where the bytes go. After an error its content is undefined.
        settings: How to fetch.
        chunks: Only these, ascending.
        receivers: Who passes on what they have; nobody does by default.
        on_landed: Called with each chunk that is there now, by the thread that received it.

    Raises:
        FetchFailedError: No source could deliver the rest; carries each failure.
        DeadlineExceededError: The deadline passed first.
    """
    num_chunks = manifest.chunks.num_chunks
    ranges = _ranges_of(chunks) if chunks is not None else [(0, num_chunks)]
    num_in_flight = -(-_IN_FLIGHT_BYTES // manifest.chunks.chunk_bytes)
    work: Work[int]
    if receivers is None and len(sources) == 1:
        num_workers = max(1, min(settings.num_connections, num_chunks))
        work = ChunkWork(ranges, num_workers=num_workers, num_in_flight=num_in_flight)
    else:
        num_receivers = len(receivers.peers) if receivers is not None else 1
        at_once = requests_at_once(
            num_sources=len(sources),
            num_receivers=num_receivers,
            num_connections=settings.num_connections,
            num_chunks=num_chunks,
        )
        num_workers = at_once.num_workers
        fleet = Fleet(
            num_sources=len(sources),
            num_receivers=num_receivers,
            own=receivers.own if receivers is not None else 0,
        )
        work = FleetWork(ranges, num_chunks=num_chunks, fleet=fleet, num_own_requests=at_once.num_own)
    peers = [source.peer for source in sources]
    FetchPool(
        [*peers, *(receivers.others if receivers is not None else ())],
        FetchMachine(
            work,
            sources=[*map(str, peers), *(f"relay {peer}" for peer in (receivers.others if receivers else ()))],
            max_failures=settings.max_failures,
        ),
        _ChunkWire(
            manifest,
            destination,
            sources=sources,
            relay=receivers.relay if receivers is not None else None,
            on_landed=on_landed,
            is_verified=settings.verify or receivers is not None,
        ),
        settings,
        num_workers=num_workers,
        num_sources=len(sources),
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
    """Requests for consecutive chunks: of a source's file, or of what another receiver passes on."""

    def __init__(
        self,
        manifest: Manifest,
        destination: Memory,
        *,
        sources: Sequence[SourceFile],
        relay: Relay | None,
        on_landed: Callable[[int], None] | None,
        is_verified: bool,
    ) -> None:
        self._manifest = manifest
        self._destination = destination
        self._sources = sources
        self._relay = relay
        self._on_landed = on_landed
        self._digests = manifest.digests if is_verified else None
        self._longest_chunk_s = 0.0

    def receive(self, connection: Connection, request: Request[int]) -> Iterator[int]:
        """See ``http.fetch_pool.Wire``."""
        chunks = request.units
        start, stop = self._manifest.chunks.range_of(chunks[0], chunks[-1] + 1)
        if request.source < len(self._sources):
            response = self._ask_source(connection, self._sources[request.source], start, stop)
        else:
            response, stop = self._ask_relay(connection, start, stop)
            chunks = chunks[: -(-(stop - start) // self._manifest.chunks.chunk_bytes)]
        for chunk in chunks:
            began_s = time.monotonic()
            try:
                num_bytes = self._receive_chunk(connection, chunk)
            except PeerUnreachableError as error:
                if request.source < len(self._sources) or chunk == chunks[0]:
                    raise
                # It had no more of them in time, or has gone; the next request tells which.
                logger.debug("%s ended its answer before chunk %d: %s", connection.peer, chunk, error)
                return
            if self._relay is not None:
                self._relay.landed(chunk)
                if request.source < len(self._sources):
                    self._longest_chunk_s = max(self._longest_chunk_s, time.monotonic() - began_s)
            if self._on_landed is not None:
                self._on_landed(chunk)
            yield num_bytes
        connection.end_response(response)

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
            raise _unexpected(connection, expected_range, response)
        return response

    def _ask_relay(self, connection: Connection, start: int, stop: int) -> tuple[HTTPResponse, int]:
        """Returns where its answer is to end; what lies behind is asked for again."""
        assert self._relay is not None, "who asks others passes on itself"
        wait_s = min(_LONGEST_RELAY_WAIT_S, max(_RELAY_WAIT_S, _WAIT_IN_CHUNKS * self._longest_chunk_s))
        follow_s = min(wait_s, _LONGEST_PAUSE_S, connection.stall_timeout_s / 2)
        response = connection.get(
            relay_path(self._relay.content, wait_s=wait_s, follow_s=follow_s),
            headers={"Range": f"bytes={start}-{stop - 1}"},
            expected_status=206,
            answer_within_s=wait_s,
        )
        num_bytes, table = response.length or 0, self._manifest.chunks
        end = start + num_bytes
        is_whole = num_bytes > 0 and (end == stop or (end < stop and not num_bytes % table.chunk_bytes))
        expected_range = f"bytes {start}-{end - 1}/{table.data_bytes}"
        if not is_whole or response.headers.get("Content-Range") != expected_range:
            raise _unexpected(connection, f"whole chunks of bytes {start}-{stop - 1}/{table.data_bytes}", response)
        return response, end

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


def _unexpected(connection: Connection, expected: str, response: HTTPResponse) -> MessageDamagedError:
    content_range = str(response.headers.get("Content-Range"))[:100]
    return MessageDamagedError(
        f"expected {expected!r}, got {content_range!r} of {response.length} bytes", peer=str(connection.peer)
    )
