"""Support for decoders of large states: the errors that msgspec raises, and pauses of Python's garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Errors that msgspec raises for invalid input. Text that is not UTF-8 raises ``UnicodeError``. About a thousand nested
brackets, even under an ignored key, raise ``RecursionError``: 2 KB from a peer suffice."""


class _Pause:
    """One pause of the garbage collector. It ends when its last reference is dropped, for example by an exception."""

    __slots__ = ("__weakref__",)


_pauses: weakref.WeakSet[_Pause] = weakref.WeakSet()
_is_disabled_here = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector of the whole process while the block creates many objects that stay alive.

    Pauses may nest, and pauses of several threads may overlap. A process that has imported torch has several hundred
    thousand objects, and a full collection takes about 0.1 s. Ten thousand new objects, such as those of a state of ten
    thousand tensors, trigger a full collection. Use this only for blocks of milliseconds, because no garbage of any
    thread is collected meanwhile. There is no lock: if two threads enter and leave at the same moment, the collector
    may run within a block, which only costs time.
    """
    global _is_disabled_here  # noqa: PLW0603 - a process has only one collector
    pause = _Pause()
    try:
        _pauses.add(pause)
        if gc.isenabled():
            _is_disabled_here = True
            gc.disable()
        yield
    finally:
        _pauses.discard(pause)
        # After an interruption between these steps, the end of the next pause enables the collector.
        if not _pauses and _is_disabled_here:
            gc.enable()
            _is_disabled_here = False
