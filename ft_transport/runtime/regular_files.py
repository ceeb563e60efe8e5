"""Opens regular files safely in directories to which other users may write.

A FIFO in place of a file would block its reader until a process writes to the FIFO. A symbolic link would make the
caller read or overwrite another file. ``O_NOFOLLOW`` refuses a link only as the last component of a path (open(2)), so
the directory may be reached through links.
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
"""Umask that removes all permissions of other users (umask(2))."""
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


class UnusableFileError(OSError):
    """The path is a link, a directory, a FIFO, a socket or a device, or the file is larger than the caller allows."""


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = _FILE_MODE) -> int:
    """Open or create a regular file; return its descriptor.

    Args:
        path: Path of the file.
        flags: Flags of ``os.open``, without ``O_TRUNC``, which would empty the file before the check.
        mode: Permissions of a new file, before the umask.

    Raises:
        UnusableFileError: The path is not a regular file.
        OSError: The file cannot be opened.
    """
    assert not flags & os.O_TRUNC, "it would empty the file before the check"
    try:
        # O_NONBLOCK has no effect on a regular file; it lets the open of a FIFO or a device return at once.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as error:
        # ELOOP means a link; ENXIO a socket, a missing device, or a FIFO without a reader.
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
        path: Path of the file.
        is_private: Whether only the file's owner may read it; otherwise the umask decides.

    Raises:
        OSError: The file exists or cannot be created.
    """
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE & ~_umask(is_private))


def make_directory(path: Path, *, is_private: bool = False, is_ok_if_there: bool = False) -> None:
    """Create a directory and its missing parents."""
    path.mkdir(_DIRECTORY_MODE & ~_umask(is_private), parents=True, exist_ok=is_ok_if_there)


def make_read_only(path: Path) -> None:
    """Remove all write permissions from a regular file.

    Raises:
        UnusableFileError: The path is not a regular file.
        OSError: The file cannot be opened, or belongs to another user.
    """
    descriptor = open_regular(path)
    try:
        os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) & ~_WRITE_BITS)
    finally:
        os.close(descriptor)


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a small file.

    Raises:
        UnusableFileError: The path is not a regular file, or the file has more than ``max_bytes``.
        OSError: The file is unreadable.
    """
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > max_bytes:
            raise UnusableFileError(
                errno.EFBIG, f"expected a file of at most {max_bytes} bytes, got {num_bytes} bytes", str(path)
            )
        # Read no more than this, even if the file grows meanwhile.
        content = bytearray(num_bytes)
        filled = 0
        while filled < num_bytes and (count := file.readinto(memoryview(content)[filled:])):
            filled += count
        return bytes(content[:filled])


def read_pieces(descriptor: int, start: int, end: int) -> Iterator[memoryview]:
    """Yield bytes ``[start, end)`` of a file, or up to its end, in pieces; each piece overwrites the previous one."""
    piece = memoryview(bytearray(min(_PIECE_BYTES, end - start)))
    while start < end and (count := os.preadv(descriptor, [piece[: end - start]], start)):
        yield piece[:count]
        start += count


def try_lock(descriptor: int) -> bool:
    """Try to lock an open file. The lock lasts until the descriptor is closed or the process ends.

    Returns:
        Whether the file is locked now; ``False`` if another process or descriptor holds the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def is_in_place(descriptor: int, path: Path) -> bool:
    """Return whether ``path`` still names the open file; another process may have renamed or replaced the file."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def sync_directory(path: Path) -> None:
    """Write the entries of a directory to the disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_regular(path: Path) -> bool:
    """Return whether the path is a regular file and not a link.

    Raises:
        OSError: The path cannot be examined.
    """
    return _kind_of(path) == stat.S_IFREG


def is_directory(path: Path) -> bool:
    """Return whether the path is a directory and not a link.

    Raises:
        OSError: The path cannot be examined.
    """
    return _kind_of(path) == stat.S_IFDIR


def _kind_of(path: Path) -> int:
    """Return the file type bits of ``st_mode``, without following a link; 0 if the path does not exist."""
    try:
        return stat.S_IFMT(os.stat(path, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _umask(is_private: bool) -> int:
    return PRIVATE_UMASK if is_private else 0


def _not_regular(path: Path) -> UnusableFileError:
    try:
        found = stat.S_IFMT(os.stat(path, follow_symlinks=False).st_mode)
    except OSError:
        found = 0
    what = _KINDS.get(found, "something else")
    return UnusableFileError(errno.EINVAL, f"expected a regular file, got {what}", str(path))
