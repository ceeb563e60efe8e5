"""Reads the files of a checkpoint, retries failed reads, and compares the content with the digests.

A file is damaged if it is missing, is not a regular file, has another length, or differs from its digest. No retry
cures damage. Other errors say nothing about the content of a file: too many open descriptors (EMFILE), a permission
that is missing for a moment (EACCES), a stale handle of a file server (ESTALE). Reads with such errors are retried. If
these errors counted as damage, a job would load an older checkpoint and repeat steps for no reason. EIO is retried as
well, but counts as damage if it persists.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from ft_transport.checkpoint.files import BucketTimeoutError, CheckpointFiles, FileSource
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
from ft_transport.runtime.regular_files import UnusableFileError

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0
_ABSENT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError, UnusableFileError)


def _sleep(pause_s: float) -> None:
    time.sleep(pause_s)


class ReadRetries:
    """Retries failed reads. All calls share one budget for the pauses between attempts. Thread-safe.

    Args:
        total_s: The budget in seconds. When it is used up, failures are final.
        pause: Sleeps for the given number of seconds.
    """

    def __init__(self, total_s: float, pause: Callable[[float], None] = _sleep) -> None:
        self._left_s = total_s
        self._pause = pause
        self._mutex = threading.Lock()

    def call(self, action: Callable[[], T]) -> T:
        """Call ``action`` until it succeeds or the budget is used up, and return its result.

        Raises:
            OSError: The error of the last attempt. A missing file is not retried, nor a request to a bucket, which has
                been repeated already.
            Exception: Any other error of ``action``, which is not retried.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return action()
            except OSError as error:
                # Some errors of ft_transport are also an OSError, for example by way of TimeoutError.
                if isinstance(error, (TransportError, BucketTimeoutError, *_ABSENT)) or not self._wait(pause_s):
                    raise
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def read(self, name: str, action: Callable[[], T]) -> T:
        """Read a file of a checkpoint with the retries of `call`, and return the result of ``action``.

        Args:
            name: Name of the file.
            action: Reads the file.

        Raises:
            CheckpointDamagedError: The file is missing, is not a regular file, or the disk cannot read it (EIO).
            OSError: The file could not be read for another reason, which says nothing about its content.
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
"""The byte that `StoredFile.read` appends to a chunk that matches its digest."""


class StoredFile:
    """A file of a checkpoint, which the first read opens. Thread-safe, except `close`. A context manager.

    Args:
        files: The files of the checkpoint.
        entry: Name, length and digests of the file.
        hash_name: Hash function of the digests.
        retries: Retries failed reads.
    """

    def __init__(self, files: CheckpointFiles, entry: FileEntry, hash_name: HashName, retries: ReadRetries) -> None:
        self._files = files
        self._entry = entry
        self._retries = retries
        self._hash_name = hash_name
        self._mutex = threading.Lock()
        self._source: FileSource | None = None
        self._given_up: list[FileSource] = []

    def check_length(self) -> None:
        """Check that the file has the length that the list of files states.

        Raises:
            CheckpointDamagedError: The file has another length, or is missing.
            OSError: The length cannot be read.
        """

        def look() -> int:
            source = self._open()
            try:
                return source.length()
            except OSError:
                self._give_up(source)
                raise

        num_bytes = self._retries.read(self._entry.name, look)
        if num_bytes != self._entry.num_bytes:
            raise damaged(self._entry.name, f"expected {self._entry.num_bytes} bytes, the file has {num_bytes}")

    def read(self, number: int) -> bytearray:
        """Read a chunk and compare it with its digest. Return its bytes, followed by the byte `CHUNK_IS_GOOD`.

        Raises:
            CheckpointDamagedError: The chunk differs from its digest, or the file is too short.
            OSError: The chunk cannot be read.
        """
        return self._retries.read(self._entry.name, lambda: self._read(number))

    def close(self) -> None:
        """Close the file. Idempotent."""
        sources, self._given_up = self._given_up, []
        if self._source is not None:
            sources.append(self._source)
            self._source = None
        for source in sources:
            source.close()

    def __enter__(self) -> StoredFile:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _open(self) -> FileSource:
        with self._mutex:
            if self._source is None:
                self._source = self._files.open(self._entry)
            return self._source

    def _give_up(self, source: FileSource) -> None:
        """Let the next read reopen the file. The old source stays open until `close`: other threads may use it."""
        with self._mutex:
            if self._source is source:
                self._source = None
                self._given_up.append(source)

    def _read(self, number: int) -> bytearray:
        start = number * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, self._entry.num_bytes)
        chunk = bytearray(end - start + 1)
        view = memoryview(chunk)[:-1]
        position = start
        source = self._open()
        while position < end:
            try:
                count = source.read_into(view[position - start :], position)
            except OSError:
                self._give_up(source)
                raise
            if not count:
                raise damaged(self._entry.name, f"expected {self._entry.num_bytes} bytes, the file ends at {position}")
            position += count
        if hash_of(self._hash_name, view) != digest_of(self._entry, number, self._hash_name):
            raise damaged(self._entry.name, f"the chunk of bytes {start} to {end} differs from its digest")
        chunk[-1] = CHUNK_IS_GOOD
        return chunk


_MAX_MANIFEST_BYTES: Final = 1 << 30
"""Limit for the list of files. The list of a checkpoint of 100 TB is smaller."""
_MAX_RANK_FILE_BYTES: Final = 1 << 30
"""Limit for ``rank-K.json``. The headers in it are smaller: ``wire.manifest`` limits each of them."""


def read_manifest(files: CheckpointFiles, step: int | None, trust: Trust, retries: ReadRetries) -> CheckpointManifest:
    """Read and verify the list of files of a checkpoint, ``manifest.json``.

    Args:
        files: The files of the checkpoint.
        step: The step that the list must have; ``None`` accepts any step.
        trust: Verifies the signature of the list.
        retries: Retries failed reads.

    Raises:
        CheckpointDamagedError: The list was changed, or is missing.
        CheckpointUntrustedError: The list has no valid signature with the job token.
        OSError: The list cannot be read.
    """
    manifest = trust.open(read_encoded_manifest(files, retries), name=MANIFEST_NAME)
    if step is not None and manifest.step != step:
        raise damaged(
            MANIFEST_NAME, f"expected the list of step {step}, as its location says, got that of {manifest.step}"
        )
    return manifest


def read_encoded_manifest(files: CheckpointFiles, retries: ReadRetries) -> bytes:
    """Return the content of ``manifest.json``. Raises the errors of `ReadRetries.read`."""
    return retries.read(MANIFEST_NAME, lambda: files.read_list(MANIFEST_NAME, max_bytes=_MAX_MANIFEST_BYTES))


def read_rank_files(files: CheckpointFiles, manifest: CheckpointManifest, retries: ReadRetries) -> list[bytes]:
    """Read and verify each file ``rank-K.json``. Return the encoded contents in the order of the ranks.

    Raises:
        CheckpointDamagedError: A file is missing, too large, or differs from its digest.
        OSError: A file cannot be read.
    """
    entries = {entry.name: entry for entry in manifest.files}
    encoded = []
    for rank in range(manifest.num_ranks):
        name = rank_file_name(rank)
        entry = entries.get(name)
        if entry is None:
            raise damaged(MANIFEST_NAME, f"expected an entry for {name}, found none")
        if entry.num_bytes > _MAX_RANK_FILE_BYTES:
            raise damaged(name, f"expected at most {_MAX_RANK_FILE_BYTES} bytes, the file has {entry.num_bytes}")
        encoded.append(read_file(files, entry, manifest.hash, retries))
    return encoded


def decode_rank_files(encoded: Sequence[bytes], manifest: CheckpointManifest) -> list[StoredRank]:
    """Decode and check the contents that `read_rank_files` has returned.

    Raises:
        CheckpointDamagedError: A file has invalid content.
    """
    entries = {entry.name: entry for entry in manifest.files}
    ranks = []
    data_files: set[str] = set()
    for rank, each in enumerate(encoded):
        name = rank_file_name(rank)
        stored = decode_rank_file(each, name=name)
        for data_file in stored.data_files:
            if data_file not in entries:
                raise damaged(name, f"expected a data file that {MANIFEST_NAME} lists, got {data_file[:80]!r}")
            if data_file in data_files:
                raise damaged(name, f"expected each data file once, got {data_file} twice")
            data_files.add(data_file)
        num_parts = 2 if manifest.local_keys else 1
        if len(stored.manifests) != num_parts:
            raise damaged(name, f"expected {num_parts} parts of the state, got {len(stored.manifests)}")
        stored.check_positions([entries[each].num_bytes for each in stored.data_files], name=name)
        ranks.append(stored)
    return ranks


def read_file(files: CheckpointFiles, entry: FileEntry, hash_name: HashName, retries: ReadRetries) -> bytes:
    """Read a small file, compare it with its digests, and return its content.

    Raises:
        CheckpointDamagedError: The file is missing or differs from its digest.
        OSError: The file cannot be read.
    """
    return b"".join(_chunks(files, entry, hash_name, retries))


def find_damage(
    files: CheckpointFiles,
    entries: Sequence[FileEntry],
    hash_name: HashName,
    retries: ReadRetries,
    check: Callable[[], None] | None,
) -> list[str]:
    """Compare files with their digests, and return a description of each damaged file.

    Args:
        files: The files of the checkpoint.
        entries: The files to read.
        hash_name: Hash function of the digests.
        retries: Retries failed reads.
        check: Called after each chunk; an error that it raises ends the call. ``None`` compares only the lengths.

    Raises:
        OSError: A file cannot be read, for a reason that says nothing about its content.
    """
    damages = []
    for entry in entries:
        try:
            if check is None:
                with StoredFile(files, entry, hash_name, retries) as file:
                    file.check_length()
            else:
                for _ in _chunks(files, entry, hash_name, retries):
                    check()
        except CheckpointDamagedError as error:
            damages.append(error.message)
    return damages


def _chunks(
    files: CheckpointFiles, entry: FileEntry, hash_name: HashName, retries: ReadRetries
) -> Iterator[memoryview]:
    with StoredFile(files, entry, hash_name, retries) as file:
        file.check_length()
        for number in range(num_chunks_of(entry.num_bytes)):
            yield memoryview(file.read(number))[:-1]
