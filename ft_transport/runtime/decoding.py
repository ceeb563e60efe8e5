"""Support for decoders of large states: the errors of msgspec, and pauses of Python's garbage collector.

A decoder, or the walk through a state, creates very many objects, none of them garbage.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""``UnicodeError``: text that is not UTF-8. ``RecursionError``: about a thousand nested brackets, even under an ignored
key; a caller that catches only ``MsgspecError`` would crash on 2 KB from a peer."""


class _Passage:
    """One passage. It counts while something refers to it, so a signal handler's exception leaves none behind."""

    __slots__ = ("__weakref__",)


_passages: weakref.WeakSet[_Passage] = weakref.WeakSet()
_is_disabled_here = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the collector of the whole process; passages nest, and threads' passages may overlap.

    A process that has imported torch has several hundred thousand objects, and a full collection takes about 0.1 s. Ten
    thousand new objects, such as a state of as many tensors, trigger one. For passages of milliseconds: other threads'
    garbage stays meanwhile. Without a lock, two threads that begin and end at the same moment may leave the collector
    running in a passage, which only costs time.
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
        # In this order: after an interruption here, the end of the next passage enables the collector.
        if not _passages and _is_disabled_here:
            gc.enable()
            _is_disabled_here = False
