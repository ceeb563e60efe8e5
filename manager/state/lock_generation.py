"""The library's lock, made so that it can be abandoned when a signal wrecks it.

``readerwriterlock`` builds a reader/writer lock out of plain locks. A Python signal handler that raises can stop its
code between any two bytecodes, with some of those inner locks taken for good. Nothing can mend that in place, so
`StateLock` keeps its own record of who holds what, and replaces the whole library lock by a new one: a new
*generation*. The inner locks here make the change possible, because those who wait in the old generation wait in
short slices and notice that it has been abandoned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from readerwriterlock.rwlock import Lockable, RWLockWrite

from manager.errors import Kind

# Long enough that waiting costs nothing, short enough that moving to a new generation goes unnoticed.
_SLICE_S = 0.05


class GenerationWreckedError(Exception):
    """Raised to those who wait in an abandoned generation, and caught before it reaches any caller."""


class Generation:
    """One library lock and what happened to it.

    Attributes:
        ready: Whether it may be used: whoever held the generation before holds this one by now.
        wrecked: Whether it has been replaced, so that to wait in it is in vain.
        keep_waiting: Called by a waiting thread once in every slice, with the time on the monotonic clock at which
            it began to wait; the wait ends as if timed out on a False.
    """

    __slots__ = ("_library_lock", "keep_waiting", "ready", "wrecked")

    def __init__(self, *, keep_waiting: Callable[[float], bool], ready: bool) -> None:
        """Make a lock that nobody holds."""
        self.keep_waiting = keep_waiting
        self.ready = ready
        self.wrecked = False
        # Of the library's three locks this one prefers writers: a trainer waits only for those who read already.
        self._library_lock = RWLockWrite(lock_factory=lambda: _InnerLock(self), time_source=time.monotonic)

    def new_handle(self, kind: Kind) -> Lockable:
        """Return a fresh handle; a handle that two acquisitions share would lose a reader."""
        return self._library_lock.gen_wlock() if kind == "write" else self._library_lock.gen_rlock()


class _InnerLock:
    """A `threading.Lock` for the library, whose waits notice that their generation has been abandoned."""

    __slots__ = ("_generation", "_lock", "_take", "locked", "release")

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._lock = threading.Lock()
        self._take = self._lock.acquire
        # As attributes they cost no Python frame, and a signal cannot come between the frame and the release.
        self.release = self._lock.release
        self.locked = self._lock.locked

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; ``timeout`` is in seconds, a negative one waits without end."""
        if self._take(False):
            return True
        if not blocking or timeout == 0:
            return False
        start_s = time.monotonic()
        deadline_s = start_s + timeout if timeout > 0 else None
        generation = self._generation
        while True:
            # The library's waits without a deadline come from releasing, which has to be carried through.
            if not generation.keep_waiting(start_s) and deadline_s is not None:
                return False
            if generation.wrecked:
                raise GenerationWreckedError
            slice_s = _SLICE_S if deadline_s is None else min(_SLICE_S, deadline_s - time.monotonic())
            if slice_s <= 0:
                return False
            if self._take(True, slice_s):
                return True

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self.release()
        return None
