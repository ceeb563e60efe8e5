"""The reader/writer lock between the training thread, which changes the state, and the threads that copy the state.

The library readerwriterlock decides which sections may overlap. This module adds deadlines, errors that name holders,
nested sections, owning threads, release from any thread, preference for writers, and safety from signal handlers.

A Python signal handler that raises can stop the main thread between any two calls, even inside the library. The
library's inner locks would then stay locked for ever. Four rules prevent that:

1. The record (``_record``) lists every open section and is always correct. It changes only under the mutex, by single
   dict operations, which a handler cannot interrupt. The mutex is written in C, so no handler runs between its
   acquisition and the first line of the block.
2. The library's lock decides which section may open. Threads use the library's lock only under the mutex, and only by
   calls that do not wait. ``_agrees`` is false while a thread changes the library's lock and the record. If a handler
   raises then, the next thread under the mutex builds a new library lock from the record. The same holds if a handler
   interrupts that repair.
3. The record has only a weak reference to a section. A handler may raise in the first instruction of a release, before
   any ``try``. Then no reference to the section remains, and the lock closes it at the next call, or in the next slice
   of a wait.
4. A thread waits outside the mutex in short slices. If a handler prevents a wake-up, the thread loses one slice.

A handler must not wait for a lock of this class that it may have interrupted.
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
from typing import Final, Literal, NoReturn, TypeAlias

from readerwriterlock.rwlock import Lockable, RWLockFair

from ft_transport.telemetry.metrics import MetricValues
from manager.errors import Kind, LockHolder, LockNotHeldError, LockOrderError, LockTimeoutError

_logger = logging.getLogger(__name__)

_SLICE_S: Final = 0.05  # costs hardly any CPU time, and is a short delay after a missed wake-up


Change: TypeAlias = Literal["step", "disallow", "other"]
"""The purpose of a write section: an optimizer's step, `StateLock.disallow`, which torchft calls around the steps of
optimizers, or something else."""


@dataclass(slots=True, eq=False)
class _Hold:
    """One acquisition of the library's lock, which all nested sections of a thread share."""

    kind: Kind
    handle: Lockable
    opened_s: float


@dataclass(slots=True, eq=False)
class _Entry:
    """The record's entry for one section, which is open or which a thread waits to open."""

    section: weakref.ref[Section]
    kind: Kind
    what: str
    is_detached: bool
    stepping: object
    asked_s: float = 0.0
    # The object and not its identifier, because the system reuses the identifiers of threads that ended.
    thread: threading.Thread = field(default_factory=threading.current_thread)  # noqa: TID251 # any kind
    hold: _Hold | None = None  # None while the thread waits
    opened_s: float = 0.0
    change: threading.Lock = field(default_factory=threading.Lock)  # locked unless the record has changed


@dataclass(slots=True, eq=False)
class LockWaits:
    """Number and length of the waits for a lock. Approximate, because waits that end at the same time may get lost."""

    num: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def add(self, waited_s: float) -> None:
        """Count one wait."""
        self.num += 1
        self.total_s += waited_s
        self.longest_s = max(self.longest_s, waited_s)


class Section:
    """A section of a `StateLock`. Keep a reference to an open section: without one, the lock closes the section."""

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
        self._lock = lock
        self._timeout = timeout
        self._entry = _Entry(weakref.ref(self), kind, what, detached, stepping)

    @property
    def is_open(self) -> bool:
        """Whether the section is open."""
        return self._entry in self._lock._record

    def release(self) -> None:
        """Close the section. Any thread may do this; `LockNotHeldError` is raised if the section is closed already."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Section:
        return self._lock._open(self)

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        # An exception here would hide an exception from the body of the ``with`` block.
        if not self._lock._close(self._entry) and exc is None:
            raise LockNotHeldError(kind=self._entry.kind, what=self._entry.what)


class StateLock:
    """A reader/writer lock, preferring writers, around the state of one replica.

    Every wait has a deadline. A thread may open a section inside its own sections, except a write section inside its
    read section. Any thread may call any method. The lock can be neither copied nor pickled. In a forked child, the
    sections of the thread that forked stay open, and the sections of other threads are closed.

    Methods that open a section have two parameters in common: ``what`` is the purpose of the section, for errors;
    ``timeout`` is the longest wait, by default that of the lock. They raise `LockTimeoutError` if other threads hold
    the lock until the deadline, `LockOrderError` if the section would wait for the calling thread itself, and
    ``ValueError`` for a negative timeout. After an error, the lock is as before.

    Attributes:
        costs: Metrics of waits, holds and timeouts, written under the lock's mutex.
        contended: The waits of threads that did not get the lock at once.
    """

    def __init__(self, *, timeout: timedelta, before_change: Callable[[Change], None] | None = None) -> None:
        """Make a lock that no thread holds.

        Args:
            timeout: Default deadline of waits.
            before_change: Called on the writing thread when a write section opens, even a nested one. The argument is
                the purpose of the section. If the call raises, the section is closed.
        """
        self._timeout_s = _seconds(timeout)
        self._before_change = before_change
        self.costs = MetricValues("lock")
        self.contended = LockWaits()
        # Reentrant: during a release, the garbage collector may run a finalizer that releases another section.
        self._mutex = threading.RLock()
        self._record: dict[_Entry, None] = {}
        # No thread waits in it. `_try_open` prefers writers, by the record; RWLockFair itself prefers nobody.
        self._library = RWLockFair()
        self._agrees = True
        # The section that the last `disallow` opened. Readers are barred while this section is open.
        self._disallowed: Section | None = None
        _locks.add(self)

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise TypeError(
            "a StateLock cannot be copied or pickled: threads that hold the original would not hold the copy; make a "
            "new StateLock for the new state"
        )

    def acquire_write(self, what: str, timeout: timedelta | None = None, *, stepping: object = None) -> Section:
        """Open a write section, which overlaps no other thread's section. ``stepping``: an optimizer about to step."""
        # The section is in no variable here: if a handler raises, no reference to the section remains.
        return self._open(Section(self, "write", what, timeout, False, stepping=stepping))

    def acquire_read(self, what: str, timeout: timedelta | None = None, *, detached: bool = False) -> Section:
        """Open a read section, which overlaps no other thread's write section.

        A ``detached`` section belongs to no thread. Another thread releases it, and even the calling thread must wait
        for its end before writing. A detached section cannot open inside the calling thread's own write section.
        """
        return self._open(Section(self, "read", what, timeout, detached))

    def write(self, what: str, timeout: timedelta | None = None) -> Section:
        """Return a write section for one ``with`` block. The block opens the section, like `acquire_write`."""
        return Section(self, "write", what, timeout, False)

    def read(self, what: str, timeout: timedelta | None = None) -> Section:
        """Return a read section for one ``with`` block. The block opens the section, like `acquire_read`."""
        return Section(self, "read", what, timeout, False)

    def disallow(self) -> None:
        """Open a write section of the calling thread that bars readers until `allow` is called, as in torchft.

        Returns at once if readers are barred already, by any thread. Otherwise waits for the lock.
        """
        if self.is_read_allowed:
            self._open(Section(self, "write", "disallow_state_dict_read", None, False), disallows=True)

    def allow(self) -> None:
        """End the section of `disallow`. Any thread may do this. Does nothing if readers are not barred."""
        if self._disallowed is not None:
            self._close(self._disallowed._entry)

    @property
    def is_read_allowed(self) -> bool:
        """Whether readers may open sections: no `disallow` is in effect."""
        return self._disallowed is None or not self._disallowed.is_open

    def holders(self) -> tuple[LockHolder, ...]:
        """Return the open sections of all threads, the oldest first."""
        self._close_dropped()
        return _holders(list(self._record))

    def write_owned(self) -> bool:
        """Return whether the calling thread has an open write section."""
        own = self._own()
        return bool(own) and own[0].hold is not None and own[0].hold.kind == "write"

    def stepping(self) -> object:
        """Return the optimizer for whose step the calling thread opened its innermost section, if any."""
        return next((entry.stepping for entry in reversed(self._own()) if entry.stepping is not None), None)

    def mark(self) -> frozenset[object]:
        """Return the calling thread's open sections, as a mark for `close_sections_opened_since`."""
        return frozenset(self._own())

    def close_sections_opened_since(self, mark: frozenset[object]) -> None:
        """Close the sections that the calling thread has opened since the mark, except detached sections."""
        for entry in self._own():
            if entry not in mark:
                self._close(entry)

    def _wait_to_open(self, entry: _Entry, timeout_s: float, *, disallows: bool) -> bool:
        """Wait until the section is open. Return false for a section of `disallow` if another `disallow` came first."""
        # A loop needs a function of its own, as in `_wake_waiting`: ``runtime.signal_safe`` says why.
        has_waited = False
        while not self._try_open(entry):
            if disallows and not self.is_read_allowed:
                return False
            waited_s = time.monotonic() - entry.asked_s
            if waited_s >= timeout_s:
                with self._mutex:
                    self.costs.add("lock_timeouts_total", entry.kind)
                wanted = f"{entry.kind} ({entry.what!r})"
                raise LockTimeoutError(wanted=wanted, waited_s=waited_s, holders=self.holders())
            has_waited = True
            entry.change.acquire(True, min(_SLICE_S, timeout_s - waited_s))
        if has_waited:
            self.contended.add(time.monotonic() - entry.asked_s)
        return True

    def _open(self, section: Section, *, disallows: bool = False) -> Section:
        timeout_s = self._timeout_s if section._timeout is None else _seconds(section._timeout)
        entry = section._entry
        entry.hold = None
        entry.asked_s = time.monotonic()
        try:
            if not self._wait_to_open(entry, timeout_s, disallows=disallows):
                self._close(entry)
                return section
            if entry.kind == "write" and self._before_change is not None:
                self._before_change("disallow" if disallows else "other" if entry.stepping is None else "step")
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
            # Meanwhile, a finalizer may have released another section and so replaced the library's lock.
            self._agrees = library is self._library
            if entry.hold is None:
                return False
            self.costs.add("lock_wait_seconds", entry.kind, by=entry.opened_s - entry.asked_s)
            return True

    def _nest(self, entry: _Entry, own: list[_Entry]) -> None:
        hold = own[0].hold
        assert hold is not None, "a thread's own sections are open"
        if hold.kind == "read" and entry.kind == "write":
            raise LockOrderError(wanted=f"write ({entry.what!r})", holders=_holders(own))
        if hold.kind == "write" and entry.is_detached:
            raise LockOrderError(wanted=f"open a detached read ({entry.what!r})", holders=_holders(own))
        entry.opened_s, entry.hold = time.monotonic(), hold
        self._record[entry] = None

    def _close(self, entry: _Entry) -> bool:
        """Close a section, or end the wait for it; return whether the record had an entry for it."""
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
                self.costs.add("lock_hold_seconds", hold.kind, by=time.monotonic() - hold.opened_s)
            self._agrees = True
            return True

    def _wake_waiting(self, hold: _Hold | None) -> bool:
        """Wake all waiting threads; return whether another section shares ``hold``."""
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
                assert is_free, "no two holds in the record exclude each other"
            self._agrees = library is self._library

    def _close_dropped(self) -> None:
        for entry in list(self._record):
            if entry.section() is None and self._close(entry):
                what = f"a {entry.kind} section ({entry.what!r}) opened by thread {entry.thread.name!r}"
                _logger.warning("%s was dropped without a release; the lock has closed it", what)

    def _own(self) -> list[_Entry]:
        """Return the calling thread's open sections, without detached ones."""
        if not self._record:
            return []
        me = threading.current_thread()
        return [e for e in list(self._record) if e.thread is me and e.hold is not None and not e.is_detached]

    def _close_in_child(self) -> None:
        # A new mutex: the thread that held the old one may not exist in the child.
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
        raise ValueError(f"expected a timeout of at least 0, got {timeout}")
    return timeout_s


def _close_in_child() -> None:
    for lock in list(_locks):
        lock._close_in_child()


_locks: Final[weakref.WeakSet[StateLock]] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
