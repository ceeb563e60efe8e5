"""Opening files in a directory that others may write to: regular files alone, through no link, and without a wait.

A FIFO in place of a file would hold its reader until somebody writes to it, a link would have the file behind it read
or overwritten. ``O_NOFOLLOW`` refuses a link as the last part of a path (open(2)); the directory may be reached by one.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

PRIVATE_UMASK: Final = 0o077
"""Takes away all that is not the owner's (umask(2))."""
_FILE_MODE: Final = 0o666
_WRITE_BITS: Final = 0o222
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
    """What has the name of a file is a link, a directory, a FIFO, a socket or a device."""


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = _FILE_MODE) -> int:
    """Opens a regular file that is there, or makes one, and returns its descriptor.

    Args:
        path: Of the file.
        flags: As for ``os.open``; nothing of the file may be lost by it (``O_TRUNC``) before it is known what it is.
        mode: Of a file that is made; the umask takes from it.

    Raises:
        NotRegularFileError: It is something else.
        OSError: It cannot be opened.
    """
    assert not flags & os.O_TRUNC, "what it is comes first"
    try:
        # A regular file ignores O_NONBLOCK; a FIFO and a device open at once.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    except OSError as error:
        # ELOOP: a link. ENXIO: a socket, a device that is not there, or a FIFO that nobody reads.
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
    """Makes a file that is not there yet, and returns its descriptor, to write to.

    Args:
        path: Of the file.
        is_private: Whether nobody but its owner may read it; else the umask says who may.

    Raises:
        OSError: There is one, or it cannot be made.
    """
    return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE & ~_umask(is_private))


def make_directory(path: Path, *, is_private: bool = False, is_ok_if_there: bool = False) -> None:
    """Makes a directory, and those above it that are missing."""
    path.mkdir(_DIRECTORY_MODE & ~_umask(is_private), parents=True, exist_ok=is_ok_if_there)


def make_read_only(path: Path) -> None:
    """Has nobody write to a file any more; who may read it stays."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_WRITE_BITS)


def read_regular(path: Path, *, max_bytes: int) -> bytes:
    """The content of a small file.

    Raises:
        NotRegularFileError: It is none.
        FileTooLargeError: It has more than ``max_bytes``.
        OSError: It cannot be read.
    """
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > max_bytes:
            raise FileTooLargeError(errno.EFBIG, f"expected at most {max_bytes} bytes, it has {num_bytes}", str(path))
        # It may grow meanwhile.
        content = bytearray(num_bytes)
        filled = 0
        while filled < num_bytes and (count := file.readinto(memoryview(content)[filled:])):
            filled += count
        return bytes(content[:filled])


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FileTooLargeError(OSError):
    """A file is larger than it can be."""


def is_regular(path: Path) -> bool:
    """Whether there is a regular file of this name, and no link to one.

    Raises:
        OSError: It cannot be seen whether there is.
    """
    try:
        return stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_directory(path: Path, *, follows_links: bool) -> bool:
    """Whether there is a directory of this name.

    Raises:
        OSError: It cannot be seen whether there is.
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
