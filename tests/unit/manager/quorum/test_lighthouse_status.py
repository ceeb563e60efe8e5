"""The Lighthouse's status page, where strangers may have written: it is read in bounded time, or not at all."""

from __future__ import annotations

import html
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from scripted_peer import Peer, scripted

from manager.quorum.lighthouse_status import parse_status, read_status

HEARTBEAT = '<li class="heartbeat\n {kind}\n">\n {name}: seen {age}s ago\n</li>'
MEMBER = "<b>{name}</b> <br/>\n Step: {step} <br/>\n Manager: {addresses} <br/>"
SPACES = " " * 200_000
HOSTILE_NAMES = (
    "x: seen 1..2s ago",
    "x: seen .s ago",
    "x: seen 0.1s ago: seen ",
    "a\nb",
    "\n",
    "<b>x</b> <br/>\n  Step: 5 <br/>\n  Manager: http://127.0.0.1:1 <br/>",
    SPACES + "a\nb",
    ": seen " * 20_000,
    "[" + "9" * 5_000 + "/1 participants",
    "quorum status: ok",
    "\x1b[2J\x1b]0;mine\x07\u202e",
)


def heartbeat(name: str, kind: str = "", age: str = "0.1") -> str:
    return HEARTBEAT.format(kind=kind, name=html.escape(name), age=age)


def within(seconds: float, action: Callable[[], object]) -> None:
    began_s = time.process_time()
    action()
    assert time.process_time() - began_s < seconds


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: ascii(name[:30]))
@pytest.mark.parametrize("kind", ["", "old"])
def test_a_name_cannot_move_the_terminal_or_take_the_room_of_others(name: str, kind: str) -> None:
    status = parse_status(heartbeat(name, kind) + heartbeat("genuine:1", kind))
    told = status.missing("own:1")
    assert "genuine:1" in told
    assert told.isprintable()
    assert len(told) < 1_000


@pytest.mark.parametrize(
    "page",
    [
        heartbeat(SPACES + "a\nb"),
        '<li class="heartbeat' + SPACES,
        '<li class="heartbeat' * 20_000,
        '<li class="heartbeat">' + SPACES,
        MEMBER.format(name="a:1", step=3, addresses=SPACES + "b").replace("<br/>", "", 2),
        MEMBER.format(name="a:1", step=3, addresses="x" + SPACES + "y<"),
        "<b>" * 100_000,
        "quorum status:" + SPACES,
        "[" + "9" * 300_000,
    ],
    ids=lambda page: ascii(page[:40]),
)
def test_no_page_takes_long(page: str) -> None:
    within(2, lambda: parse_status(page))


def test_numbers_that_are_none_are_left_out() -> None:
    many = "9" * 5_000
    page = heartbeat("a:1", age=many) + heartbeat("b:1", "old", "1.2.3") + heartbeat("c:1", age="٣")
    page += MEMBER.format(name="c:1", step=many, addresses="http://127.0.0.1:1") + f"[{many}/1 participants"
    status = parse_status(page)
    assert (status.alive, status.silent, status.members, status.num_asking) == ((), (), (), None)


@contextmanager
def trickling(piece: bytes) -> Iterator[str]:
    """A server that sends a little more before a reader would give it up."""
    is_over = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        while not is_over.wait(0.02):
            peer.send(piece)

    with scripted(script) as port:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            is_over.set()


@pytest.mark.parametrize("piece", [b"H", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_page_that_trickles_is_given_up(piece: bytes) -> None:
    with trickling(piece) as address:
        began_s = time.monotonic()
        assert read_status(address, 0.1) is None
        assert time.monotonic() - began_s < 5


def test_a_page_without_end_is_read_in_part() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\n\r\n" + heartbeat("a:1").encode() + b" " * (64 << 20))

    with scripted(script) as port:
        status = read_status(f"http://127.0.0.1:{port}", 2.0)
    assert status is None or status.alive == ("a:1",)


def test_what_is_no_answer_is_none() -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"SSH-2.0-x\r\n\r\n" + heartbeat("a:1").encode())

    with scripted(script) as port:
        assert read_status(f"http://127.0.0.1:{port}", 2.0) is None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert read_status(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.1) is None
