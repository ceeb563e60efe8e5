"""Writes a new file of a checkpoint, and meanwhile computes the digests of its chunks on another thread."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from ft_transport.checkpoint.files import Buffer, CheckpointFiles, DirectoryFiles
from ft_transport.checkpoint.manifest import CHECKSUM, CHUNK_BYTES, HASHES, FileEntry, HashName, hash_of
from ft_transport.runtime.regular_files import open_regular
from ft_transport.runtime.threads import SafeExecutor

_BATCH_BYTES: Final = 8 << 20
_MAX_BUFFERS: Final = 512
"""Largest number of buffers in one ``writev`` call; the system accepts 1024 (IOV_MAX)."""


class DigestedFile:
    """A new file that is written once, with a digest of each chunk. Not thread-safe. A context manager.

    Args:
        files: The files of the checkpoint.
        name: Name of the file, which must not exist.
        check: Called before each batch of data; an error that it raises ends the write.
        hash_name: Hash function of the digests.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        name: str,
        check: Callable[[], None] = lambda: None,
        *,
        hash_name: HashName = CHECKSUM,
    ) -> None:
        self._name = name
        self._check = check
        self._sink = files.create(name)
        self._pool = SafeExecutor(1, "ft-transport-digest")
        self._digesting: Future[None] | None = None
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        self._hash_name = hash_name
        self._hasher = HASHES[hash_name]()
        self._hashed_bytes = 0
        self._digests: list[str] = []
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
        """Wait until all data is stored, close the file, and return its name, length and digests."""
        try:
            self._flush()
            if self._digesting is not None:
                self._digesting.result()
            if self._hashed_bytes % CHUNK_BYTES:
                self._digests.append(self._hasher.hexdigest())
            self._sink.finish()
        finally:
            self.close()
        return FileEntry(self._name, self.position, "".join(self._digests))

    def close(self) -> None:
        """End the thread and close the file, even if the file is incomplete. Idempotent."""
        self._pool.shutdown(wait=True)
        self._sink.close()

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
        self._sink.write(buffers, num_bytes)

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


def write_small(
    directory: CheckpointFiles | Path,
    name: str,
    content: bytes,
    *,
    is_private: bool = False,
    hash_name: HashName = CHECKSUM,
) -> FileEntry:
    """Write a small file, wait until it is stored, and return its name, length and digests.

    Args:
        directory: The files of a checkpoint, or a directory.
        name: Name of the file.
        content: Content of the file.
        is_private: Whether only the owner may read the file in a directory. Otherwise the umask decides.
        hash_name: Hash function of the digests.
    """
    files = DirectoryFiles(directory, is_private=is_private) if isinstance(directory, Path) else directory
    with DigestedFile(files, name, hash_name=hash_name) as file:
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
