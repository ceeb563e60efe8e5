"""What is tried again when a directory or a file could not be read, for how long, and what is damage instead.

Damage is what no further attempt changes: there is no such file, it is none, it is too long or too short, or it differs
from its digest. All else says nothing of the file: no descriptor was left (EMFILE), a permission was missing for a
moment (EACCES), a file server had forgotten a handle (ESTALE). If that were taken for damage, an older checkpoint would
be loaded, and steps lost without need. A disk that reports EIO is tried again, too, and is damaged if it goes on.
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
    """Runs what reads, again and again while its failure may pass. Thread-safe.

    Args:
        total_s: How long all that use it may pause, all together.
        pause: Waits for so many seconds.
    """

    def __init__(self, total_s: float, pause: Callable[[float], None] = _sleep) -> None:
        self._left_s = total_s
        self._pause = pause
        self._mutex = threading.Lock()

    def call(self, action: Callable[[], T]) -> T:
        """Returns what ``action`` returns.

        Raises:
            OSError: That of the last attempt.
            Exception: What else ``action`` raises, at once.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return action()
            except OSError as error:
                # Some of ours are an OSError as well.
                if isinstance(error, (TransportError, *_ABSENT)) or not self._wait(pause_s):
                    raise
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def read(self, name: str, action: Callable[[], T]) -> T:
        """As `call`, for what reads a file of a checkpoint.

        Args:
            name: Of the file.
            action: Reads it.

        Raises:
            CheckpointDamagedError: It is not there, is none, or the disk cannot read it.
            OSError: It could not be read, for a reason that says nothing of the file.
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
