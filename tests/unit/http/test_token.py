"""The job token lets in who has it, and is never seen elsewhere."""

from __future__ import annotations

import copy
import hmac
import logging
from datetime import timedelta

import pytest

from ft_transport import ConfigurationError, HTTPTransport, PeerAuthenticationError, TransportSettings
from ft_transport.http.token import TOKEN_VARIABLE, JobToken

SECRET = "correct-horse~battery/staple=="


def test_it_accepts_its_own_header_and_no_other() -> None:
    token = JobToken(SECRET)
    assert token.accepts(token.header())
    for other in (None, "", SECRET, f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}", f"bearer {SECRET}", "Bearer \udcff"):
        assert not token.accepts(other)


def test_it_compares_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def spy(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return real(left, right)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    assert not JobToken(SECRET).accepts("Bearer wrong")
    assert compared == [(b"Bearer wrong", f"Bearer {SECRET}".encode())]


def test_it_cannot_be_printed() -> None:
    token = JobToken(SECRET)
    settings = TransportSettings(token=SECRET)
    for text in (repr(token), str(token), f"{token}", repr([token]), repr(settings), repr(copy.copy(token))):
        assert SECRET not in text


@pytest.mark.parametrize("secret", ["", " ", "my password", "hunter2\n", "tab\t", "\x00", "ü", "✓", "nbsp\u00a0"])
def test_what_no_header_can_carry_is_refused_without_being_shown(secret: str) -> None:
    with pytest.raises(ConfigurationError, match="visible ASCII") as caught:
        JobToken(secret)
    assert len(secret) < 2 or secret not in str(caught.value)


def test_the_environment_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert JobToken.from_environment() is None
    monkeypatch.setenv(TOKEN_VARIABLE, "")  # A secret that was not found.
    with pytest.raises(ConfigurationError, match="set and empty"):
        JobToken.from_environment()
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    token = JobToken.from_environment()
    assert token is not None
    assert token.header() == f"Bearer {SECRET}"


def test_a_fetch_shows_it_to_the_peer_and_to_nobody_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    timeout = timedelta(seconds=20)
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    sender: HTTPTransport[object] = HTTPTransport(timeout, settings=TransportSettings(host="127.0.0.1"))
    receivers: list[HTTPTransport[object]] = [
        HTTPTransport(timeout, settings=TransportSettings(host="127.0.0.1", token=token))
        for token in (SECRET, "another-one", None)
    ]
    monkeypatch.delenv(TOKEN_VARIABLE)
    receivers.append(HTTPTransport(timeout, settings=TransportSettings(host="127.0.0.1")))
    try:
        sender.send_checkpoint([], 1, {"a": 1}, timeout)
        for allowed in (receivers[0], receivers[2]):
            assert allowed.fetch(sender.metadata(), 1).state == {"a": 1}
        for refused in (receivers[1], receivers[3]):
            with pytest.raises(PeerAuthenticationError) as caught:
                refused.fetch(sender.metadata(), 1)
            assert SECRET not in str(caught.value)
            assert not caught.value.retryable
    finally:
        for transport in (sender, *receivers):
            transport.shutdown()
    assert "refused" in caplog.text
    for secret in (SECRET, "another-one"):
        assert secret not in caplog.text
