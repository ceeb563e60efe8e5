"""The server among receivers that stall, vanish, crowd in or send nonsense, and while it shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from served_memory import Serving, serving, until

from ft_transport.errors import SnapshotLimitError
from ft_transport.http.server import bodies, body_sender, connection_slots, listener
from ft_transport.http.server import server as server_module
from ft_transport.http.server.request_guard import RequestGuard
from ft_transport.http.server.snapshot_cache import SnapshotCache

# More than the socket buffers of both ends take.
LARGE = bytes(1 << 20) * 48


@contextmanager
def receiver(served: Serving, path: str, *, buffer_bytes: int = 1 << 14) -> Iterator[socket.socket]:
    """A connection that has asked and read the first byte of the answer, and then reads no more by itself."""
    with closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", served.server.port))
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert sock.recv(1) == b"H"
        yield sock


def read_rest(sock: socket.socket) -> bytes:
    received = bytearray()
    try:
        while piece := sock.recv(1 << 20):
            received += piece
    except ConnectionError:
        pass
    return bytes(received)


@pytest.mark.parametrize("what", ["full", "metadata"])
def test_a_stalled_reader_is_cut_off_and_its_snapshot_freed(what: str, caplog: pytest.LogCaptureFixture) -> None:
    with serving(stall_timeout_s=0.3) as served:
        snapshot = served.put(5, LARGE)
        if what == "metadata":
            # A header as long as the data: what matters is that it is sent like a file and bounded like one.
            snapshot.header = snapshot.content
        with receiver(served, f"/checkpoint/5/{what}") as sock:
            served.cache.clear()
            assert not snapshot.closed.is_set()
            assert snapshot.closed.wait(20)
            assert len(read_rest(sock)) < len(LARGE)
            until(lambda: _sending_threads() == 0)
    assert "was cut off" in caplog.text


@pytest.mark.parametrize(("piece_bytes", "is_whole"), [(1 << 20, True), (1 << 15, False)])
def test_a_slow_reader_is_served_as_long_as_it_takes_enough(
    piece_bytes: int, is_whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(stall_timeout_s=0.5) as served:
        content = served.put(5, LARGE[: 24 << 20]).content
        with receiver(served, "/checkpoint/5/full", buffer_bytes=2 * piece_bytes) as sock:
            received = 0
            never = threading.Event()
            with contextlib.suppress(ConnectionError):
                while received < len(content) and (piece := sock.recv(piece_bytes, socket.MSG_WAITALL)):
                    received += len(piece)
                    never.wait(0.05)  # 4 MiB in half a second is what it has to take at least.
    assert (received >= len(content)) == is_whole
    assert ("was cut off" in caplog.text) != is_whole


def test_where_nobody_tells_what_was_acknowledged_the_kernel_s_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bodies, body_sender):
        monkeypatch.setattr(module, "acked_bytes", lambda _connected: 0)
    with serving(stall_timeout_s=0.3) as served:
        content = served.put(5, LARGE).content
        assert served.ask("/checkpoint/5/full").body == content
        with receiver(served, "/checkpoint/5/full") as sock:
            until(lambda: served.cache.num_readers() == 0)
            assert len(read_rest(sock)) < len(content)


def test_whatever_ends_the_sending_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_connected: object, _body: object) -> None:
        raise MemoryError("no memory today")

    monkeypatch.setattr(body_sender, "_send_blocking", fail)
    with serving() as served:
        served.put(5, LARGE)
        with receiver(served, "/checkpoint/5/full") as sock:
            assert len(read_rest(sock)) < len(LARGE)
        until(lambda: served.cache.num_readers() == 0)


def _sending_threads() -> int:
    return sum(thread.name == "ft-transport-send" for thread in threading.enumerate())


def test_a_reader_that_vanishes_ends_its_reading_and_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as served:
        snapshot = served.put(5, LARGE)
        with receiver(served, "/checkpoint/5/full"):
            served.cache.clear()
        assert snapshot.closed.wait(20)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_what_was_sent_but_not_read_yet_is_not_overwritten() -> None:
    """sendfile hands over pages, not copies: the receiver's kernel still looks into the snapshot's memory."""
    with serving(max_snapshots=1, lease_s=0) as served:
        snapshot = served.put(5, bytes(1 << 16))
        with receiver(served, "/checkpoint/5/full", buffer_bytes=1 << 20) as sock:
            until(lambda: served.cache.num_readers() == 0)
            with pytest.raises(SnapshotLimitError, match="still being fetched"):
                served.cache.reserve()
            assert not snapshot.closed.is_set()
            sock.settimeout(0.5)
            received = bytearray()
            while len(received) < 1 << 16:
                received += sock.recv(1 << 16)
        # Closed by the receiver: it has what it wanted.
        served.put(6)
        assert snapshot.closed.is_set()


def test_it_is_kept_also_where_the_server_closes_the_connection() -> None:
    with serving(max_snapshots=1, lease_s=0, stall_timeout_s=0.5) as served:
        snapshot = served.put(5, bytes(1 << 16))
        answer = served.ask("/checkpoint/5/full", Connection="close")
        until(lambda: served.cache.num_readers() == 0)
        with pytest.raises(SnapshotLimitError):
            served.cache.reserve()
        served.put(6)  # For the time that a receiver is given at most, and no longer.
    assert answer.body == snapshot.content


def test_status_answers_beside_readers_that_stall() -> None:
    with serving() as served, ExitStack() as stack:
        served.put(5, LARGE)
        for _ in range(6):
            stack.enter_context(receiver(served, "/checkpoint/5/full"))
        assert json.loads(served.ask("/status").body)["clients"] == 6


def test_where_all_places_are_busy_the_next_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "max_connections", lambda: 3)
    with serving() as served, ExitStack() as stack:
        served.put(5, LARGE)
        first, *_others = [stack.enter_context(receiver(served, "/checkpoint/5/full")) for _ in range(3)]
        late = stack.enter_context(closing(socket.create_connection(("127.0.0.1", served.server.port), timeout=20)))
        late.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        late.settimeout(0.2)
        with pytest.raises(TimeoutError):
            late.recv(1)
        late.settimeout(20)
        first.close()
        assert read_rest(late).startswith(b"HTTP/1.1 200 ")


def test_the_last_place_is_kept_while_nobody_else_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "max_connections", lambda: 1)
    with (
        serving() as served,
        closing(socket.create_connection(("127.0.0.1", served.server.port), timeout=0.2)) as sock,
    ):
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.settimeout(20)
        sock.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_rest(sock).startswith(b"HTTP/1.1 200 ")


def test_the_head_of_a_request_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_slots, "NEWCOMER_S", 0.1)
    monkeypatch.setattr(listener, "_SWEEP_S", 0.05)
    with serving() as served, ExitStack() as stack:
        address = ("127.0.0.1", served.server.port)
        for sent in (b"", b"GET /status HTTP/1.1\r\nHost:", b"POST /checkpoint/5/sl"):
            sock = stack.enter_context(closing(socket.create_connection(address, timeout=20)))
            sock.sendall(sent)
            assert read_rest(sock) == b""


def test_who_shows_no_token_keeps_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_slots, "NEWCOMER_S", 0.1)
    monkeypatch.setattr(listener, "_SWEEP_S", 0.05)
    with serving(token="secret") as served:
        with (
            closing(socket.create_connection(("127.0.0.1", served.server.port), timeout=20)) as sock,
            contextlib.suppress(ConnectionError),
        ):
            while True:
                sock.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = sock.recv(1 << 16)
                if not answer:
                    break
                assert answer.startswith(b"HTTP/1.1 401 ")
        connections = set()
        with served.proved() as peer:
            for _ in range(3):
                response = peer.get("/status", headers={}, expected_status=200, answer_within_s=20)
                assert peer.read_body(response, max_bytes=1 << 16)
                threading.Event().wait(0.1)
                connections.add(id(peer._socket))
            assert len(connections) == 1


def test_a_body_that_comes_slowly_holds_no_snapshot() -> None:
    with serving(stall_timeout_s=0.5) as served:
        snapshot = served.put(5)
        with closing(socket.create_connection(("127.0.0.1", served.server.port), timeout=20)) as sock:
            sock.sendall(b"POST /checkpoint/5/slices HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            until(lambda: served.server._slots.num_open == 1)
            served.cache.retire(snapshot.snapshot_id, even_if_needed=True)
            assert snapshot.closed.is_set()
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


HOSTILE = [
    b"GET /checkpoint/%ff%fe/full HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /checkpoint/\xff\xfe/full HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /checkpoint/" + b"9" * 100_000 + b"/full HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /checkpoint/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /checkpoint/5%2f..%2ffull/full HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /checkpoint/5/full?snapshot=" + b"a" * 4000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /checkpoint/5/full?snapshot=%ff%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /status HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
    b"GET /status HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"\r\n\r\n\r\nnonsense\r\n\r\n",
]


def test_nonsense_is_refused_and_the_next_one_served() -> None:
    with serving(max_wait_s=0.1) as served:
        snapshot = served.put(5)
        for request in HOSTILE:
            with closing(socket.create_connection(("127.0.0.1", served.server.port), timeout=20)) as sock:
                with contextlib.suppress(OSError):
                    sock.sendall(request)
                    sock.shutdown(socket.SHUT_WR)
                head = read_rest(sock)
            assert head == b"" or head.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), request[:100]
            assert served.ask("/checkpoint/5/full").body == snapshot.content


def test_nothing_that_a_peer_sent_gets_into_a_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bit of a good request is flipped on the way: the log must not have the secret that somebody put into it."""
    # Without the line that has them close, or with half of a head, connections stay open for a while.
    monkeypatch.setattr(connection_slots, "NEWCOMER_S", 0.1)
    monkeypatch.setattr(listener, "_SWEEP_S", 0.05)
    monkeypatch.setattr(server_module, "_KEEP_ALIVE_S", 0.05)
    caplog.set_level(logging.DEBUG)
    good = (
        b"GET /checkpoint/5/metadata?wait=0 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sesame-0123456789\r\n"
        b"Accept-Encoding: identity\r\nUser-Agent: pytest/1.0\r\nConnection: close\r\n\r\n"
    )
    with serving(max_wait_s=0.1) as served:
        served.put(5)
        answers = []
        for position in range(len(good) - 4):
            for bit in (1 << position % 8, 1 << (position + 3) % 8):
                damaged = good[:position] + bytes([good[position] ^ bit]) + good[position + 1 :]
                with closing(socket.create_connection(("127.0.0.1", served.server.port), timeout=20)) as sock:
                    sock.sendall(damaged)
                    answers.append(read_rest(sock))
    assert len(answers) >= 300
    assert sum(answer.startswith(b"HTTP/1.1 200 ") for answer in answers) >= 20
    assert sum(answer.startswith(b"HTTP/1.0 400 ") for answer in answers) >= 20
    assert not any(b"sesame" in answer for answer in answers)
    # Those whose request was good all the same have a line each of the audit, as they should.
    records = [record for record in caplog.records if record.name != "ft_transport.audit"]
    logged = [record.getMessage() + (record.exc_text or "") for record in records]
    assert not any(record.exc_info for record in caplog.records)
    for sent in ("sesame", "0123456789", "trainer", "checkpoint", "wait", "Bearer"):
        assert not any(sent in line for line in logged), (sent, logged)
    assert any("malformed" in line for line in logged)
    assert sum(map(len, logged)) < 1000


def test_a_handler_that_fails_is_logged_without_what_it_was_given(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_cache: object) -> None:
        raise ValueError("what the peer sent")

    monkeypatch.setattr(SnapshotCache, "newest", fail)
    with serving() as served:
        assert served.ask("/status").status == 500
        assert b"peer" not in served.ask("/status").body
    failures = [record.getMessage() for record in caplog.records]
    assert len(failures) == 1
    assert "ValueError at test_server_trouble.py" in failures[0]
    assert "what the peer sent" not in caplog.text


@pytest.mark.parametrize("wait", [True, False])
def test_close_cuts_running_transfers_and_waiting_requests(wait: bool) -> None:
    waiting = threading.Event()

    def fresh(_step: int | None) -> int:
        waiting.set()
        return 10

    with serving(fresh_snapshot=fresh) as served:
        snapshot = served.put(5, LARGE)
        with (
            receiver(served, "/checkpoint/5/full") as sock,
            closing(socket.create_connection(("127.0.0.1", served.server.port), timeout=20)) as held,
        ):
            held.sendall(b"GET /checkpoint/latest/full HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert waiting.wait(20)
            until(lambda: _sending_threads() == 1)
            served.server.close(wait=wait)
            served.cache.clear()
            until(lambda: _sending_threads() == 0)
            assert len(read_rest(sock)) < len(LARGE)
            assert not read_rest(held).startswith(b"HTTP/1.1 2")
            assert snapshot.closed.wait(20)
        served.server.close(wait=True)  # A second time, and this one waits where the first did not.
        with pytest.raises(ConnectionError):
            served.ask("/status")


def test_the_loop_is_one_that_can_sendfile_whatever_the_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_loop() -> asyncio.AbstractEventLoop:
        raise AssertionError("the loop of the process (uvloop, say) has no sendfile")

    monkeypatch.setattr(asyncio, "new_event_loop", other_loop)
    with serving() as served:
        snapshot = served.put(5)
        assert served.ask("/checkpoint/5/full").body == snapshot.content


def test_a_server_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(RequestGuard, "add_to", fail)
    with pytest.raises(OSError, match="no room"), serving():
        pass
