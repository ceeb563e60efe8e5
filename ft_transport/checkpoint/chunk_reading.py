"""Reads the bytes that each rank needs from the data files of a checkpoint. By default one rank reads each chunk.

A chunk is `CHUNK_BYTES` bytes of one file. First, the ranks tell each other which chunks they need. Each chunk is
assigned to one of the ranks that need it, such that these ranks read similar numbers of chunks. This rank reads the
chunk, verifies it, and sends it to the other ranks that need it. All ranks process the chunks in the same order, which
prevents deadlocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ft_transport.checkpoint.chunk_reader import Ahead, ChunkReader, DataFiles
from ft_transport.checkpoint.stored_files import CHUNK_IS_GOOD, ReadRetries
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.gloo_exchange import GlooExchange
from ft_transport.coordination.votes import AbandonedError
from ft_transport.wire.slices import Slice
from ft_transport.wire.snapshot import Memory, copy_out, put

T = TypeVar("T")

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
            chunks = self._chunks_of(need)
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
            receiving = Ahead(self._begin_receive, [chunk for chunk in involved if not is_own[chunk]])
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

    def _chunks_of(self, need: Need) -> range:
        return self._files.chunks_between(need.file, need.piece.start, need.piece.end)

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
        while self._needs and self._chunks_of(self._needs[0])[-1] <= chunk:
            self._put(self._needs.popleft())
        # The needs are in order of the file, so no later need uses an earlier chunk.
        first = self._chunks_of(self._needs[0])[0] if self._needs else self._files.num_chunks
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
        for chunk in self._chunks_of(need):
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
