"""Keys, and the protocol by which two peers prove to each other that they know the job's key, without sending it.

All signatures are HMAC-SHA256 (RFC 2104), each for one purpose. This module does no I/O.

The client sends a random nonce. The server answers with a nonce of its own and a proof of the key. Both sides derive a
session key from the two nonces, the job's key, and the address at which the client reached the server. So a response
that was relayed, replayed or sent from another address proves nothing. In the session, each request has a number and a
MAC, and each response has a MAC. A MAC covers everything on which the other side acts, except bodies. The numbers must
increase, so a request cannot be replayed.

Bodies are covered by digests: those of chunks are in the signed manifest, and those of other bodies in the header
``Content-Digest`` (RFC 9530).
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
    """A key. The secret does not appear in the key's repr.

    Attributes:
        key_id: Public id of the key, which does not reveal the secret; equal keys have equal ids.
    """

    key_id: str
    _secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> Key:
        """Return the key with this secret."""
        return cls(_mac(secret, "id")[:_ID_BYTES].hex(), secret)

    def mac(self, purpose: str, *parts: Bytes) -> bytes:
        """Return the HMAC-SHA256 (32 bytes) of a purpose and parts. Each part is hashed after its length."""
        return _mac(self._secret, purpose, *parts)

    def derived(self, purpose: str, *parts: bytes) -> Key:
        """Derive another key for a purpose. The derived key does not reveal this key."""
        return Key.of(self.mac(purpose, *parts))


def is_equal(one: str | bytes, other: str | bytes) -> bool:
    """Compare two values in constant time, so that the duration does not reveal where they differ."""
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
"""Purpose of a manifest's signature, which covers the JSON header with padding, so that relays can pass it on."""

NONCE_BYTES: Final = 16

REQUEST_HEADERS: Final = ("Range", "If-Range", CONTENT_DIGEST_HEADER)
"""The request headers on which the server acts."""
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
"""The response headers on which the client acts."""


class Headers(Protocol):
    """The headers of a request or a response, as in HTTP libraries."""

    def get(self, name: str, default: str, /) -> str:
        """Returns the first header named ``name``; ``default`` if there is none."""


_MAX_KEYS: Final = 2
_NONCE: Final = re.compile(f"[0-9a-f]{{{2 * NONCE_BYTES}}}", re.ASCII)
_KEY_ID: Final = re.compile("[0-9a-f]{16}", re.ASCII)
_CREDENTIALS: Final = re.compile(f"{SCHEME} number=([0-9]{{1,18}}), mac=([0-9a-f]{{64}})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Challenge:
    """A client's challenge to a server to prove that it knows the job's key.

    Attributes:
        key_ids: Ids of the client's keys, in order of preference.
        nonce: Random hexadecimal digits.
        address: The address at which the client reached the server.
    """

    key_ids: tuple[str, ...]
    nonce: str
    address: str

    def query(self) -> dict[str, str]:
        """Return the query parameters of the request."""
        return {"keys": ",".join(self.key_ids), "nonce": self.nonce, "address": self.address}

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Challenge | None:
        """Parse the query parameters of a request; return ``None`` if they are invalid."""
        key_ids = tuple(query.get("keys", "").split(",", _MAX_KEYS))
        nonce = query.get("nonce", "")
        if len(key_ids) > _MAX_KEYS or not all(map(_KEY_ID.fullmatch, key_ids)) or not _NONCE.fullmatch(nonce):
            return None
        return cls(key_ids, nonce, query.get("address", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChallengeAnswer:
    """A server's answer to a challenge.

    Attributes:
        key_id: Id of a key that both sides have.
        nonce: Random hexadecimal digits.
        proof: Proof that the server knows this key.
    """

    key_id: str
    nonce: str
    proof: str


@dataclass(frozen=True, slots=True)
class Session:
    """A session between a client and a server that have proved the job's key to each other.

    Attributes:
        key: Key of the session, which both sides have derived.
    """

    key: Key

    def credentials(self, number: int, method: str, target: str, headers: Headers) -> str:
        """Return the ``Authorization`` header of a request.

        Args:
            number: Number of the request, greater than those of all earlier requests of the session.
            method: HTTP method.
            target: Path and query, exactly as sent.
            headers: Headers of the request. The MAC covers those in `REQUEST_HEADERS`.
        """
        return (
            f"{SCHEME} number={number}, mac={self._mac('request', number, (method, target), headers, REQUEST_HEADERS)}"
        )

    def number_of(
        self, credentials: str | None, method: str, target: str, headers: Headers, *, after: int
    ) -> int | None:
        """Verify a request of this session, and return its number; ``None`` if it was replayed or has a wrong MAC.

        Args:
            credentials: The ``Authorization`` header of the request.
            method: HTTP method.
            target: Path and query, exactly as received.
            headers: Headers of the request.
            after: Number of the previous request of the session.
        """
        found = _CREDENTIALS.fullmatch(credentials or "")
        if found is None or int(found[1]) <= after:
            return None
        number = int(found[1])
        expected = self._mac("request", number, (method, target), headers, REQUEST_HEADERS)
        return number if is_equal(found[2], expected) else None

    def proof(self, number: int, status: int, headers: Headers) -> str:
        """Return the ``FT-Proof`` header of the response to request ``number``."""
        return self._mac("answer", number, (str(status),), headers, ANSWER_HEADERS)

    def proves(self, proof: str | None, number: int, status: int, headers: Headers) -> bool:
        """Return whether a response comes from this session's server, and answers request ``number``."""
        return is_equal(proof or "", self.proof(number, status, headers))

    def _mac(self, purpose: str, number: int, first: Sequence[str], headers: Headers, names: Sequence[str]) -> str:
        parts = (str(number), *first, *(headers.get(name, "") for name in names))
        return self.key.mac(purpose, *(part.encode("utf-8", "surrogateescape") for part in parts)).hex()


def answer_challenge(keys: Sequence[Key], challenge: Challenge, nonce: str) -> tuple[ChallengeAnswer, Session] | None:
    """Answer a challenge on the server; return the answer and the session. ``None`` without a common key.

    Args:
        keys: Keys of the job.
        challenge: The challenge. The caller must have checked that its address is the server's own.
        nonce: A new random nonce.
    """
    key = _first(keys, challenge.key_ids)
    if key is None:
        return None
    return ChallengeAnswer(key_id=key.key_id, nonce=nonce, proof=_proof(key, challenge, nonce)), _session(
        key, challenge, nonce
    )


def accept_answer(keys: Sequence[Key], challenge: Challenge, answer: ChallengeAnswer) -> Session | None:
    """Verify a server's answer on the client; return the session, or ``None`` if the answer does not prove a key."""
    key = _first(keys, (answer.key_id,))
    if key is None or not _NONCE.fullmatch(answer.nonce):
        return None
    if not is_equal(answer.proof, _proof(key, challenge, answer.nonce)):
        return None
    return _session(key, challenge, answer.nonce)


def content_digest(body: Bytes) -> str:
    """Return the ``Content-Digest`` header of a body: its SHA-256 in hexadecimal digits."""
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
