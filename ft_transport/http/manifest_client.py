"""Asking a peer for the manifest of a snapshot, and waiting for it where it is not there yet."""

from __future__ import annotations

import logging
import time
from typing import Final

import msgspec

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
from ft_transport.http.connection import Connection
from ft_transport.http.fetch_settings import FetchSettings
from ft_transport.runtime.decode_errors import DECODE_ERRORS
from ft_transport.wire.authentication import MANIFEST_PURPOSE, MANIFEST_SIGNATURE_HEADER
from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import MAX_HEADER_BYTES, Manifest, decode_header
from ft_transport.wire.routes import MANIFEST_DIGEST_HEADER, STATUS_ROUTE, StepSelector, metadata_path

logger = logging.getLogger(__name__)

_RETRY_PAUSE_S: Final = 0.1
_FIRST_WARNING_S: Final = 3.0
_WARNING_FACTOR: Final = 4
"""Each warning comes after so many times the wait before the one before it."""
_UNKNOWN_HOST_S: Final = 5.0
"""A name that nobody knows is asked for as long: that of a peer which is just starting may be new."""
_HOLD_S: Final = 10.0
"""The longest that the server is asked to hold one request; after that the client asks again."""
_HELD_SHARE: Final = 0.75
_MAX_STATUS_BYTES: Final = 1 << 20


def fetch_manifest(connection: Connection, step: StepSelector, settings: FetchSettings) -> Manifest:
    """The manifest of the snapshot that a peer serves for ``step``, waiting for it until the deadline.

    Args:
        connection: To the peer. While it is open, the peer keeps the snapshot for its lease after each request.
        step: A step or ``latest``.
        settings: How to fetch.

    Raises:
        PeerUnreachableError: It was out of reach for longer than ``unreachable_s``, or nobody knows its name.
        StepNotServedError: The peer serves other steps, and this one does not come any more.
        DeadlineExceededError: The step did not come, or the peer could not be reached, in time.
        PeerError: The peer refused, or answered outside the protocol.
        ManifestError: What it sent is no manifest.
        IntegrityError: The manifest was damaged on the way, time and again.
        MessageDamagedError: It was changed, or the answers were.
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
                f"timed out waiting for a snapshot: {timeouts.reason()}; last: {last.message}",
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
                # Past the deadline it is the deadline that is named.
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
            # Later steps than those served may still come: the peer held the request for a while, not for good.
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


def fetch_server_id(connection: Connection) -> str:
    """What the server at the other end calls itself, drawn at random when it started.

    Raises:
        PeerError: It cannot be reached, refuses, or is no server of this package.
        DeadlineExceededError: It did not answer in time.
    """
    response = connection.get(STATUS_ROUTE, headers={}, expected_status=200, answer_within_s=0.0)
    body = connection.read_body(response, max_bytes=_MAX_STATUS_BYTES)
    try:
        return _status_decoder.decode(body).server
    except DECODE_ERRORS as error:
        raise PeerProtocolError(f"expected the status of a server: {error}", peer=str(connection.peer)) from error


class _Status(msgspec.Struct):
    server: str


_status_decoder: Final = msgspec.json.Decoder(_Status)


def _read_manifest(connection: Connection, step: StepSelector, after: int | None, settings: FetchSettings) -> Manifest:
    peer, timeouts = str(connection.peer), settings.timeouts
    # Not all the time that is left: the peer's reason for not answering has to arrive before the deadline.
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
