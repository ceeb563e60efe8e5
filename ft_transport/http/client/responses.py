"""Reads responses: bodies, refusals (as errors), and the proofs that responses belong to the client's session."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException, HTTPMessage, HTTPResponse
from typing import Final

import msgspec

from ft_transport.credentials import TOKEN_VARIABLE, Keys
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
    """Return the error for a response with an unsuccessful status.

    Args:
        response: The response; this function reads its body.
        source: The peer that sent the response.
        in_session: Whether the peer and the response are authenticated.
        has_token: Whether the response refuses a challenge, so that this process must have a job token.
    """
    peer = str(source)
    reason = escape_peer_text(
        f"{response.status} {response.reason}: {_text_of(response)}", max_characters=MAX_ERROR_BODY_BYTES
    )
    match response.status:
        case 401 if in_session:
            return MessageDamagedError(f"the request was changed on its way to the peer: {reason}", peer=peer)
        case 401 if has_token:
            return PeerAuthenticationError(f"the peer refused the challenge: {reason}", peer=peer)
        case 401:
            return PeerAuthenticationError(
                f"the peer requires a proof of the job token, and this process has no token ({TOKEN_VARIABLE}): "
                f"{reason}",
                peer=peer,
            )
        case 404 | 410:
            served = parse_served_steps(response.headers.get(SERVED_STEPS_HEADER))
            return StepNotServedError(
                f"the peer does not serve the step: {reason}", served=served, is_past=response.status == 410, peer=peer
            )
        case 409:
            return SnapshotReplacedError(f"the snapshot was replaced: {reason}", peer=peer)
        case 421:
            # This process sent the host name in the peer's address. If the peer saw another name, the request was
            # damaged on the way.
            refusal = PeerProtocolError(f"the peer does not accept the host name in its address: {reason}", peer=peer)
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
            return PeerProtocolError(f"unexpected response {reason}", peer=peer)


def check_understood(
    request: RequestRead, response: HTTPResponse, refusal: PeerError | None, peer: PeerAddress
) -> None:
    """Check that neither the request nor the head of its response was damaged on the way.

    The peer sends a digest of both, computed from the request as the peer has read it.

    Args:
        request: The request as it was sent.
        response: The response to the request.
        refusal: The error for the response; ``None`` for a success.
        peer: The peer that sent the response.

    Raises:
        MessageDamagedError: The digest shows damage, or a response that needs a digest has none.
    """
    announced = response.headers.get(EXCHANGE_DIGEST_HEADER)
    if announced == exchange_digest(request, response.status, response.headers):
        return
    if refusal is None:
        # A response to a GET request needs no digest; without a digest, a response to a POST request may be that to
        # another body.
        if announced is None and request.body is None:
            return
    elif response.status != _REQUEST_TIMEOUT:
        # A peer may refuse a request before it reads the body. A timeout means that it has tried to read the body.
        unread = dataclasses.replace(request, body=None)
        if announced == exchange_digest(unread, response.status, response.headers):
            return
    answer = f"; its response is: {refusal.message}" if refusal is not None else ""
    raise MessageDamagedError(
        f"the peer did not read {request.method} {request.target[:200]} as it was sent, or its response was "
        f"damaged{answer}",
        refusal=refusal,
        peer=str(peer),
    )


def _text_of(response: HTTPResponse) -> str:
    """Return the peer's explanation of its refusal."""
    with contextlib.suppress(OSError, HTTPException, ValueError):
        return response.read(MAX_ERROR_BODY_BYTES).decode("utf-8", "replace")
    return ""


def _seconds(text: str | None) -> float:
    """Return the seconds of a ``Retry-After`` header, at most 999; one second without a usable value."""
    if text is not None and text.isascii() and text.isdigit() and len(text) <= 3:
        return float(text)
    return 1.0


_MAX_VIEWS_PER_READ: Final = 512
"""Less than IOV_MAX, which is 1024 on Linux (``man 2 readv``)."""
_WAKE_BYTES: Final = 256 << 10
"""Bytes after which the kernel wakes a waiting read. This halves the receiver's wake-ups; with far more bytes, the
sender would find the TCP window full."""
_TICK_S: Final = 0.1
"""Interval at which a waiting read checks the deadline."""


class BodyReader:
    """Reads the body of one response, after its head was read. For one thread at a time.

    Args:
        sock: Socket of the connection.
        peer: The peer that sends the response.
        timeouts: Deadlines and the minimum throughput.
        length: Length of the body according to the head; 0 if the head does not contain it.

    Attributes:
        ahead: Bytes of the body that were read together with the head.
        num_bytes: Number of bytes of the body that were read so far.
    """

    def __init__(self, sock: DeadlineSocket, *, peer: PeerAddress, timeouts: Timeouts, length: int) -> None:
        self.ahead = b""
        self.num_bytes = 0
        self._num_uncounted = 0
        self._socket = sock
        self._peer = peer
        self._timeouts = timeouts
        self._length = length
        self._started_s = self._received_s = time.monotonic()
        self._tick_s = 0.0

    def read_into(self, views: Sequence[memoryview], *, is_steady: bool = False) -> None:
        """Fill all views, in order, with the next bytes.

        Args:
            views: The memory to fill.
            is_steady: Whether the peer sends the rest of the body without waiting for anything.

        Raises:
            PeerUnreachableError: The body ended early.
            TimeoutError: The bytes arrived too slowly, or the deadline passed.
            OSError: The connection broke.
        """
        # The time since the last read does not count against the peer: this process did not read meanwhile.
        self._received_s = time.monotonic()
        if self.num_bytes:
            self._timeouts.note_progress()
        # The last bytes wake the read one by one, because more bytes may be slow to follow: a relay sends a chunk only
        # when it has received the chunk. If enough bytes follow at once, they wake the read, which saves a read.
        num_bytes = sum(map(len, views))
        has_more = is_steady and self._length - self.num_bytes - num_bytes >= _WAKE_BYTES
        early, late = _split(views, num_bytes if has_more else num_bytes - _WAKE_BYTES)
        for wake_bytes, part in ((_WAKE_BYTES, early), (1, late)):
            for start in range(0, len(part), _MAX_VIEWS_PER_READ):
                self._socket.wake_at(wake_bytes)
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
            self._limit_read()
            try:
                got = self._socket.receive_into(views[index:])
            except BlockingIOError:
                continue
            if not got:
                raise PeerUnreachableError(
                    f"expected more bytes of the body, but the peer closed the connection after {self.num_bytes} bytes",
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

    def restart_throughput(self) -> None:
        """Measure the throughput from now on, so that earlier bytes do not hide that later bytes are slow."""
        self._started_s, self._num_uncounted = time.monotonic(), self.num_bytes

    def _limit_read(self) -> None:
        """Set the timeout of the next read from the deadline, the stall timeout and the minimum throughput."""
        timeouts = self._timeouts
        counted = self.num_bytes - self._num_uncounted
        until_s = min(
            timeouts.end_s(),
            self._received_s + timeouts.stall_timeout_s,
            self._started_s + timeouts.stall_timeout_s + counted / timeouts.min_bytes_per_s,
        )
        remaining_s = until_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        tick_s = min(_TICK_S, remaining_s)
        if tick_s != self._tick_s:
            self._socket.block(tick_s)
            self._tick_s = tick_s


def _split(views: Sequence[memoryview], at: int) -> tuple[Sequence[memoryview], Sequence[memoryview]]:
    """Split the bytes of views, in order, after the first ``at`` bytes."""
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
    """The client's half of an authenticated session, which lasts as long as its connection. For one thread at a time.

    Args:
        session: The session, with the key on which client and server agreed.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._number = 0

    def signed(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> dict[str, str]:
        """Return the headers of the next request together with those that authenticate the request."""
        signed = dict(headers)
        if body is not None:
            signed[CONTENT_DIGEST_HEADER] = content_digest(body)
        self._number += 1
        signed["Authorization"] = self._session.credentials(self._number, method, target, signed)
        return signed

    def is_proved(self, status: int, headers: HTTPMessage) -> bool:
        """Return whether the headers prove that the response to the last request is authentic."""
        return self._session.proves(headers.get(PROOF_HEADER), self._number, status, headers)


def make_challenge(keys: Keys, address: str) -> Challenge:
    """Return a challenge with a new nonce, which the server must answer to prove that it knows the job token.

    Args:
        keys: The job's keys.
        address: Address at which the server was reached, in the form of `socket_address`.
    """
    return Challenge(tuple(key.key_id for key in keys.current()), secrets.token_hex(NONCE_BYTES), address)


def begin_session(keys: Keys, challenge: Challenge, answer: bytes) -> ClientSession | None:
    """Return the session that the server's answer to ``challenge`` begins; ``None`` if the answer is no proof."""
    try:
        decoded = _answer_decoder.decode(answer)
    except DECODE_ERRORS:
        return None
    session = accept_answer(keys.current(), challenge, decoded)
    return ClientSession(session) if session is not None else None
