"""Translates error responses, and detects responses that do not belong to the request as it was sent."""

from __future__ import annotations

import contextlib
import dataclasses
from http.client import HTTPException, HTTPResponse
from typing import Final

from ft_transport.errors import (
    MessageDamagedError,
    PeerAuthenticationError,
    PeerError,
    PeerNotReadyError,
    PeerProtocolError,
    SnapshotReplacedError,
    StateNotServedError,
    StepNotServedError,
    escape_peer_text,
)
from ft_transport.http.peer_address import PeerAddress
from ft_transport.keys import TOKEN_VARIABLE
from ft_transport.wire.routes import (
    AFTER_HEADER,
    EXCHANGE_DIGEST_HEADER,
    SERVED_STEPS_HEADER,
    RequestRead,
    exchange_digest,
    parse_after,
    parse_served_steps,
)

MAX_ERROR_BODY_BYTES: Final = 2048
_REQUEST_TIMEOUT: Final = 408


def refusal_of(response: HTTPResponse, source: PeerAddress, *, in_session: bool, has_token: bool = False) -> PeerError:
    """Return the error that an unsuccessful response stands for.

    Args:
        response: Its head; this function reads its body.
        source: The peer that sent it.
        in_session: Whether the peer and this response are authenticated.
        has_token: Whether this side has tried to prove that it knows the job token.
    """
    peer = str(source)
    reason = escape_peer_text(
        f"{response.status} {response.reason}: {_text_of(response)}", max_characters=MAX_ERROR_BODY_BYTES
    )
    match response.status:
        case 401 if in_session:
            return MessageDamagedError(f"the peer did not get the request as it was made: {reason}", peer=peer)
        case 401 if has_token:
            return PeerAuthenticationError(f"the peer has refused the challenge: {reason}", peer=peer)
        case 401:
            return PeerAuthenticationError(
                f"the peer asks for a proof of the job token, and this side has none ({TOKEN_VARIABLE}): {reason}",
                peer=peer,
            )
        case 404 | 410:
            served = parse_served_steps(response.headers.get(SERVED_STEPS_HEADER))
            return StepNotServedError(
                f"the peer does not serve it: {reason}", served=served, is_past=response.status == 410, peer=peer
            )
        case 409:
            return SnapshotReplacedError(f"the snapshot was replaced: {reason}", peer=peer)
        case 421:
            # This side sends the peer's name as it was configured; another name was changed on the way.
            refusal = PeerProtocolError(f"the peer does not have the name in its address: {reason}", peer=peer)
            return MessageDamagedError(refusal.message, refusal=refusal, peer=peer)
        case 501:
            return StateNotServedError(f"the peer cannot serve its state: {reason}", peer=peer)
        case 503:
            retry_after_s = _seconds(response.headers.get("Retry-After"))
            after = parse_after(response.headers.get(AFTER_HEADER))
            return PeerNotReadyError(
                f"the peer is not ready: {reason}", retry_after_s=retry_after_s, after=after, peer=peer
            )
        case _:
            return PeerProtocolError(f"unexpected answer {reason}", peer=peer)


def check_understood(
    request: RequestRead, response: HTTPResponse, refusal: PeerError | None, peer: PeerAddress
) -> None:
    """Check that neither the request nor the head of its response was damaged on the way.

    Args:
        request: The request as it was sent.
        response: Its head.
        refusal: The error that it stands for; ``None`` after a success.
        peer: The peer that sent it.

    Raises:
        MessageDamagedError: One of them was, as far as this side can tell.
    """
    announced = response.headers.get(EXCHANGE_DIGEST_HEADER)
    if announced == exchange_digest(request, response.status, response.headers):
        return
    if refusal is None:
        # Only the digest shows that a response to a posted body belongs to it.
        if announced is None and request.body is None:
            return
    elif response.status != _REQUEST_TIMEOUT:
        # A peer that refuses may not have read the body, unless that is what it could not read.
        unread = dataclasses.replace(request, body=None)
        if announced == exchange_digest(unread, response.status, response.headers):
            return
    said = f"; it answered: {refusal.message}" if refusal is not None else ""
    raise MessageDamagedError(
        f"expected an answer to {request.method} {request.target[:200]} as it was sent; the peer has read "
        f"something else, or its answer was damaged{said}",
        refusal=refusal,
        peer=str(peer),
    )


def _text_of(response: HTTPResponse) -> str:
    """Return the peer's explanation of its refusal."""
    with contextlib.suppress(OSError, HTTPException, ValueError):
        return response.read(MAX_ERROR_BODY_BYTES).decode("utf-8", "replace")
    return ""


def _seconds(text: str | None) -> float:
    """Return the seconds of a ``Retry-After`` header, within reason; one second without a usable value."""
    if text is not None and text.isascii() and text.isdigit() and len(text) <= 3:
        return float(text)
    return 1.0
