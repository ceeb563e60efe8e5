"""Reads the bytes that each rank needs from the data files of a checkpoint. By default one rank reads each chunk.

A chunk is `CHUNK_BYTES` bytes of one file. First, the ranks tell each other which chunks they need. Each chunk is
assigned to one of the ranks that need it, such that these ranks read similar numbers of chunks. This rank reads the
chunk, verifies it, and sends it to the other ranks that need it. All ranks process the chunks in the same order, which
prevents deadlocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ft_transport.checkpoint.manifest import CHUNK_BYTES, FileEntry, HashName
from ft_transport.checkpoint.stored_files import CHUNK_IS_GOOD, ReadRetries, StoredFile
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.gloo_exchange import GlooExchange
from ft_transport.coordination.votes import AbandonedError
from ft_transport.runtime.threads import SafeExecutor
from ft_transport.wire.slices import Slice
from ft_transport.wire.snapshot import Memory, copy_out, put

T = TypeVar("T")

_NUM_READERS: Final = 2
_AHEAD: Final = 4
"""Number of chunks that are read ahead from files, and also received ahead from other ranks."""
_MAX_SENDING: Final = 16
_CHECK_EVERY: Final = 16
_NOBODY: Final = -1


class Need(NamedTuple):
    """A piece of a file that a rank needs, and its destination in memory.

    Attributes:
        file: Index of the file in `DataFiles.files`.
        piece: The needed bytes of the file.
        memory: The destination memory.
        target: The bytes of ``memory`` to which ``piece`` is copied.
        path: Path of the tensor to which the bytes belong, for errors.
    """

    file: int
    piece: Slice
    memory: Memory
    target: Slice
    path: str


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The data files of a checkpoint. The index of a chunk continues from one file to the next.

    Attributes:
        directory: The directory of the files.
        files: Name, length and digests of each file.
        hash_name: Hash function of the digests.
        first_chunks: Index of the first chunk of each file, followed by the total number of chunks.
    """

    directory: Path
    files: tuple[FileEntry, ...]
    hash_name: HashName
    first_chunks: tuple[int, ...]

    @classmethod
    def of(cls, directory: Path, files: Sequence[FileEntry], hash_name: HashName) -> DataFiles:
        """Return the data files, after counting their chunks."""
        first = [0]
        for file in files:
            first.append(first[-1] + -(-file.num_bytes // CHUNK_BYTES))
        return cls(directory, tuple(files), hash_name, tuple(first))

    @property
    def num_chunks(self) -> int:
        """Total number of chunks in all files."""
        return self.first_chunks[-1]

    def place_of(self, chunk: int) -> tuple[int, int, int]:
        """Return the index of the file that contains a chunk, and the chunk's start and end in that file."""
        file = bisect_right(self.first_chunks, chunk) - 1
        start = (chunk - self.first_chunks[file]) * CHUNK_BYTES
        return file, start, min(start + CHUNK_BYTES, self.files[file].num_bytes)

    def chunks_of(self, need: Need) -> range:
        """Return the indices of all chunks that contain needed bytes."""
        first = self.first_chunks[need.file]
        return range(first + need.piece.start // CHUNK_BYTES, first + (need.piece.end - 1) // CHUNK_BYTES + 1)


class _Ahead(Generic[T]):
    """Starts an operation for each chunk, a few chunks ahead of `next`, which returns the operations in order."""

    def __init__(self, begin: Callable[[int], T], chunks: Sequence[int]) -> None:
        self._begin, self._chunks = begin, iter(chunks)
        self._begun = deque(map(begin, islice(self._chunks, _AHEAD)))

    def next(self) -> T:
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
        self._pool = SafeExecutor(_NUM_READERS, "ft-transport-read")
        self._ahead = _Ahead(self._begin, chunks)

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
            self._open[number] = StoredFile(files.directory, files.files[number], files.hash_name, self._retries)
        return number, self._pool.submit(self._open[number].read, start // CHUNK_BYTES)


def read_needs(
    needs: Sequence[Need], files: DataFiles, agreement: Agreement, *, retries: ReadRetries, is_read_once: bool
) -> int:
    """Read the bytes that this rank needs into their destination. Called on all ranks.

    Args:
        needs: The bytes that this rank needs, and their destination.
        files: The files to read.
        agreement: Exchanges data between the ranks, and raises if another rank has failed.
        retries: Retries failed reads.
        is_read_once: Whether one rank reads each chunk and sends it to the others. Otherwise, every rank reads each
            chunk that it needs.

    Returns:
        Number of bytes that this rank has read from files.

    Raises:
        CheckpointDamagedError: A file differs from its digests.
        AbandonedError: Another rank could not read a chunk that this rank needs.
        RankGoneError: A rank did not take part in time.
        OSError: A file cannot be read.
    """

    def read() -> tuple[int, Exception | None]:
        reading = _Reading(needs, files, agreement, retries, is_read_once=is_read_once)
        return reading.run(), reading.failure

    num_bytes, failure = agreement.exchange.ending_on_failure(read)() if is_read_once else read()
    if failure is not None:
        # Raised after the exchange: the other ranks have received every chunk, marked as bad, and need not time out.
        raise failure
    return num_bytes


class _Reading:
    def __init__(
        self,
        needs: Sequence[Need],
        files: DataFiles,
        agreement: Agreement,
        retries: ReadRetries,
        *,
        is_read_once: bool,
    ) -> None:
        self._files = files
        self._retries = retries
        self._exchange = agreement.exchange
        self._check = agreement.check_others
        self._needs = deque(sorted(needs, key=lambda need: (need.file, need.piece.start)))
        wanted = np.zeros(files.num_chunks, dtype=np.bool_)
        for need in self._needs:
            chunks = files.chunks_of(need)
            wanted[chunks.start : chunks.stop] = True
        alone = agreement.size == 1 or not is_read_once
        self._by_rank = wanted[np.newaxis] if alone else _gather_flags(wanted, self._exchange)
        self._rank = 0 if alone else agreement.rank
        self._readers = _choose_readers(self._by_rank)
        self._data: dict[int, memoryview] = {}
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self.failure: Exception | None = None

    def run(self) -> int:
        is_own = self._readers == self._rank
        involved = np.flatnonzero(self._by_rank[self._rank] | is_own).tolist()
        num_bytes = 0
        with ChunkReader(self._files, np.flatnonzero(is_own).tolist(), self._retries) as reader:
            receiving = _Ahead(self._begin_receive, [chunk for chunk in involved if not is_own[chunk]])
            for number, chunk in enumerate(involved):
                if not number % _CHECK_EVERY:
                    self._attempt(self._check)
                if is_own[chunk]:
                    data = self._attempt(reader.next) or self._empty(chunk)
                    num_bytes += len(data) - 1
                    self._send(chunk, data)
                else:
                    work, data = receiving.next()
                    self._exchange.wait(work)
                if self._by_rank[self._rank, chunk]:
                    self._attempt(partial(self._deliver, chunk, data))
            for work, _ in self._sending:
                self._exchange.wait(work)
        assert self.failure is not None or not self._needs, "every needed chunk was read"
        return num_bytes

    def _attempt(self, action: Callable[[], T]) -> T | None:
        """Run ``action`` and return its result; return ``None`` if the action fails or an earlier action has failed.

        The first error is stored in ``failure``. After a failure, this rank still sends chunks, marked as bad, so that
        no other rank waits for them in vain.
        """
        if self.failure is None:
            try:
                return action()
            except Exception as error:
                self.failure = error
        return None

    def _empty(self, chunk: int) -> bytearray:
        """Return zeroed memory for a chunk and one more byte. While that byte is 0, it marks the chunk as bad."""
        _, start, end = self._files.place_of(chunk)
        return bytearray(end - start + 1)

    def _begin_receive(self, chunk: int) -> tuple[Any, bytearray]:
        data = self._empty(chunk)
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        return self._exchange.begin_receive(tensor, int(self._readers[chunk]), chunk), data

    def _send(self, chunk: int, data: bytearray) -> None:
        for rank in np.flatnonzero(self._by_rank[:, chunk]).tolist():
            if rank != self._rank:
                tensor = torch.frombuffer(data, dtype=torch.uint8)
                self._sending.append((self._exchange.begin_send(tensor, rank, chunk), tensor))
                if len(self._sending) > _MAX_SENDING:
                    self._exchange.wait(self._sending.popleft()[0])

    def _deliver(self, chunk: int, data: bytearray) -> None:
        view = memoryview(data)
        if view[-1] != CHUNK_IS_GOOD:
            # Only the rank that read the chunk knows whether it is damaged or could not be read; that rank reports it.
            name = self._files.files[self._files.place_of(chunk)[0]].name
            raise AbandonedError(f"rank {self._readers[chunk]} could not read a chunk of {name}")
        self._data[chunk] = view[:-1]
        while self._needs and self._files.chunks_of(self._needs[0])[-1] <= chunk:
            self._put(self._needs.popleft())
        # The needs are in order of the file, so no later need uses an earlier chunk.
        first = self._files.chunks_of(self._needs[0])[0] if self._needs else self._files.num_chunks
        for done in [each for each in self._data if each < first]:
            del self._data[done]

    def _put(self, need: Need) -> None:
        piece = need.piece
        if piece.loops:
            span = memoryview(b"".join(self._pieces(need)))
            if len(span) != piece.end - piece.start:
                raise AssertionError("the chunks of a need are contiguous")
            gathered = memoryview(bytearray(piece.num_bytes))
            copy_out(span, piece, gathered)
            put(gathered, need.memory, need.target)
        elif need.target.loops:
            put(memoryview(b"".join(self._pieces(need))), need.memory, need.target)
        else:
            start = need.target.start
            for data in self._pieces(need):
                put(data, need.memory, Slice(start, len(data)))
                start += len(data)

    def _pieces(self, need: Need) -> Iterator[memoryview]:
        for chunk in self._files.chunks_of(need):
            _, start, end = self._files.place_of(chunk)
            yield self._data[chunk][max(need.piece.start, start) - start : min(need.piece.end, end) - start]


def _gather_flags(wanted: npt.NDArray[np.bool_], exchange: GlooExchange) -> npt.NDArray[np.bool_]:
    packed = torch.from_numpy(np.packbits(wanted))
    gathered = exchange.all_gather(packed) if len(packed) else [packed] * exchange.size
    return np.stack([np.unpackbits(each.numpy(), count=len(wanted)).astype(np.bool_) for each in gathered])


def _choose_readers(by_rank: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Choose the rank that reads each chunk: of the ranks that need it, the one with the fewest chunks so far."""
    readers = np.full(by_rank.shape[1], _NOBODY, dtype=np.int64)
    loads = [0] * len(by_rank)
    for chunk in range(by_rank.shape[1]):
        wanting = np.flatnonzero(by_rank[:, chunk]).tolist()
        if wanting:
            reader = min(wanting, key=loads.__getitem__)
            loads[reader] += 1
            readers[chunk] = reader
    return readers
