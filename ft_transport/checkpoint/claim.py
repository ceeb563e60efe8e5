"""A lock that lets only one group of ranks at a time write to a directory. The lock ends with the process that has it.

``flock`` needs only an open descriptor, so any process that may read the lock file could lock it. Therefore a new lock
file has mode 0600. In an existing lock file, users who may not write lose the permission to read. On NFS, the system
turns the lock into a lock of the file server, which other hosts respect (flock(2)).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import stat
import time
from pathlib import Path
from typing import Final

from ft_transport.errors import CheckpointError, CheckpointInUseError
from ft_transport.runtime.children import close_files_in_children
from ft_transport.runtime.regular_files import UnusableFileError, is_in_place, make_directory, open_regular, try_lock

_OWNER_NAME: Final = ".owner"
_OWNER_MODE: Final = 0o600
_PAUSE_S: Final = 0.05
_MAX_SHOWN_BYTES: Final = 1000
_OTHERS: Final = (stat.S_IRGRP, stat.S_IWGRP), (stat.S_IROTH, stat.S_IWOTH)


class RootClaim:
    """The lock of a directory to which one group of ranks writes. Not thread-safe.

    Args:
        root: The directory; `take` creates it if it is missing.
        is_private: Whether only the owner may read a directory that `take` creates.
    """

    def __init__(self, root: Path, *, is_private: bool = False) -> None:
        self._root = root
        self._path = root / _OWNER_NAME
        self._is_private = is_private
        self._descriptor: int | None = None
        close_files_in_children(self)

    def take(self, owner: str, timeout_s: float) -> None:
        """Lock the directory until `release` or the end of this process.

        Args:
            owner: Description of this group, for the errors of other groups.
            timeout_s: How long to wait for another process to release the lock.

        Raises:
            CheckpointInUseError: Another group has the lock, or the lock file belongs to another user.
            CheckpointError: The path of the lock file is a link, a directory or a device.
            OSError: The root cannot be created or written to.
        """
        make_directory(self._root, is_private=self._is_private, is_ok_if_there=True)
        descriptor = self._locked(time.monotonic() + timeout_s)
        try:
            if os.fstat(descriptor).st_nlink > 1:
                descriptor = self._renewed(descriptor)
            text = json.dumps({"owner": owner, "host": socket.gethostname(), "process": os.getpid()}).encode()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text, 0)
            self._descriptor = descriptor
        except BaseException:
            self._descriptor = None
            os.close(descriptor)
            raise

    def release(self) -> None:
        """Release the lock. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # Closing is not enough: the lock lasts as long as a forked child has a copy of the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def is_my_file(self, status: os.stat_result) -> bool:
        """Return whether a file is the lock file. Forked children close it, so that the lock ends with this process."""
        return self._descriptor is not None and os.path.samestat(os.fstat(self._descriptor), status)

    def _locked(self, deadline_s: float) -> int:
        while True:
            descriptor = _open(self._path)
            try:
                if try_lock(descriptor) and is_in_place(descriptor, self._path):
                    return descriptor
                if time.monotonic() > deadline_s:
                    raise self._in_use(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            time.sleep(_PAUSE_S)

    def _renewed(self, descriptor: int) -> int:
        """Replace a lock file that has several names (hard links) with a new file, to leave the other names unchanged.

        The caller must have locked the old file. A process that waits for the old file notices the replacement
        (`is_in_place`), and opens the new one.
        """
        path = self._path.with_name(f"{_OWNER_NAME}.{secrets.token_hex(8)}")
        new = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _OWNER_MODE)
        try:
            fcntl.flock(new, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(path, self._path)
        except BaseException:
            os.close(new)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        os.close(descriptor)
        return new

    def _in_use(self, descriptor: int) -> CheckpointInUseError:
        text = os.pread(descriptor, _MAX_SHOWN_BYTES, 0).decode(errors="replace")
        return CheckpointInUseError(
            f"expected to be the only group that saves to {self._root}, another group does: "
            f"{repr(text) if text else 'unknown'}, user {os.fstat(descriptor).st_uid}",
        )


def _open(path: Path) -> int:
    """Open or create the lock file. Users who may read the file but not write it lose the permission to read it."""
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, _OWNER_MODE)
    except UnusableFileError as error:
        raise CheckpointError(
            f"expected a regular file as lock file, {path} is a link, directory or device; delete it if no group saves "
            "here"
        ) from error
    except PermissionError as error:
        raise CheckpointInUseError(
            f"expected to be the only group that saves to {path.parent}, {path} belongs to another user: {error}"
        ) from error
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    # A user who may write to the file may also save here, and so needs the lock.
    closed = mode & ~sum(read for read, write in _OTHERS if not mode & write)
    if closed != mode:
        with contextlib.suppress(PermissionError):  # another user's file
            os.fchmod(descriptor, closed)
    return descriptor
