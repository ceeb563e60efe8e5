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
"""Stands behind the bytes of a chunk that is what was written."""


class StoredFile:
    """A file that is opened when it is first read. Thread-safe, but for `close`. A context manager.

    Args:
        directory: Where it is.
        entry: What was written.
        hash_name: What it was digested by.
        patience: For what may pass.
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
        """How many chunks it has."""
        return num_chunks_of(self._entry.num_bytes)

    def check_length(self) -> None:
        """Compares the length of the file.

        Raises:
            CheckpointDamagedError: It has another, or is not there.
            OSError: It cannot be seen.
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
        """The bytes of a chunk, and behind them one more that says that they are those that were written.

        Raises:
            CheckpointDamagedError: They are not.
            OSError: They cannot be read.
        """
        return self._patience.read(self._entry.name, lambda: self._read(number))

    def close(self) -> None:
        """Closes the file. May be called twice."""
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
        """Has the next attempt open the file anew: a stale descriptor stays stale. Others may still read with it."""
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
    """The error that names a file and what is wrong with it."""
    return CheckpointDamagedError(f"{entry.name}: {what}", files=(entry.name,))
