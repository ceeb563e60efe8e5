"""Arenas: reusable host buffers, each one anonymous memory file that the kernel can send from.

A fresh mapping is filled at about a tenth of the speed of memory, because every page has to be found and cleared
first; so arenas are made resident once and then reused for snapshot after snapshot.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Final

import torch

from ft_transport.errors import SnapshotError, SnapshotLimitError
from ft_transport.wire.manifest import MAX_HEADER_BYTES

HEADER_ROOM_BYTES: Final = -(-(MAX_HEADER_BYTES + 8) // (2 << 20)) * (2 << 20)
"""Where the tensor data begins in an arena's file.

The header is encoded after the copy, when the digests are known, and is put right before the data. The room before it
is a hole in the file and takes no memory.
"""
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14, include/uapi/asm-generic/mman-common.h


class Arena:
    """One memory file with room for ``capacity_bytes`` of tensor data, mapped and resident.

    Not thread-safe: whoever holds it writes it, and after that nobody does until it returns to its pool.

    Attributes:
        capacity_bytes: Room for data.
        data: ``uint8 [capacity_bytes]``, the mapping as a CPU tensor.
        view: The same memory for those who do not need a tensor.
        descriptor: The memory file; data begins at ``HEADER_ROOM_BYTES``.
    """

    def __init__(self, capacity_bytes: int, *, pin: Callable[[torch.Tensor], Callable[[], None]] | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.descriptor = _memory_file()
        self._unpin: Callable[[], None] | None = None
        try:
            os.ftruncate(self.descriptor, HEADER_ROOM_BYTES + capacity_bytes)
            self._mapping = mmap.mmap(self.descriptor, capacity_bytes, offset=HEADER_ROOM_BYTES)
            _make_resident(self._mapping)
            self.data = torch.frombuffer(self._mapping, dtype=torch.uint8)
            self.view = memoryview(self._mapping)
            if pin is not None:
                self._unpin = pin(self.data)
        except BaseException:
            os.close(self.descriptor)
            raise

    def write_header(self, header: bytes) -> int:
        """Puts ``header`` right before the data. Returns the position in the file where it begins."""
        start = HEADER_ROOM_BYTES - len(header)
        written = 0
        while written < len(header):
            written += os.pwrite(self.descriptor, memoryview(header)[written:], start + written)
        return start

    def close(self) -> None:
        """Gives the memory back once the last tensor that looks into it is gone."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        os.close(self.descriptor)
        # The tensor keeps the mapping alive for as long as anybody holds it.
        del self.data, self.view, self._mapping


class ArenaPool:
    """At most ``max_arenas`` arenas, handed out one holder each and reused. Thread-safe.

    Args:
        max_arenas: How many may exist at once.
        pin: Page-locks an arena for device copies and returns the function that undoes it; ``None`` without a device.
    """

    def __init__(self, max_arenas: int, *, pin: Callable[[torch.Tensor], Callable[[], None]] | None = None) -> None:
        self._max_arenas = max_arenas
        self._pin = pin
        self._lock = threading.Lock()
        self._free: list[Arena] = []
        self._num_taken = 0
        self._closed = False

    def take(self, data_bytes: int) -> Arena:
        """An arena with room for ``data_bytes``: a free one that is large enough, or else a new one.

        Raises:
            SnapshotLimitError: Every arena is taken.
            SnapshotError: There is not enough memory, or the pool was closed.
        """
        with self._lock:
            if self._closed:
                raise SnapshotError("expected an open transport, got one that was shut down")
            fitting = [arena for arena in self._free if arena.capacity_bytes >= data_bytes]
            if fitting:
                arena = min(fitting, key=lambda candidate: candidate.capacity_bytes)
                self._free.remove(arena)
                self._num_taken += 1
                return arena
            if self._num_taken >= self._max_arenas:
                raise SnapshotLimitError(
                    f"expected at most {self._max_arenas} snapshots alive at once (max_snapshots), and all of them are "
                    "still being written or read"
                )
            # What is too small for today's state is of no more use.
            outgrown, self._free = self._free, []
            self._num_taken += 1
        for arena in outgrown:
            arena.close()
        page = mmap.PAGESIZE
        try:
            return Arena(max(-(-data_bytes // page) * page, page), pin=self._pin)
        except BaseException as error:
            with self._lock:
                self._num_taken -= 1
            if isinstance(error, (OSError, OverflowError)):
                raise SnapshotError(f"expected {data_bytes} bytes of host memory for a snapshot: {error}") from error
            raise

    def give_back(self, arena: Arena) -> None:
        """Returns an arena that nobody reads any more."""
        with self._lock:
            self._num_taken -= 1
            keep = not self._closed
            if keep:
                self._free.append(arena)
        if not keep:
            arena.close()

    def close(self) -> None:
        """Frees what is free now, and the rest as it comes back."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for arena in free:
            arena.close()


def _memory_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("ft-transport-snapshot", os.MFD_CLOEXEC)
    with tempfile.NamedTemporaryFile(prefix="ft-transport-snapshot-") as file:
        return os.dup(file.fileno())


def _make_resident(mapping: mmap.mmap) -> None:
    if sys.platform == "linux":
        try:
            mapping.madvise(_MADV_POPULATE_WRITE)
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # no memory
                raise
            # A kernel before 5.14: touched page by page below.
    for position in range(0, len(mapping), mmap.PAGESIZE):
        mapping[position] = 0
