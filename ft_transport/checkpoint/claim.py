"""One group at a time may write to a directory: it holds a lock that ends with its process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import Final

from ft_transport.errors import CheckpointInUseError

_OWNER_NAME: Final = ".owner"
_PAUSE_S: Final = 0.05


class RootClaim:
    """A claim on a directory. Not thread-safe.

    Args:
        root: The directory; made if it is not there.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._descriptor: int | None = None
        _claims.add(self)

    def take(self, owner: str, timeout_s: float) -> None:
        """Makes sure that no other group writes here, until `release` or the end of this process.

        Args:
            owner: The group that claims it, for others to read.
            timeout_s: How long to wait for a process that is just ending.

        Raises:
            CheckpointInUseError: Another group does.
            OSError: The root cannot be made or written to.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._root / _OWNER_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline_s = time.monotonic() + timeout_s
        try:
            while not _try_lock(descriptor):
                if time.monotonic() > deadline_s:
                    holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "unknown"
                    raise CheckpointInUseError(
                        f"expected to be the only group that saves to {self._root}, and another one does: {holder}",
                    )
                time.sleep(_PAUSE_S)
            text = json.dumps({"owner": owner, "host": socket.gethostname(), "process": os.getpid()}).encode()
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text, 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Lets others write here. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # A forked child may have the descriptor as well, and with it the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked child: the lock is the parent's, and ends with it, although the child has got its descriptor."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_claims: weakref.WeakSet[RootClaim] = weakref.WeakSet()


def _forget_claims() -> None:
    for claim in list(_claims):
        claim.forget()


os.register_at_fork(after_in_child=_forget_claims)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
