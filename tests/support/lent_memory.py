"""Live memory that a server reads in place, as a test lends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from served_memory import MemorySnapshot, Serving

from ft_transport.errors import SnapshotError
from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import encode_digests


class LentMemory:
    """Stands in for live memory, after ``wire.snapshot.SharedFile``."""

    def __init__(self, snapshot: MemorySnapshot) -> None:
        self._content = memoryview(snapshot.content)
        self._num_header_bytes = len(snapshot.header)
        self.num_pinned = self.num_unpinned = 0
        self.is_lost = False

    @contextmanager
    def pin(self, start: int, end: int) -> Iterator[list[memoryview]]:
        if self.is_lost:
            raise SnapshotError("it is lost")
        self.num_pinned += 1
        try:
            middle = (start + end) // 2
            yield [self._content[start:middle], self._content[middle:end]]
        finally:
            self.num_pinned -= 1
            self.num_unpinned += 1

    @contextmanager
    def pin_data(self, start: int, end: int) -> Iterator[list[memoryview]]:
        with self.pin(start + self._num_header_bytes, end + self._num_header_bytes):
            yield [self._content[self._num_header_bytes + start : self._num_header_bytes + end]]

    def encoded_digests(self) -> str:
        if self.is_lost:
            raise SnapshotError("it is lost")
        return encode_digests([digest(self._content)])


@contextmanager
def lent(served: Serving, data: bytes) -> Iterator[LentMemory]:
    """Live memory in the place of a snapshot's file."""
    place = served.cache.reserve()
    snapshot = MemorySnapshot(5, data)
    file, memory = snapshot.memory, LentMemory(snapshot)
    snapshot.memory = memory
    close = snapshot.close

    def close_file() -> None:
        snapshot.memory = file
        close()

    snapshot.close = close_file  # type: ignore[method-assign]
    served.cache.put(snapshot, place)
    served.server.wake()
    yield memory
