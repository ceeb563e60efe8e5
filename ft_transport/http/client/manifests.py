"""Requests the manifest of a snapshot, digests that the source computes later, and deltas between two versions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from ft_transport.errors import (
    DeadlineExceededError,
    IntegrityError,
    ManifestError,
    MessageDamagedError,
    PeerNotReadyError,
    PeerProtocolError,
    PeerUnreachableError,
    StepNotServedError,
    TransportError,
    UnknownHostError,
)
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import FetchSettings
from ft_transport.http.peer_address import PeerAddress
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.settings import default_num_threads
from ft_transport.wire.chunks import DIGEST_HEX_DIGITS, digest
from ft_transport.wire.delta import Delta, decode_delta
from ft_transport.wire.manifest import MAX_HEADER_BYTES, Manifest, decode_digests, decode_header
from ft_transport.wire.routes import (
    DELTA_ROUTE,
    DIGESTS_ROUTE,
    MANIFEST_DIGEST_HEADER,
    StepSelector,
    bound_path,
    metadata_path,
)
from ft_transport.wire.signing import MANIFEST_PURPOSE, MANIFEST_SIGNATURE_HEADER

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S: Final = 0.1
_FIRST_WARNING_S: Final = 3.0
_WARNING_FACTOR: Final = 4
"""Factor by which the wait before each further warning grows."""
_UNKNOWN_HOST_S: Final = 5.0
"""How long an unknown host name is looked up repeatedly: the name of a peer that just started may not be known yet."""
_LONGEST_WAIT_S: Final = 10.0
"""Longest time that the server is asked to wait for a snapshot; then the client sends the next request."""
_WAIT_SHARE: Final = 0.75
"""Maximum wait of one request, as a share of the remaining time."""


def fetch_manifest(connection: Connection, step: StepSelector, settings: FetchSettings) -> Manifest:
    """Return the manifest of a peer's snapshot of ``step``; wait until the deadline for the snapshot.

    Args:
        connection: Connection to the peer. After each request, the peer keeps the snapshot for the time of a lease if
            the connection stays open.
        step: A step or ``latest``.
        settings: Settings of the fetch.

    Raises:
        PeerUnreachableError: The peer was out of reach for longer than ``unreachable_s``, or its host name is unknown.
        StepNotServedError: The peer does not serve the step and has trained beyond it.
        DeadlineExceededError: The peer had no such snapshot, or could not be reached, before the deadline.
        PeerError: The peer refused the request or violated the protocol.
        ManifestError: The peer sent something other than a manifest.
        IntegrityError: The manifest was damaged on the way in several attempts.
        MessageDamagedError: Requests or responses were damaged on the way in several attempts.
    """
    timeouts = settings.timeouts
    num_damaged = 0
    peer = connection.peer
    last: TransportError | None = None
    after: int | None = None
    started_s = reached_s = time.monotonic()
    warning_s = _FIRST_WARNING_S
    while True:
        try:
            timeouts.remaining_s(f"waiting for step {step}", peer)
            return _read_manifest(connection, step, after, settings)
        except DeadlineExceededError as error:
            connection.close()
            if last is None:
                raise
            raise DeadlineExceededError(
                f"timed out waiting for a snapshot: {timeouts.reason()}; last error: {last.message}",
                peer=str(peer),
                step=step,
            ) from error
        except (PeerUnreachableError, PeerNotReadyError) as error:
            connection.close()
            last = error
            if isinstance(error, PeerNotReadyError):
                reached_s = time.monotonic()
            else:
                is_unknown = isinstance(error, UnknownHostError)
                longest_s = min(settings.unreachable_s, _UNKNOWN_HOST_S) if is_unknown else settings.unreachable_s
                # After the deadline, the loop raises the error that names the deadline.
                if connection.is_interrupted or reached_s + longest_s <= time.monotonic() < timeouts.end_s():
                    raise
            if isinstance(error, PeerNotReadyError) and error.after is not None:
                after = error.after if after is None else min(after, error.after)
        except (IntegrityError, MessageDamagedError) as error:
            connection.close()
            num_damaged += 1
            if num_damaged >= settings.max_failures:
                if isinstance(error, MessageDamagedError) and error.refusal is not None:
                    error.refusal.step = step
                    raise error.refusal from error
                raise
            last = error
        except StepNotServedError as error:
            error.step = step
            # The peer may still reach the step: it refuses a request that has waited for long.
            if error.is_past or not isinstance(step, int) or not error.served or step < max(error.served):
                raise
            last = error
        waited_s = time.monotonic() - started_s
        if waited_s >= warning_s:
            warning_s *= _WARNING_FACTOR
            logger.warning(
                "still waiting for a snapshot of step %s from %s after %.1f s, for another %.1f s at most: %s: %s",
                step,
                peer,
                waited_s,
                max(0.0, timeouts.end_s() - time.monotonic()),
                type(last).__name__,
                last,
            )
        time.sleep(min(_RETRY_PAUSE_S, max(0.0, timeouts.end_s() - time.monotonic())))


def _read_manifest(connection: Connection, step: StepSelector, after: int | None, settings: FetchSettings) -> Manifest:
    peer, timeouts = str(connection.peer), settings.timeouts
    # Less than the remaining time, so that the reason of a refusal arrives before the deadline.
    wait_s = min(_LONGEST_WAIT_S, max(0.0, timeouts.end_s() - time.monotonic()) * _WAIT_SHARE)
    response = connection.get(
        metadata_path(step, wait_s=wait_s, after=after), headers={}, expected_status=200, answer_within_s=wait_s
    )
    length = response.length
    if not length or length > MAX_HEADER_BYTES:
        unusable = ManifestError(
            f"expected a manifest of 1 to {MAX_HEADER_BYTES} bytes, got one of {length} bytes", peer=peer, step=step
        )
        raise MessageDamagedError(unusable.message, refusal=unusable, peer=peer, step=step)
    body = bytearray(length)
    connection.read_into([memoryview(body)])
    connection.end_response(response)
    announced = response.headers.get(MANIFEST_DIGEST_HEADER, "")
    actual = digest(memoryview(body))
    if announced != f"{actual:016x}":
        try:
            expected = int(announced, 16)
        except ValueError:
            raise MessageDamagedError(
                f"expected a manifest digest, got {announced[:64]!r}", peer=peer, step=step
            ) from None
        raise IntegrityError(
            "the manifest was damaged", chunk=None, expected=expected, actual=actual, peer=peer, step=step
        )
    if settings.keys is not None and not settings.keys.verifies(
        response.headers.get(MANIFEST_SIGNATURE_HEADER), MANIFEST_PURPOSE, body
    ):
        raise MessageDamagedError(
            "expected a manifest signed with the job token, got no signature or a wrong one", peer=peer, step=step
        )
    manifest = decode_header(
        memoryview(body),
        keys=settings.keys.current() if settings.keys is not None else (),
        peer=peer,
        check_time=timeouts.check_deadline,
    )
    if isinstance(step, int) and manifest.step != step:
        raise PeerProtocolError(f"expected the manifest of step {step}, got step {manifest.step}", peer=peer, step=step)
    return manifest


Views: TypeAlias = Callable[[int, int], Iterable[memoryview]]
"""Returns views of bytes ``[start, end)`` of the data, in order. Any thread may call it."""


def with_digests(connection: Connection, manifest: Manifest, *, max_failures: int) -> Manifest:
    """Return the manifest with the digests of all chunks; request the digests if the manifest has none.

    Args:
        connection: Connection to the peer that served the manifest; the peer may have closed it while it was idle.
        manifest: Manifest of the snapshot.
        max_failures: Number of failures after which this function raises the last error.

    Raises:
        PeerError: The peer cannot be reached, refuses the request, or violates the protocol.
        ManifestError: The peer sent something other than digests.
        DeadlineExceededError: The digests did not arrive in time.
    """
    if manifest.digests is not None:
        return manifest
    if not manifest.chunks.num_chunks:
        return replace(manifest, digests=())
    for _ in range(max_failures - 1):
        try:
            return replace(manifest, digests=_read_digests(connection, manifest))
        except (PeerUnreachableError, MessageDamagedError):
            connection.close()
            time.sleep(_RETRY_PAUSE_S)
    return replace(manifest, digests=_read_digests(connection, manifest))


def _read_digests(connection: Connection, manifest: Manifest) -> tuple[int, ...]:
    response = connection.get(
        bound_path(DIGESTS_ROUTE, manifest.step, manifest.snapshot_id),
        headers={},
        expected_status=200,
        answer_within_s=0.0,
    )
    expected_bytes = DIGEST_HEX_DIGITS * manifest.chunks.num_chunks
    if response.length != expected_bytes:
        raise MessageDamagedError(
            f"expected digests of {expected_bytes} bytes, got {response.length} bytes",
            peer=str(connection.peer),
            step=manifest.step,
        )
    body = connection.read_body(response, max_bytes=expected_bytes)
    return decode_digests(body.decode("ascii", "replace"), manifest.chunks.num_chunks, peer=str(connection.peer))


def find_damaged(manifest: Manifest, views: Views, *, chunks: Sequence[int] | None = None) -> list[int]:
    """Return the indices of the chunks whose bytes do not match the digests of the manifest.

    Args:
        manifest: The manifest, with digests.
        views: Returns views of the received or stored data.
        chunks: Indices of the chunks to check; ``None`` for all.
    """
    expected = manifest.digests
    assert expected is not None, "the caller passes a manifest with digests"
    checked = chunks if chunks is not None else range(manifest.chunks.num_chunks)
    actual = digest_chunks(manifest, views, chunks=checked)
    return [chunk for chunk, digest in zip(checked, actual, strict=True) if digest != expected[chunk]]


def digest_chunks(manifest: Manifest, views: Views, *, chunks: Sequence[int] | None = None) -> list[int]:
    """Compute the digests of ``chunks``, in this order; ``None`` means all chunks."""

    def digest(chunk: int) -> int:
        return manifest.digester.digest_of(views(*manifest.chunks.range_of(chunk, chunk + 1)))

    with SafeExecutor(default_num_threads(), "ft-transport-verify") as pool:
        return list(pool.map(digest, chunks if chunks is not None else range(manifest.chunks.num_chunks)))


def fetch_deltas(
    source: PeerAddress, base: int, version: int, *, max_bytes: int, settings: FetchSettings
) -> list[Delta]:
    """Fetch the deltas that turn one version of the weights into a later version.

    Args:
        source: A peer that caches the deltas.
        base: The version that the receiver has.
        version: The later version that the receiver needs.
        max_bytes: Maximum total size of the encoded deltas, and also of the decoded deltas.
        settings: Settings of the fetch.

    Returns:
        The deltas, in the order in which the receiver must apply them; empty if the peer lacks a delta or the deltas
        exceed ``max_bytes``. Only their headers are checked: the caller must compare the patched weights with the
        manifest of the later version.

    Raises:
        TransportError: The peer cannot be reached, refuses the request, or sends something other than a delta.
    """
    deltas: list[Delta] = []
    max_memory_bytes = max_bytes
    with Connection.of(source, settings) as connection:
        while base < version:
            encoded = _fetch_delta(connection, base, max_bytes=max_bytes)
            if encoded is None:
                return []
            max_bytes -= len(encoded)
            delta = decode_delta(encoded, max_bytes=max_memory_bytes)
            max_memory_bytes -= delta.memory_bytes
            if delta.base != base or not base < delta.version <= version:
                return []
            deltas.append(delta)
            base = delta.version
    return deltas


def _fetch_delta(connection: Connection, base: int, *, max_bytes: int) -> bytearray | None:
    """Return a peer's encoded delta from ``base``; ``None`` if the peer has none, or one larger than ``max_bytes``."""
    try:
        response = connection.get(DELTA_ROUTE.format(step=base), headers={}, expected_status=200, answer_within_s=0.0)
    except StepNotServedError:
        return None
    length = response.length
    if not length or length > max_bytes:
        connection.close()
        return None
    return connection.read_body(response, max_bytes=max_bytes)
