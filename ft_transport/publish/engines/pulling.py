"""The protocol between a publisher and an engine that fetches weights over HTTP, without a shared disk.

``GET /weights`` returns the version of the engine's ``WeightReceiver``. ``POST /weights/{version}`` orders the receiver
to fetch a version from the publisher's transport. The response comes when the fetch has succeeded or failed.

With a job token there are four signed messages. The publisher requests the receiver's version (question). The receiver
responds with the version and a challenge (answer). The publisher orders a fetch and repeats the challenge, so that the
order is valid only once (order). The receiver's response refers to the same challenge (outcome). Each signature covers
the whole message and the address that the publisher uses for the receiver, so a forwarded or replayed message proves
nothing. The token itself is never sent. Without a token, the messages have no signatures and no challenge.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeAlias
from urllib.parse import urlsplit

from ft_transport.credentials import TOKEN_VARIABLE, Keys
from ft_transport.errors import EngineRefusedError, EngineUnreachableError
from ft_transport.http.peer_address import PeerAddress
from ft_transport.publish.engines.engine import Delivery, EngineConnection, checked_url
from ft_transport.wire.signing import Key, is_equal

ROUTE: Final = "/weights"
MAX_VERSION_DIGITS: Final = 18
Reason: TypeAlias = str
"""A key of `REASONS`."""
REASONS: Final[Mapping[Reason, tuple[int, str]]] = {
    "malformed": (400, "expected an order of this package's publisher"),
    "unproved": (
        401,
        "expected a proof of the job token (FT_TRANSPORT_TOKEN): the publisher has none or another one, or the order "
        "was changed, too old or sent twice",
    ),
    "reached_elsewhere": (
        403,
        "the order was made for another address than the receiver's own; if a gateway translates addresses, add the "
        "address that the publisher uses to WeightReceiver.reached_at",
    ),
    "stale": (409, "the receiver has a later version of the same source, or has begun one"),
    "superseded": (409, "a later order of the same source replaced this order before its turn"),
    "busy": (503, "orders of too many sources wait for their turn"),
    "source_refused": (
        403,
        "the receiver may not fetch from the publisher's address: without a job token it fetches only from the "
        "loopback, otherwise only from WeightReceiver.sources",
    ),
    "source_unreachable": (500, "the receiver cannot reach the publisher's transport"),
    "source_failed": (500, "the publisher's transport did not deliver a complete version with valid proofs"),
    "too_slow": (500, "the weights did not arrive in time, or arrived so slowly that a waiting order was preferred"),
    "weights_differ": (500, "the engine's weights and the version differ in names, shapes, dtypes or ties"),
    "weights_unusable": (500, "the engine has weights into which data cannot be received"),
    "engine_failed": (500, "the engine's own code or its device failed"),
    "closing": (503, "the receiver is being closed"),
    "not_loaded": (500, "vLLM did not load the version: its names or shapes are not the model's, or a device failed"),
    "session_open": (409, "a weight update of another publisher is already active"),
}
"""The reasons for which a receiver refuses an order or fails to carry it out: HTTP status and meaning.

A receiver reports nothing else about an error. Otherwise a client could use the receiver to read from addresses that
only the receiver can reach.
"""
CHALLENGE_S: Final = 30.0
_MAX_USED: Final = 4096
_NONCE_BYTES: Final = 16
_NONCE: Final = re.compile(f"[0-9a-f]{{{2 * _NONCE_BYTES}}}", re.ASCII)
_CHALLENGE: Final = re.compile(f"([0-9a-f]{{1,16}})-([0-9a-f]{{{2 * _NONCE_BYTES}}})-([0-9a-f]{{64}})", re.ASCII)
_MAX_TEXT: Final = 512


@dataclass(frozen=True, slots=True)
class PullingEngine:
    """An engine with a ``WeightReceiver``, which fetches versions from the publisher's transport.

    Attributes:
        url: Base URL of the receiver.
        headers: HTTP headers of each request, such as those that a proxy requires.
        token: The job token. Publisher and receiver prove to each other that they know the token, which is never sent.
            Default: the token of the environment, as for ``TransportSettings``.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    token: str | None = field(default=None, repr=False)
    adapter_features: ClassVar = frozenset({"lora_embedding"})
    _keys: Keys | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", checked_url(self.url))
        object.__setattr__(self, "_keys", Keys.of(self.token) if self.token is not None else Keys.from_environment())

    async def deliver(self, connection: EngineConnection, delivery: Delivery) -> int:
        """Order the receiver to fetch a version, and wait for the outcome (`Engine.deliver`)."""
        address = await delivery.source(self.url)
        question = Question.of(self.url)
        _, challenge = await self._status(connection, question)
        order = Order(version=delivery.version, address=address, reached=question.reached, challenge=challenge)
        with connection.replacing(stays_paused=False):
            try:
                answer = await connection.post(f"{ROUTE}/{delivery.version}", order.body(self._keys))
            except EngineRefusedError as error:
                raise self._refusal(error, order) from error
            outcome = order.accepted(self._keys, answer.json())
            if outcome is None:
                # The receiver may have the version nevertheless. The next attempt will show that.
                raise EngineUnreachableError(
                    "expected the receiver's outcome to prove that it knows the job token, got no valid proof",
                    peer=self.url,
                )
        if outcome.version is None:
            raise answer.refusal(f"expected version {delivery.version}")
        return outcome.version

    async def served_version(self, connection: EngineConnection, newest: Delivery) -> int | None:
        """Return the version of the receiver (`PolledEngine.served_version`)."""
        del newest
        version, _ = await self._status(connection, Question.of(self.url))
        return version

    async def _status(self, connection: EngineConnection, question: Question) -> tuple[int | None, str]:
        """Request the receiver's version, and the challenge for the next order."""
        try:
            answer = await connection.get(ROUTE, **question.query(self._keys))
        except EngineRefusedError as error:
            raise self._refusal(error, None) from error
        if self._keys is None:
            version = _fields(answer.json()).get("version")
            return version if isinstance(version, int) else None, ""
        status = question.accepted(self._keys, answer.json())
        if status is None:
            text = f"expected the receiver to prove that it knows the job token ({TOKEN_VARIABLE}), got no valid proof"
            raise EngineRefusedError(text, status=answer.status, body=text, request=answer.request, peer=self.url)
        return status

    def _refusal(self, error: EngineRefusedError, order: Order | None) -> EngineRefusedError:
        """Return an error that explains the receiver's reason. If ``error`` contains no reason, return it unchanged."""
        try:
            answer = json.loads(error.body)
        except (ValueError, RecursionError):
            return error
        outcome = _claimed(answer) if order is None else order.accepted(self._keys, answer) or _claimed(answer)
        if outcome is None or outcome.reason is None:
            return error
        known = f"; it has version {outcome.version}" if outcome.version is not None else ""
        meaning = f"{REASONS[outcome.reason][1]} ({outcome.reason}{known}); see the log of the receiver"
        return EngineRefusedError(meaning, status=error.status, body=meaning, request=error.request, peer=self.url)


def _claimed(answer: object) -> Outcome | None:
    """Parse an unsigned refusal. A receiver sends it to a publisher that has not proved that it knows the token."""
    reason = _text(_fields(answer).get("reason"))
    return Outcome(version=None, reason=reason) if reason in REASONS else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The first message: the publisher requests the receiver's version.

    Attributes:
        nonce: Random hexadecimal digits.
        reached: Address (``host:port``) that the publisher uses for the receiver.
    """

    nonce: str
    reached: str

    @classmethod
    def of(cls, url: str) -> Question:
        """Return a question, with a new nonce, for the receiver at a URL."""
        return cls(nonce=secrets.token_hex(_NONCE_BYTES), reached=reached_by(url))

    def query(self, keys: Keys | None) -> dict[str, str]:
        """Return the query parameters of the request. Without a job token (``keys`` is ``None``), there are none."""
        if keys is None:
            return {}
        signature = keys.sign("weights question", *_bytes(self.nonce, self.reached))
        return {"nonce": self.nonce, "reached": self.reached, "signature": signature}

    @classmethod
    def proved(cls, keys: Keys, query: Mapping[str, str]) -> Question | None:
        """Parse the query parameters of a request; return ``None`` unless they are signed with one of these keys."""
        nonce, reached = query.get("nonce", ""), query.get("reached", "")
        if not _NONCE.fullmatch(nonce) or len(reached) > _MAX_TEXT:
            return None
        is_proved = keys.verifies(query.get("signature"), "weights question", *_bytes(nonce, reached))
        return cls(nonce=nonce, reached=reached) if is_proved else None

    def answer(self, keys: Keys, version: int | None, challenge: str) -> dict[str, object]:
        """Return the JSON body of the receiver's answer.

        Args:
            keys: Keys of the job.
            version: The receiver's version.
            challenge: The challenge for the next order.
        """
        signature = keys.sign("weights answer", *_bytes(self.nonce, self.reached, version, challenge))
        return {"version": version, "challenge": challenge, "proof": signature}

    def accepted(self, keys: Keys, answer: object) -> tuple[int | None, str] | None:
        """Return the version and the challenge in an answer; ``None`` if the answer is not signed with a key."""
        fields = _fields(answer)
        version, challenge = fields.get("version"), fields.get("challenge")
        if not _is_version(version) or not isinstance(challenge, str):
            return None
        parts = _bytes(self.nonce, self.reached, version, challenge)
        if not keys.verifies(_text(fields.get("proof")), "weights answer", *parts):
            return None
        return version, challenge


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The third message: the publisher orders the receiver to fetch a version.

    Attributes:
        version: Number of the version.
        address: URL of the transport that serves the version.
        reached: Address (``host:port``) that the publisher uses for the receiver.
        challenge: The receiver's challenge; empty without a job token.
    """

    version: int
    address: str
    reached: str = ""
    challenge: str = ""

    def body(self, keys: Keys | None) -> dict[str, object]:
        """Return the JSON body of the request. It lacks the version, which is in the path of the URL."""
        if keys is None:
            return {"address": self.address}
        return {
            "address": self.address,
            "reached": self.reached,
            "challenge": self.challenge,
            "signature": keys.sign("weights order", *self._signed()),
        }

    @classmethod
    def read(cls, version: int, body: object) -> tuple[Order, str] | None:
        """Parse the body of a request into an order and its signature. Return ``None`` if the body is malformed."""
        fields = _fields(body)
        texts = [_text(fields.get(name, "")) for name in ("address", "reached", "challenge", "signature")]
        if None in texts or not texts[0]:
            return None
        address, reached, challenge, signature = (text or "" for text in texts)
        return cls(version=version, address=address, reached=reached, challenge=challenge), signature

    def is_proved(self, keys: Keys, signature: str) -> bool:
        """Return whether the signature was made with one of these keys."""
        return keys.verifies(signature, "weights order", *self._signed())

    def outcome(self, keys: Keys | None, *, version: int | None, reason: Reason | None) -> dict[str, object]:
        """Return the JSON body of the response to this order.

        Args:
            keys: Keys of the job; ``None`` without a job token.
            version: The version that the receiver has now.
            reason: Why the receiver does not have the ordered version; ``None`` if it has that version.
        """
        outcome: dict[str, object] = {"version": version} | ({"reason": reason} if reason is not None else {})
        if keys is not None and self.challenge:
            outcome["proof"] = keys.sign("weights outcome", *self._signed(), *_bytes(version, reason))
        return outcome

    def accepted(self, keys: Keys | None, answer: object) -> Outcome | None:
        """Parse the response to this order. Return ``None`` if the response is malformed or not signed with a key."""
        fields = _fields(answer)
        version, reason = fields.get("version"), fields.get("reason")
        if not _is_version(version) or not (reason is None or _text(reason) in REASONS):
            return None
        if keys is not None:
            parts = (*self._signed(), *_bytes(version, reason))
            if not keys.verifies(_text(fields.get("proof")), "weights outcome", *parts):
                return None
        return Outcome(version=version, reason=reason)

    def _signed(self) -> tuple[bytes, ...]:
        return _bytes(self.challenge, self.reached, self.version, self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The fourth message: the outcome of an order.

    Attributes:
        version: The version that the receiver has now; ``None`` if its weights are not a complete version.
        reason: Why the receiver does not have the ordered version; ``None`` if it has that version.
    """

    version: int | None
    reason: Reason | None


class Challenges:
    """Issues challenges. Each challenge is valid once, within `CHALLENGE_S` seconds. Not thread-safe.

    A MAC in each challenge proves that this object has issued it. Only used challenges are stored, so clients that only
    request challenges cost no memory.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._key = Key.of(secrets.token_bytes(32))
        self._used: dict[str, int] = {}

    def issue(self) -> str:
        """Return a new challenge."""
        until_ms, nonce = int((self._clock() + CHALLENGE_S) * 1000), secrets.token_hex(_NONCE_BYTES)
        return f"{until_ms:x}-{nonce}-{self._mac(until_ms, nonce)}"

    def use(self, challenge: str) -> bool:
        """Mark a challenge as used. Return ``False`` if it is not from this object, has expired or was used before.

        Call this only for orders with a valid signature, because used challenges take memory.
        """
        found = _CHALLENGE.fullmatch(challenge)
        if found is None:
            return False
        until_ms, nonce = int(found[1], 16), found[2]
        now_ms = int(self._clock() * 1000)
        if not is_equal(found[3], self._mac(until_ms, nonce)) or until_ms <= now_ms:
            return False
        self._used = {each: end_ms for each, end_ms in self._used.items() if end_ms > now_ms}
        if nonce in self._used or len(self._used) >= _MAX_USED:
            return False
        self._used[nonce] = until_ms
        return True

    def _mac(self, until_ms: int, nonce: str) -> str:
        return self._key.mac("challenge", *_bytes(until_ms, nonce)).hex()


def reached_by(url: str) -> str:
    """Return the normalised ``host:port`` of a URL."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    port = parts.port if parts.port is not None else 443 if parts.scheme == "https" else 80
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_address(host))
    return str(PeerAddress(host=host, port=port))


def _fields(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_version(value: object) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and len(value) <= _MAX_TEXT else None


def _bytes(*parts: object) -> tuple[bytes, ...]:
    return tuple(str(part).encode("utf-8", "surrogateescape") for part in parts)
