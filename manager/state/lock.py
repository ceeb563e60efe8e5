"""The lock between the trainer, which changes the state, and the threads that copy it.

A reader/writer lock of the library readerwriterlock keeps them apart. Added here are deadlines whose errors name the
holders, nesting, ownership, release from any thread, preference for writers, and safety from signal handlers.

A Python handler that raises can stop the main thread between any two calls, also inside the library, and would leave
inner locks of the library taken for good. Four rules keep the lock whole:

1. The record says who holds what, and is always right. It changes under the mutex only, by single operations of a dict,
   which a handler cannot split. The mutex is C, so no handler runs between taking it and entering the block.
2. The library's lock decides who may enter. It is asked under the mutex alone, and answers without waiting. While it
   and the record change, ``_agrees`` is false. After a handler that raises it stays false, and the next thread under
   the mutex makes a new library lock that holds what the record says. A handler may interrupt that, too.
3. The record refers to a section weakly. A handler may raise in the first instruction of a release, before any ``try``.
   The section's object is dropped then, and the next call, or the next slice of a wait, closes the section.
4. A thread waits outside of the mutex and looks again in every slice: a wake-up that a handler prevents is no loss.

A handler must not itself wait for the lock that it interrupts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, NoReturn

from readerwriterlock.rwlock import Lockable, RWLockFair

from manager.errors import Kind, LockHolder, LockNotHeldError, LockOrderError, LockTimeoutError
from manager.state.lock_costs import LockCosts

_logger = logging.getLogger(__name__)

# Long enough that waiting costs nothing, short enough that a missed wake-up goes unnoticed.
_SLICE_S: Final = 0.05


@dataclass(slots=True, eq=False)
class _Hold:
    """One acquisition of the library's lock, which the sections that a thread nests have in common."""

    kind: Kind
    handle: Lockable
    opened_s: float


@dataclass(slots=True, eq=False)
class _Entry:
    """What the record knows of a section that is open, or that a thread waits for."""

    section: weakref.ref[Section]
    kind: Kind
    what: str
    is_detached: bool
    stepping: object = None
    asked_s: float = 0.0
    # An identifier would not do: the system gives those of ended threads to new ones.
    thread: threading.Thread = field(default_factory=threading.current_thread)  # noqa: TID251 # any thread, started long ago
    hold: _Hold | None = None  # none while the thread waits
    opened_s: float = 0.0
    # Locked while the waiting thread has seen the latest change.
    change: threading.Lock = field(default_factory=threading.Lock)


class Section:
    """A section of a `StateLock`. Keep it while it is open: the lock closes a section whose object is dropped."""

    __slots__ = ("__weakref__", "_entry", "_lock", "_timeout")

    def __init__(
        self,
        lock: StateLock,
        kind: Kind,
        what: str,
        timeout: timedelta | None,
        detached: bool,
        *,
        stepping: object = None,
    ) -> None:
        """For `StateLock` alone."""
        self._lock = lock
        self._timeout = timeout
        self._entry = _Entry(weakref.ref(self), kind, what, detached, stepping)

    @property
    def is_open(self) -> bool:
        """Whether it still has to be released."""
        return self._entry in self._lock._record

    def release(self) -> None:
        """Release it, once, from any thread; raises `LockNotHeldError` if it has been released already."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Section:
        return self._lock._open(self)

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        # Next to the exception of the body, another one would only hide it.
        if not self._lock._close(self._entry) and exc is None:
            raise LockNotHeldError(kind=self._entry.kind, what=self._entry.what)


class StateLock:
    """A reader/writer lock, preferring writers, around the state of one replica.

    Every wait has a deadline. A thread nests freely in what it holds, except that it cannot write in its own read
    section. All methods may be called from any thread. It can be neither copied nor pickled. A forked child keeps the
    sections of the thread that forked; those of threads that the child does not have are closed in it.

    Methods that open a section take ``what`` it is for, which appears in the errors of threads that wait for it, and
    the longest wait, the lock's own ``timeout`` by default. They raise `LockTimeoutError` if other threads hold the
    lock until the deadline, `LockOrderError` if the calling thread holds what the section would wait for, and
    ``ValueError`` if the timeout is negative. Nothing has changed then.

    Attributes:
        costs: How long threads have waited for it and held it.
    """

    def __init__(self, *, timeout: timedelta, before_change: Callable[[bool], None] | None = None) -> None:
        """Make a lock that no thread holds.

        Args:
            timeout: Deadline of every wait that names none of its own.
            before_change: Called on the writing thread whenever a write section has been opened, a nested one
                included, before the writer goes on; with whether an optimizer's step is all that it is for. If it
                raises, the section is closed again.
        """
        self._timeout_s = _seconds(timeout)
        self._before_change = before_change
        self.costs = LockCosts()
        # Reentrant: the collector may run a finalizer, which releases a section, in the midst of a release.
        self._mutex = threading.RLock()
        self._record: dict[_Entry, None] = {}
        # It is only tried, never waited in. `_try_open` prefers writers by the record; RWLockFair itself prefers
        # neither.
        self._library = RWLockFair()
        self._agrees = True
        # What `disallow` opened last; it is in force while the section is open.
        self._disallowed: Section | None = None
        _locks.add(self)

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise TypeError(
            "a StateLock cannot be copied or pickled: a copy would guard nothing, as the threads that hold sections "
            "hold those of the original; make a new StateLock for the new state"
        )

    def acquire_write(
        self,
        what: str,
        timeout: timedelta | None = None,
        *,
        is_optimizer_step: bool = False,
        stepping: object = None,
    ) -> Section:
        """Open a write section, which no other thread's section overlaps; ``before_change`` hears what it is for.

        ``stepping`` says whose step it is (`stepping`).
        """
        # In no variable: if a handler raises here, the section is dropped at once.
        return self._open(
            Section(self, "write", what, timeout, False, stepping=stepping), is_optimizer_step=is_optimizer_step
        )

    def acquire_read(self, what: str, timeout: timedelta | None = None, *, detached: bool = False) -> Section:
        """Open a read section, which overlaps no other thread's write section.

        A ``detached`` section belongs to no thread: another one will release it, and the calling thread waits for it
        like any other when it wants to write. It cannot be opened in the thread's own write section.
        """
        return self._open(Section(self, "read", what, timeout, detached))

    def write(self, what: str, timeout: timedelta | None = None) -> Section:
        """Return a section that ``with`` opens as `acquire_write` does, once, and releases."""
        return Section(self, "write", what, timeout, False)

    def read(self, what: str, timeout: timedelta | None = None) -> Section:
        """Return a section that ``with`` opens as `acquire_read` does, once, and releases."""
        return Section(self, "read", what, timeout, False)

    def disallow(self) -> None:
        """Keep readers out until `allow`, as a write section of the calling thread; as torchft's Manager does.

        Returns at once if they are kept out already, whichever thread asked for it; otherwise when the lock is held.
        """
        if self.is_read_allowed:
            # torchft calls it around the steps of optimizers.
            section = Section(self, "write", "disallow_state_dict_read", None, False)
            self._open(section, is_optimizer_step=True, disallows=True)

    def allow(self) -> None:
        """Let readers in again, from any thread; nothing happens if they are not kept out."""
        if self._disallowed is not None:
            self._close(self._disallowed._entry)

    @property
    def is_read_allowed(self) -> bool:
        """Whether no `disallow` is in force."""
        return self._disallowed is None or not self._disallowed.is_open

    def holders(self) -> tuple[LockHolder, ...]:
        """Return every open section of every thread, the oldest first."""
        self._close_dropped()
        return _holders(list(self._record))

    def write_owned(self) -> bool:
        """Whether the calling thread holds the lock for writing."""
        own = self._own()
        return bool(own) and own[0].hold is not None and own[0].hold.kind == "write"

    def stepping(self) -> object:
        """Whose step the calling thread's innermost write section is for; ``None`` if nobody has said so."""
        return next((entry.stepping for entry in reversed(self._own()) if entry.stepping is not None), None)

    def mark(self) -> frozenset[object]:
        """Remember what the calling thread has open, for `close_sections_opened_since`."""
        return frozenset(self._own())

    def close_sections_opened_since(self, mark: frozenset[object]) -> None:
        """Close what the calling thread has opened since the mark and not released; a `disallow` among it ends.

        Detached sections stay open, as they belong to no thread.
        """
        for entry in self._own():
            if entry not in mark:
                self._close(entry)

    def _wait_to_open(self, entry: _Entry, timeout_s: float, *, disallows: bool) -> bool:
        """Wait until the section is open; false where another thread has disallowed reads meanwhile.

        A function of its own, as `_wake_waiting`: see ``runtime.handler_safety`` about loops.
        """
        has_waited = False
        while not self._try_open(entry):
            if disallows and not self.is_read_allowed:
                return False
            waited_s = time.monotonic() - entry.asked_s
            if waited_s >= timeout_s:
                wanted = f"{entry.kind} ({entry.what!r})"
                with self._mutex:
                    self.costs.timed_out(entry.kind)
                raise LockTimeoutError(wanted=wanted, waited_s=waited_s, holders=self.holders())
            has_waited = True
            entry.change.acquire(True, min(_SLICE_S, timeout_s - waited_s))
        if has_waited:
            self.costs.contended.note(time.monotonic() - entry.asked_s)
        return True

    def _open(self, section: Section, *, is_optimizer_step: bool = False, disallows: bool = False) -> Section:
        timeout_s = self._timeout_s if section._timeout is None else _seconds(section._timeout)
        entry = section._entry
        entry.hold = None
        entry.asked_s = time.monotonic()
        try:
            if not self._wait_to_open(entry, timeout_s, disallows=disallows):
                self._close(entry)
                return section
            if entry.kind == "write" and self._before_change is not None:
                self._before_change(is_optimizer_step)
            if disallows:
                self._disallowed = section
        except BaseException:
            self._close(entry)
            raise
        return section

    def _try_open(self, entry: _Entry) -> bool:
        self._close_dropped()
        with self._mutex:
            self._repair()
            if own := self._own():
                self._nest(entry, own)
                return True
            others = list(self._record)
            self._record[entry] = None
            if entry.kind == "read" and others and "write" in [other.kind for other in others if other.hold is None]:
                return False
            self._agrees = False
            library = self._library
            handle = _new_handle(library, entry.kind)
            if handle.acquire(blocking=False):
                entry.opened_s = time.monotonic()
                entry.hold = _Hold(entry.kind, handle, entry.opened_s)
            # A finalizer that released another section meanwhile may have replaced the library's lock.
            self._agrees = library is self._library
            if entry.hold is None:
                return False
            self.costs.waited(entry.kind, entry.opened_s - entry.asked_s)
            return True

    def _nest(self, entry: _Entry, own: list[_Entry]) -> None:
        hold = own[0].hold
        assert hold is not None, "what a thread owns is open"
        if hold.kind == "read" and entry.kind == "write":
            raise LockOrderError(wanted=f"write ({entry.what!r})", holders=_holders(own))
        if hold.kind == "write" and entry.is_detached:
            raise LockOrderError(wanted=f"open a detached read ({entry.what!r})", holders=_holders(own))
        entry.opened_s, entry.hold = time.monotonic(), hold
        self._record[entry] = None

    def _close(self, entry: _Entry) -> bool:
        """Close a section, or end the wait for it; returns whether there was anything to close."""
        try:
            return self._close_once(entry)
        except BaseException:
            self._close_once(entry)
            raise

    def _close_once(self, entry: _Entry) -> bool:
        with self._mutex:
            if entry not in self._record:
                return False
            self._repair()
            self._agrees = False
            del self._record[entry]
            hold = entry.hold
            is_shared = self._wake_waiting(hold)
            if hold is not None and not is_shared:
                hold.handle.release()
            self._agrees = True
            if hold is not None and not is_shared:
                self.costs.held(hold.kind, time.monotonic() - hold.opened_s)
            return True

    def _wake_waiting(self, hold: _Hold | None) -> bool:
        """Let threads that wait look anew; whether another section shares ``hold``."""
        is_shared = False
        for other in list(self._record):
            is_shared = is_shared or other.hold is hold
            if other.hold is None and other.change.locked():
                other.change.release()
        return is_shared

    def _repair(self) -> None:
        while not self._agrees:
            library = self._library = RWLockFair()
            for hold in {entry.hold for entry in list(self._record) if entry.hold is not None}:
                hold.handle = _new_handle(library, hold.kind)
                is_free = hold.handle.acquire(blocking=False)
                assert is_free, "the record has no two holds that exclude each other"
            self._agrees = library is self._library

    def _close_dropped(self) -> None:
        for entry in list(self._record):
            if entry.section() is None and self._close(entry):
                what = f"a {entry.kind} section ({entry.what!r}) opened by thread {entry.thread.name!r}"
                _logger.warning("%s was dropped without a release; it is closed now", what)

    def _own(self) -> list[_Entry]:
        """Return the calling thread's open sections that belong to it."""
        if not self._record:
            return []
        me = threading.current_thread()
        return [e for e in list(self._record) if e.thread is me and e.hold is not None and not e.is_detached]

    def _close_in_child(self) -> None:
        # The thread that holds the mutex may be one that the child does not have.
        self._mutex = threading.RLock()
        self._record = dict.fromkeys(self._own())
        self._agrees = False


def _new_handle(library: RWLockFair, kind: Kind) -> Lockable:
    return library.gen_wlock() if kind == "write" else library.gen_rlock()


def _holders(entries: list[_Entry]) -> tuple[LockHolder, ...]:
    now_s = time.monotonic()
    return tuple(
        LockHolder(
            kind=entry.hold.kind,
            what=entry.what,
            thread_name=entry.thread.name,
            thread_id=entry.thread.ident or 0,
            age_s=max(0.0, now_s - entry.opened_s),
        )
        for entry in sorted(entries, key=lambda entry: entry.opened_s)
        if entry.hold is not None
    )


def _seconds(timeout: timedelta) -> float:
    if not isinstance(timeout, timedelta):
        raise TypeError(f"expected a datetime.timedelta as timeout, got {type(timeout).__name__} {timeout!r}")
    timeout_s = timeout.total_seconds()
    if timeout_s < 0:
        raise ValueError(f"expected a timeout that is not negative, got {timeout}")
    return timeout_s


def _close_in_child() -> None:
    for lock in list(_locks):
        lock._close_in_child()


_locks: Final[weakref.WeakSet[StateLock]] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
