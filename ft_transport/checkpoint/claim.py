"""A lock on a directory, which ends with its process: one group at a time may write there.

``flock`` requires nothing but an open descriptor, so any process that may read the locked file may lock it. A new file
is created so that only its owner may open it (mode 0600); an existing file is closed to users who may only read it. On
NFS the system turns the lock into one that the server knows (flock(2)), and that other hosts see.
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
import weakref
from pathlib import Path
from typing import Final

from ft_transport.errors import CheckpointError, CheckpointInUseError
from ft_transport.runtime.regular_files import NotRegularFileError, is_in_place, make_directory, open_regular, try_lock

_OWNER_NAME: Final = ".owner"
_OWNER_MODE: Final = 0o600
_PAUSE_S: Final = 0.05
_MAX_SHOWN_BYTES: Final = 1000
_OTHERS: Final = (stat.S_IRGRP, stat.S_IWGRP), (stat.S_IROTH, stat.S_IWOTH)


class RootClaim:
    """A claim on a directory. Not thread-safe.

    Args:
        root: The directory; created if it is missing.
        is_private: Whether only its owner may read the directory, if it is created here.
    """

    def __init__(self, root: Path, *, is_private: bool = False) -> None:
        self._root = root
        self._path = root / _OWNER_NAME
        self._is_private = is_private
        self._descriptor: int | None = None
        _claims.add(self)

    def take(self, owner: str, timeout_s: float) -> None:
        """Make sure that no other group writes here, until `release` or the end of this process.

        Args:
            owner: The group that claims the directory, for other processes to read.
            timeout_s: How long to wait for a process that is about to exit.

        Raises:
            CheckpointInUseError: Another group writes here, or another user's group did.
            CheckpointError: The lock file is a link, or something else that was put there.
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
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the claim. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # A forked child may have the descriptor as well, and with it the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def forget(self) -> None:
        """Close the descriptor in a forked child: the lock is the parent's, and ends with the parent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

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
        """Replace a locked file that has other names by a new file, so that those names keep their content.

        Only the process that holds the lock of the file in place does so, and a process that waited for that lock
        checks again.
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
            f"expected to be the only group that saves to {self._root}, and another one does: "
            f"{repr(text) if text else 'unknown'}, user {os.fstat(descriptor).st_uid}",
        )


_claims: weakref.WeakSet[RootClaim] = weakref.WeakSet()


def _forget_claims() -> None:
    for claim in list(_claims):
        claim.forget()


os.register_at_fork(after_in_child=_forget_claims)


def _open(path: Path) -> int:
    """Open the lock file, or create it, so that a user who may only read the directory cannot lock it."""
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT, _OWNER_MODE)
    except NotRegularFileError as error:
        raise CheckpointError(
            f"expected a file of this store's own, {path} is a link or something else; delete it if no group saves here"
        ) from error
    except PermissionError as error:
        raise CheckpointInUseError(
            f"expected to be the only group that saves to {path.parent}, {path} belongs to another user: {error}"
        ) from error
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    # A user who may write to the file may save here as well, and claim the directory for it.
    closed = mode & ~sum(read for read, write in _OTHERS if not mode & write)
    if closed != mode:
        with contextlib.suppress(PermissionError):  # another user's file
            os.fchmod(descriptor, closed)
    return descriptor
