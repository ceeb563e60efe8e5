"""Conditions, events, futures, threads, executors and counters for threads on which a signal handler may raise.

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


class ExecutorClosedError(RuntimeError):
    """The executor has been shut down and accepts no further job."""


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


def outcome_of(function: Callable[[], T]) -> T | Exception:
    """Call a native function that would treat a handler's exception as its own error.

    On the main thread another thread makes the call, and continues alone if a handler raises here.

    Returns:
        The function's result, or its exception; this function itself raises only handlers' exceptions.
    """
    if threading.current_thread() is not threading.main_thread():
        return _outcome(function)
    future: Future[T | Exception] = SafeFuture()
    jobs: SimpleQueue[_Job | None] = SimpleQueue()
    jobs.put((future, lambda: _outcome(function)))
    jobs.put(None)
    # A daemon: even the interpreter's end does not wait for an abandoned call.
    SafeThread(target=_work, args=(jobs,), name="ft-transport-call", daemon=True).start()
    return future.result()


def _outcome(function: Callable[[], T]) -> T | Exception:
    try:
        return function()
    except Exception as error:
        return error


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


class SafeExecutor(Executor):
    """An executor with a few threads, safe from signal handlers; the first job starts them.

    The threads finish their jobs and end with `shutdown`, with the last reference to the executor, or with the
    interpreter. As a context manager the executor waits for its jobs; an exception cancels jobs that have not begun.

    Args:
        num_threads: Number of threads.
        name: Prefix of the threads' names.
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
        # After an interrupted start a thread may run or not: it does not count, and the next call starts another. A
        # function of its own: the module explains why for loops inside a ``with``.
        while self._num_started < self._num_threads:
            thread = SafeThread(target=_work, args=(self._jobs,), name=f"{self.name}_{self._num_started}")
            self._threads.append(thread)
            thread.start()
            self._num_started += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no further job; the threads end after their present jobs.

        Args:
            wait: Whether to wait for the threads.
            cancel_futures: Whether to cancel jobs that have not begun.
        """
        self._is_closed = True
        if cancel_futures:
            with contextlib.suppress(Empty):
                while True:
                    if (job := self._jobs.get_nowait()) is not None:
                        job[0].cancel()
        # In each call: a signal handler may have raised in the first one.
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
        # While it waits for the next job, the thread must not refer to the last one.
        del job, future, call
    # For the other threads, and for a thread that starts only now.
    jobs.put(None)


def _end_all() -> None:
    for executor in list(_living):
        executor.shutdown(wait=False)


# Before the interpreter waits for threads, as concurrent.futures does; `atexit` runs later.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
