"""Which requests a server accepts: with a proof of the job token, with the watch token, or by the Host header."""

from __future__ import annotations

import base64
import json
import logging
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from proxy import Fault, Link, Proxy, forward, proxied
from scripted_peer import Peer, scripted
from served_memory import serving
from transport_settings import settings_of

from ft_transport import (
    DeadlineExceededError,
    FetchFailedError,
    HTTPTransport,
    PeerAuthenticationError,
    TransportError,
    WeightReceiver,
)
from ft_transport.credentials import Keys
from ft_transport.errors import MessageDamagedError
from ft_transport.http.peer_address import socket_address
from ft_transport.http.server.request_guard import HostCheck
from ft_transport.wire.routes import WATCH_ROUTES

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
        source.server.http._routes.keys = Keys.of("another-one")
        with pytest.raises(MessageDamagedError, match="signed with the job token"):
            receiver.fetch(source.metadata(), 1)


@pytest.mark.parametrize("pattern", [rb'"proof":"..', rb'"nonce":"..', rb"FT-Proof: .."])
def test_one_changed_answer_costs_one_more_request(pattern: bytes) -> None:
    changing = _changing(pattern, pattern[:-2] + b"x0")
    with meddler(changing, times=1) as (proxy, _source), transport() as receiver:
        assert receiver.fetch(proxy.url, 1).state == STATE
        assert proxy.num_faulty == 1


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
            response = HTTPResponse(sock)
            response.begin()
            response.read()
            statuses.append(response.status)
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


@pytest.mark.parametrize("num_new", [0, 1], ids=["with its challenge", "behind a new challenge"])
def test_what_a_source_has_said_before_is_not_believed(num_new: int) -> None:
    heard: list[bytes] = []
    num_answers: Counter[Link] = Counter()

    def record(link: Link, data: bytes) -> bool:
        if data.startswith(b"HTTP/1.1"):
            heard.append(b"")
        heard[-1] += data
        return forward(link, data)

    def replay(link: Link, data: bytes) -> bool:
        is_first_part = data.startswith(b"HTTP/1.1")
        num_answers[link] += is_first_part
        if num_answers[link] <= num_new:
            link.send(data)
        elif is_first_part:
            link.send(heard[num_answers[link] - 1])
        return True

    with meddler(record, times=1) as (proxy, source), transport(max_failures=2) as receiver:
        assert receiver.fetch(proxy.url).step == 1
        source.send_checkpoint([], 9, STATE, TIMEOUT)
        proxy.inject(replay, on="/challenge", times=1000)
        with pytest.raises((MessageDamagedError, PeerAuthenticationError)):
            receiver.fetch(proxy.url)
        assert max(num_answers.values()) > num_new


WATCH_TOKEN = Keys.of(SECRET).watch_tokens()[0]


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


@pytest.mark.parametrize("authorization", [f"Bearer {WATCH_TOKEN}", basic(WATCH_TOKEN), f"bearer {WATCH_TOKEN}"])
def test_the_watch_token_opens_what_is_watched(authorization: str) -> None:
    with serving(token=SECRET) as served:
        for path in WATCH_ROUTES:
            assert served.ask(path, Authorization=authorization).status == 200


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        f"Bearer {SECRET}",
        basic(SECRET),
        basic(WATCH_TOKEN[:-1]),
        f"Bearer {WATCH_TOKEN[:-1]}",
        "Bearer é",
        "Basic !!!",
        "Basic " + "A" * 4000,
        f"Digest {WATCH_TOKEN}",
        "FT-HMAC-SHA256 number=1, mac=" + "0" * 64,
    ],
)
def test_without_it_a_browser_is_told_to_ask_for_it_and_nothing_else(authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode().decode("latin-1")}
    with serving(token=SECRET) as served:
        for path in WATCH_ROUTES:
            answer = served.ask(path, **headers)
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"].startswith("Basic ")
            assert b"replica-7" not in answer.body
            assert WATCH_TOKEN.encode() not in answer.body


def test_it_opens_nothing_of_the_state() -> None:
    with serving(token=SECRET) as served:
        served.put(5)
        for path in ("/status", "/checkpoint/latest/metadata", "/checkpoint/latest/full", "/relay/" + "0" * 32):
            answer = served.ask(path, Authorization=f"Bearer {WATCH_TOKEN}")
            assert answer.status == 401
            assert b"state" not in answer.body


def test_while_the_job_token_is_replaced_both_watch_tokens_do() -> None:
    with serving(token="the-new-token the-old-token") as served:
        for token in ("the-new-token", "the-old-token"):
            watch_token = Keys.of(token).watch_tokens()[0]
            assert served.ask("/state", Authorization=f"Bearer {watch_token}").status == 200


def test_a_peer_of_the_job_may_watch() -> None:
    with serving(token=SECRET) as served:
        assert json.loads(served.ask_proved("/state"))["transport"]["replica"] == "replica-7"


FOREIGN = ["rebound.example", "rebound.example:80", "localhost.rebound.example", "127.0.0.1.rebound.example", ""]


def ask_as(port: int, host: str, method: str = "GET", path: str = "/status") -> int:
    with closing(HTTPConnection("127.0.0.1", port, timeout=20)) as http:
        body = json.dumps({}) if method == "POST" else None
        http.request(method, path, body, {"Host": host, "Content-Type": "application/json"})
        return http.getresponse().status


def test_a_foreign_name_reads_nothing() -> None:
    with serving() as served:
        served.put(5)
        for host in FOREIGN:
            for path in ("/status", "/checkpoint/5/full", "/checkpoint/5/metadata"):
                assert ask_as(served.server.port, host, path=path) == 421


def test_the_names_of_this_host_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "own-name")
    with serving() as served:
        for host in ("127.0.0.1", "127.0.0.1:1", "[::1]:1", "localhost", "LOCALHOST.:80", "own-name"):
            assert ask_as(served.server.port, host) == 200


def test_a_foreign_name_orders_nothing() -> None:
    with WeightReceiver({"w": torch.zeros(4)}) as receiver:
        port = urlsplit(receiver.url).port
        assert port is not None
        for host in FOREIGN:
            assert ask_as(port, host, "POST", "/weights/1") == 421
            assert ask_as(port, host, "GET", "/weights") == 421
        assert ask_as(port, "localhost", "GET", "/weights") != 421


def test_with_a_token_the_proof_decides() -> None:
    with serving(token="a-secret-of-this-job") as served:
        assert ask_as(served.server.port, "rebound.example") == 401


def test_it_is_told_once_and_without_the_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), serving() as served:
        for _ in range(3):
            ask_as(served.server.port, "rebound.example")
    assert [each.getMessage() for each in caplog.records if "refused" in each.getMessage()] == [
        "127.0.0.1: a request was refused: expected an address, localhost or a name of this host in the Host header"
    ]


def test_a_request_that_names_no_host_is_from_no_browser() -> None:
    assert HostCheck([]).has(None)
    assert HostCheck(["forwarded.example:99"]).has("forwarded.example")
