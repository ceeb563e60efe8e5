"""Live memory is served as any file; its digests have a route of their own, and no slow receiver keeps it."""

from __future__ import annotations

import socket
from contextlib import closing
from http.client import IncompleteRead

import pytest
from certificates import Issued
from encrypted_transports import connection
from lent_memory import lent
from served_memory import MemorySnapshot, serving, until

DATA = bytes(range(256)) * 4096
LARGE = DATA * 48
"""More than the socket buffers of both ends take."""


def test_the_file_its_parts_its_header_and_its_digests() -> None:
    with serving() as served, lent(served, DATA) as memory:
        snapshot = served.cache.newest()
        assert isinstance(snapshot, MemorySnapshot)
        assert served.ask("/checkpoint/5/full").body == snapshot.content
        part = served.ask("/checkpoint/5/full", Range="bytes=100-700099")
        assert (part.status, part.body) == (206, snapshot.content[100:700100])
        assert served.ask("/checkpoint/5/metadata").body == snapshot.header[8:]
        assert served.ask("/checkpoint/5/full", "HEAD").body == b""
        digests = served.ask(f"/checkpoint/5/digests?snapshot={snapshot.snapshot_id}")
        assert (digests.status, digests.body.decode()) == (200, memory.encoded_digests())
        until(lambda: memory.num_pinned == 0)
        served.put(6)
        assert served.ask("/checkpoint/6/digests").status == 404, "those of a file are in its header"


@pytest.mark.parametrize(("is_encrypted", "default_timeout_s"), [(False, None), (False, 60.0), (True, None)])
def test_a_receiver_that_takes_its_time_holds_no_memory(
    issued: Issued, is_encrypted: bool, default_timeout_s: float | None
) -> None:
    own, before = issued if is_encrypted else None, socket.getdefaulttimeout()
    with serving(tls=own.files if own is not None else None) as served, lent(served, LARGE) as memory:
        socket.setdefaulttimeout(default_timeout_s)
        try:
            with closing(connection(served.server.port, own)) as http:
                http.request("GET", "/checkpoint/5/full")
                response = http.getresponse()
                until(lambda: served.cache.num_readers() == 1)
                if is_encrypted:
                    # The sending thread waits for this receiver now; the owner of the memory does not.
                    until(lambda: memory.num_pinned == 0)
                else:
                    for _ in range(20):
                        num_before = memory.num_unpinned
                        until(lambda num_before=num_before: memory.num_unpinned > num_before)  # type: ignore[misc]
                assert response.read().endswith(LARGE)
        finally:
            socket.setdefaulttimeout(before)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_memory_that_is_lost_cuts_the_answer_short(issued: Issued, is_encrypted: bool) -> None:
    own = issued if is_encrypted else None
    with serving(tls=own.files if own is not None else None) as served, lent(served, LARGE) as memory:
        with closing(connection(served.server.port, own)) as http:
            http.request("GET", "/checkpoint/5/full")
            response = http.getresponse()
            memory.is_lost = True
            with pytest.raises((OSError, IncompleteRead)):
                response.read()
        with closing(connection(served.server.port, own)) as http:
            http.request("GET", "/checkpoint/5/digests")
            assert http.getresponse().status >= 400
