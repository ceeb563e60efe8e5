"""Copies and digests host memory as fast as memory allows."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from ft_transport.errors import SnapshotError
from ft_transport.runtime.signal_safe import ThreadRefusedError
from ft_transport.runtime.threads import ExecutorClosedError, SafeExecutor
from ft_transport.state.tensors import Column
from ft_transport.wire.chunks import PLAIN, ChunkTable, Digester

T = TypeVar("T")
R = TypeVar("R")

_MIN_SHARE_BYTES: Final = 1 << 20
"""Smallest share of a copy for one thread. For less, starting the thread takes longer than the copy."""

_LOWEST_PRIORITY: Final = 19


@dataclass(frozen=True, slots=True, eq=False)
class HostCopies:
    """Copies of ``num_bytes[i]`` bytes from address ``sources[i]`` to ``targets[i]``.

    The caller keeps the memory of sources and targets alive. Arrays rather than objects: a state may have tens of
    thousands of tensors, and the caller holds the lock.
    """

    targets: Column
    sources: Column
    num_bytes: Column


class HostCopier:
    """A pool of threads that copy and digest memory. Thread-safe.

    The threads copy with ``ctypes.memmove``, which releases the GIL. torch's own copy would start intra-op threads,
    which compete with those of the training thread.

    Args:
        num_threads: Number of threads that copy.
        is_patient: Whether nobody waits for digests. Then one further thread computes them, and yields to training.
    """

    def __init__(self, num_threads: int, *, is_patient: bool = False) -> None:
        self._num_threads = num_threads
        self._pool = SafeExecutor(num_threads, "ft-transport-copy")
        self._digesting = SafeExecutor(1, "ft-transport-digest") if is_patient else self._pool
        self._is_patient = is_patient

    def copy(self, copies: HostCopies) -> None:
        """Copy everything, with the same number of bytes on each thread. Return when all copies are complete."""
        total = int(copies.num_bytes.sum())
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
            # Wait even if a signal handler raises: the caller may free the memory after this call.
            for future in futures:
                future.exception()

    def digests(self, data: memoryview, chunks: ChunkTable, digester: Digester = PLAIN) -> list[int]:
        """Return the digest of each chunk of ``data``, computed on all threads."""
        if self._is_patient:
            self._submit(_yield_to_others, None, self._digesting)

        def digest_of(index: int) -> int:
            start, end = chunks.range_of(index, index + 1)
            return digester.digest(data[start:end])

        futures = [self._submit(digest_of, index, self._digesting) for index in range(chunks.num_chunks)]
        return [future.result() for future in futures]

    def _submit(self, function: Callable[[T], R], argument: T, pool: SafeExecutor | None = None) -> Future[R]:
        pool = pool if pool is not None else self._pool
        try:
            return pool.submit(function, argument)
        except ExecutorClosedError as error:
            raise SnapshotError("expected an open transport, got one that was shut down") from error
        except ThreadRefusedError as error:
            raise SnapshotError(f"expected to start another thread ({pool.name}): {error}") from error

    def close(self) -> None:
        """Finish running copies, and end the threads."""
        self._pool.shutdown(wait=True)
        self._digesting.shutdown(wait=True)


def _yield_to_others(_: None) -> None:
    """Give the calling thread the lowest priority. On Linux, threads have priorities of their own (``man 7 sched``)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _copy_all(copies: HostCopies) -> None:
    memmove = ctypes.memmove
    for target, source, num_bytes in zip(
        copies.targets.tolist(), copies.sources.tolist(), copies.num_bytes.tolist(), strict=True
    ):
        memmove(target, source, num_bytes)


def _divide(copies: HostCopies, share_bytes: int) -> list[HostCopies]:
    """Divide the copies into shares of ``share_bytes`` bytes. A large copy may be cut into several shares."""
    ends = np.cumsum(copies.num_bytes)
    total = int(ends[-1]) if len(ends) else 0
    shares = []
    for start in range(0, total, share_bytes):
        end = min(start + share_bytes, total)
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, end, side="left"))
        part = slice(first, last + 1)
        targets, sources, num_bytes = (
            copies.targets[part].copy(),
            copies.sources[part].copy(),
            copies.num_bytes[part].copy(),
        )
        skipped = start - int(ends[first] - copies.num_bytes[first])
        targets[0] += skipped
        sources[0] += skipped
        num_bytes[0] -= skipped
        num_bytes[-1] -= int(ends[last]) - end
        shares.append(HostCopies(targets, sources, num_bytes))
    return shares
