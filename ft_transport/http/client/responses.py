"""Sessions of a client, the bodies of responses, refusals, and responses that were damaged on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException, HTTPMessage, HTTPResponse
from typing import Final

import msgspec

from ft_transport.errors import (
    MessageDamagedError,
    PeerAuthenticationError,
    PeerError,
    PeerNotReadyError,
    PeerProtocolError,
    PeerUnreachableError,
    SnapshotReplacedError,
    StateNotServedError,
    StepNotServedError,
    escape_peer_text,
)
from ft_transport.http.client.deadline_socket import DeadlineSocket
from ft_transport.http.client.fetch_settings import Timeouts
from ft_transport.http.peer_address import PeerAddress
from ft_transport.keys import TOKEN_VARIABLE, Keys
from ft_transport.runtime.decoding import DECODE_ERRORS
from ft_transport.wire.routes import (
    AFTER_HEADER,
    EXCHANGE_DIGEST_HEADER,
    SERVED_STEPS_HEADER,
    RequestRead,
    exchange_digest,
    parse_after,
    parse_served_steps,
)
from ft_transport.wire.signing import (
    CONTENT_DIGEST_HEADER,
    NONCE_BYTES,
    PROOF_HEADER,
    Challenge,
    ChallengeAnswer,
    Session,
    accept_answer,
    content_digest,
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


_MAX_VIEWS_PER_READ: Final = 512
"""Below IOV_MAX, which Linux puts at 1024 (``man 2 readv``)."""
_WAKE_BYTES: Final = 256 << 10
"""Halves a receiver's wake-ups; with far more, the sender runs into a full window."""
_TICK_S: Final = 0.1
"""Interval at which a waiting read checks the clock."""


class BodyReader:
    """Reads one body; made when the head of the response has arrived. Used by one thread.

    Args:
        timed: The socket.
        peer: The responding peer.
        timeouts: Deadlines and the minimum throughput.
        length: Bytes of the body according to the head; 0 if the head has no length.

    Attributes:
        ahead: Bytes of the body that were read together with the head.
        num_bytes: Bytes of the body received so far.
    """

    def __init__(self, timed: DeadlineSocket, *, peer: PeerAddress, timeouts: Timeouts, length: int) -> None:
        self.ahead = b""
        self.num_bytes = 0
        self._num_paced = 0
        self._timed = timed
        self._peer = peer
        self._timeouts = timeouts
        self._length = length
        self._started_s = self._received_s = time.monotonic()
        self._tick_s = 0.0

    def read_into(self, views: Sequence[memoryview]) -> None:
        """Fill all views, in order, with the next bytes.

        Raises:
            PeerUnreachableError: The body ended early.
            TimeoutError: The body came too slowly, or the deadline passed.
            OSError: The connection broke.
        """
        # The peer is not to blame for time that this side spent in between.
        self._received_s = time.monotonic()
        if self.num_bytes:
            self._timeouts.note_progress()
        # The bytes behind these views may take a while: a relay sends each chunk when it has it.
        early, late = _split(views, sum(map(len, views)) - _WAKE_BYTES)
        for num_bytes, part in ((_WAKE_BYTES, early), (1, late)):
            for start in range(0, len(part), _MAX_VIEWS_PER_READ):
                self._timed.wake_at(num_bytes)
                self._fill(list(part[start : start + _MAX_VIEWS_PER_READ]))

    def _fill(self, views: list[memoryview]) -> None:
        index = 0
        while index < len(views) and self.ahead:
            taken = min(len(self.ahead), len(views[index]))
            views[index][:taken] = self.ahead[:taken]
            self.ahead = self.ahead[taken:]
            self.num_bytes += taken
            if taken < len(views[index]):
                views[index] = views[index][taken:]
                break
            index += 1
        while index < len(views):
            self._check_pace()
            try:
                got = self._timed.receive_into(views[index:])
            except BlockingIOError:
                continue
            if not got:
                raise PeerUnreachableError(
                    f"expected more of the body, the peer closed the connection after {self.num_bytes} bytes",
                    peer=str(self._peer),
                )
            self.num_bytes += got
            self._received_s = time.monotonic()
            self._timeouts.note_progress(got)
            while got:
                size = len(views[index])
                if got < size:
                    views[index] = views[index][got:]
                    break
                got -= size
                index += 1

    def pace_anew(self) -> None:
        """Restart the throughput measurement: fast bytes before do not excuse a trickle now."""
        self._started_s, self._num_paced = time.monotonic(), self.num_bytes

    def _check_pace(self) -> None:
        """Limit the next read to the deadline, the stall timeout and the minimum throughput."""
        timeouts = self._timeouts
        until_s = min(
            timeouts.end_s(),
            self._received_s + timeouts.stall_timeout_s,
            self._started_s + timeouts.stall_timeout_s + (self.num_bytes - self._num_paced) / timeouts.min_bytes_per_s,
        )
        remaining_s = until_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        tick_s = min(_TICK_S, remaining_s)
        if tick_s != self._tick_s:
            self._timed.block(tick_s)
            self._tick_s = tick_s


def _split(views: Sequence[memoryview], at: int) -> tuple[Sequence[memoryview], Sequence[memoryview]]:
    """Split views after the first ``at`` bytes."""
    if at <= 0:
        return (), views
    early: list[memoryview] = []
    for number, view in enumerate(views):
        if at <= len(view):
            early.append(view[:at])
            return early, [*([view[at:]] if at < len(view) else ()), *views[number + 1 :]]
        early.append(view)
        at -= len(view)
    return early, ()


_answer_decoder: Final = msgspec.json.Decoder(ChallengeAnswer)


class ClientSession:
    """The client's side of the session of one connection. Used only by the connection's thread.

    Args:
        session: The session that both sides agreed upon.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._number = 0

    def signed(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> dict[str, str]:
        """Return the headers of the next request, including those that authenticate it."""
        signed = dict(headers)
        if body is not None:
            signed[CONTENT_DIGEST_HEADER] = content_digest(body)
        self._number += 1
        signed["Authorization"] = self._session.credentials(self._number, method, target, signed)
        return signed

    def is_proved(self, status: int, headers: HTTPMessage) -> bool:
        """Whether the response to the last request is authentic."""
        return self._session.proves(headers.get(PROOF_HEADER), self._number, status, headers)


def make_challenge(keys: Keys, address: str) -> Challenge:
    """Return a challenge with a new nonce.

    Args:
        keys: The job's keys.
        address: The address at which the server was reached; see `socket_address`.
    """
    return Challenge(tuple(key.key_id for key in keys.current()), secrets.token_hex(NONCE_BYTES), address)


def begin_session(keys: Keys, challenge: Challenge, answer: bytes) -> ClientSession | None:
    """Return the session of a connection; ``None`` if the answer proves nothing."""
    try:
        decoded = _answer_decoder.decode(answer)
    except DECODE_ERRORS:
        return None
    session = accept_answer(keys.current(), challenge, decoded)
    return ClientSession(session) if session is not None else None
