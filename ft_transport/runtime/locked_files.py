"""Files that one process at a time works on, and that only their owner could have made."""

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
    """Opens a file to read and write, or makes it, when nobody else has it locked, and returns its descriptor.

    The lock goes with the descriptor, and with the process that has it.

    Args:
        path: Of the file.
        kind: What it is to be, for errors.
        mode: Of a file that is made; the umask takes from it.
        within_s: How long a process that is just ending may keep it.

    Raises:
        ConfigurationError: The file cannot be made, is another user's, a link, no regular file or has other names, or
            another process has it.
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
    """Removes the name of an open file, unless another file has taken it, or it is gone.

    Raises:
        OSError: It cannot be removed.
    """
    if _is_in_place(descriptor, path):
        os.unlink(path)


def rename_open(path: Path, descriptor: int, new_path: Path) -> None:
    """Gives an open file another name, unless its name is another file's by now.

    Raises:
        OSError: It cannot be renamed, or is not there under its name.
    """
    if not _is_in_place(descriptor, path):
        raise FileNotFoundError(errno.ENOENT, "expected the file that was written, another one has its name", str(path))
    os.replace(path, new_path)


def _check_owner(descriptor: int, path: Path, kind: str) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or found.st_nlink > 1:
        # It would be overwritten, and weights would be written to it.
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
    """Whether the file that was locked is the one that others will open: one that ends well removes it."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
