"""Digests that are sent after the data: a snapshot in shared memory is digested while it is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from ft_transport.errors import MessageDamagedError, PeerUnreachableError
from ft_transport.http.connection import Connection
from ft_transport.runtime.handler_safety import SafeExecutor
from ft_transport.wire.chunks import DIGEST_HEX_DIGITS
from ft_transport.wire.manifest import Manifest, decode_digests
from ft_transport.wire.routes import DIGESTS_ROUTE, bound_path

_RETRY_PAUSE_S: Final = 0.1

Views: TypeAlias = Callable[[int, int], Iterable[memoryview]]
"""Returns views that cover bytes ``[start, end)`` of the data once, in order. Called by any thread."""


def fetch_digests(connection: Connection, manifest: Manifest, *, max_failures: int) -> tuple[int, ...]:
    """Fetch the digests of all chunks.

    Args:
        connection: Connection to the peer that served the data; it may have been closed while idle.
        manifest: The snapshot's manifest.
        max_failures: Failures after which the last error is raised.

    Raises:
        PeerError: The peer cannot be reached, refuses, or violates the protocol.
        ManifestError: The peer sent something other than digests.
        DeadlineExceededError: They did not come in time.
    """
    if not manifest.chunks.num_chunks:
        return ()
    for _ in range(max_failures - 1):
        try:
            return _ask(connection, manifest)
        except (PeerUnreachableError, MessageDamagedError):
            connection.close()
            time.sleep(_RETRY_PAUSE_S)
    return _ask(connection, manifest)


def _ask(connection: Connection, manifest: Manifest) -> tuple[int, ...]:
    response = connection.get(
        bound_path(DIGESTS_ROUTE, manifest.step, manifest.snapshot_id),
        headers={},
        expected_status=200,
        answer_within_s=0.0,
    )
    expected_bytes = DIGEST_HEX_DIGITS * manifest.chunks.num_chunks
    if response.length != expected_bytes:
        raise MessageDamagedError(
            f"expected digests of {expected_bytes} bytes, the peer announced {response.length}",
            peer=str(connection.peer),
            step=manifest.step,
        )
    body = connection.read_body(response, max_bytes=expected_bytes)
    return decode_digests(body.decode("ascii", "replace"), manifest.chunks.num_chunks, peer=str(connection.peer))


def find_damaged(
    manifest: Manifest, views: Views, *, num_threads: int, chunks: Sequence[int] | None = None
) -> list[int]:
    """Return the chunks whose bytes do not match the digests of the manifest.

    Args:
        manifest: The manifest, with digests.
        views: Views of the received or stored data.
        num_threads: Threads that read the data.
        chunks: Only these chunks are checked.
    """
    expected = manifest.digests
    assert expected is not None, "they have been asked for"
    looked_at = chunks if chunks is not None else range(manifest.chunks.num_chunks)
    actual = digest_chunks(manifest, views, num_threads=num_threads, chunks=looked_at)
    return [chunk for chunk, digest in zip(looked_at, actual, strict=True) if digest != expected[chunk]]


def digest_chunks(
    manifest: Manifest, views: Views, *, num_threads: int, chunks: Sequence[int] | None = None
) -> list[int]:
    """Return the digests of all chunks, or of ``chunks`` in their order."""

    def digest(chunk: int) -> int:
        return manifest.digester.digest_of(views(*manifest.chunks.range_of(chunk, chunk + 1)))

    with SafeExecutor(num_threads, "ft-transport-verify") as pool:
        return list(pool.map(digest, chunks if chunks is not None else range(manifest.chunks.num_chunks)))
