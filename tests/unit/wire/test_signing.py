"""Both sides prove that they have the key; what is passed on, repeated or changed proves nothing."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_transport.wire.signing import (
    Challenge,
    ChallengeAnswer,
    Key,
    Session,
    accept_answer,
    answer_challenge,
    content_digest,
)

OURS, OLD, FOREIGN = (Key.of(name * 32) for name in (b"a", b"b", b"c"))
NONCES = ("0" * 32, "f" * 32)


def _challenge(*keys: Key, address: str = "10.0.0.1:29600") -> Challenge:
    return Challenge(tuple(key.key_id for key in keys), NONCES[0], address)


def _sessions() -> tuple[Session, Session]:
    challenge = _challenge(OURS)
    answered = answer_challenge([OURS], challenge, NONCES[1])
    assert answered is not None
    accepted = accept_answer([OURS], challenge, answered[0])
    assert accepted is not None
    return accepted, answered[1]


def test_who_has_the_key_gets_the_same_session() -> None:
    client, server = _sessions()
    assert client == server


def test_the_first_key_that_both_have_is_taken() -> None:
    answered = answer_challenge([OLD], _challenge(OURS, OLD), NONCES[1])
    assert answered is not None
    assert answered[0].key_id == OLD.key_id
    assert answer_challenge([FOREIGN], _challenge(OURS, OLD), NONCES[1]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"proof": "0" * 64},
        {"proof": "é"},
        {"nonce": NONCES[0]},
        {"nonce": "short"},
        {"key_id": FOREIGN.key_id},
    ],
)
def test_an_answer_that_was_changed_is_no_proof(change: dict[str, str]) -> None:
    challenge = _challenge(OURS)
    answered = answer_challenge([OURS], challenge, NONCES[1])
    assert answered is not None
    assert accept_answer([OURS], challenge, dataclasses.replace(answered[0], **change)) is None


def test_an_answer_for_another_address_or_another_time_is_no_proof() -> None:
    answered = answer_challenge([OURS], _challenge(OURS), NONCES[1])
    assert answered is not None
    assert accept_answer([OURS], _challenge(OURS, address="10.6.6.6:29600"), answered[0]) is None
    later = dataclasses.replace(_challenge(OURS), nonce="1" * 32)
    assert accept_answer([OURS], later, answered[0]) is None


def test_without_the_key_no_proof_is_made() -> None:
    stolen = ChallengeAnswer(key_id=OURS.key_id, nonce=NONCES[1], proof=FOREIGN.mac("server").hex())
    assert accept_answer([OURS], _challenge(OURS), stolen) is None


def test_a_request_counts_once_and_only_as_it_was_made() -> None:
    client, server = _sessions()
    headers = {"Range": "bytes=0-9"}
    given_ = client.credentials(3, "GET", "/checkpoint/1/full?snapshot=x", headers)
    target = "/checkpoint/1/full?snapshot=x"
    assert server.number_of(given_, "GET", target, headers, after=2) == 3
    assert server.number_of(given_, "GET", target, headers, after=3) is None
    assert server.number_of(given_, "POST", target, headers, after=2) is None
    assert server.number_of(given_, "GET", target + "y", headers, after=2) is None
    assert server.number_of(given_, "GET", target, {"Range": "bytes=0-99"}, after=2) is None
    assert server.number_of(given_.replace("number=3", "number=4"), "GET", target, headers, after=2) is None
    for other in (None, "", "Bearer secret", given_[:-1], given_ + " "):
        assert server.number_of(other, "GET", target, headers, after=2) is None


def test_an_answer_is_to_one_request_and_cannot_be_changed() -> None:
    client, server = _sessions()
    headers = {"Content-Length": "3", "Content-Digest": content_digest(b"abc"), "X-Other": "1"}
    proof = server.proof(1, 200, headers)
    assert client.proves(proof, 1, 200, {**headers, "X-Other": "2"})
    assert not client.proves(proof, 2, 200, headers)
    assert not client.proves(proof, 1, 206, headers)
    assert not client.proves(proof, 1, 200, {**headers, "Content-Digest": content_digest(b"abd")})
    assert not client.proves(proof, 1, 200, {**headers, "FT-After": "9"})
    assert not client.proves(None, 1, 200, headers)
    # What one side makes cannot be sent back to it.
    assert not client.proves(client.credentials(1, "GET", "200", {}).rpartition("=")[2], 1, 200, {})


def test_a_challenge_survives_its_way() -> None:
    challenge = _challenge(OURS, OLD)
    assert Challenge.parse(challenge.query()) == challenge


@given(st.dictionaries(st.sampled_from(["keys", "nonce", "address"]), st.text()))
def test_whatever_comes_as_a_challenge_is_one_or_none(query: dict[str, str]) -> None:
    found = Challenge.parse(query)
    assert found is None or Challenge.parse(found.query()) == found
