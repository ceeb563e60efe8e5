"""Events for who watches: their form, their number, and who does not read them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from served_memory import Serving, serving, until
from watching import read_event

from ft_transport.http.event_stream import MAX_WATCHERS
from ft_transport.telemetry.recorder import Recorder
from ft_transport.telemetry.watch import Watch


class Counted:
    """A part that counts how often it is asked."""

    def __init__(self, text: str = "") -> None:
        self.num_asked = 0
        self.text = text

    def __call__(self) -> object:
        self.num_asked += 1
        return {"number": self.num_asked, "text": self.text}


@pytest.fixture
def part() -> Counted:
    return Counted()


@pytest.fixture
def served(part: Counted) -> Iterator[Serving]:
    watch = Watch(Recorder())
    watch.tell("part", part)
    with serving(watch=watch) as running:
        yield running


def test_events_are_framed_and_follow_each_other(served: Serving) -> None:
    with closing(served.connect()) as http:
        http.request("GET", "/events")
        response = http.getresponse()
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        lines = [response.readline() for _ in range(4)]
        assert lines[:2] == [b"retry: 2000\n", b"\n"]
        assert lines[2].startswith(b'data: {"')
        assert lines[3] == b"\n"
        first, second = read_event(response), read_event(response)

    assert second["part"]["number"] == first["part"]["number"] + 1


def test_all_who_watch_cost_as_much_as_one_and_nobody_costs_nothing(served: Serving, part: Counted) -> None:
    with ExitStack() as open_, closing(served.connect()) as first:
        first.request("GET", "/events")
        response = first.getresponse()
        read_event(response)
        for _ in range(5):
            other = open_.enter_context(closing(served.connect()))
            other.request("GET", "/events")
            read_event(other.getresponse())
        numbers = [read_event(response)["part"]["number"] for _ in range(3)]
        assert numbers[2] - numbers[0] == 2
    streams = served.server._watch_routes._events
    until(lambda: streams.num_watchers == 0)
    assert streams._pump is None


def test_too_many_are_told_to_come_back(served: Serving) -> None:
    with ExitStack() as open_:
        for _ in range(MAX_WATCHERS):
            http = open_.enter_context(closing(served.connect()))
            http.request("GET", "/events")
            assert http.getresponse().status == 200
        for _ in range(100 - MAX_WATCHERS):
            refused = served.ask("/events")
            assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
        # The rest of the server goes on.
        assert served.ask("/state").status == 200
    until(lambda: served.server._watch_routes._events.num_watchers == 0)
    with closing(served.connect()) as http:
        http.request("GET", "/events")
        assert http.getresponse().status == 200


def test_who_does_not_read_is_cut_off_and_costs_others_nothing() -> None:
    watch = Watch(Recorder())
    watch.tell("part", Counted("x" * (4 << 20)))
    with serving(watch=watch) as served:
        streams = served.server._watch_routes._events
        streams._write_s = 0.2
        with socket.socket() as stalled, closing(served.connect()) as http:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect(("127.0.0.1", served.server.port))
            stalled.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            until(lambda: streams.num_watchers == 1)
            http.request("GET", "/events")
            response = http.getresponse()
            first = read_event(response)["part"]["number"]
            until(lambda: streams.num_watchers == 1)
            assert read_event(response)["part"]["number"] > first


@pytest.mark.parametrize("path", ["/events", "/job/events"])
def test_who_watches_does_not_hold_up_the_end(path: str) -> None:
    with serving() as served, ExitStack() as open_:
        for _ in range(MAX_WATCHERS):
            http = open_.enter_context(closing(served.connect()))
            http.request("GET", path)
            read_event(http.getresponse())
        began_s = time.monotonic()
        served.server.close(wait=True)
        took_s = time.monotonic() - began_s
    assert took_s < 3.0


def test_a_part_that_hangs_holds_up_neither_the_server_nor_its_end() -> None:
    is_asked, may_end = threading.Event(), threading.Event()

    def hanging() -> object:
        is_asked.set()
        may_end.wait(20)
        return None

    watch = Watch(Recorder())
    watch.tell("part", hanging)
    try:
        with serving(watch=watch) as served, closing(served.connect()) as http:
            http.request("GET", "/events")
            http.getresponse().readline()
            assert is_asked.wait(20)
            assert served.ask("/status").status == 200
            began_s = time.monotonic()
            served.server.close(wait=True)
            assert time.monotonic() - began_s < 3.0
    finally:
        may_end.set()
