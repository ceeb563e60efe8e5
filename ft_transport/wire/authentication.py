"""How two peers prove to each other that they have the job's key, without showing it; pure.

The client draws a nonce and asks for a challenge. The server answers with a nonce of its own and a proof. From both
nonces, the job's key and the address at which the client reached the server both sides derive the key of a session: an
answer that somebody else passes on, from another address or from before, proves nothing. Within the session each
request carries its number and a MAC, and each answer a MAC, over all that either side acts upon. Numbers only go up, so
no request can be made twice.

Bodies are covered by their digests: those of chunks in the manifest, which is signed itself, that of any other body in
``Content-Digest`` (RFC 9530).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ft_transport.wire.key import Bytes, Key, is_equal

SCHEME: Final = "FT-HMAC-SHA256"
PROOF_HEADER: Final = "FT-Proof"
CONTENT_DIGEST_HEADER: Final = "Content-Digest"
MANIFEST_SIGNATURE_HEADER: Final = "FT-Manifest-Signature"
MANIFEST_PURPOSE: Final = "manifest"
"""Of the signature of a manifest: its JSON header, padding included. It holds wherever that is passed on."""

NONCE_BYTES: Final = 16

REQUEST_HEADERS: Final = ("Range", "If-Range", CONTENT_DIGEST_HEADER)
"""Those that change what a server does."""
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
"""Those that a client acts upon."""


class Headers(Protocol):
    """Headers of a request or an answer, as HTTP libraries have them."""

    def get(self, name: str, default: str, /) -> str:
        """The first header of that name, or the default."""


_MAX_KEYS: Final = 2
_NONCE: Final = re.compile(f"[0-9a-f]{{{2 * NONCE_BYTES}}}", re.ASCII)
_KEY_ID: Final = re.compile("[0-9a-f]{16}", re.ASCII)
_CREDENTIALS: Final = re.compile(f"{SCHEME} number=([0-9]{{1,18}}), mac=([0-9a-f]{{64}})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Challenge:
    """What a client asks with.

    Attributes:
        key_ids: The keys that it has, the one that it prefers first.
        nonce: Drawn at random, hexadecimal.
        address: Where it reached the server.
    """

    key_ids: tuple[str, ...]
    nonce: str
    address: str

    def query(self) -> dict[str, str]:
        """Parameters of the request."""
        return {"keys": ",".join(self.key_ids), "nonce": self.nonce, "address": self.address}

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Challenge | None:
        """What `query` made, or ``None`` if it is something else."""
        key_ids = tuple(query.get("keys", "").split(",", _MAX_KEYS))
        nonce = query.get("nonce", "")
        if len(key_ids) > _MAX_KEYS or not all(map(_KEY_ID.fullmatch, key_ids)) or not _NONCE.fullmatch(nonce):
            return None
        return cls(key_ids, nonce, query.get("address", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChallengeAnswer:
    """What the server answers.

    Attributes:
        key_id: The key that both have.
        nonce: Drawn at random, hexadecimal.
        proof: That it has that key.
    """

    key_id: str
    nonce: str
    proof: str


@dataclass(frozen=True, slots=True)
class Session:
    """What both sides have in common after the challenge.

    Attributes:
        key: Derived for this session alone.
    """

    key: Key

    def credentials(self, number: int, method: str, target: str, headers: Headers) -> str:
        """The ``Authorization`` header of a request.

        Args:
            number: Greater than that of any request before.
            method: The method.
            target: Path and query, as on the wire.
            headers: Of the request; `REQUEST_HEADERS` count.
        """
        return (
            f"{SCHEME} number={number}, mac={self._mac('request', number, (method, target), headers, REQUEST_HEADERS)}"
        )

    def number_of(
        self, credentials: str | None, method: str, target: str, headers: Headers, *, after: int
    ) -> int | None:
        """The number of a request that was made within this session; ``None`` for any other.

        Args:
            credentials: Its ``Authorization`` header.
            method: The method.
            target: Path and query, as on the wire.
            headers: Of the request.
            after: The number of the last request.
        """
        found = _CREDENTIALS.fullmatch(credentials or "")
        if found is None or int(found[1]) <= after:
            return None
        number = int(found[1])
        expected = self._mac("request", number, (method, target), headers, REQUEST_HEADERS)
        return number if is_equal(found[2], expected) else None

    def proof(self, number: int, status: int, headers: Headers) -> str:
        """The ``FT-Proof`` header of the answer to the request of that number."""
        return self._mac("answer", number, (str(status),), headers, ANSWER_HEADERS)

    def proves(self, proof: str | None, number: int, status: int, headers: Headers) -> bool:
        """Whether an answer was made by the server of this session, to this request."""
        return is_equal(proof or "", self.proof(number, status, headers))

    def _mac(self, purpose: str, number: int, first: Sequence[str], headers: Headers, names: Sequence[str]) -> str:
        parts = (str(number), *first, *(headers.get(name, "") for name in names))
        return self.key.mac(purpose, *(part.encode("utf-8", "surrogateescape") for part in parts)).hex()


def answer_challenge(keys: Sequence[Key], challenge: Challenge, nonce: str) -> tuple[ChallengeAnswer, Session] | None:
    """The server's part; ``None`` if it has none of the client's keys.

    Args:
        keys: Of the job.
        challenge: As it came; the caller has made sure that the address is its own.
        nonce: Drawn afresh.
    """
    key = _first(keys, challenge.key_ids)
    if key is None:
        return None
    return ChallengeAnswer(key_id=key.key_id, nonce=nonce, proof=_proof(key, challenge, nonce)), _session(
        key, challenge, nonce
    )


def accept_answer(keys: Sequence[Key], challenge: Challenge, answer: ChallengeAnswer) -> Session | None:
    """The client's part; ``None`` if the answer does not prove that the server has the key."""
    key = _first(keys, (answer.key_id,))
    if key is None or not _NONCE.fullmatch(answer.nonce):
        return None
    if not is_equal(answer.proof, _proof(key, challenge, answer.nonce)):
        return None
    return _session(key, challenge, answer.nonce)


def content_digest(body: Bytes) -> str:
    """The ``Content-Digest`` header of a body: SHA-256 in hexadecimal digits, as RFC 9530's structured field."""
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
