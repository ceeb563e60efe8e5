"""Requests what describes a snapshot: its manifest, later digests, and deltas between two versions."""

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
"""Ratio of the waits before two consecutive warnings."""
_UNKNOWN_HOST_S: Final = 5.0
"""How long an unknown host name is looked up: the name of a starting peer may be new."""
_HOLD_S: Final = 10.0
"""Longest time that the server is asked to hold one request; then the client asks again."""
_HELD_SHARE: Final = 0.75


def fetch_manifest(connection: Connection, step: StepSelector, settings: FetchSettings) -> Manifest:
    """Return the manifest of the snapshot that a peer serves for ``step``; wait until the deadline for it.

    Args:
        connection: Connection to the peer. While it is open, the peer keeps the snapshot for the lease after each
            request.
        step: A step or ``latest``.
        settings: Settings of the fetch.

    Raises:
        PeerUnreachableError: The peer was out of reach for longer than ``unreachable_s``, or its name does not exist.
        StepNotServedError: The peer serves other steps, and is past this one.
        DeadlineExceededError: The step did not come, or the peer could not be reached, in time.
        PeerError: The peer refused, or violated the protocol.
        ManifestError: The peer sent something other than a manifest.
        IntegrityError: The manifest was damaged on the way repeatedly.
        MessageDamagedError: The manifest or the responses were changed on the way repeatedly.
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
                patient_s = min(settings.unreachable_s, _UNKNOWN_HOST_S) if is_unknown else settings.unreachable_s
                # Past the deadline, the error names the deadline.
                if connection.is_interrupted or reached_s + patient_s <= time.monotonic() < timeouts.end_s():
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
            # A later step than the served ones may still come: the peer holds a request only for a while.
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
    # Less than the remaining time: the peer's reason for a refusal has to arrive before the deadline.
    wait_s = min(_HOLD_S, max(0.0, timeouts.end_s() - time.monotonic()) * _HELD_SHARE)
    response = connection.get(
        metadata_path(step, wait_s=wait_s, after=after), headers={}, expected_status=200, answer_within_s=wait_s
    )
    length = response.length
    if not length or length > MAX_HEADER_BYTES:
        unusable = ManifestError(
            f"expected a manifest of 1 to {MAX_HEADER_BYTES} bytes, the peer announced {length}", peer=peer, step=step
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
        raise MessageDamagedError("expected a manifest that was signed with the job token", peer=peer, step=step)
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
"""Returns views that cover bytes ``[start, end)`` of the data once, in order. Called by any thread."""


def with_digests(connection: Connection, manifest: Manifest, *, max_failures: int) -> Manifest:
    """Return the manifest with the digests of all chunks; fetch them if they come after the data.

    Args:
        connection: Connection to the peer that served the data; it may have been closed while idle.
        manifest: The snapshot's manifest.
        max_failures: Failures after which the last error is raised.

    Raises:
        PeerError: The peer cannot be reached, refuses, or violates the protocol.
        ManifestError: The peer sent something other than digests.
        DeadlineExceededError: They did not come in time.
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


def fetch_deltas(
    source: PeerAddress, base: int, version: int, *, max_bytes: int, settings: FetchSettings
) -> list[Delta]:
    """Fetch the deltas that lead from one version to another.

    Args:
        source: A peer that caches them.
        base: The version that the receiver has.
        version: The later one that it wants.
        max_bytes: Maximum size of all of them together, as they come and, once more, decoded.
        settings: Settings of the fetch.

    Returns:
        The deltas in the order in which they are applied; empty if the peer lacks one of them, or they are larger.
        Their headers are checked; the caller compares the result with the manifest of the version.

    Raises:
        TransportError: The peer cannot be reached or refuses, or its answer is no delta.
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
    """Return the encoded delta that a peer caches for ``base``; ``None`` if it has none, or only a larger one."""
    try:
        response = connection.get(DELTA_ROUTE.format(step=base), headers={}, expected_status=200, answer_within_s=0.0)
    except StepNotServedError:
        return None
    length = response.length
    if not length or length > max_bytes:
        connection.close()
        return None
    return connection.read_body(response, max_bytes=max_bytes)
