"""Opens files that one process at a time uses and only the user can have made."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Final

from ft_transport.errors import ConfigurationError
from ft_transport.runtime.regular_files import open_regular

_PAUSE_S: Final = 0.02


def open_locked(path: Path, *, kind: str, mode: int, within_s: float) -> int:
    """Open a file for reading and writing, or create it, and lock it; return its descriptor.

    The lock ends with the descriptor or its process.

    Args:
        path: The file.
        kind: The kind of file, for errors.
        mode: Mode of a new file, before the umask.
        within_s: Seconds to wait for another process's lock.

    Raises:
        ConfigurationError: The file cannot be created, belongs to another user, is a link, is not regular, has several
            names, or is locked by another process.
    """
    until_s = time.monotonic() + within_s
    while True:
        try:
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, mode)
        except OSError as error:
            raise ConfigurationError(f"expected a regular file of this user's as {kind}: {error}") from error
        try:
            _check_owner(descriptor, path, kind)
            if _try_lock(descriptor) and _is_in_place(descriptor, path):
                return descriptor
            if time.monotonic() > until_s:
                raise ConfigurationError(
                    f"expected a {kind} that no other fetch uses, another one writes to {path}; let it end, or name "
                    "another file"
                )
        except OSError as error:
            os.close(descriptor)
            raise ConfigurationError(f"expected a file that can be locked as {kind}: {error}") from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(_PAUSE_S)


def unlink_open(path: Path, descriptor: int) -> None:
    """Remove the name of an open file, unless the name is missing or belongs to another file.

    Raises:
        OSError: The name cannot be removed.
    """
    if _is_in_place(descriptor, path):
        os.unlink(path)


def rename_open(path: Path, descriptor: int, new_path: Path) -> None:
    """Rename an open file, unless its name belongs to another file.

    Raises:
        OSError: The file cannot be renamed, or no longer has its name.
    """
    if not _is_in_place(descriptor, path):
        raise FileNotFoundError(errno.ENOENT, "expected the file that was written, another one has its name", str(path))
    os.replace(path, new_path)


def _check_owner(descriptor: int, path: Path, kind: str) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or found.st_nlink > 1:
        # Otherwise weights would overwrite another user's file.
        raise ConfigurationError(
            f"expected a file of this user's with one name as {kind}, {path} has {found.st_nlink} and is user "
            f"{found.st_uid}'s"
        )


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_in_place(descriptor: int, path: Path) -> bool:
    """Return whether the path still leads to the locked file: a process that succeeds removes it."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
