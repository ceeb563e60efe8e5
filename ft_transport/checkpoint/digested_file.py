"""Writes a new file from front to back, and meanwhile computes the digests of its chunks on another thread."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeAlias

from ft_transport.checkpoint.manifest import CHECKSUM, CHUNK_BYTES, HASHES, FileEntry, HashName, hash_of
from ft_transport.runtime.regular_files import create_file, open_regular
from ft_transport.runtime.threads import SafeExecutor

Buffer: TypeAlias = bytes | memoryview

_BATCH_BYTES: Final = 8 << 20
_MAX_BUFFERS: Final = 512
"""Largest number of buffers in one ``writev`` call; the system accepts 1024 (IOV_MAX)."""
_SYNC_FILE_RANGE_WRITE: Final = 2  # include/uapi/linux/fs.h


class DigestedFile:
    """A new file that is written once, with a digest of each chunk. Not thread-safe. A context manager.

    Args:
        path: Path of the file, which must not exist.
        check: Called before each batch of data; an error that it raises ends the write.
        is_private: Whether only the owner may read the file. Otherwise the umask decides.
        hash_name: Hash function of the digests.
    """

    def __init__(
        self,
        path: Path,
        check: Callable[[], None] = lambda: None,
        *,
        is_private: bool = False,
        hash_name: HashName = CHECKSUM,
    ) -> None:
        self._name = path.name
        self._check = check
        self._descriptor = create_file(path, is_private=is_private)
        self._pool = SafeExecutor(1, "ft-transport-digest")
        self._digesting: Future[None] | None = None
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._hash_name = hash_name
        self._hasher = HASHES[hash_name]()
        self._hashed_bytes = 0
        self._digests: list[str] = []
        self._start_write_back = _write_back_function()
        self._written = 0
        self.position = 0

    def write(self, *buffers: Buffer) -> None:
        """Append the content of buffers. The buffers must not change until `finish` has returned."""
        for buffer in buffers:
            if len(buffer) > _BATCH_BYTES:
                view = memoryview(buffer)
                for start in range(0, len(view), _BATCH_BYTES):
                    self.write(view[start : start + _BATCH_BYTES])
            elif len(buffer):
                self._pending.append(buffer)
                self._pending_bytes += len(buffer)
                self.position += len(buffer)
                if self._pending_bytes >= _BATCH_BYTES or len(self._pending) >= _MAX_BUFFERS:
                    self._flush()

    def finish(self) -> FileEntry:
        """Flush all data to disk, close the file, and return its name, length and digests."""
        try:
            self._flush()
            if self._digesting is not None:
                self._digesting.result()
            if self._hashed_bytes % CHUNK_BYTES:
                self._digests.append(self._hasher.hexdigest())
            os.fsync(self._descriptor)
        finally:
            self.close()
        return FileEntry(self._name, self.position, "".join(self._digests))

    def close(self) -> None:
        """End the thread and close the file, even if the file is incomplete. Idempotent."""
        self._pool.shutdown(wait=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> DigestedFile:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _flush(self) -> None:
        buffers, self._pending = self._pending, []
        num_bytes, self._pending_bytes = self._pending_bytes, 0
        if not buffers:
            return
        self._check()
        if self._digesting is not None:
            self._digesting.result()
        self._digesting = self._pool.submit(self._digest, buffers)
        rest = buffers
        written = 0
        while written < num_bytes:
            count = os.writev(self._descriptor, rest)
            written += count
            if written < num_bytes:
                rest = _without(rest, count)
        if self._start_write_back is not None:
            # Let the disk start to write now, and not only at the fsync in `finish`.
            self._start_write_back(self._descriptor, self._written, num_bytes, _SYNC_FILE_RANGE_WRITE)
        self._written += num_bytes

    def _digest(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            view = memoryview(buffer)
            start = 0
            while start < len(view):
                count = min(len(view) - start, CHUNK_BYTES - self._hashed_bytes % CHUNK_BYTES)
                self._hasher.update(view[start : start + count])
                self._hashed_bytes += count
                start += count
                if not self._hashed_bytes % CHUNK_BYTES:
                    self._digests.append(self._hasher.hexdigest())
                    self._hasher = HASHES[self._hash_name]()


def write_small(path: Path, content: bytes, *, is_private: bool = False, hash_name: HashName = CHECKSUM) -> FileEntry:
    """Write a small file to disk, and return its name, length and digests."""
    with DigestedFile(path, is_private=is_private, hash_name=hash_name) as file:
        file.write(content)
        return file.finish()


def digested(path: Path, check: Callable[[], None], *, hash_name: HashName = CHECKSUM) -> FileEntry:
    """Read an existing file, and return its name, length and digests.

    Args:
        path: Path of the file.
        check: Called after each chunk; an error that it raises ends the read.
        hash_name: Hash function of the digests.
    """
    digests = []
    num_bytes = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while True:
            filled = 0
            while filled < CHUNK_BYTES and (count := file.readinto(buffer[filled:])):
                filled += count
            if filled:
                digests.append(hash_of(hash_name, buffer[:filled]))
                num_bytes += filled
            if filled < CHUNK_BYTES:
                return FileEntry(path.name, num_bytes, "".join(digests))
            check()


def _without(buffers: list[Buffer], count: int) -> list[Buffer]:
    """Return the buffers that remain to be written after the first ``count`` bytes."""
    for position, buffer in enumerate(buffers):
        if count < len(buffer):
            return [memoryview(buffer)[count:], *buffers[position + 1 :]]
        count -= len(buffer)
    return []


def _write_back_function() -> Callable[[int, int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    start: Callable[[int, int, int, int], int] = function
    return start
