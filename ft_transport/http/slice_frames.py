"""The receiver's side of frames of slices (``wire.slices``): many per request, each followed by its digest."""

from __future__ import annotations

from collections.abc import Sequence
from http.client import HTTPResponse

from ft_transport.errors import IntegrityError, MessageDamagedError
from ft_transport.http.connection import Connection
from ft_transport.wire.manifest import Manifest
from ft_transport.wire.routes import SLICES_ROUTE, bound_path
from ft_transport.wire.slices import FRAME_DIGEST_BYTES, SliceFrame, answer_bytes, encode_request, frame_context


def ask_for_frames(connection: Connection, manifest: Manifest, frames: Sequence[SliceFrame]) -> HTTPResponse:
    """Request frames of a source's snapshot.

    Returns:
        The response: receive each frame in turn, then call ``connection.end_response``.

    Raises:
        MessageDamagedError: The response's length differs from that of the frames.
        PeerError: The source refuses, or cannot be reached.
    """
    response = connection.get(
        bound_path(SLICES_ROUTE, manifest.step, manifest.snapshot_id),
        headers={"Content-Type": "application/json"},
        expected_status=200,
        answer_within_s=0.0,
        body=encode_request(frames),
    )
    if response.length != answer_bytes(frames):
        raise MessageDamagedError(
            f"expected an answer of {answer_bytes(frames)} bytes, got {response.length}", peer=str(connection.peer)
        )
    return response


def receive_frame(
    connection: Connection,
    manifest: Manifest,
    frame: SliceFrame,
    views: Sequence[memoryview],
    *,
    is_verified: bool,
    what: str,
) -> None:
    """Receive the next frame of a response.

    Args:
        connection: The connection to the source.
        manifest: The source's manifest.
        frame: The frame as it was requested.
        views: Memory for its bytes, in order.
        is_verified: Whether to compare its digest.
        what: Description of the frame, for errors.

    Raises:
        IntegrityError: The frame has another digest. Its bytes are in ``views`` already.
    """
    told = bytearray(FRAME_DIGEST_BYTES)
    connection.read_into([*views, memoryview(told)])
    if not is_verified:
        return
    hasher = manifest.digester.hasher(frame_context(manifest.snapshot_id, frame) if manifest.digester.is_keyed else b"")
    for view in views:
        hasher.update(view)
    expected, actual = int.from_bytes(told, "big"), hasher.intdigest()
    if actual != expected:
        raise IntegrityError(
            f"{what} was damaged",
            chunk=None,
            expected=expected,
            actual=actual,
            peer=str(connection.peer),
            step=manifest.step,
        )
