"""Conditions, events, futures, threads and counters for threads on which a signal handler may raise.

CPython runs signal handlers between any two calls of the main thread, also inside Python code of the standard library.
For example, a handler that raises in ``Condition.__enter__`` after the lock was taken leaves it locked for ever, and
with it every ``Event``, ``Future``, ``Semaphore`` and executor built on a condition. Here the lock's own method takes
it: that is C code, in which no handler runs.

Python 3.13 does not cover the jump at the end of some loops by the ``with`` or ``try`` around the loop, and runs
handlers at that jump, where a lock would stay locked. So a loop under a lock of the training thread is a function of
its own.
"""

from __future__ import annotations

import _thread
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class SafeCondition(threading.Condition):
    """A ``threading.Condition`` with a reentrant lock, safe from signal handlers.

    Args:
        beside: Another condition whose lock to share.
    """

    # A special method is looked up on the type: these find the lock's own one without a frame of Python.
    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def __init__(self, beside: SafeCondition | None = None) -> None:
        """Share the lock of ``beside``, or make a new one."""
        self._mutex: Any = beside._mutex if beside is not None else threading.RLock()
        super().__init__(self._mutex)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification. The calling thread holds the lock once."""
        try:
            return super().wait(timeout)
        except BaseException:
            # A handler may have raised between the release of the lock and the ``try`` that takes it again.
            if not self._mutex._is_owned():
                self._mutex.acquire()
            raise


class SafeEvent(threading.Event):
    """A ``threading.Event`` safe from signal handlers."""

    def __init__(self) -> None:
        """Start unset."""
        super().__init__()
        self._cond = SafeCondition()


class SafeFuture(Future[T]):
    """A ``concurrent.futures.Future`` safe from signal handlers; wait with its own methods."""

    def __init__(self) -> None:
        """Start pending."""
        super().__init__()
        self._condition = SafeCondition()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the future is done; return whether it is."""
        with self._condition:
            return self._condition.wait_for(self.done, timeout_s)


class ThreadRefusedError(RuntimeError):
    """The system has no further thread, or the interpreter is ending."""


class SafeThread(threading.Thread):
    """A ``threading.Thread`` safe from signal handlers.

    A handler that raises in ``threading.Thread.start`` may leave a new thread waiting for ever. In
    ``threading.Thread.join`` it may make a running thread count as ended.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See ``threading.Thread``."""
        super().__init__(*args, **kwargs)
        # Held while the thread runs: waiting for a lock is a C call, in which no handler runs.
        self._running = threading.Lock()
        self._pid = 0

    def start(self) -> None:
        """Start the thread. After an exception of a handler the thread runs, will run, or never runs.

        Raises:
            ThreadRefusedError: The thread cannot be started.
        """
        if self.ident is not None:
            raise RuntimeError("threads can only be started once")
        self._pid = os.getpid()
        begun: SimpleQueue[ThreadRefusedError | None] = SimpleQueue()
        if threading.current_thread() is threading.main_thread():
            try:
                _thread.start_new_thread(self._begin, (begun,))
            except _thread.error as error:
                raise ThreadRefusedError(*error.args) from error
        else:
            self._begin(begun)
        refusal = begun.get()
        if refusal is not None:
            raise refusal

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended; return at once if it has not begun, or runs in the parent process."""
        if timeout is not None:
            super().join(timeout)
        elif self._pid == os.getpid():
            with self._running:
                pass
            if self.is_alive():
                super().join()

    def run(self) -> None:
        """Call the target."""
        try:
            super().run()
        finally:
            self._running.release()

    def _begin(self, begun: SimpleQueue[ThreadRefusedError | None]) -> None:
        self._running.acquire()
        try:
            super().start()
        except BaseException as error:
            self._running.release()
            begun.put(ThreadRefusedError(*error.args))
        else:
            begun.put(None)


class LazyThread:
    """A daemon thread that starts with the first `start`.

    After an exception of a handler in `start` the thread may run or not; the next call makes sure that one runs.

    Args:
        target: Called once.
        name: The thread's name.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        self._target = target
        self._name = name
        self._threads: list[SafeThread] = []
        self._is_started = False
        self._is_over = False
        self._running = threading.Lock()

    @property
    def is_begun(self) -> bool:
        """Whether `start` was called."""
        return bool(self._threads)

    def start(self) -> None:
        """Start the thread, unless it has started; raises the errors of `SafeThread.start`."""
        if not self._is_started:
            thread = SafeThread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
            self._is_started = True

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended; see `SafeThread.join`."""
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        # After an interrupted start, two threads may run, one after the other; the second finds nothing to do.
        with self._running:
            if not self._is_over:
                self._is_over = True
                self._target()


class Place:
    """One place of `Places`."""

    __slots__ = ("__weakref__", "is_taken")

    def __init__(self) -> None:
        """Take the place."""
        self.is_taken = True

    def give_back(self) -> None:
        """Free the place; a second call does nothing."""
        self.is_taken = False


class Places:
    """Counts places in use. A place becomes free when it is given back, or loses its last reference.

    A handler's exception may drop a place between the call that takes it and the ``try`` that gives it back; a plain
    counter would then count it for ever. The caller holds a lock.
    """

    def __init__(self) -> None:
        """Start with no place in use."""
        self._taken: list[weakref.ref[Place]] = []

    def take(self) -> Place:
        """Return a new place, in use."""
        place = Place()
        self._taken = [*filter(_is_in_use, self._taken), weakref.ref(place)]
        return place

    def num_taken(self) -> int:
        """Return the number of places in use."""
        return sum(map(_is_in_use, self._taken))


def _is_in_use(reference: weakref.ref[Place]) -> bool:
    place = reference()
    return place is not None and place.is_taken


class SafeEnd:
    """Runs the closing of an object once, on a thread of its own, where no handler can interrupt it.

    A handler that raises in a call ends only the caller's wait: the closing continues, and the next call waits for it,
    as the interpreter does before it ends.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_made = False
        self._error: BaseException | None = None
        # Held until the closing is complete: waiting for a lock is a C call, in which no handler runs.
        self._pending = threading.Lock()
        self._pending.acquire()

    def __call__(self, end: Callable[[], None], *, wait: bool = True) -> None:
        """Run the closing, unless it has run or runs already.

        Args:
            end: Closes the object.
            wait: Whether to wait for it.

        Raises:
            BaseException: ``end`` failed, and the call waited for it.
        """
        if not self._is_made:
            try:
                _thread.start_new_thread(self._start, (end,))
            except RuntimeError:  # The interpreter is ending, or no thread is left.
                self._run(end)
        if wait:
            with self._pending:
                pass
            if self._error is not None:
                raise self._error

    def _start(self, end: Callable[[], None]) -> None:
        try:
            # threading, and with it logging, would make a dummy thread object for a foreign thread and keep it.
            threading.Thread(target=self._run, args=(end,), name="ft-transport-end", daemon=False).start()
        except RuntimeError:
            self._run(end)

    def _run(self, end: Callable[[], None]) -> None:
        with self._mutex:
            if self._is_made:
                return
            try:
                end()
            except BaseException as error:
                self._error = error
            finally:
                self._is_made = True
                self._pending.release()
