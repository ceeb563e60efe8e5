"""Conditions, events, futures, threads and counters that stay usable if a signal handler raises inside their methods.

CPython runs signal handlers on the main thread between any two bytecode instructions, even inside Python code of the
standard library. If a handler raises in ``Condition.__enter__`` after the lock was acquired, the lock is never
released. That blocks every ``Event``, ``Future``, ``Semaphore`` and executor built on the condition. The classes here
call the lock's own C methods, which no handler can interrupt.

In Python 3.13, the jump at the end of some loops is not covered by the ``with`` or ``try`` around the loop. A handler
that raises at that jump would leave a lock locked. So each loop that runs under a lock on the training thread is in a
function of its own.
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
    """A ``threading.Condition`` with a reentrant lock that stays usable if a signal handler raises.

    Args:
        beside: Another condition, whose lock this condition shares.
    """

    # Python looks up special methods on the type. These properties return the lock's C methods, so that ``with`` runs
    # no Python code.
    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def __init__(self, beside: SafeCondition | None = None) -> None:
        """Share the lock of ``beside``, or create a new lock."""
        self._mutex: Any = beside._mutex if beside is not None else threading.RLock()
        super().__init__(self._mutex)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification. The calling thread must have acquired the lock exactly once."""
        try:
            return super().wait(timeout)
        except BaseException:
            # A handler may have raised after the release of the lock and before the ``try`` that acquires it again.
            if not self._mutex._is_owned():
                self._mutex.acquire()
            raise


class SafeEvent(threading.Event):
    """A ``threading.Event`` that stays usable if a signal handler raises."""

    def __init__(self) -> None:
        """Create an event that is not set."""
        super().__init__()
        self._cond = SafeCondition()


class SafeFuture(Future[T]):
    """A ``Future`` that stays usable if a signal handler raises, unlike one used with ``concurrent.futures.wait``."""

    def __init__(self) -> None:
        """Create a future that is not done."""
        super().__init__()
        self._condition = SafeCondition()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the future is done, for ``timeout_s`` at most; return whether the future is done."""
        with self._condition:
            return self._condition.wait_for(self.done, timeout_s)


class ThreadRefusedError(RuntimeError):
    """The system cannot start another thread, or the interpreter is ending."""


class SafeThread(threading.Thread):
    """A ``threading.Thread`` that stays usable if a signal handler raises.

    If a handler raises in ``threading.Thread.start``, the new thread may wait forever. If a handler raises in
    ``threading.Thread.join``, Python may treat a running thread as ended.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of ``threading.Thread``."""
        super().__init__(*args, **kwargs)
        # Locked while the thread runs, because a wait for a lock is a C call that no handler interrupts half-way.
        self._running = threading.Lock()
        self._pid = 0

    def start(self) -> None:
        """Start the thread. If a signal handler raises in this call, the thread may or may not run.

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
        """Wait until the thread has ended; return at once if the thread was not started in this process."""
        if timeout is not None:
            super().join(timeout)
        elif self._pid == os.getpid():
            with self._running:
                pass
            if self.is_alive():
                super().join()

    def run(self) -> None:
        """Call the thread's target; the thread calls this method."""
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
    """A daemon thread that starts at the first call of `start`.

    If a signal handler raises in `start`, the thread may or may not run. The next call of `start` ensures that a thread
    runs.

    Args:
        target: Function that the thread calls, once.
        name: Name of the thread.
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
        """Start the thread, unless it has started. Raises the errors of `SafeThread.start`."""
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
        # After an interrupted start, two threads may run, one after the other. The second thread has nothing to do.
        with self._running:
            if not self._is_over:
                self._is_over = True
                self._target()


class Place:
    """One use of a limited resource, counted by `Places` until `give_back`."""

    __slots__ = ("__weakref__", "is_taken")

    def __init__(self) -> None:
        """Begin the use."""
        self.is_taken = True

    def give_back(self) -> None:
        """End the use. Idempotent."""
        self.is_taken = False


class Places:
    """Counts current uses of a limited resource. A use ends with `give_back`, or when its `Place` is freed.

    If a signal handler raises between the call of `take` and the ``try`` after it, the use still ends; a plain
    counter would stay too high forever. The caller must hold one lock around all calls.
    """

    def __init__(self) -> None:
        """Begin to count, at zero uses."""
        self._taken: list[weakref.ref[Place]] = []

    def take(self) -> Place:
        """Begin a use."""
        place = Place()
        self._taken = [*filter(_is_in_use, self._taken), weakref.ref(place)]
        return place

    def num_taken(self) -> int:
        """Return the number of current uses."""
        return sum(map(_is_in_use, self._taken))


def _is_in_use(reference: weakref.ref[Place]) -> bool:
    place = reference()
    return place is not None and place.is_taken


class SafeEnd:
    """Closes an object once, on a separate thread, where no signal handler can interrupt the closing.

    If a handler raises while a caller waits, only the wait ends. The closing continues; the next call waits for it, and
    so does the interpreter before it exits.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_made = False
        self._error: BaseException | None = None
        # Locked until the closing is complete, because a wait for a lock is a C call that no handler interrupts
        # half-way.
        self._pending = threading.Lock()
        self._pending.acquire()

    def __call__(self, end: Callable[[], None], *, wait: bool = True) -> None:
        """Call ``end`` on a separate thread, unless an earlier call did.

        Args:
            end: Function that closes the object.
            wait: Whether to wait until ``end`` has returned.

        Raises:
            BaseException: ``wait`` is set, and ``end`` raised this error.
        """
        if not self._is_made:
            try:
                _thread.start_new_thread(self._start, (end,))
            except RuntimeError:  # The interpreter is ending, or the system cannot start another thread.
                self._run(end)
        if wait:
            with self._pending:
                pass
            if self._error is not None:
                raise self._error

    def _start(self, end: Callable[[], None]) -> None:
        try:
            # A thread of ``threading``: for any other thread, logging would make a dummy thread object that stays.
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
