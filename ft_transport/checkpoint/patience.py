"""Retries of failed reads of directories and files: which errors are retried, for how long, and which are damage.

Damage is an error that no retry cures: the file is missing, is not a file, is too long or too short, or differs from
its digest. Other errors do not concern the file's content: no descriptor was left (EMFILE), a permission was missing
for a moment (EACCES), a file server had forgotten a handle (ESTALE). Treating them as damage would load an older
checkpoint, and lose steps without need. A disk that reports EIO is retried, too, and counts as damaged if the error
persists.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from ft_transport.errors import CheckpointDamagedError, TransportError
from ft_transport.runtime.regular_files import FileTooLargeError, NotRegularFileError

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0
_ABSENT: Final = (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotRegularFileError, FileTooLargeError)


def _sleep(pause_s: float) -> None:
    time.sleep(pause_s)


class Patience:
    """Retries reads while their errors may pass. Thread-safe.

    Args:
        total_s: Limit of the pauses of all users together, in seconds.
        pause: Sleeps for a number of seconds.
    """

    def __init__(self, total_s: float, pause: Callable[[float], None] = _sleep) -> None:
        self._left_s = total_s
        self._pause = pause
        self._mutex = threading.Lock()

    def call(self, action: Callable[[], T]) -> T:
        """Return the result of ``action``.

        Raises:
            OSError: The error of the last attempt.
            Exception: Any other error of ``action``, at once.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return action()
            except OSError as error:
                # Some of our errors are an OSError as well.
                if isinstance(error, (TransportError, *_ABSENT)) or not self._wait(pause_s):
                    raise
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def read(self, name: str, action: Callable[[], T]) -> T:
        """Return the result of an ``action`` that reads a file of a checkpoint; retries as `call`.

        Args:
            name: Name of the file.
            action: Reads it.

        Raises:
            CheckpointDamagedError: The file is missing, is not a file, or the disk cannot read it.
            OSError: The file could not be read, for a reason that does not concern its content.
        """
        try:
            return self.call(action)
        except OSError as error:
            if isinstance(error, _ABSENT) or error.errno == errno.EIO:
                raise CheckpointDamagedError(f"{name}: cannot be read: {error}", files=(name,)) from error
            raise

    def _wait(self, pause_s: float) -> bool:
        with self._mutex:
            pause_s = min(pause_s, self._left_s)
            self._left_s -= pause_s
        if pause_s > 0:
            self._pause(pause_s)
        return pause_s > 0
