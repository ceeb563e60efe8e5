"""The files of one checkpoint, in a directory or in a bucket: how they are created, opened, read and shared.

Ranks and writer processes name the place of a checkpoint by its location: the path of a directory, or a URL such as
``s3://bucket/run-7/step-5/attempt-0123456789abcdef``. `files_at` returns the files at a location.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from ft_transport.checkpoint.manifest import FileEntry
from ft_transport.errors import ConfigurationError
from ft_transport.runtime.regular_files import (
    create_file,
    make_read_only,
    open_regular,
    read_regular,
    sync_directory,
)

Buffer: TypeAlias = bytes | memoryview
Identity: TypeAlias = tuple[str | int, ...]
"""Distinguishes a stored file from any other content under its name."""

_SCHEMES: Final = ("s3", "gs", "az", "abfs", "abfss")
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SYNC_FILE_RANGE_WRITE: Final = 2  # include/uapi/linux/fs.h


class BucketTimeoutError(TimeoutError):
    """A request to a bucket failed, also when it was repeated."""


class FileSink(Protocol):
    """A new file that is written from front to back. Not thread-safe."""

    def write(self, buffers: list[Buffer], num_bytes: int) -> None:
        """Appends buffers, of ``num_bytes`` together. The buffers must not change until `finish` has returned."""

    def finish(self) -> None:
        """Waits until all data is on the disk or in the bucket."""

    def close(self) -> None:
        """Frees the file's resources, even if the file is incomplete. Idempotent."""


class FileSource(Protocol):
    """An open file. Thread-safe, except `close`. Methods raise an `OSError` if the file cannot be read."""

    def length(self) -> int:
        """Returns the length of the file."""

    def read_into(self, target: memoryview, position: int) -> int:
        """Reads into a part of ``target`` or all of it, and returns the number of bytes; 0 at the end of the file."""

    def close(self) -> None:
        """Closes the file."""


class CheckpointFiles(Protocol):
    """The files of one checkpoint.

    Attributes:
        num_readers: Number of reads at once that keep the storage busy.
    """

    num_readers: int

    def create(self, name: str) -> FileSink:
        """Creates a file."""

    def open(self, entry: FileEntry) -> FileSource:
        """Opens a file of a complete checkpoint."""

    def read_list(self, name: str, *, max_bytes: int) -> bytes:
        """Returns the content of the list of files."""

    def identity(self, entry: FileEntry) -> Identity:
        """Returns what distinguishes a stored file from any other content under its name."""

    def share(self, entry: FileEntry, identity: Identity, last: str) -> bool:
        """Makes a data file of the last checkpoint a file of this one, without copying it.

        Args:
            entry: Name and length of the file.
            identity: Identity of the stored file.
            last: Location of the last checkpoint.

        Returns:
            Whether the file is shared; ``False`` if it was deleted or has changed.
        """

    @property
    def shared(self) -> Mapping[str, str]:
        """The objects of `share`, by file name, that belong to other checkpoints; empty in a directory."""

    def put_shared(self, shared: Mapping[str, str]) -> None:
        """Stores the objects that this checkpoint shares, of all ranks. Called on the first rank."""

    def sync(self) -> None:
        """Writes the names of new files to the disk."""


def is_url(location: str) -> bool:
    """Return whether a location or a root is the URL of a bucket, and not a path."""
    return _URL.match(location) is not None


def checked_url(url: str) -> str:
    """Return the URL of a prefix in a bucket, without a slash at the end.

    Raises:
        ConfigurationError: The scheme is unknown, or the URL names no bucket.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES or not rest.strip("/") or any(mark in rest for mark in "?#"):
        known = ", ".join(f"{each}://" for each in _SCHEMES)
        raise ConfigurationError(
            f"expected the path of a directory, or the URL of a bucket and a prefix in it ({known}), got {url!r}"
        )
    return f"{scheme}://{rest.strip('/')}"


def files_at(location: str, *, is_private: bool = False) -> CheckpointFiles:
    """Return the files at a location.

    Args:
        location: The path of a directory, or a URL.
        is_private: Whether only the owner may read new files of a directory. Otherwise the umask decides.
    """
    if is_url(location):
        # Imports obstore, which is an extra.
        from ft_transport.checkpoint.bucket_files import BucketFiles  # noqa: PLC0415

        return BucketFiles(location)
    return DirectoryFiles(Path(location), is_private=is_private)


class DirectoryFiles:
    """The files of a directory (`CheckpointFiles`).

    Args:
        path: The directory.
        is_private: Whether only the owner may read new files. Otherwise the umask decides.
    """

    num_readers = 2
    shared: Mapping[str, str] = {}

    def __init__(self, path: Path, *, is_private: bool = False) -> None:
        self._path = path
        self._is_private = is_private

    def create(self, name: str) -> FileSink:
        """Create a file. Raises an `OSError` if it exists or cannot be created."""
        return _DescriptorSink(create_file(self._path / name, is_private=self._is_private))

    def open(self, entry: FileEntry) -> FileSource:
        """Open a file."""
        return _DescriptorSource(open_regular(self._path / entry.name))

    def read_list(self, name: str, *, max_bytes: int) -> bytes:
        """Return the content of the list of files."""
        return read_regular(self._path / name, max_bytes=max_bytes)

    def identity(self, entry: FileEntry) -> Identity:
        """Return inode, length and modification time, which differ after another program has changed the file."""
        status = os.stat(self._path / entry.name, follow_symlinks=False)
        return status.st_ino, status.st_size, status.st_mtime_ns

    def share(self, entry: FileEntry, identity: Identity, last: str) -> bool:
        """Link a file of the last checkpoint. Return ``False`` also if the file system has no hard links."""
        path = self._path / entry.name
        with contextlib.suppress(OSError):
            os.link(Path(last) / entry.name, path, follow_symlinks=False)
            if self.identity(entry) == identity:
                # A program that overwrites a file of one checkpoint would change it in all of them.
                make_read_only(path)
                return True
        # A link may be there even after an error: NFS may carry a request out twice.
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def put_shared(self, shared: Mapping[str, str]) -> None:
        """Do nothing: every link is a file of this directory."""

    def sync(self) -> None:
        """Write the names of new files to the disk."""
        sync_directory(self._path)


class _DescriptorSink:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = 0
        self._start_write_back = _write_back_function()

    def write(self, buffers: list[Buffer], num_bytes: int) -> None:
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

    def finish(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _DescriptorSource:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def length(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_into(self, target: memoryview, position: int) -> int:
        return os.preadv(self._descriptor, [target], position)

    def close(self) -> None:
        os.close(self._descriptor)


def _without(buffers: Sequence[Buffer], count: int) -> list[Buffer]:
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
