"""Keeps Python's garbage collector out of passages that make very many objects at once, none of them garbage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_open = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector of the whole process; sections nest and may overlap between threads.

    A process that has imported torch has some hundred thousand objects, and looking at all of them takes about 0.1 s.
    Ten thousand new ones, a state of as many tensors, are what makes the collector do so. Only for passages of
    milliseconds that wait for nothing: garbage that other threads make meanwhile stays.
    """
    global _num_open, _was_enabled  # noqa: PLW0603 - the collector is one per process
    with _lock:
        if not _num_open:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_open += 1
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            if not _num_open and _was_enabled:
                gc.enable()
