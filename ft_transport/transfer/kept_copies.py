"""Receives a copy of another rank's kept snapshot, without the data that further ranks have as well.

Ranks of DDP or HSDP have equal data: their snapshots have equal chunks at equal positions. A copy has a hole in place
of each chunk that all of the given twins have, and the header with the digests of all chunks. To use the copy, a rank
fills the holes from a twin; the digests show that these are the right chunks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec import Struct

from ft_transport.http.client.chunks import fetch_data
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.state.arena import HEADER_ROOM_BYTES, Arena, ArenaPool, refuse_beyond_available
from ft_transport.transfer.sources import AgreedSources, ask_sources
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.snapshot import MemoryFile, Snapshot

_MAX_COPIES: Final = 1 << 16
_BLOCK_BYTES: Final = 512
"""Unit of ``st_blocks`` (``man 7 inode``)."""


class Offer(Struct, frozen=True, kw_only=True):
    """Describes the kept snapshot of a rank to the ranks that may copy it.

    Attributes:
        address: The address at which it is served; empty if the rank cannot serve it.
        first: Digest of its first chunk. Ranks whose snapshots have equal data have equal digests.
        domain: Failure domain of the rank, such as its host.
    """

    address: str
    first: int
    domain: str

    def encode(self) -> bytes:
        """Encode the offer for the key-value store."""
        return _encoder.encode(self)


_encoder: Final = msgspec.msgpack.Encoder()
offer_decoder: Final = msgspec.msgpack.Decoder(Offer)


def sources_of(domains: Sequence[str], copies: int) -> list[tuple[int, ...]]:
    """Return for each rank the ranks of which it holds copies.

    Args:
        domains: Failure domain of each rank.
        copies: Number of failure domains that are to hold the state of each rank, its own included. If there are fewer,
            all of them hold it.
    """
    members: dict[str, list[int]] = {}
    for rank, domain in enumerate(domains):
        members.setdefault(domain, []).append(rank)
    names = list(members)
    sources: list[list[int]] = [[] for _ in domains]
    for at, name in enumerate(names):
        for index, rank in enumerate(members[name]):
            for distance in range(1, min(copies, len(names))):
                others = members[names[(at + distance) % len(names)]]
                sources[others[index % len(others)]].append(rank)
    return [tuple(each) for each in sources]


def twins_of(rank: int, offers: Sequence[Offer], copies: int) -> tuple[int, ...]:
    """Return ranks that may have the data of a rank, in ``copies - 1`` other failure domains; empty if there are fewer.

    Only a comparison of all digests shows which data they have.
    """
    own = offers[rank]
    found: dict[str, int] = {}
    for other, offer in enumerate(offers):
        if offer.first == own.first and offer.domain != own.domain:
            found.setdefault(offer.domain, other)
    return tuple(found.values())[: copies - 1] if len(found) >= copies - 1 else ()


class CopyMemory:
    """The memory of the copies that a process holds. One thread at a time may call `receive`."""

    def __init__(self) -> None:
        # Only what is received uses memory, and no receiver waits until all of it is resident.
        self._pool = ArenaPool(_MAX_COPIES, are_resident=False)

    def receive(
        self, holder: str, twins: Sequence[str], step: int, settings: FetchSettings, *, is_filled: bool
    ) -> tuple[Snapshot, bool]:
        """Receive a snapshot, and verify each received chunk.

        Args:
            holder: Address of the rank that has the snapshot, or a copy of it.
            twins: Addresses of ranks that may have the same data.
            step: Step of the snapshot.
            settings: Settings of the fetch.
            is_filled: Whether to receive the chunks that the twins have, too: from the first twin.

        Returns:
            The snapshot, and whether it is whole. If not, it has holes.

        Raises:
            TransportError: A rank could not deliver its chunks; or there is not enough memory.
        """
        with contextlib.ExitStack() as connections:
            source, manifest = _ask(holder, step, settings, connections)
            others = [_ask(twin, step, settings, connections) for twin in twins]
            shared = _shared_chunks(manifest, [other for _, other in others])
            arena = self._pool.take(manifest.data_bytes)
            # Copies of later steps use the memory again, unless they have holes, or belong to a recovery.
            release = partial(self._pool.give_back, arena, is_reused=not shared and not is_filled)
            try:
                memory = _ArenaMemory(arena)
                own = [chunk for chunk in range(manifest.chunks.num_chunks) if chunk not in shared]
                received = range(manifest.chunks.num_chunks) if is_filled else own
                num_bytes = sum(map(manifest.chunks.length_of, received))
                refuse_beyond_available(num_bytes - os.fstat(arena.descriptor).st_blocks * _BLOCK_BYTES)
                if own:
                    fetch_data(source.files, manifest, memory, settings, chunks=own)
                if shared and is_filled:
                    twin, twin_manifest = others[0]
                    fetch_data(twin.files, twin_manifest, memory, settings, chunks=sorted(shared))
                snapshot = _finished(manifest, arena, release)
            except BaseException:
                release()
                raise
        return snapshot, is_filled or not shared

    def close(self) -> None:
        """Free the memory, as soon as each copy is closed."""
        self._pool.close()


class _ArenaMemory:
    """The data of an arena as the destination of a fetch."""

    def __init__(self, arena: Arena) -> None:
        self._view = arena.view

    def buffers(self, start: int, end: int) -> Sequence[memoryview]:
        """Return the memory of bytes ``[start, end)``; see ``wire.snapshot.Memory``."""
        return (self._view[start:end],)


def _ask(
    address: str, step: int, settings: FetchSettings, connections: contextlib.ExitStack
) -> tuple[AgreedSources, Manifest]:
    agreed = ask_sources([PeerAddress.from_url(address)], step, settings, connections)
    return agreed, agreed.manifest_with_digests(settings)


def _shared_chunks(manifest: Manifest, others: Sequence[Manifest]) -> set[int]:
    """Return the chunks that all others have, at the same positions."""
    if not others:
        return set()
    tables = [manifest.chunks, *(other.chunks for other in others)]
    shared = set(range(min(table.num_chunks for table in tables)))
    for other in others:
        if other.digester.name != manifest.digester.name:
            return set()
        assert manifest.digests is not None, "it was requested with digests"
        assert other.digests is not None, "it was requested with digests"
        shared = {
            chunk
            for chunk in shared
            if manifest.digests[chunk] == other.digests[chunk]
            and manifest.chunks.range_of(chunk, chunk + 1) == other.chunks.range_of(chunk, chunk + 1)
        }
    return shared


def _finished(manifest: Manifest, arena: Arena, close: Callable[[], None]) -> Snapshot:
    assert manifest.digests is not None, "it was requested with digests"
    header = manifest.header(manifest.digests)
    start = arena.write_header(header)
    return Snapshot(
        step=manifest.step,
        snapshot_id=manifest.snapshot_id,
        header=header,
        memory=MemoryFile(arena.descriptor, start, HEADER_ROOM_BYTES, arena.view[: manifest.data_bytes]),
        total_bytes=len(header) + manifest.data_bytes,
        close=close,
        digester=manifest.digester,
    )
