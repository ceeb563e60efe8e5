"""One connection to a peer that answers slowly, wrongly or not at all."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from scripted_peer import Peer, Script, answering, scripted

from ft_transport.errors import (
    ConfigurationError,
    DeadlineExceededError,
    MessageDamagedError,
    PeerAuthenticationError,
    PeerError,
    PeerNotReadyError,
    PeerProtocolError,
    PeerUnreachableError,
    SnapshotReplacedError,
    StepNotServedError,
    TransportError,
)
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import FetchHandle, Timeouts
from ft_transport.http.peer_address import PeerAddress

BODY = bytes(range(256)) * 64


def timeouts(
    deadline_s: float = 20.0,
    *,
    stall_timeout_s: float = 20.0,
    min_bytes_per_s: float = 1.0,
    handle: FetchHandle | None = None,
) -> Timeouts:
    return Timeouts(
        deadline_s=time.monotonic() + deadline_s,
        connect_timeout_s=20.0,
        stall_timeout_s=stall_timeout_s,
        min_bytes_per_s=min_bytes_per_s,
        handle=handle or FetchHandle(),
    )


def connection_to(port: int, limits: Timeouts | None = None, *, host: str = "127.0.0.1") -> Connection:
    return Connection(PeerAddress(host=host, port=port), keys=None, certificates=None, timeouts=limits or timeouts())


def receive(connection: Connection, num_bytes: int = len(BODY)) -> bytes:
    body = bytearray(num_bytes)
    response = connection.get("/x", headers={}, expected_status=200, answer_within_s=0.0)
    connection.read_into([memoryview(body)[:100], memoryview(body)[100:101], memoryview(body)[101:]])
    connection.end_response(response)
    return bytes(body)


def ok(body: bytes = BODY, *extra: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *extra, "", ""]
    return "\r\n".join(lines).encode() + body


def answering_once(data: bytes) -> Script:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(data)

    return script


@pytest.mark.parametrize(
    ("url", "host", "port", "text"),
    [
        ("http://node1:1234/checkpoint/", "node1", 1234, "node1:1234"),
        ("http://10.0.0.1:80", "10.0.0.1", 80, "10.0.0.1:80"),
        ("http://node1/", "node1", 80, "node1:80"),
        ("https://node1/", "node1", 443, "node1:443"),
        ("https://[::1]:1234/checkpoint/", "::1", 1234, "[::1]:1234"),
        ("HTTP://NODE1:9/x", "node1", 9, "node1:9"),
        ("http://[::1]:1234/checkpoint/", "::1", 1234, "[::1]:1234"),
        ("http://[fe80::1%25eth0]:5/", "fe80::1%25eth0", 5, "[fe80::1%25eth0]:5"),
    ],
)
def test_an_address_is_read_from_a_url(url: str, host: str, port: int, text: str) -> None:
    address = PeerAddress.from_url(url)
    assert (address.host, address.port, str(address)) == (host, port, text)
    assert address.is_tls == url.startswith("https")


@pytest.mark.parametrize(
    "url",
    [
        "", "node1:1234", "ws://node1:1/", "ftp://node1/", "http://", "http:///x", "http://:80/", "http://[::1/",
        "http://node1:port/", "http://node1:70000/", "http://node1:-1/", "http://user@node1:1/", "http://a:b@node1:1/",
        "http://node 1:1/", "http://no\x00de:1/", "\x00", "file:///etc/passwd",
    ],
)  # fmt: skip
def test_what_is_no_url_of_a_peer_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        PeerAddress.from_url(url)


def test_requests_follow_each_other_on_one_connection() -> None:
    heads = []

    def script(peer: Peer) -> None:
        heads.append(peer.request())
        peer.send(ok())
        answering(ok())(peer)

    with scripted(script) as port, connection_to(port) as connection:
        assert [receive(connection) for _ in range(3)] == [BODY] * 3
    (head,) = heads
    assert "\r\nAccept-Encoding: identity\r\n" in head


@pytest.mark.parametrize("head", [ok(BODY, "Connection: close"), ok().replace(b"HTTP/1.1", b"HTTP/1.0")])
def test_a_peer_that_closes_after_each_answer_is_connected_to_again(head: bytes) -> None:
    with scripted(answering_once(head)) as port, connection_to(port) as connection:
        assert [receive(connection) for _ in range(2)] == [BODY] * 2


def test_an_answer_that_trickles_through_head_and_body_is_read() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        answer = ok()
        peer.trickle(answer[:60], bytes_at_once=6)
        peer.trickle(answer[60:], bytes_at_once=4000)

    with scripted(script) as port, connection_to(port) as connection:
        assert receive(connection) == BODY


@pytest.mark.parametrize("last_bytes", [1, (256 << 10) - 1, 256 << 10, (256 << 10) + 1])
def test_a_short_answer_after_a_long_one_is_not_waited_for(last_bytes: int) -> None:
    """Though reads of the long one are woken for large parts alone."""
    body = bytes(1 << 20) + bytes(range(256)) * 2048

    def script(peer: Peer) -> None:
        peer.request()
        answer = ok(body)
        peer.send(answer[: -last_bytes - 1000])
        peer.trickle(answer[-last_bytes - 1000 :], bytes_at_once=100_000)
        peer.request()
        peer.send(ok())
        peer.hold()  # An end of the connection would wake the reader as well.

    limits = timeouts(stall_timeout_s=5.0)
    with scripted(script) as port, connection_to(port, limits) as connection:
        received = bytearray(len(body))
        response = connection.get("/x", headers={}, expected_status=200, answer_within_s=0.0)
        connection.read_into([memoryview(received)[:700_000]])
        connection.read_into([memoryview(received)[700_000:-last_bytes]])
        connection.read_into([memoryview(received)[-last_bytes:]])
        connection.end_response(response)
        assert received == body
        assert receive(connection) == BODY


@pytest.mark.parametrize("end", ["deadline", "stall"])
@pytest.mark.parametrize("where", ["head", "body"])
def test_an_answer_that_trickles_for_too_long_is_given_up(where: str, end: str) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        if where == "head":
            peer.trickle(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 60_000)
        else:
            peer.send(ok()[:-10_000])
            peer.trickle(BODY[-10_000:])

    # 16 KiB at 1 MB/s are worth 16 ms more.
    limits = timeouts(0.3) if end == "deadline" else timeouts(20, stall_timeout_s=0.3, min_bytes_per_s=1e6)
    expected = DeadlineExceededError if end == "deadline" else PeerUnreachableError
    started_s = time.monotonic()
    with scripted(script) as port, connection_to(port, limits) as connection, pytest.raises(expected) as caught:
        receive(connection)
    assert 0.25 < time.monotonic() - started_s < 5
    assert "timed out" in str(caught.value)
    assert caught.value.retryable is (end != "deadline")
    assert caught.value.peer == f"127.0.0.1:{port}"


def test_silence_is_given_up_and_the_connection_can_be_used_again() -> None:
    silent = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        if not silent.is_set():
            silent.set()
            peer.send(ok()[:200])
            peer.hold()
        peer.send(ok())

    limits = timeouts(20, stall_timeout_s=0.2)
    with scripted(script) as port, connection_to(port, limits) as connection:
        with pytest.raises(PeerUnreachableError, match="timed out reading after 158 bytes"):
            receive(connection)
        assert receive(connection) == BODY


def test_time_that_the_receiver_takes_for_itself_is_no_silence_of_the_peer() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(ok())

    with scripted(script) as port, connection_to(port, timeouts(20, stall_timeout_s=0.2)) as connection:
        response = connection.get("/x", headers={}, expected_status=200, answer_within_s=0.0)
        assert response.length is not None
        received = bytearray(response.length)
        connection.read_into([memoryview(received)[:100]])
        threading.Event().wait(0.4)
        connection.read_into([memoryview(received)[100:]])
    assert received == BODY


@pytest.mark.parametrize("sent", [0, 5, 20, 38, 41, 42, 60, 1000])
@pytest.mark.parametrize("reset", [False, True])
def test_an_answer_cut_short_is_a_lost_connection(sent: int, reset: bool) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(ok()[:sent])
        if reset:
            peer.reset()

    with scripted(script) as port, connection_to(port) as connection, pytest.raises(PeerUnreachableError) as caught:
        receive(connection)
    assert caught.value.peer == f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b"\x00\xff" * 500 + b"\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(1000)) + b"\r\n",
    ],
    ids=["text", "binary", "ssh", "status", "version", "long header", "many headers"],
)
def test_what_is_no_http_is_an_answer_outside_the_protocol(answer: bytes) -> None:
    with scripted(answering_once(answer)) as port, connection_to(port) as connection:
        with pytest.raises(PeerProtocolError) as caught:
            receive(connection)
        assert caught.value.retryable
        assert len(str(caught.value)) < 1000


def test_a_redirect_is_not_followed() -> None:
    asked = []

    def script(peer: Peer) -> None:
        while head := peer.request():
            asked.append(head.split("\r\n")[0])
            peer.send(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n")

    with (
        scripted(script) as port,
        connection_to(port) as connection,
        pytest.raises(PeerProtocolError, match="302 Found"),
    ):
        receive(connection)
    assert asked == ["GET /x HTTP/1.1"]


@pytest.mark.parametrize(
    ("status", "headers", "body", "expected", "fields"),
    [
        (401, "", "whole", PeerAuthenticationError, {}),
        (404, "FT-Served-Steps: 3, 4,x,5\r\n", "whole", StepNotServedError, {"served": (3, 4, 5)}),
        (409, "", "whole", SnapshotReplacedError, {"retryable": True}),
        (503, "Retry-After: 7\r\n", "whole", PeerNotReadyError, {"retry_after_s": 7.0}),
        (503, "Retry-After: Wed, 21 Oct 2026\r\n", "whole", PeerNotReadyError, {"retry_after_s": 1.0}),
        (503, "Retry-After: 99999999\r\n", "whole", PeerNotReadyError, {"retry_after_s": 1.0}),
        *((status, "", "whole", PeerProtocolError, {}) for status in (500, 206, 204)),
        *((500, "", body, PeerProtocolError, {}) for body in ("cut", "missing", "endless")),
        (503, "", "endless", PeerNotReadyError, {}),
    ],
)
def test_a_refusal_says_why(
    status: int, headers: str, body: str, expected: type[TransportError], fields: dict[str, Any]
) -> None:
    reason = b"because of this"
    head = f"HTTP/1.1 {status} Reason\r\n{headers}".encode()

    def script(peer: Peer) -> None:
        peer.request()
        if body == "endless":
            peer.send(head + b"\r\n")
            while True:
                peer.send(reason * 1000)
        length = len(reason) * (1 if body == "whole" else 2)
        peer.send(head + b"Content-Length: %d\r\n\r\n" % length + (reason if body != "missing" else b""))

    with scripted(script) as port, connection_to(port) as connection, pytest.raises(PeerError) as caught:
        receive(connection)
    # A server of another kind does not say what it has understood; that it is not ready means the same either way.
    refusal = caught.value.refusal if isinstance(caught.value, MessageDamagedError) else caught.value
    assert (refusal is caught.value) == (status == 503)
    assert isinstance(refusal, expected)
    for error in (caught.value, refusal):
        assert f"{status} Reason" in str(error)
        assert len(str(error)) < 4000
        if body == "whole" and status != 204:
            assert "because of this" in str(error)
    for name, value in fields.items():
        assert getattr(refusal, name) == value


def test_what_a_peer_says_cannot_move_the_terminal_or_forge_a_line() -> None:
    body = "no\x1b[2J\r\nERROR forged \u202e".encode()
    answer = b"HTTP/1.1 500 R\x1b[31m\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with (
        scripted(answering(answer)) as port,
        connection_to(port) as connection,
        pytest.raises(PeerProtocolError) as caught,
    ):
        receive(connection)
    assert str(caught.value).isprintable()
    assert "no\\x1b[2J\\r\\nERROR forged \\u202e" in str(caught.value)


@pytest.fixture
def closed_port() -> Iterator[int]:
    with closing(socket.socket()) as sock:  # bound and not listening: nobody else gets it meanwhile
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def test_a_closed_port_is_named(closed_port: int) -> None:
    with pytest.raises(PeerUnreachableError, match=rf"127\.0\.0\.1.*refused.*peer 127\.0\.0\.1:{closed_port}"):
        receive(connection_to(closed_port))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 100, "a..b"])
def test_a_host_that_does_not_resolve_is_unreachable(host: str) -> None:
    with pytest.raises(PeerUnreachableError):
        receive(connection_to(1, host=host))


@pytest.fixture
def silent_resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Stands in for a name server that does not answer; set once somebody asks."""
    asked, ended = threading.Event(), threading.Event()

    def wait(*_args: object, **_kwargs: object) -> list[Any]:
        asked.set()
        ended.wait(20)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    yield asked
    ended.set()
    for thread in threading.enumerate():
        if thread.name == "ft-transport-look-up":
            thread.join(20)


def test_a_look_up_ends_with_the_deadline(silent_resolver: threading.Event) -> None:
    started_s = time.monotonic()
    with pytest.raises(PeerUnreachableError, match="'silent' did not resolve within"):
        receive(connection_to(1, timeouts(0.3), host="silent"))
    assert silent_resolver.is_set()
    assert 0.3 <= time.monotonic() - started_s < 10
    # Whoever asks again waits for the same answer, and no further thread does.
    with pytest.raises(PeerUnreachableError, match="'silent' did not resolve within"):
        receive(connection_to(1, timeouts(0.1), host="silent"))
    assert sum(thread.name == "ft-transport-look-up" for thread in threading.enumerate()) == 1


def test_a_look_up_without_a_thread_is_an_error_of_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(PeerUnreachableError, match="a thread to look up 'peer': can't start"):
        receive(connection_to(1, host="peer"))


def test_another_thread_ends_a_look_up(silent_resolver: threading.Event) -> None:
    connection = connection_to(1, host="silent")
    ending = threading.Thread(target=lambda: (silent_resolver.wait(20), connection.interrupt()))
    ending.start()
    started_s = time.monotonic()
    with pytest.raises(PeerUnreachableError):
        receive(connection)
    ending.join()
    assert time.monotonic() - started_s < 10


def test_of_several_addresses_the_one_that_answers_is_used(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    with scripted(answering(ok())) as port:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", p)) for p in (closed_port, port)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: found)
        with connection_to(port, host="several") as connection:
            assert receive(connection) == BODY


def test_several_silent_addresses_do_not_add_up_beyond_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    # A full backlog drops what comes then, as a host that is down does.
    with closing(socket.socket()) as full, closing(socket.socket()) as first, closing(socket.socket()) as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for sock in (first, second):
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", full.getsockname())] * 20
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: found)
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceededError, match="timed out connecting"):
            receive(connection_to(1, timeouts(0.4), host="silent"))
    assert time.monotonic() - started_s < 3


def test_another_thread_ends_a_read_and_everything_after_it() -> None:
    reading = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(ok()[:200])
        reading.set()
        peer.hold()

    with scripted(script) as port, connection_to(port) as connection:
        ending = threading.Thread(target=lambda: (reading.wait(20), connection.interrupt()))
        ending.start()
        started_s = time.monotonic()
        with pytest.raises(PeerUnreachableError):
            receive(connection)
        assert time.monotonic() - started_s < 5
        with pytest.raises(PeerUnreachableError, match="the request was cancelled"):
            receive(connection)
        ending.join()


@pytest.mark.parametrize("where", ["head", "body", "before"])
def test_another_thread_ends_a_wait_at_once(where: str) -> None:
    reached = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        if where == "body":
            peer.send(ok()[:-1])
        reached.set()
        peer.hold()

    handle = FetchHandle()

    def end() -> None:
        reached.wait(20)
        handle.cancel("nobody waits for it")

    ending = threading.Thread(target=end)
    started_s = time.monotonic()
    with scripted(script) as port:
        if where == "before":
            reached.set()
        ending.start()
        if where == "before":
            ending.join()
        patience = timeouts(handle=handle)
        with connection_to(port, patience) as connection, pytest.raises(TransportError):
            receive(connection)
        assert patience.is_over()
        assert patience.reason() == "nobody waits for it"
    ending.join()
    assert time.monotonic() - started_s < 5
    # The last byte of the body did not come.
    assert handle.num_bytes < len(BODY)
