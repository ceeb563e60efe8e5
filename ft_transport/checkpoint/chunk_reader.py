"""Reads and verifies chunks of a checkpoint's data files, several at once and a few ahead of their use."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Final, Generic, TypeVar

from ft_transport.checkpoint.files import CheckpointFiles
from ft_transport.checkpoint.manifest import CHUNK_BYTES, FileEntry, HashName
from ft_transport.checkpoint.stored_files import ReadRetries, StoredFile
from ft_transport.runtime.threads import SafeExecutor

T = TypeVar("T")

AHEAD: Final = 4
"""Least number of chunks that are read ahead."""


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The data files of a checkpoint. The index of a chunk continues from one file to the next.

    Attributes:
        stored: The files of the checkpoint.
        files: Name, length and digests of each file.
        hash_name: Hash function of the digests.
        first_chunks: Index of the first chunk of each file, followed by the total number of chunks.
    """

    stored: CheckpointFiles
    files: tuple[FileEntry, ...]
    hash_name: HashName
    first_chunks: tuple[int, ...]

    @classmethod
    def of(cls, stored: CheckpointFiles, files: Sequence[FileEntry], hash_name: HashName) -> DataFiles:
        """Return the data files, after counting their chunks."""
        first = [0]
        for file in files:
            first.append(first[-1] + -(-file.num_bytes // CHUNK_BYTES))
        return cls(stored, tuple(files), hash_name, tuple(first))

    @property
    def num_chunks(self) -> int:
        """Total number of chunks in all files."""
        return self.first_chunks[-1]

    def place_of(self, chunk: int) -> tuple[int, int, int]:
        """Return the index of the file that contains a chunk, and the chunk's start and end in that file."""
        file = bisect_right(self.first_chunks, chunk) - 1
        start = (chunk - self.first_chunks[file]) * CHUNK_BYTES
        return file, start, min(start + CHUNK_BYTES, self.files[file].num_bytes)

    def chunks_between(self, file: int, start: int, end: int) -> range:
        """Return the indices of all chunks that contain bytes from ``start`` to ``end`` of a file."""
        first = self.first_chunks[file]
        return range(first + start // CHUNK_BYTES, first + (end - 1) // CHUNK_BYTES + 1)


class Ahead(Generic[T]):
    """Starts an operation for each chunk, in order, a few chunks ahead of `next`."""

    def __init__(self, begin: Callable[[int], T], chunks: Sequence[int], ahead: int = AHEAD) -> None:
        self._begin, self._chunks = begin, iter(chunks)
        self._begun = deque(map(begin, islice(self._chunks, ahead)))

    def next(self) -> T:
        """Return the next operation, and start another one."""
        begun = self._begun.popleft()
        self._begun.extend(map(self._begin, islice(self._chunks, 1)))
        return begun


class ChunkReader:
    """Reads and verifies chunks in order, a few chunks ahead of `next`, on its own threads. A context manager.

    Args:
        files: The files to read.
        chunks: Indices of the chunks to read, ascending.
        retries: Retries failed reads.
    """

    def __init__(self, files: DataFiles, chunks: Sequence[int], retries: ReadRetries) -> None:
        self._files = files
        self._retries = retries
        self._open: dict[int, StoredFile] = {}
        num_readers = files.stored.num_readers
        self._pool = SafeExecutor(num_readers, "ft-transport-read")
        # One chunk for each reader, and some that the caller has not taken yet.
        self._ahead = Ahead(self._begin, chunks, max(AHEAD, num_readers + AHEAD // 2))

    def next(self) -> bytearray:
        """Return the bytes of the next chunk, followed by the byte `CHUNK_IS_GOOD`.

        Raises:
            CheckpointDamagedError: The chunk differs from its digest.
            OSError: The chunk cannot be read.
        """
        file, reading = self._ahead.next()
        chunk = reading.result()
        # Close finished files: each saving rank wrote one, and a process may not have so many open.
        for done in [number for number in self._open if number < file]:
            self._open.pop(done).close()
        return chunk

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._open.values():
            file.close()

    def _begin(self, chunk: int) -> tuple[int, Future[bytearray]]:
        files = self._files
        number, start, _ = files.place_of(chunk)
        if number not in self._open:
            self._open[number] = StoredFile(files.stored, files.files[number], files.hash_name, self._retries)
        return number, self._pool.submit(self._open[number].read, start // CHUNK_BYTES)
