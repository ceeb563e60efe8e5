"""A file that lies in shared memory is served as any other; its digests have a route of their own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import IncompleteRead

import pytest
from served_memory import MemorySnapshot, Serving, serving, until

from ft_transport.errors import SnapshotError
from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import encode_digests

DATA = bytes(range(256)) * 400_000


class SharedInMemory:
    """Stands in for ``state.copy_on_write.CopyOnWriteMemory``, after ``wire.snapshot.SharedFile``."""

    def __init__(self, content: bytes) -> None:
        self.content = memoryview(content)
        self.num_borrowers = 0
        self.num_given_back = 0
        self.is_lost = False

    @contextmanager
    def pin(self, start: int, end: int) -> Iterator[list[memoryview]]:
        if self.is_lost:
            raise SnapshotError("it is lost")
        self.num_borrowers += 1
        try:
            middle = (start + end) // 2
            yield [self.content[start:middle], self.content[middle:end]]
        finally:
            self.num_borrowers -= 1
            self.num_given_back += 1

    def encoded_digests(self) -> str:
        if self.is_lost:
            raise SnapshotError("it is lost")
        return encode_digests([digest(self.content)])


class SharedMemory:
    def __init__(self, served: Serving) -> None:
        place = served.cache.reserve()
        self.snapshot = MemorySnapshot(5, DATA)
        self.memory = SharedInMemory(self.snapshot.content)
        self.file, self.snapshot.memory = self.snapshot.memory, self.memory
        close = self.snapshot.close

        def close_file() -> None:
            self.snapshot.memory = self.file
            close()

        self.snapshot.close = close_file  # type: ignore[method-assign]
        served.cache.put(self.snapshot, place)


@pytest.fixture
def served() -> Iterator[Serving]:
    with serving(stall_timeout_s=20.0) as serving_:
        yield serving_


@pytest.fixture
def shared(served: Serving) -> SharedMemory:
    return SharedMemory(served)


def test_the_file_its_parts_and_its_header(served: Serving, shared: SharedMemory) -> None:
    content = shared.snapshot.content
    assert served.ask("/checkpoint/5/full").body == content
    part = served.ask("/checkpoint/5/full", Range="bytes=100-70000099")
    assert (part.status, part.body) == (206, content[100:70000100])
    assert served.ask("/checkpoint/5/metadata").body == shared.snapshot.header[8:]
    assert served.ask("/checkpoint/5/full", "HEAD").body == b""
    until(lambda: shared.memory.num_borrowers == 0)


def test_the_digests_are_there_for_shared_memory_alone(served: Serving, shared: SharedMemory) -> None:
    answer = served.ask(f"/checkpoint/5/digests?snapshot={shared.snapshot.snapshot_id}")
    assert (answer.status, answer.body.decode()) == (200, shared.memory.encoded_digests())
    served.put(6)
    assert served.ask("/checkpoint/6/digests").status == 404


def test_nobody_holds_the_memory_while_a_receiver_does_not_read(served: Serving, shared: SharedMemory) -> None:
    with closing(served.connect()) as http:
        http.request("GET", "/checkpoint/5/full")
        response = http.getresponse()
        for _ in range(20):
            before = shared.memory.num_given_back
            until(lambda before=before: shared.memory.num_given_back > before)  # type: ignore[misc]
        assert response.read() == shared.snapshot.content


def test_a_default_timeout_of_sockets_changes_nothing_of_that(served: Serving, shared: SharedMemory) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(60.0)
    try:
        test_nobody_holds_the_memory_while_a_receiver_does_not_read(served, shared)
    finally:
        socket.setdefaulttimeout(before)


def test_what_is_lost_ends_the_answer_early(served: Serving, shared: SharedMemory) -> None:
    with closing(served.connect()) as http:
        http.request("GET", "/checkpoint/5/full")
        response = http.getresponse()
        shared.memory.is_lost = True
        with pytest.raises((IncompleteRead, ConnectionResetError)):
            response.read()
    assert served.ask("/checkpoint/5/digests").status >= 400
