"""Peers prove to each other that they know the job token, and show it to nobody."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from proxy import Fault, Link, Proxy, proxied
from scripted_peer import Peer, scripted
from transport_settings import settings_of

from ft_transport import (
    DeadlineExceededError,
    FetchFailedError,
    HTTPTransport,
    PeerAuthenticationError,
    TransportError,
)
from ft_transport.errors import MessageDamagedError
from ft_transport.http.peer_address import socket_address
from ft_transport.keys import TOKEN_VARIABLE, Keys

SECRET = "correct-horse~battery/staple=="
TIMEOUT = timedelta(seconds=20)
STATE = {"a": 1, "b": [2.5] * 100}


@contextmanager
def transport(token: str | None = SECRET, **settings: Any) -> Iterator[HTTPTransport[Any]]:
    made: HTTPTransport[Any] = HTTPTransport(TIMEOUT, settings=settings_of(host="127.0.0.1", token=token, **settings))
    try:
        yield made
    finally:
        made.shutdown()


@contextmanager
def meddler(fault: Fault | None = None, *, times: int = 1000) -> Iterator[tuple[Proxy, HTTPTransport[Any]]]:
    """A source whose connections all go through somebody who is believed to be at the source's own address."""
    with proxied(0) as proxy, transport(reached_at=[f"127.0.0.1:{proxy.port}"]) as source:
        proxy.target_port = int(source.metadata().split(":")[2].split("/")[0])
        if fault is not None:
            proxy.inject(fault, on="/challenge", times=times)
        source.send_checkpoint([], 1, STATE, TIMEOUT)
        yield proxy, source


@pytest.mark.parametrize(
    ("here", "there", "is_allowed"),
    [
        (SECRET, SECRET, True),
        ("old new", "old", True),
        ("old", "old new", True),
        ("new old", "old new", True),
        ("old new", "new old", True),
        ("new old", "new", True),
        ("new", "new old", True),
        ("old", "new", False),
        (SECRET, "another-one", False),
        (SECRET, None, False),
        (None, SECRET, False),
        (None, None, True),
    ],
)
def test_both_need_the_token(
    here: str | None, there: str | None, is_allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with transport(there) as source, transport(here) as receiver:
        source.send_checkpoint([], 1, STATE, TIMEOUT)
        if is_allowed:
            assert receiver.fetch(source.metadata(), 1).state == STATE
            return
        with pytest.raises(PeerAuthenticationError) as caught:
            receiver.fetch(source.metadata(), 1)
        assert not caught.value.retryable
        assert ("this process has no token" in str(caught.value)) == (here is None)
        assert ("the peer has another job token" in str(caught.value)) == (here is not None and there is not None)
    for secret in (SECRET, "another-one"):
        assert secret not in f"{caught.value} {caplog.text}"


def test_the_environment_sets_it_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    with transport(None) as source, transport(None) as receiver:
        monkeypatch.delenv(TOKEN_VARIABLE)
        source.send_checkpoint([], 1, STATE, TIMEOUT)
        assert receiver.fetch(source.metadata(), 1).state == STATE
        with transport(None) as stranger, pytest.raises(PeerAuthenticationError):
            stranger.fetch(source.metadata(), 1)


DEEP = b"[" * 5_000 + b"]" * 5_000
"""More brackets in each other than decoders go down."""


@pytest.mark.parametrize(
    "body",
    [
        b'{"key_id":"00","nonce":"00","proof":"00","padding":"xx"}',
        b'{"key_id":"00","nonce":"00","proof":"00","padding":%s}' % DEEP,
        b'{"key_id":"00","nonce":"\xff","proof":"00"}',
        DEEP,
        b"",
    ],
    ids=["wrong", "deep padding", "no text", "deep", "empty"],
)
def test_an_impostor_is_shown_nothing_that_it_could_use(body: bytes) -> None:
    heard: list[str] = []

    def script(peer: Peer) -> None:
        heard.append(peer.request())
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    with (
        scripted(script) as port,
        transport() as receiver,
        pytest.raises(PeerAuthenticationError, match="expected the peer to prove"),
    ):
        receiver.fetch(f"http://127.0.0.1:{port}/checkpoint/", 1)
    assert heard
    assert SECRET not in "".join(heard)


def test_who_passes_the_challenge_on_is_found_out() -> None:
    with transport() as source, transport() as receiver:
        source.send_checkpoint([], 1, STATE, TIMEOUT)
        relaying = proxied(int(source.metadata().split(":")[2].split("/")[0]))
        with relaying as relay, pytest.raises(PeerAuthenticationError, match="expected to be reached at"):
            receiver.fetch(relay.url, 1)
        assert receiver.fetch(source.metadata(), 1).state == STATE


def test_an_address_that_is_translated_on_the_way_can_be_named() -> None:
    with meddler() as (proxy, _source), transport() as receiver:
        assert receiver.fetch(proxy.url, 1).state == STATE


def _changing(pattern: bytes, replacement: bytes) -> Fault:
    def fault(link: Link, data: bytes) -> bool:
        link.send(re.sub(pattern, replacement, data))
        return True

    return fault


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (rb"HTTP/1.1 200 OK\r\n(?=[^\x00]*FT-Manifest)", b"HTTP/1.1 410 Gone\r\n"),
        (rb"FT-Manifest-Digest: .", b"FT-Manifest-Digest: x"),
        (rb"FT-Manifest-Signature: .", b"FT-Manifest-Signature: x"),
        (rb"FT-Proof: ....", b"FT-Proof: 0000"),
        (rb"FT-Proof: [^\r]*\r\n", b""),
        (rb'"ft_transport.tree":"..', b'"ft_transport.tree":"xx'),
    ],
)
def test_an_answer_that_somebody_changed_is_not_used(pattern: bytes, replacement: bytes) -> None:
    with meddler(_changing(pattern, replacement)) as (proxy, _source), transport() as receiver:
        with pytest.raises(TransportError) as caught:
            receiver.fetch(proxy.url, 1, timeout=timedelta(seconds=5))
        assert isinstance(caught.value, MessageDamagedError | FetchFailedError) or "damaged" in str(caught.value)
        assert not caught.value.destination_touched


def test_a_manifest_that_somebody_forged_is_not_used() -> None:
    """Where the digest of the manifest is right, and even the session was taken over, the signature is wrong."""
    with transport() as source, transport() as receiver:
        source.send_checkpoint([], 1, STATE, TIMEOUT)
        source.server.http._routes._keys = Keys.of("another-one")
        with pytest.raises(MessageDamagedError, match="signed with the job token"):
            receiver.fetch(source.metadata(), 1)


@pytest.mark.parametrize("pattern", [rb'"proof":"..', rb'"nonce":"..'])
def test_one_changed_challenge_costs_another_one(pattern: bytes) -> None:
    changing = _changing(pattern, pattern[:-2] + b"x0")
    with meddler(changing, times=1) as (proxy, _source), transport() as receiver:
        assert receiver.fetch(proxy.url, 1).state == STATE
        assert proxy.num_faulty == 1


def test_one_changed_answer_costs_one_more_request() -> None:
    changing = _changing(rb"FT-Proof: ....", b"FT-Proof: 0000")
    with meddler(changing, times=1) as (proxy, _source), transport() as receiver:
        assert receiver.fetch(proxy.url, 1).state == STATE


def test_what_nobody_has_proved_makes_no_older_snapshot_new_enough() -> None:
    """``FT-After`` of an answer to the challenge, which whoever is on the way can make."""

    def refuse(link: Link, _data: bytes) -> bool:
        link.send(b"HTTP/1.1 503 Service Unavailable\r\nFT-After: 0\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
        return False

    with meddler(refuse, times=1) as (proxy, source), transport() as receiver:
        newest = source.server._cache.newest_sequence()
        source.serve_fresh(lambda _step: newest)  # the trainer is past the step that is served
        with pytest.raises(DeadlineExceededError, match="waiting for a snapshot"):
            receiver.fetch(proxy.url, "latest", timeout=timedelta(seconds=0.8))
        assert proxy.num_faulty == 1
        assert len(proxy.requests) > 1, "it has asked again"


def _statuses(port: int, requests: list[bytes]) -> list[int]:
    statuses = []
    with closing(socket.create_connection(("127.0.0.1", port), timeout=10)) as sock:
        for request in requests:
            sock.sendall(request)
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += sock.recv(65536)
            head, _, body = answer.partition(b"\r\n\r\n")
            statuses.append(int(head.split(b" ")[1]))
            found = re.search(rb"Content-Length: (\d+)", head)
            left = int(found[1]) - len(body) if found else 0
            while left > 0:
                left -= len(sock.recv(left))
    return statuses


def test_a_request_that_is_made_again_is_refused() -> None:
    with proxied(0) as proxy, transport(reached_at=[f"127.0.0.1:{proxy.port}"]) as source, transport() as receiver:
        port = proxy.target_port = int(source.metadata().split(":")[2].split("/")[0])
        source.send_checkpoint([], 1, STATE, TIMEOUT)
        seen: list[bytes] = []
        proxy.watch = seen.append
        receiver.fetch(proxy.url, 1)
        text = b"".join(seen)
        requests = [part + b"\r\n\r\n" for part in text.split(b"\r\n\r\n") if part]
        assert [request.split(b" ")[1].split(b"?")[0] for request in requests[:2]] == [
            b"/challenge",
            b"/checkpoint/1/metadata",
        ]
        # On a connection of its own: that has another challenge, whoever answers.
        assert _statuses(port, requests[1:2]) == [401]
        own, other = (f"address=127.0.0.1%3A{each}".encode() for each in (port, proxy.port))
        assert _statuses(port, [requests[0].replace(other, own), requests[1]]) == [200, 401]
        assert SECRET.encode() not in text


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (("127.0.0.1", 80), "127.0.0.1:80"),
        (("::ffff:10.1.2.3", 80, 0, 0), "10.1.2.3:80"),
        (("fe80::1%eth0", 80, 0, 2), "[fe80::1]:80"),
        (("2001:DB8::0:1", 80, 0, 0), "[2001:db8::1]:80"),
    ],
)
def test_both_ends_name_an_address_alike(address: tuple[Any, ...], expected: str) -> None:
    assert socket_address(address) == expected


class _Recorder(BaseHTTPRequestHandler):
    """Somebody at the source's own address, who passes on what is said and may say what he has heard before."""

    protocol_version = "HTTP/1.1"
    source_port = 0
    is_replaying = False
    with_challenge = False
    heard: ClassVar[dict[str, tuple[int, list[tuple[str, str]], bytes]]] = {}
    num_replayed = 0

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        cls = type(self)
        if cls.is_replaying and path in cls.heard and (cls.with_challenge or path != "/challenge"):
            cls.num_replayed += 1
            answer = cls.heard[path]
        else:
            answer = self._ask()
            if not cls.is_replaying:
                cls.heard[path] = answer
        status, headers, body = answer
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.connection_to_source = HTTPConnection("127.0.0.1", type(self).source_port, timeout=20)

    def finish(self) -> None:
        super().finish()
        self.connection_to_source.close()

    def _ask(self) -> tuple[int, list[tuple[str, str]], bytes]:
        self.connection_to_source.request("GET", self.path, headers=dict(self.headers.items()))
        response = self.connection_to_source.getresponse()
        return response.status, response.getheaders(), response.read()


@pytest.mark.parametrize("with_challenge", [False, True])
def test_what_a_source_has_said_before_is_not_believed(with_challenge: bool) -> None:
    class Recorder(_Recorder):
        heard: ClassVar[dict[str, tuple[int, list[tuple[str, str]], bytes]]] = {}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}/checkpoint/"
    try:
        with (
            transport(reached_at=[f"127.0.0.1:{server.server_port}"]) as source,
            transport(max_failures=2) as receiver,
        ):
            Recorder.source_port = int(source.metadata().split(":")[2].split("/")[0])
            source.send_checkpoint([], 1, STATE, TIMEOUT)
            assert receiver.fetch(url).step == 1
            source.send_checkpoint([], 9, STATE, TIMEOUT)
            Recorder.is_replaying, Recorder.with_challenge = True, with_challenge
            with pytest.raises((MessageDamagedError, PeerAuthenticationError)):
                receiver.fetch(url)
            assert Recorder.num_replayed
            Recorder.is_replaying = False
            assert receiver.fetch(url).step == 9
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
