"""The lock between the trainer, who changes the state, and those who copy it.

Writers are preferred: the trainer waits for those who read already, and for nobody who comes after it. Every wait has
a deadline, and its error names who held the lock. What makes the lock survive signal handlers that raise is told in
`manager.state.lock_holds`. A handler may raise anywhere in here; what it must not do is use the same lock itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

from manager.errors import Kind, LockHolder, LockNotHeldError, LockOrderError, LockTimeoutError
from manager.state.lock_holds import HoldTable, Root, Token

_DISALLOW = "disallow_state_dict_read"


class _PerThread(threading.local):
    root: Root | None = None
    is_disallowing: bool = False


@dataclass(frozen=True, slots=True)
class SectionMark:
    """Which sections a thread had open at some moment; see `StateLock.mark`."""

    tokens: frozenset[object]


_NOTHING_OPEN = SectionMark(frozenset())


class Section:
    """An open section of a `StateLock`. Keep it: a section whose object is dropped is closed by the lock.

    Attributes:
        kind: ``read`` or ``write``.
        what: What it was opened for.
    """

    __slots__ = ("__weakref__", "_lock", "_token", "kind", "what")

    def __init__(self, lock: StateLock, kind: Kind, what: str) -> None:
        """For `StateLock` alone."""
        self._lock = lock
        self.kind: Kind = kind
        self.what = what
        self._token: Token | None = None

    def release(self) -> None:
        """Release it, once, from any thread. Interrupted by an exception, it is released nevertheless.

        Raises:
            LockNotHeldError: It has been released already.
        """
        if self._token is None or not self._lock._holds.close(self._token):
            raise LockNotHeldError(kind=self.kind, what=self.what)

    @property
    def is_open(self) -> bool:
        """Whether it still has to be released."""
        return self._token is not None and self._token.is_open


class _SectionContext(AbstractContextManager[Section]):
    """A class and no generator: between its ``__enter__`` and the body, no handler can run."""

    __slots__ = ("_detached", "_kind", "_lock", "_section", "_timeout", "_what")

    def __init__(self, lock: StateLock, kind: Kind, what: str, timeout: timedelta | None, detached: bool) -> None:
        self._lock = lock
        self._kind: Kind = kind
        self._what = what
        self._timeout = timeout
        self._detached = detached
        self._section: Section | None = None

    def __enter__(self) -> Section:
        section = self._section = self._lock._open(self._kind, self._what, self._timeout, self._detached)
        if self._kind == "write":
            self._lock._announce_change(section, False)
        return section

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        section = self._section
        assert section is not None, "__exit__ without __enter__"
        try:
            section.release()
        except LockNotHeldError:
            # Next to the exception of the body, this one would only hide it.
            if exc is None:
                raise
        except BaseException:
            if section.is_open:
                section.release()
            raise
        finally:
            self._section = None


class StateLock:
    """A reader/writer lock, preferring writers, around the state of one replica.

    Every wait has a deadline. A thread nests freely in what it holds, except that it cannot write in its own read
    section. All methods may be called from any thread. It can be neither copied nor pickled.
    """

    def __init__(self, *, timeout: timedelta, before_change: Callable[[bool], None] | None = None) -> None:
        """Make a lock that nobody holds.

        Args:
            timeout: Deadline of every wait that names none of its own.
            before_change: Called on the writing thread whenever a write section has been opened, a nested one
                included, before the writer goes on; with whether an optimizer's step is all that it is for. If it
                raises, the section is closed again.

        Raises:
            ValueError: The timeout is negative.
        """
        self._timeout_s = _seconds(timeout)
        self._before_change = before_change
        self._per_thread = _PerThread()
        # At most one entry: the section that `disallow` opened and `allow` will release.
        self._disallowed: dict[Token, Section] = {}
        self._holds = HoldTable(is_wait_useless=self._is_wait_useless)

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a StateLock cannot be copied or pickled: a copy would guard nothing, as the threads that hold sections "
            "hold those of the original; make a new StateLock for the new state"
        )

    # ------------------------------------------------------------------------------------------------ sections

    def acquire_write(self, what: str, timeout: timedelta | None = None, *, is_optimizer_step: bool = False) -> Section:
        """Open a write section, which no other thread's section overlaps.

        Args:
            what: What for; appears in the errors of those who wait for it.
            timeout: Longest wait; the lock's own by default.
            is_optimizer_step: Passed on to ``before_change``.

        Raises:
            LockTimeoutError: Others held the lock until the deadline.
            LockOrderError: This thread holds the lock for reading.
            ValueError: The timeout is negative.
        """
        section = self._open("write", what, timeout, False)
        self._announce_change(section, is_optimizer_step)
        return section

    def acquire_read(self, what: str, timeout: timedelta | None = None, *, detached: bool = False) -> Section:
        """Open a read section, which overlaps no other thread's write section.

        Args:
            what: What for; appears in the errors of those who wait for it.
            timeout: Longest wait; the lock's own by default.
            detached: The section belongs to no thread: another one will release it, and the calling thread waits
                for it like any other when it wants to write.

        Raises:
            LockTimeoutError: Others held the lock until the deadline.
            LockOrderError: A detached read was asked for in the thread's own write section.
            ValueError: The timeout is negative.
        """
        return self._open("read", what, timeout, detached)

    def write(self, what: str, timeout: timedelta | None = None) -> AbstractContextManager[Section]:
        """Return a context manager, for one use, that does as `acquire_write`."""
        return _SectionContext(self, "write", what, timeout, False)

    def read(
        self, what: str, timeout: timedelta | None = None, *, detached: bool = False
    ) -> AbstractContextManager[Section]:
        """Return a context manager, for one use, that does as `acquire_read`."""
        return _SectionContext(self, "read", what, timeout, detached)

    # ------------------------------------------------------------------------------- as torchft's Manager does

    def disallow(self, timeout: timedelta | None = None) -> None:
        """Keep readers out until `allow`, as a write section of the calling thread.

        Returns at once if they are kept out already, whoever asked for it; otherwise returns when the lock is
        held. After an error nothing has changed.

        Raises:
            LockTimeoutError: Others held the lock until the deadline.
            LockOrderError: This thread holds the lock for reading.
            ValueError: The timeout is negative.
        """
        timeout_s = self._timeout_s if timeout is None else _seconds(timeout)
        deadline_s = time.monotonic() + timeout_s
        while not self._disallowed:
            section = self._open_until("write", _DISALLOW, timeout_s, deadline_s, detached=False, is_disallowing=True)
            if section is not None and section._token is not None:
                # torchft calls it around the steps of optimizers.
                self._announce_change(section, True)
                self._disallowed[section._token] = section
                return

    def allow(self) -> None:
        """Let readers in again, from any thread; nothing happens if they are not kept out."""
        try:
            _, section = self._disallowed.popitem()
        except KeyError:
            return
        section.release()

    @property
    def is_read_allowed(self) -> bool:
        """Whether no `disallow` is in force."""
        return not self._disallowed

    # ------------------------------------------------------------------------------------------- who holds what

    def holders(self) -> tuple[LockHolder, ...]:
        """Return every open section of every thread, the oldest hold first."""
        self._holds.close_abandoned()
        return tuple(holder for root in list(self._holds.roots) for holder in _holders_of(root))

    def write_owned(self) -> bool:
        """Whether the calling thread holds the lock for writing."""
        root = self._own_root()
        return root is not None and root.kind == "write"

    def write_depth(self) -> int:
        """Return how many sections the calling thread has open in its write hold; 0 if it has none."""
        root = self._own_root()
        return len(root.sections) if root is not None and root.kind == "write" else 0

    def mark(self) -> SectionMark:
        """Remember what the calling thread has open, for `close_sections_opened_since`."""
        root = self._own_root()
        return _NOTHING_OPEN if root is None else SectionMark(frozenset(root.sections))

    def close_sections_opened_since(self, mark: SectionMark) -> None:
        """Close what the calling thread has opened since the mark and not released; a `disallow` among it ends.

        Detached sections stay open, as they belong to no thread.
        """
        root = self._own_root()
        if root is None:
            return
        for token in list(root.sections):
            if token not in mark.tokens and not token.detached:
                # In this order, a disallow by another thread waits for the lock instead of relying on this one.
                ended = self._disallowed.pop(token, None)
                self._holds.close(token)
                del ended

    def _announce_change(self, section: Section, is_optimizer_step: bool) -> None:
        if self._before_change is None:
            return
        try:
            self._before_change(is_optimizer_step)
        except BaseException:
            if section.is_open:
                section.release()
            raise

    def _open(self, kind: Kind, what: str, timeout: timedelta | None, detached: bool) -> Section:
        timeout_s = self._timeout_s if timeout is None else _seconds(timeout)
        deadline_s = time.monotonic() + timeout_s
        section = self._open_until(kind, what, timeout_s, deadline_s, detached=detached, is_disallowing=False)
        assert section is not None, "only a disallow gives up before its deadline"
        return section

    def _open_until(
        self, kind: Kind, what: str, timeout_s: float, deadline_s: float, *, detached: bool, is_disallowing: bool
    ) -> Section | None:
        self._holds.close_abandoned()
        own = self._own_root()
        if own is not None:
            if own.kind == "read" and kind == "write":
                raise LockOrderError(wanted=f"write ({what!r})", holders=_holders_of(own))
            if own.kind == "write" and detached:
                raise LockOrderError(wanted=f"open a detached read ({what!r})", holders=_holders_of(own))
        section = Section(self, kind, what)
        token = section._token = self._holds.new_token(section, kind, what, detached=detached)
        try:
            if own is not None and self._holds.nest(own, token):
                return section
            self._per_thread.is_disallowing = is_disallowing
            while not self._holds.acquire(token, deadline_s):
                if is_disallowing and self._disallowed:
                    return None
                now_s = time.monotonic()
                if now_s >= deadline_s:
                    raise LockTimeoutError(
                        wanted=f"{kind} ({what!r})", waited_s=timeout_s + now_s - deadline_s, holders=self.holders()
                    )
            if not detached:
                self._per_thread.root = token.root
            return section
        except BaseException:
            self._holds.close(token)
            raise

    def _own_root(self) -> Root | None:
        """Return what the calling thread holds, not counting what belongs to no thread."""
        root = self._per_thread.root
        if root is None or root not in self._holds.roots:
            return None
        if all(token.detached for token in list(root.sections)):
            return None
        return root

    def _is_wait_useless(self) -> bool:
        return self._per_thread.is_disallowing and bool(self._disallowed)


def _holders_of(root: Root) -> tuple[LockHolder, ...]:
    now_s = time.monotonic()
    return tuple(
        LockHolder(
            kind=root.kind,
            what=token.what,
            thread_name=token.thread_name,
            thread_id=token.thread_id,
            age_s=max(0.0, now_s - token.opened_s),
        )
        for token in list(root.sections)
    )


def _seconds(timeout: timedelta) -> float:
    if not isinstance(timeout, timedelta):
        raise TypeError(f"expected a datetime.timedelta as timeout, got {type(timeout).__name__} {timeout!r}")
    timeout_s = timeout.total_seconds()
    if timeout_s < 0:
        raise ValueError(f"expected a timeout that is not negative, got {timeout}")
    return timeout_s
