"""Conditions, events, futures, threads, executors and counters for threads on which a signal handler may raise.

CPython runs handlers between any two calls of the main thread, also inside the standard library's classes that are
written in Python. ``Condition.__enter__`` is one: a handler that raises there, after the lock was taken, leaves it
taken for good, and with it every ``Event``, ``Future``, ``Semaphore`` and executor that is built on a condition. Here
the lock is taken by its own method, which is C and no place for a handler.

Python 3.13 leaves the jump at the end of some loops out of the ``with`` or ``try`` around the loop, and runs handlers
at that jump: a lock stays taken there. A loop under a lock of the training thread has a function of its own.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

T = TypeVar("T")

_Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


class SafeCondition(threading.Condition):
    """As ``threading.Condition``, on a lock that one thread may take twice.

    Args:
        beside: Another one, with which it shares the lock: for those who wait under it for something else.
    """

    # A special method is looked up on the type: these find the lock's own one without a frame of Python.
    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))

    def __init__(self, beside: SafeCondition | None = None) -> None:
        """Make a lock of its own, if it shares none."""
        self._mutex: Any = beside._mutex if beside is not None else threading.RLock()
        super().__init__(self._mutex)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification. The calling thread has taken the lock once."""
        try:
            return super().wait(timeout)
        except BaseException:
            # A handler raised between the release of the lock and the ``try`` that takes the lock back.
            if not self._mutex._is_owned():
                self._mutex.acquire()
            raise


class SafeEvent(threading.Event):
    """As ``threading.Event``."""

    def __init__(self) -> None:
        """Begin unset."""
        super().__init__()
        self._cond = SafeCondition()


class SafeFuture(Future[T]):
    """As ``concurrent.futures.Future``; wait for it with its own methods."""

    def __init__(self) -> None:
        """Begin pending."""
        super().__init__()
        self._condition = SafeCondition()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the future is done, in the manner of ``concurrent.futures.wait``; whether it is."""
        with self._condition:
            return self._condition.wait_for(self.done, timeout_s)


class ExecutorClosedError(RuntimeError):
    """An executor takes no further job: it was shut down."""


class ThreadRefusedError(RuntimeError):
    """The system has no further thread, or the interpreter is about to end."""


class SafeThread(threading.Thread):
    """As ``threading.Thread``.

    A handler that raises in ``threading.Thread.start`` may leave a thread that waits for ever as it begins. In
    ``threading.Thread.join`` such a handler may make a running thread count as one that ended.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See ``threading.Thread``."""
        super().__init__(*args, **kwargs)
        # Taken while the thread runs: waiting for a lock is a call in C, and no place for a handler.
        self._running = threading.Lock()
        self._pid = 0

    def start(self) -> None:
        """Start the thread. Where a handler raises, the thread has begun, begins soon, or never begins.

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
    """A daemon thread that begins with the first `start`.

    A handler that raises in `start` leaves a thread that runs or not; the next call makes sure that one does.

    Args:
        target: Called once.
        name: Of the thread.
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
        """Start the thread, unless that was done. Errors as for `SafeThread.start`."""
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
        # One thread after the other, where a start was interrupted; the second one finds nothing to do.
        with self._running:
            if not self._is_over:
                self._is_over = True
                self._target()


def outcome_of(function: Callable[[], T]) -> T | Exception:
    """Call what waits outside of Python, and takes what a handler raises meanwhile for an error of its own.

    On the main thread another thread makes the call, and goes on with it alone if a handler raises here.

    Returns:
        What it returned, or raised: what this function itself raises is a handler's.
    """
    if threading.current_thread() is not threading.main_thread():
        return _outcome(function)
    future: Future[T | Exception] = SafeFuture()
    jobs: SimpleQueue[_Job | None] = SimpleQueue()
    jobs.put((future, lambda: _outcome(function)))
    jobs.put(None)
    # A daemon: nobody waits for a call that was left, not even the interpreter when it ends.
    SafeThread(target=_work, args=(jobs,), name="ft-transport-call", daemon=True).start()
    return future.result()


def _outcome(function: Callable[[], T]) -> T | Exception:
    try:
        return function()
    except Exception as error:
        return error


class Place:
    """One of `Places`."""

    __slots__ = ("__weakref__", "is_taken")

    def __init__(self) -> None:
        """Take it."""
        self.is_taken = True

    def give_back(self) -> None:
        """Free the place; a second call does nothing."""
        self.is_taken = False


class Places:
    """Counts places in use. A place is free again when it is given back, and when nothing refers to it any more.

    A handler's exception may drop a place between the call that takes it and the ``try`` that would give it back, where
    a counter would count it for good. The caller has a lock.
    """

    def __init__(self) -> None:
        """Begin with no place in use."""
        self._taken: list[weakref.ref[Place]] = []

    def take(self) -> Place:
        """Return a new place, in use."""
        place = Place()
        self._taken = [*filter(_is_in_use, self._taken), weakref.ref(place)]
        return place

    def num_taken(self) -> int:
        """Return how many are in use."""
        return sum(map(_is_in_use, self._taken))


def _is_in_use(reference: weakref.ref[Place]) -> bool:
    place = reference()
    return place is not None and place.is_taken


class SafeEnd:
    """The end of an object, made once and on a thread of its own, where no handler can raise in the middle of it.

    A handler that raises in a call ends the caller's wait alone: the end goes on, and the next call waits for it, as
    the interpreter does before it ends.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._is_made = False
        self._error: BaseException | None = None
        # Held until the end is made: waiting for a lock is a call in C, and no place for a handler.
        self._pending = threading.Lock()
        self._pending.acquire()

    def __call__(self, end: Callable[[], None], *, wait: bool = True) -> None:
        """Make the end, unless it has been made or is being made.

        Args:
            end: Makes it.
            wait: Whether to return only when it is made.

        Raises:
            BaseException: What ``end`` raised, if it was waited for.
        """
        if not self._is_made:
            try:
                _thread.start_new_thread(self._start, (end,))
            except RuntimeError:  # The interpreter is about to end, or there is no thread left.
                self._run(end)
        if wait:
            with self._pending:
                pass
            if self._error is not None:
                raise self._error

    def _start(self, end: Callable[[], None]) -> None:
        try:
            # threading, and with it logging, makes up a thread for one that it does not know, and keeps it.
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


class SafeExecutor(Executor):
    """A few threads, started with the first job, that do one job after the other.

    They end with `shutdown`, with the last reference to the executor, or with the interpreter, after the jobs that they
    have been given. As a context manager the executor waits for its jobs, and an exception cancels the jobs that have
    not begun.

    Args:
        num_threads: How many.
        name: Of the threads, before a number.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._num_started = 0
        self.name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._threads: list[SafeThread] = []
        self._is_closed = False
        weakref.finalize(self, self._jobs.put, None)
        _living.add(self)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Let a thread call ``fn``.

        Raises:
            ExecutorClosedError: After `shutdown`.
            ThreadRefusedError: The system has no further thread.
        """
        future: Future[T] = SafeFuture()
        with self._mutex:
            if self._is_closed:
                raise ExecutorClosedError("cannot take another job after the shutdown")
            if self._num_started < self._num_threads:
                self._start_threads()
            self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def _start_threads(self) -> None:
        # A thread that a handler interrupted as it was started may run or not: it does not count, and another thread is
        # started in the next call. A function of its own: see the module about loops inside a ``with``.
        while self._num_started < self._num_threads:
            thread = SafeThread(target=_work, args=(self._jobs,), name=f"{self.name}_{self._num_started}")
            self._threads.append(thread)
            thread.start()
            self._num_started += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no further job; the threads end after those that they have.

        Args:
            wait: Whether to wait for that.
            cancel_futures: Whether jobs that have not begun are cancelled.
        """
        self._is_closed = True
        if cancel_futures:
            with contextlib.suppress(Empty):
                while True:
                    if (job := self._jobs.get_nowait()) is not None:
                        job[0].cancel()
        # Also in a further call: a signal handler may have raised in the first one.
        self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def __exit__(self, kind: type[BaseException] | None, *_exc_info: object) -> None:
        self.shutdown(wait=True, cancel_futures=kind is not None)


_living: Final[weakref.WeakSet[SafeExecutor]] = weakref.WeakSet()


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, call = job
        if future.set_running_or_notify_cancel():
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        # What waits for the next job refers to nothing of the last one.
        del job, future, call
    # For the other threads, and for a thread that begins only now.
    jobs.put(None)


def _end_all() -> None:
    for executor in list(_living):
        executor.shutdown(wait=False)


# Before the interpreter waits for threads; `atexit` comes after that. As concurrent.futures does.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
