"""Keys, and the mutual proof of the job's key between two peers, without revealing it; pure.

A signature is HMAC-SHA256 (RFC 2104), bound to one purpose.

The client draws a nonce and asks for a challenge. The server answers with its own nonce and a proof. Both sides derive
a session key from both nonces, the job's key and the address at which the client reached the server: so a relayed or
replayed answer, or one from another address, proves nothing. Within the session each request carries a number and a
MAC, and each answer a MAC, over everything that the other side acts upon. Numbers only increase, so a request cannot be
replayed.

Digests cover bodies: the signed manifest has those of chunks, ``Content-Digest`` (RFC 9530) has that of other bodies.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

Bytes: TypeAlias = bytes | bytearray | memoryview

_ID_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Key:
    """One key, whose secret does not appear in its repr.

    Attributes:
        key_id: Public id, equal for equal keys.
    """

    key_id: str
    _secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> Key:
        """Return the key with these bytes."""
        return cls(_mac(secret, "id")[:_ID_BYTES].hex(), secret)

    def mac(self, purpose: str, *parts: Bytes) -> bytes:
        """Return the HMAC-SHA256 of the purpose and the parts, with their lengths: 32 bytes."""
        return _mac(self._secret, purpose, *parts)

    def derived(self, purpose: str, *parts: bytes) -> Key:
        """Return a derived key, which does not reveal this one."""
        return Key.of(self.mac(purpose, *parts))


def is_equal(one: str | bytes, other: str | bytes) -> bool:
    """Compare in constant time, so that the duration does not reveal the position of a difference."""
    return hmac.compare_digest(
        *(each.encode("utf-8", "surrogateescape") if isinstance(each, str) else each for each in (one, other))
    )


def _mac(secret: bytes, purpose: str, *parts: Bytes) -> bytes:
    made = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (purpose.encode(), *parts):
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.digest()


SCHEME: Final = "FT-HMAC-SHA256"
PROOF_HEADER: Final = "FT-Proof"
CONTENT_DIGEST_HEADER: Final = "Content-Digest"
MANIFEST_SIGNATURE_HEADER: Final = "FT-Manifest-Signature"
MANIFEST_PURPOSE: Final = "manifest"
"""Purpose of a manifest's signature, which covers its JSON header with padding, also when relays pass it on."""

NONCE_BYTES: Final = 16

REQUEST_HEADERS: Final = ("Range", "If-Range", CONTENT_DIGEST_HEADER)
"""The request headers that the server acts upon."""
ANSWER_HEADERS: Final = (
    "Content-Length",
    "Content-Range",
    CONTENT_DIGEST_HEADER,
    "ETag",
    "FT-After",
    "FT-Manifest-Digest",
    MANIFEST_SIGNATURE_HEADER,
    "FT-Served-Steps",
    "Retry-After",
)
"""The answer headers that the client acts upon."""


class Headers(Protocol):
    """Headers of a request or an answer, as in HTTP libraries."""

    def get(self, name: str, default: str, /) -> str:
        """Returns the first header of that name, or the default."""


_MAX_KEYS: Final = 2
_NONCE: Final = re.compile(f"[0-9a-f]{{{2 * NONCE_BYTES}}}", re.ASCII)
_KEY_ID: Final = re.compile("[0-9a-f]{16}", re.ASCII)
_CREDENTIALS: Final = re.compile(f"{SCHEME} number=([0-9]{{1,18}}), mac=([0-9a-f]{{64}})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Challenge:
    """A client's challenge.

    Attributes:
        key_ids: Ids of the client's keys, the preferred one first.
        nonce: Random hexadecimal digits.
        address: The address at which the client reached the server.
    """

    key_ids: tuple[str, ...]
    nonce: str
    address: str

    def query(self) -> dict[str, str]:
        """Return the parameters of the request."""
        return {"keys": ",".join(self.key_ids), "nonce": self.nonce, "address": self.address}

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Challenge | None:
        """Parse the parameters of `query`; return ``None`` if they are invalid."""
        key_ids = tuple(query.get("keys", "").split(",", _MAX_KEYS))
        nonce = query.get("nonce", "")
        if len(key_ids) > _MAX_KEYS or not all(map(_KEY_ID.fullmatch, key_ids)) or not _NONCE.fullmatch(nonce):
            return None
        return cls(key_ids, nonce, query.get("address", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChallengeAnswer:
    """A server's answer to a challenge.

    Attributes:
        key_id: Id of the common key.
        nonce: Random hexadecimal digits.
        proof: Proof of that key.
    """

    key_id: str
    nonce: str
    proof: str


@dataclass(frozen=True, slots=True)
class Session:
    """A session, shared by both sides after the challenge.

    Attributes:
        key: The session's own key.
    """

    key: Key

    def credentials(self, number: int, method: str, target: str, headers: Headers) -> str:
        """Return the ``Authorization`` header of a request.

        Args:
            number: Greater than the number of any earlier request.
            method: The method.
            target: Path and query, as on the wire.
            headers: The request's headers, of which `REQUEST_HEADERS` are covered.
        """
        return (
            f"{SCHEME} number={number}, mac={self._mac('request', number, (method, target), headers, REQUEST_HEADERS)}"
        )

    def number_of(
        self, credentials: str | None, method: str, target: str, headers: Headers, *, after: int
    ) -> int | None:
        """Return the number of a request of this session; ``None`` for other requests.

        Args:
            credentials: Its ``Authorization`` header.
            method: The method.
            target: Path and query, as on the wire.
            headers: The request's headers.
            after: The number of the last request.
        """
        found = _CREDENTIALS.fullmatch(credentials or "")
        if found is None or int(found[1]) <= after:
            return None
        number = int(found[1])
        expected = self._mac("request", number, (method, target), headers, REQUEST_HEADERS)
        return number if is_equal(found[2], expected) else None

    def proof(self, number: int, status: int, headers: Headers) -> str:
        """Return the ``FT-Proof`` header of the answer to request ``number``."""
        return self._mac("answer", number, (str(status),), headers, ANSWER_HEADERS)

    def proves(self, proof: str | None, number: int, status: int, headers: Headers) -> bool:
        """Return whether this session's server made the answer, to this request."""
        return is_equal(proof or "", self.proof(number, status, headers))

    def _mac(self, purpose: str, number: int, first: Sequence[str], headers: Headers, names: Sequence[str]) -> str:
        parts = (str(number), *first, *(headers.get(name, "") for name in names))
        return self.key.mac(purpose, *(part.encode("utf-8", "surrogateescape") for part in parts)).hex()


def answer_challenge(keys: Sequence[Key], challenge: Challenge, nonce: str) -> tuple[ChallengeAnswer, Session] | None:
    """Return the server's answer and session; ``None`` without a common key.

    Args:
        keys: The job's keys.
        challenge: The challenge; the caller has checked that the address is its own.
        nonce: A new nonce.
    """
    key = _first(keys, challenge.key_ids)
    if key is None:
        return None
    return ChallengeAnswer(key_id=key.key_id, nonce=nonce, proof=_proof(key, challenge, nonce)), _session(
        key, challenge, nonce
    )


def accept_answer(keys: Sequence[Key], challenge: Challenge, answer: ChallengeAnswer) -> Session | None:
    """Return the client's session; ``None`` if the answer does not prove the key."""
    key = _first(keys, (answer.key_id,))
    if key is None or not _NONCE.fullmatch(answer.nonce):
        return None
    if not is_equal(answer.proof, _proof(key, challenge, answer.nonce)):
        return None
    return _session(key, challenge, answer.nonce)


def content_digest(body: Bytes) -> str:
    """Return the ``Content-Digest`` header of a body: SHA-256 in hexadecimal digits, as RFC 9530's structured field."""
    return f"sha-256={hashlib.sha256(body).hexdigest()}"


def _first(keys: Sequence[Key], key_ids: Sequence[str]) -> Key | None:
    by_id = {key.key_id: key for key in keys}
    return next((by_id[key_id] for key_id in key_ids if key_id in by_id), None)


def _proof(key: Key, challenge: Challenge, nonce: str) -> str:
    return key.mac("server", *_bound_to(challenge, nonce)).hex()


def _session(key: Key, challenge: Challenge, nonce: str) -> Session:
    return Session(key.derived("session", *_bound_to(challenge, nonce)))


def _bound_to(challenge: Challenge, nonce: str) -> tuple[bytes, ...]:
    return challenge.nonce.encode(), nonce.encode(), challenge.address.encode("utf-8", "surrogateescape")
