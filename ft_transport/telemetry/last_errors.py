"""The last things that went wrong in a process, for who watches it; the log has all of them."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from datetime import datetime, timezone
from typing import Final

from ft_transport.telemetry.told import ToldError

_NUM_KEPT: Final = 30
_MAX_TEXT: Final = 400


class LastErrors:
    """Keeps the last errors; the same one again is counted. Any thread may use it, also a signal handler."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._kept: deque[ToldError] = deque(maxlen=_NUM_KEPT)

    def note(self, about: str, text: str) -> None:
        """Keeps one.

        Args:
            about: A peer's address, or a replica.
            text: What went wrong, in words of ours.
        """
        error = ToldError(unix_s=datetime.now(timezone.utc).timestamp(), about=about[:_MAX_TEXT], text=text[:_MAX_TEXT])
        with self._mutex:
            last = self._kept[-1] if self._kept else None
            if last is not None and (last.about, last.text) == (error.about, error.text):
                self._kept[-1] = replace(error, count=last.count + 1)
            else:
                self._kept.append(error)

    def recent(self) -> tuple[ToldError, ...]:
        """The newest at the end."""
        with self._mutex:
            return tuple(self._kept)
