"""Stacks of all threads where a wait takes suspiciously long: what one wants to know of a job that hangs."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

logger = logging.getLogger(__name__)

_IDLE_S: Final = 3600.0


class StallWatch:
    """Looks after the waits of one manager on a thread of its own, which starts with the first.

    Args:
        after_s: A wait of more seconds than this is a stall, told once.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._condition = threading.Condition()
        self._waits: dict[int, tuple[float, str]] = {}
        self._num_waits = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Watch what runs inside; ``what`` names replica, step and the thing waited for."""
        with self._condition:
            self._num_waits += 1
            key = self._num_waits
            self._waits[key] = (time.monotonic() + self._after_s, what)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="ft-transport-stall-watch", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._condition:
                self._waits.pop(key, None)

    def close(self) -> None:
        """End the thread."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        with self._condition:
            while not self._is_closed:
                now_s = time.monotonic()
                for key, (stalled_s, what) in list(self._waits.items()):
                    if stalled_s <= now_s:
                        self._waits[key] = (now_s + _IDLE_S, what)
                        logger.warning(
                            "%s: nothing for %.1f s; the threads are at:\n%s", what, self._after_s, _stacks()
                        )
                # Waking at least that often finds a wait that began meanwhile at twice its time at the latest.
                self._condition.wait(self._after_s / 2)


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, '?')!r}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )
