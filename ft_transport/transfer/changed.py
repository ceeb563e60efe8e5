"""Receiving what has changed since an earlier fetch into the same tensors, without a look at what lies there.

What the receiver expects to change (what its optimizers step) is fetched, byte range by byte range. Of the rest the
digests of both manifests are compared, and chunks that differ are fetched whole. So own memory is not read here; who
relies on the state compares it with the manifest afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import torch

from ft_transport.errors import MessageDamagedError
from ft_transport.http.connection import Connection
from ft_transport.http.fetch_pool import FetchPool, FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.state.restore import Restore
from ft_transport.wire.chunk_work import ChunkWork
from ft_transport.wire.fetch import FetchMachine, Request
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import FULL_ROUTE, bound_path

_MOST_CHANGING: Final = 0.5
"""Of the data: where more is expected to change, all of it is fetched."""

Range: TypeAlias = tuple[int, int]
"""Bytes of the data, half-open."""


def changing_ranges(
    manifest: Manifest, base: Manifest, restore: Restore, is_changing: Callable[[torch.Tensor], bool]
) -> list[Range] | None:
    """Where the data is expected to differ from what lies there; ``None`` where all of it had better be fetched.

    Args:
        manifest: Of what comes.
        base: Of what was received before into the same tensors; it has digests.
        restore: Has the tensors.
        is_changing: Says of one of the receiver's tensors whether it is expected to differ.
    """
    is_same = (
        base.digests is not None
        and base.tensors == manifest.tensors
        and base.chunks == manifest.chunks
        and base.digester == manifest.digester
    )
    if not is_same:
        return None
    ranges = _merged(
        (entry.start, entry.end)
        for index, entry in enumerate(manifest.tensors)
        if entry.end > entry.start and ((own := restore.own(index)) is None or is_changing(own))
    )
    num_bytes = sum(end - start for start, end in ranges)
    return ranges if num_bytes <= _MOST_CHANGING * manifest.data_bytes else None


def fetch_ranges(
    peer: PeerAddress, manifest: Manifest, ranges: Sequence[Range], restore: Restore, settings: FetchSettings
) -> None:
    """Fetches byte ranges of the data. Nothing is verified on arrival.

    Raises:
        FetchFailedError: The peer could not deliver the rest; carries each failure.
        DeadlineExceededError: The deadline passed first.
    """
    parts = list(_parts(ranges, manifest.chunks.chunk_bytes))
    num_workers = max(1, min(settings.num_connections, len(parts)))
    FetchPool(
        [peer],
        FetchMachine(
            ChunkWork([(0, len(parts))], num_workers=num_workers, num_in_flight=1),
            sources=[str(peer)],
            max_failures=settings.max_failures,
        ),
        _RangeWire(manifest, parts, restore),
        settings,
        num_workers=num_workers,
        step=manifest.step,
        total_bytes=sum(end - start for start, end in ranges),
    ).run()


def differing_chunks(manifest: Manifest, base: Manifest, ranges: Sequence[Range]) -> list[int]:
    """The chunks outside of ``ranges`` whose digests differ from those before.

    Args:
        manifest: Of what comes, with digests.
        base: Of what lies there, with digests.
        ranges: What has been fetched already.
    """
    assert manifest.digests is not None, "they have been asked for"
    assert base.digests is not None, "it was compared"
    fetched = {
        chunk
        for start, end in ranges
        for chunk in range(start // manifest.chunks.chunk_bytes, -(-end // manifest.chunks.chunk_bytes))
    }
    return [
        chunk
        for chunk, (before, now) in enumerate(zip(base.digests, manifest.digests, strict=True))
        if before != now and chunk not in fetched
    ]


def _merged(ranges: Iterator[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _parts(ranges: Sequence[Range], most_bytes: int) -> Iterator[Range]:
    for start, end in ranges:
        for at in range(start, end, most_bytes):
            yield at, min(end, at + most_bytes)


class _RangeWire:
    """A ``Range`` request for each part."""

    def __init__(self, manifest: Manifest, parts: Sequence[Range], restore: Restore) -> None:
        self._manifest = manifest
        self._parts = parts
        self._restore = restore

    def receive(self, connection: Connection, request: Request[int]) -> Iterator[int]:
        """See ``http.fetch_pool.Wire``."""
        manifest = self._manifest
        for unit in request.units:
            start, end = self._parts[unit]
            position = manifest.header_bytes
            response = connection.get(
                bound_path(FULL_ROUTE, manifest.step, manifest.snapshot_id),
                headers={"Range": f"bytes={position + start}-{position + end - 1}"},
                expected_status=206,
                answer_within_s=0.0,
            )
            if response.length != end - start:
                raise MessageDamagedError(
                    f"expected {end - start} bytes, got an answer of {response.length}", peer=str(connection.peer)
                )
            connection.read_into(self._restore.buffers(start, end))
            connection.end_response(response)
            yield end - start
