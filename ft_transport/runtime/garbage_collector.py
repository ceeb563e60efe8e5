"""Keeps Python's garbage collector out of passages that make very many objects at once, none of them garbage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager


class _Passage:
    """One passage under way. It counts for as long as somebody holds it, so none is left over by a signal handler."""

    __slots__ = ("__weakref__",)


_passages: weakref.WeakSet[_Passage] = weakref.WeakSet()
_is_disabled_here = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector of the whole process; passages nest and may overlap between threads.

    A process that has imported torch has some hundred thousand objects, and looking at all of them takes about 0.1 s.
    Ten thousand new ones, a state of as many tensors, are what makes the collector do so. Meant for passages of
    milliseconds: garbage that other threads make meanwhile stays. There is no lock: two threads that begin and end at
    the same moment may leave the collector running in a passage, which costs time and nothing else.
    """
    global _is_disabled_here  # noqa: PLW0603 - the collector is one per process
    passage = _Passage()
    try:
        _passages.add(passage)
        if gc.isenabled():
            _is_disabled_here = True
            gc.disable()
        yield
    finally:
        _passages.discard(passage)
        # In this order: what a signal handler interrupts here is made good by the end of the next passage.
        if not _passages and _is_disabled_here:
            gc.enable()
            _is_disabled_here = False
