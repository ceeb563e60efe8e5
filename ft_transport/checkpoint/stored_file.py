"""A file of a checkpoint, read chunk by chunk and compared with its digests."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

from ft_transport.checkpoint.hashing import HashName, hash_of
from ft_transport.checkpoint.manifest import CHUNK_BYTES, FileEntry, digest_of, num_chunks_of
from ft_transport.checkpoint.patience import Patience
from ft_transport.errors import CheckpointDamagedError
from ft_transport.runtime.regular_files import open_regular

CHUNK_IS_GOOD: Final = 1
"""Follows the bytes of a chunk that matches its digest."""


class StoredFile:
    """A file that is opened at the first read. Thread-safe, except `close`. A context manager.

    Args:
        directory: The file's directory.
        entry: The file's entry in the list of files.
        hash_name: Hash function of its digests.
        patience: Retries reads that may succeed later.
    """

    def __init__(self, directory: Path, entry: FileEntry, hash_name: HashName, patience: Patience) -> None:
        self._path = directory / entry.name
        self._entry = entry
        self._patience = patience
        self._hash_name = hash_name
        self._mutex = threading.Lock()
        self._descriptor: int | None = None
        self._given_up: list[int] = []

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the file."""
        return num_chunks_of(self._entry.num_bytes)

    def check_length(self) -> None:
        """Compare the length of the file.

        Raises:
            CheckpointDamagedError: The file has another length, or is missing.
            OSError: The length cannot be read.
        """

        def look() -> int:
            descriptor = self._open()
            try:
                return os.fstat(descriptor).st_size
            except OSError:
                self._give_up(descriptor)
                raise

        num_bytes = self._patience.read(self._entry.name, look)
        if num_bytes != self._entry.num_bytes:
            raise damaged(self._entry, f"expected {self._entry.num_bytes} bytes, it has {num_bytes}")

    def read(self, number: int) -> bytearray:
        """Return the bytes of a chunk, and behind them one more byte that marks them as good.

        Raises:
            CheckpointDamagedError: The bytes differ from their digest.
            OSError: The bytes cannot be read.
        """
        return self._patience.read(self._entry.name, lambda: self._read(number))

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptors, self._given_up = self._given_up, []
        if self._descriptor is not None:
            descriptors.append(self._descriptor)
            self._descriptor = None
        for descriptor in descriptors:
            os.close(descriptor)

    def __enter__(self) -> StoredFile:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _open(self) -> int:
        with self._mutex:
            if self._descriptor is None:
                self._descriptor = open_regular(self._path)
            return self._descriptor

    def _give_up(self, descriptor: int) -> None:
        """Make the next attempt reopen the file: a stale descriptor stays stale. Other threads may still be reading."""
        with self._mutex:
            if self._descriptor == descriptor:
                self._descriptor = None
                self._given_up.append(descriptor)

    def _read(self, number: int) -> bytearray:
        start = number * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, self._entry.num_bytes)
        chunk = bytearray(end - start + 1)
        view = memoryview(chunk)[:-1]
        position = start
        descriptor = self._open()
        while position < end:
            try:
                count = os.preadv(descriptor, [view[position - start :]], position)
            except OSError:
                self._give_up(descriptor)
                raise
            if not count:
                raise damaged(self._entry, f"expected {self._entry.num_bytes} bytes, it ends at {position}")
            position += count
        if hash_of(self._hash_name, view) != digest_of(self._entry, number, self._hash_name):
            raise damaged(self._entry, f"bytes {start} to {end} differ from what was written")
        chunk[-1] = CHUNK_IS_GOOD
        return chunk


def damaged(entry: FileEntry, what: str) -> CheckpointDamagedError:
    """Return the error that names a file and its damage."""
    return CheckpointDamagedError(f"{entry.name}: {what}", files=(entry.name,))
