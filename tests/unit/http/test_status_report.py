"""What a transport tells of whom it serves and from whom it receives, while it does."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch
from served_memory import Serving, serving, until
from transport_settings import settings_of

from ft_transport import HTTPTransport, TransportSettings
from ft_transport.telemetry.process_state import ProcessState, decode_state

TIMEOUT = timedelta(seconds=30)


def told_by(served: Serving) -> ProcessState:
    return decode_state(served.ask("/state").body)


def test_a_receiver_is_told_of_while_it_is_served_and_a_moment_later() -> None:
    data = bytes(48 << 20)
    with serving() as served:
        served.put(5, data)
        with closing(served.connect()) as http:
            http.request("GET", "/checkpoint/5/full", headers={"FT-Replica": "b"})
            response = http.getresponse()
            response.read(1 << 20)
            transport = told_by(served).transport
            assert transport is not None
            (flow,) = transport.sends
            assert (flow.replica, flow.step, flow.is_running, flow.role) == ("b", 5, True, "source")
            assert [(each.step, each.num_readers) for each in transport.snapshots] == [(5, 1)]
            response.read()

        def sends() -> list[Any]:
            return json.loads(served.ask("/state").body)["transport"]["sends"]

        until(lambda: not sends()[0]["is_running"])
        assert sends()[0]["num_bytes"] > len(data)


def test_a_name_that_is_no_text_blinds_nobody() -> None:
    with serving() as served, closing(socket.create_connection(("127.0.0.1", served.server.port), 20)) as receiver:
        snapshot = served.put(5)
        head = b"GET /checkpoint/5/full HTTP/1.1\r\nHost: localhost\r\nFT-Replica: b\xff\r\nConnection: close\r\n\r\n"
        receiver.sendall(head)
        while receiver.recv(1 << 16):
            pass
        transport = told_by(served).transport
    assert transport is not None
    assert [(flow.replica, flow.step) for flow in transport.sends] == [("b?", snapshot.step)]


def test_a_fetch_tells_what_comes_from_whom_while_it_does() -> None:
    told: list[Any] = []

    def look(_progress: object) -> None:
        told.append(receiver.process_status.state())

    def look_from_elsewhere(_progress: object) -> None:
        # Here the fetch cannot go on, and who watches is not held up by it.
        thread = threading.Thread(target=look, args=(None,))
        thread.start()
        thread.join(20)

    local: dict[str, Any] = {"host": "127.0.0.1", "advertise": "127.0.0.1", "same_host": False}
    source = HTTPTransport[Any](TIMEOUT, settings=settings_of(**local, chunk_bytes=1 << 20))
    source.send_checkpoint([], 8, {"w": torch.zeros(1 << 20)}, TIMEOUT)
    peer = source.metadata().split("/")[2]
    try:
        for on_progress in (look, look_from_elsewhere):
            told.clear()
            receiver = HTTPTransport[Any](TIMEOUT, settings=TransportSettings(**local, on_progress=on_progress))
            try:
                receiver.fetch(source.metadata(), 8)
            finally:
                receiver.shutdown()
            assert len(told) == 4
            assert all(each["running"][0].step == 8 for each in told)
            assert receiver.process_status.state()["transport"].receives == ()  # type: ignore[attr-defined]
            if on_progress is look:
                (flow,) = told[-1]["transport"].receives
                assert (flow.peer, flow.step, flow.num_bytes, flow.is_running) == (peer, 8, 3 << 20, True)
    finally:
        source.shutdown()
