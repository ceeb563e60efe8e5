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
from served_memory import MemorySnapshot, Serving, serving, until

from ft_transport.errors import SnapshotError, SnapshotLimitError
from ft_transport.http import body_sender
from ft_transport.http import server as server_module
from ft_transport.http.server import SnapshotServer

# More than the socket buffers of both ends take.
LARGE = bytes(1 << 20) * 48


@contextmanager
def receiver(served: Serving, path: str, *, buffer_bytes: int = 1 << 14) -> Iterator[socket.socket]:
    """A connection that has asked and read the first byte of the answer, and then reads no more by itself."""
    with closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.settimeout(20)
        sock.connect(("127.0.0.1", served.server.port))
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
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


@pytest.mark.parametrize("end", ["stall", "shutdown"])
def test_no_thread_goes_on_sending(end: str) -> None:
    with serving(stall_timeout_s=0.3 if end == "stall" else 60) as served:
        snapshot = served.put(5, LARGE)
        with receiver(served, "/checkpoint/5/full"):
            until(lambda: _sending_threads() == 1)
            if end == "shutdown":
                served.server.close(wait=True)
            else:
                served.cache.clear()
                assert snapshot.closed.wait(20)
            until(lambda: _sending_threads() == 0)


def test_where_nobody_tells_what_was_acknowledged_the_kernel_s_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_sender, "_acked_bytes", lambda _connected: 0)
    with serving(stall_timeout_s=0.3) as served:
        content = served.put(5, LARGE).content
        assert served.ask("/checkpoint/5/full").body == content
        with receiver(served, "/checkpoint/5/full") as sock:
            assert len(read_rest_after(sock, 1.5)) < len(content)


def test_whatever_ends_the_sending_ends_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_body: object) -> None:
        raise MemoryError("no memory today")

    monkeypatch.setattr(body_sender._Body, "send", fail)
    with serving() as served:
        served.put(5, LARGE)
        with receiver(served, "/checkpoint/5/full") as sock:
            assert len(read_rest(sock)) < len(LARGE)
        until(lambda: served.cache.num_readers() == 0)


def read_rest_after(sock: socket.socket, pause_s: float) -> bytes:
    """What a receiver gets that reads nothing for a while."""
    threading.Event().wait(pause_s)
    return read_rest(sock)


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


def test_too_many_connections_are_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_MAX_CONNECTIONS", 3)
    with serving() as served:
        served.put(5, LARGE)
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(receiver(served, "/checkpoint/5/full"))
            with closing(socket.create_connection(("127.0.0.1", served.server.port), timeout=20)) as sock:
                head = read_rest(sock)
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nRetry-After: 1\r\n" in head

        def answers() -> bool:
            try:
                return served.ask("/status").status == 200
            except ConnectionError:
                return False

        until(answers)


HOSTILE = [
    b"GET /checkpoint/%ff%fe/full HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /checkpoint/\xff\xfe/full HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /checkpoint/" + b"9" * 100_000 + b"/full HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /checkpoint/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /checkpoint/5%2f..%2ffull/full HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /checkpoint/5/full?snapshot=" + b"a" * 4000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /checkpoint/5/full?snapshot=%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /status HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
    b"GET /status HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"\r\n\r\n\r\nnonsense\r\n\r\n",
]


@pytest.mark.parametrize("request_", HOSTILE, ids=range(len(HOSTILE)))
def test_nonsense_is_refused_and_the_next_one_served(request_: bytes) -> None:
    with serving(max_wait_s=0.1) as served:
        snapshot = served.put(5)
        with closing(socket.create_connection(("127.0.0.1", served.server.port), timeout=20)) as sock:
            try:
                sock.sendall(request_)
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
            head = read_rest(sock)
        assert head == b"" or head.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
        assert served.ask("/checkpoint/5/full").body == snapshot.content


def test_a_request_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ft_transport")
    with serving() as served:
        served.put(5)
        served.ask("/checkpoint/x%0d%0aforged/full")
    refusals = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(refusals) == 1
    assert "\n" not in refusals[0]


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
            held.sendall(b"GET /checkpoint/latest/full HTTP/1.1\r\nHost: x\r\n\r\n")
            assert waiting.wait(20)
            served.server.close(wait=wait)
            served.cache.clear()
            assert len(read_rest(sock)) < len(LARGE)
            assert not read_rest(held).startswith(b"HTTP/1.1 2")
            assert snapshot.closed.wait(20)
        served.server.close(wait=True)  # A second time, and this one waits where the first did not.
        with pytest.raises(ConnectionError):
            served.ask("/status")


def test_a_snapshot_that_is_finished_after_the_shutdown_is_freed() -> None:
    with serving() as served:
        served.cache.reserve()
        served.server.close(wait=True)
        served.cache.clear()
        snapshot = MemorySnapshot(5, b"late")
        served.cache.put(snapshot)
        assert snapshot.closed.is_set()
        with pytest.raises(SnapshotError, match="shut down"):
            served.cache.reserve()


def test_the_loop_is_one_that_can_sendfile_whatever_the_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_loop() -> asyncio.AbstractEventLoop:
        raise AssertionError("the loop of the process (uvloop, say) has no sendfile")

    monkeypatch.setattr(asyncio, "new_event_loop", other_loop)
    with serving() as served:
        snapshot = served.put(5)
        assert served.ask("/checkpoint/5/full").body == snapshot.content


def test_a_server_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_self: SnapshotServer) -> None:
        raise OSError("no room")

    monkeypatch.setattr(SnapshotServer, "_start", fail)
    with pytest.raises(OSError, match="no room"), serving():
        pass
