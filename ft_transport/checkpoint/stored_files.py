"""Reading and verifying the files of a checkpoint: retries of failed reads, and the comparison with the digests.

Damage is an error that no retry cures: the file is missing, is not a file, is too long or too short, or differs from
its digest. Other errors do not concern the content of the file: no descriptor was left (EMFILE), a permission was
missing for a moment (EACCES), a file server had forgotten a handle (ESTALE). Treating them as damage would load an
older checkpoint, and lose steps without need. A disk that reports EIO is retried, too, and counts as damaged if the
error persists.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from ft_transport.checkpoint.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    CheckpointManifest,
    FileEntry,
    HashName,
    StoredRank,
    Trust,
    damaged,
    decode_rank_file,
    digest_of,
    hash_of,
    num_chunks_of,
    rank_file_name,
)
from ft_transport.errors import CheckpointDamagedError, TransportError
from ft_transport.runtime.regular_files import FileTooLargeError, NotRegularFileError, open_regular, read_regular

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0
_ABSENT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularFileError, FileTooLargeError)


def _sleep(pause_s: float) -> None:
    time.sleep(pause_s)


class ReadRetries:
    """Retries reads while their errors may pass. Thread-safe.

    Args:
        total_s: Limit of the pauses of all users together, in seconds.
        pause: Sleeps for a number of seconds.
    """

    def __init__(self, total_s: float, pause: Callable[[float], None] = _sleep) -> None:
        self._left_s = total_s
        self._pause = pause
        self._mutex = threading.Lock()

    def call(self, action: Callable[[], T]) -> T:
        """Return the result of ``action``.

        Raises:
            OSError: The error of the last attempt.
            Exception: Any other error of ``action``, at once.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return action()
            except OSError as error:
                # Some of our errors are an OSError as well.
                if isinstance(error, (TransportError, *_ABSENT)) or not self._wait(pause_s):
                    raise
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def read(self, name: str, action: Callable[[], T]) -> T:
        """Return the result of an ``action`` that reads a file of a checkpoint; retries as `call`.

        Args:
            name: Name of the file.
            action: Reads it.

        Raises:
            CheckpointDamagedError: The file is missing, is not a file, or the disk cannot read it.
            OSError: The file could not be read, for a reason that does not concern its content.
        """
        try:
            return self.call(action)
        except OSError as error:
            if isinstance(error, _ABSENT) or error.errno == errno.EIO:
                raise damaged(name, f"cannot be read: {error}") from error
            raise

    def _wait(self, pause_s: float) -> bool:
        with self._mutex:
            pause_s = min(pause_s, self._left_s)
            self._left_s -= pause_s
        if pause_s > 0:
            self._pause(pause_s)
        return pause_s > 0


CHUNK_IS_GOOD: Final = 1
"""Follows the bytes of a chunk that matches its digest."""


class StoredFile:
    """A file that is opened at the first read. Thread-safe, except `close`. A context manager.

    Args:
        directory: The file's directory.
        entry: The file's entry in the list of files.
        hash_name: Hash function of its digests.
        retries: Retries reads that may succeed later.
    """

    def __init__(self, directory: Path, entry: FileEntry, hash_name: HashName, retries: ReadRetries) -> None:
        self._path = directory / entry.name
        self._entry = entry
        self._retries = retries
        self._hash_name = hash_name
        self._mutex = threading.Lock()
        self._descriptor: int | None = None
        self._given_up: list[int] = []

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

        num_bytes = self._retries.read(self._entry.name, look)
        if num_bytes != self._entry.num_bytes:
            raise damaged(self._entry.name, f"expected {self._entry.num_bytes} bytes, it has {num_bytes}")

    def read(self, number: int) -> bytearray:
        """Return the bytes of a chunk, and behind them one more byte that marks them as good.

        Raises:
            CheckpointDamagedError: The bytes differ from their digest.
            OSError: The bytes cannot be read.
        """
        return self._retries.read(self._entry.name, lambda: self._read(number))

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
                raise damaged(self._entry.name, f"expected {self._entry.num_bytes} bytes, it ends at {position}")
            position += count
        if hash_of(self._hash_name, view) != digest_of(self._entry, number, self._hash_name):
            raise damaged(self._entry.name, f"bytes {start} to {end} differ from what was written")
        chunk[-1] = CHUNK_IS_GOOD
        return chunk


_MAX_MANIFEST_BYTES: Final = 1 << 30
"""The digests of 100 TB take less."""
_MAX_RANK_FILE_BYTES: Final = 1 << 30
"""Larger than the descriptions of all parts of a snapshot may be (``wire.manifest``)."""


def read_manifest(directory: Path, step: int | None, trust: Trust, retries: ReadRetries) -> CheckpointManifest:
    """Return the list of files of a checkpoint; a ``step`` of ``None`` accepts any, for a directory with another name.

    Raises:
        CheckpointDamagedError: The list was changed, or is missing.
        CheckpointUntrustedError: The job token has not signed it.
        OSError: The list cannot be read.
    """
    path = directory / MANIFEST_NAME
    encoded = retries.read(MANIFEST_NAME, lambda: read_regular(path, max_bytes=_MAX_MANIFEST_BYTES))
    manifest = trust.open(encoded, name=MANIFEST_NAME)
    if step is not None and manifest.step != step:
        raise damaged(
            MANIFEST_NAME, f"expected that of step {step}, as the directory is named, got that of step {manifest.step}"
        )
    return manifest


def read_rank_files(directory: Path, manifest: CheckpointManifest, retries: ReadRetries) -> list[bytes]:
    """Return each rank's description, still encoded.

    Raises:
        CheckpointDamagedError: A description differs from its digest, or has impossible content.
        OSError: A description cannot be read.
    """
    entries = {entry.name: entry for entry in manifest.files}
    encoded = []
    for rank in range(manifest.num_ranks):
        name = rank_file_name(rank)
        entry = entries.get(name)
        if entry is None:
            raise damaged(MANIFEST_NAME, f"it does not list {name}")
        if entry.num_bytes > _MAX_RANK_FILE_BYTES:
            raise damaged(name, f"expected at most {_MAX_RANK_FILE_BYTES} bytes, it has {entry.num_bytes}")
        encoded.append(read_file(directory, entry, manifest.hash, retries))
    return encoded


def decode_rank_files(encoded: Sequence[bytes], manifest: CheckpointManifest) -> list[StoredRank]:
    """Decode the ranks' descriptions.

    Raises:
        CheckpointDamagedError: A description has impossible content.
    """
    entries = {entry.name: entry for entry in manifest.files}
    ranks = []
    for rank, each in enumerate(encoded):
        name = rank_file_name(rank)
        stored = decode_rank_file(each, name=name)
        if stored.data_file not in entries:
            raise damaged(name, f"expected a data file that {MANIFEST_NAME} lists, got {stored.data_file[:80]!r}")
        if len(stored.manifests) != (2 if manifest.local_keys else 1):
            raise damaged(name, f"expected a part for each kind of state, got {len(stored.manifests)}")
        stored.check_positions(entries[stored.data_file].num_bytes, name=name)
        ranks.append(stored)
    return ranks


def read_file(directory: Path, entry: FileEntry, hash_name: HashName, retries: ReadRetries) -> bytes:
    """Return the content of a small file.

    Raises:
        CheckpointDamagedError: The file differs from its digest.
        OSError: The file cannot be read.
    """
    return b"".join(_chunks(directory, entry, hash_name, retries))


def find_damage(
    directory: Path,
    files: Sequence[FileEntry],
    hash_name: HashName,
    retries: ReadRetries,
    check: Callable[[], None] | None,
) -> list[str]:
    """Read files, and return a description of the damage of each damaged file.

    Args:
        directory: The files' directory.
        files: The files to read.
        hash_name: Hash function of their digests.
        retries: Retries reads that may succeed later.
        check: Called now and then; ``None`` reads only the lengths of the files.

    Raises:
        OSError: A file cannot be read.
    """
    damages = []
    for entry in files:
        try:
            if check is None:
                with StoredFile(directory, entry, hash_name, retries) as file:
                    file.check_length()
            else:
                for _ in _chunks(directory, entry, hash_name, retries):
                    check()
        except CheckpointDamagedError as error:
            damages.append(error.message)
    return damages


def _chunks(directory: Path, entry: FileEntry, hash_name: HashName, retries: ReadRetries) -> Iterator[memoryview]:
    with StoredFile(directory, entry, hash_name, retries) as file:
        file.check_length()
        for number in range(num_chunks_of(entry.num_bytes)):
            yield memoryview(file.read(number))[:-1]
