"""Copies between host blocks at the speed of memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, NamedTuple, TypeVar

from ft_transport.errors import SnapshotError
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.integrity import digest

T = TypeVar("T")
R = TypeVar("R")

_MIN_SHARE_BYTES: Final = 1 << 20
"""Below this a second thread costs more than it saves."""


class HostCopy(NamedTuple):
    """``num_bytes`` from address ``source`` to address ``target``; the caller keeps both alive and unchanged."""

    target: int
    source: int
    num_bytes: int


def default_num_threads() -> int:
    """Threads that saturate the memory of common machines; more only take cores from the training."""
    return min(8, os.cpu_count() or 1)


class HostCopier:
    """A pool of threads that copy and digest memory. Thread-safe.

    ``ctypes.memmove`` releases the GIL and starts no intra-op threads of torch, which would compete with those of the
    training thread.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ft-transport-copy")

    def copy(self, copies: Sequence[HostCopy]) -> None:
        """Performs all copies, divided evenly by bytes among the threads; returns when the last is done."""
        total = sum(copy.num_bytes for copy in copies)
        if total < 2 * _MIN_SHARE_BYTES or self._num_threads == 1:
            _copy_all(copies)
            return
        shares = _divide(copies, max(total // self._num_threads + 1, _MIN_SHARE_BYTES))
        futures: list[Future[None]] = []
        try:
            futures.extend(self._submit(_copy_all, share) for share in shares)
            for future in futures:
                future.result()
        finally:
            # A signal handler may raise here: nothing may be written any more when the caller lets go of the memory.
            wait(futures)

    def digests(self, data: memoryview, chunks: ChunkTable) -> list[int]:
        """One digest per chunk of ``data``, computed by all threads."""

        def digest_of(index: int) -> int:
            start, end = chunks.range_of(index, index + 1)
            return digest(data[start:end])

        return [future.result() for future in [self._submit(digest_of, index) for index in range(chunks.num_chunks)]]

    def _submit(self, function: Callable[[T], R], argument: T) -> Future[R]:
        try:
            return self._pool.submit(function, argument)
        except RuntimeError as error:
            raise SnapshotError("expected an open transport, got one that was shut down") from error

    def close(self) -> None:
        """Ends the threads after the work that they have."""
        self._pool.shutdown(wait=True)


def _copy_all(copies: Sequence[HostCopy]) -> None:
    memmove = ctypes.memmove
    for copy in copies:
        memmove(copy.target, copy.source, copy.num_bytes)


def _divide(copies: Sequence[HostCopy], share_bytes: int) -> list[list[HostCopy]]:
    """Splits the list into shares of ``share_bytes``, cutting through large copies."""
    shares: list[list[HostCopy]] = []
    share: list[HostCopy] = []
    room = share_bytes
    for copy in copies:
        rest = copy
        while rest.num_bytes > room:
            share.append(HostCopy(rest.target, rest.source, room))
            rest = HostCopy(rest.target + room, rest.source + room, rest.num_bytes - room)
            shares.append(share)
            share, room = [], share_bytes
        share.append(rest)
        room -= rest.num_bytes
    if share:
        shares.append(share)
    return shares
