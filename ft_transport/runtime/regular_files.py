"""Opens only regular files, without links and without waiting, in directories that other users may write to.

A FIFO in place of a file would block its reader until a writer comes; a link would let the caller read or overwrite
another file. ``O_NOFOLLOW`` refuses a link as the last part of a path (open(2)); links to the directory are allowed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PRIVATE_UMASK: Final = 0o077
"""Removes all permissions of other users (umask(2))."""
_FILE_MODE: Final = 0o666
_WRITE_BITS: Final = 0o222
_PIECE_BYTES: Final = 1 << 20
_DIRECTORY_MODE: Final = 0o777
_KINDS: Final = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotRegularFileError(OSError):
    """The path is a link, a directory, a FIFO, a socket or a device."""


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = _FILE_MODE) -> int:
    """Open or create a regular file; return its descriptor.

    Args:
        path: The file.
        flags: See ``os.open``; without ``O_TRUNC``, which would act before the check.
        mode: Mode of a new file, before the umask.

    Raises:
        NotRegularFileError: The path is not a regular file.
        OSError: The file cannot be opened.
    """
    assert not flags & os.O_TRUNC, "the check comes first"
    try:
        # A regular file ignores O_NONBLOCK; a FIFO and a device open at once.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as error:
        # ELOOP: a link. ENXIO: a socket, a missing device, or a FIFO without a reader.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _not_regular(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_regular(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def create_file(path: Path, *, is_private: bool = False) -> int:
    """Create a new file for writing; return its descriptor.

    Args:
        path: The file.
        is_private: Whether only its owner may read it; otherwise the umask decides.

    Raises:
        OSError: The file exists or cannot be created.
    """
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE & ~_umask(is_private))


def make_directory(path: Path, *, is_private: bool = False, is_ok_if_there: bool = False) -> None:
    """Create a directory and its missing parents."""
    path.mkdir(_DIRECTORY_MODE & ~_umask(is_private), parents=True, exist_ok=is_ok_if_there)


def make_read_only(path: Path) -> None:
    """Remove all write permissions of a file."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_WRITE_BITS)


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a small file.

    Raises:
        NotRegularFileError: The path is not a regular file.
        FileTooLargeError: The file has more than ``max_bytes``.
        OSError: The file is unreadable.
    """
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > max_bytes:
            raise FileTooLargeError(errno.EFBIG, f"expected at most {max_bytes} bytes, it has {num_bytes}", str(path))
        # The file may grow meanwhile.
        content = bytearray(num_bytes)
        filled = 0
        while filled < num_bytes and (count := file.readinto(memoryview(content)[filled:])):
            filled += count
        return bytes(content[:filled])


def read_pieces(descriptor: int, start: int, end: int) -> Iterator[memoryview]:
    """Read a file piece by piece into one buffer, which each piece overwrites; yield less at the end of the file."""
    piece = memoryview(bytearray(min(_PIECE_BYTES, end - start)))
    while start < end and (count := os.preadv(descriptor, [piece[: end - start]], start)):
        yield piece[:count]
        start += count


def try_lock(descriptor: int) -> bool:
    """Lock an open file, until the descriptor is closed or the process ends; return whether no other process had."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def is_in_place(descriptor: int, path: Path) -> bool:
    """Return whether the name still leads to the open file; another process may have renamed or replaced it."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileTooLargeError(OSError):
    """A file exceeds its maximum size."""


def is_regular(path: Path) -> bool:
    """Return whether the path is a regular file and not a link.

    Raises:
        OSError: The path cannot be examined.
    """
    try:
        return stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_directory(path: Path, *, follows_links: bool) -> bool:
    """Return whether the path is a directory.

    Raises:
        OSError: The path cannot be examined.
    """
    try:
        return stat.S_ISDIR(os.stat(path, follow_symlinks=follows_links).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:  # links that lead to each other
            return False
        raise


def _umask(is_private: bool) -> int:
    return PRIVATE_UMASK if is_private else 0


def _not_regular(path: Path) -> NotRegularFileError:
    try:
        found = stat.S_IFMT(os.stat(path, follow_symlinks=False).st_mode)
    except OSError:
        found = 0
    what = _KINDS.get(found, "something else")
    return NotRegularFileError(errno.EINVAL, f"expected a regular file, found {what}", str(path))
