"""Executors and groups of threads, safe from signal handlers, and functions at the end of a process."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias, TypeVar

from ft_transport.errors import TransportError
from ft_transport.runtime.signal_safe import SafeFuture, SafeThread, ThreadRefusedError

T = TypeVar("T")

_Job: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


class ExecutorClosedError(RuntimeError):
    """The executor has been shut down and accepts no further job."""


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


def start(thread: SafeThread) -> None:
    """Start a thread.

    Raises:
        TransportError: The system has no further thread.
    """
    try:
        thread.start()
    except ThreadRefusedError as error:
        raise TransportError(f"expected a further thread ({thread.name}): {error}") from error


def run_on_threads(
    work: Callable[[int], None],
    num_threads: int,
    *,
    name: str,
    failed: Callable[[BaseException], None],
    needs_all: bool,
) -> None:
    """Run ``work`` on this thread, with 0, and on further threads, each with its number.

    Returns only when no thread works any more, even if signal handlers raise meanwhile.

    Args:
        work: The work of one thread.
        num_threads: Number of threads, this one included.
        name: Name of the further threads, before their number.
        failed: Called with each error of ``work`` and of signal handlers, on the thread that raised it.
        needs_all: Whether it is an error if the system has no further thread; otherwise the others do its part.
    """
    ended: set[int] = set()
    ends: SimpleQueue[None] = SimpleQueue()

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failed(error)
        finally:
            ended.add(number)
            ends.put(None)

    threads = [
        SafeThread(target=run, args=(number,), name=f"{name}-{number}", daemon=True) for number in range(1, num_threads)
    ]
    try:
        for thread in threads:
            if needs_all:
                start(thread)
            else:
                with contextlib.suppress(ThreadRefusedError):
                    thread.start()
        work(0)
    except BaseException as error:
        failed(error)
    # Not Thread.join: after a signal handler raises in it, it takes a running thread for an ended one. Starts are not
    # counted: such a handler may come before the count. A thread that begins only now finds that the work has ended.
    while len(ended) < sum(thread.ident is not None for thread in threads):
        try:
            ends.get()
        except BaseException as error:
            failed(error)
    for thread in threads:
        if thread.ident is not None:
            with contextlib.suppress(RuntimeError):  # The thread begins only now.
                thread.join()


def at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Decorator: call ``function`` after the main thread ends, before thread pools stop accepting work.

    ``atexit`` runs later, when pools, and with them asyncio, already refuse work. ``concurrent.futures`` registers
    itself in the same way (Lib/concurrent/futures/thread.py); the last registration runs first.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(function)
    return function


@at_exit
def _end_all() -> None:
    for executor in list(_living):
        executor.shutdown(wait=False)
