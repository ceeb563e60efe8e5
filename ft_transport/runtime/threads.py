"""Executors and groups of threads that stay usable if a signal handler raises, and functions to call at exit."""

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
    """The executor has been shut down and accepts no more jobs."""


class SafeExecutor(Executor):
    """A thread pool executor that stays usable if a signal handler raises. The first job starts the threads.

    The threads finish their jobs and end after `shutdown`, after the last reference to the executor is dropped, or when
    the interpreter ends. As a context manager, the executor waits for its jobs; if the block raises, the executor
    cancels the jobs that have not begun.

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
        """Queue a call of ``fn`` for the threads.

        Raises:
            ExecutorClosedError: `shutdown` was called.
            ThreadRefusedError: The system cannot start another thread.
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
        # A thread whose start was interrupted may or may not run. It is not counted; the next call starts another one.
        # The loop is in a function of its own, away from the ``with``, for the reason that `signal_safe` explains.
        while self._num_started < self._num_threads:
            thread = SafeThread(target=_work, args=(self._jobs,), name=f"{self.name}_{self._num_started}")
            self._threads.append(thread)
            thread.start()
            self._num_started += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more jobs, and end the threads after the queued jobs.

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
        # Every call does this, because a signal handler may have raised in the first call.
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
        # The thread must not keep objects of the last job alive while it waits for the next job.
        del job, future, call
    # Ends the other threads, and any thread that starts later.
    jobs.put(None)


def outcome_of(function: Callable[[], T]) -> T | Exception:
    """Call a native function that would mistake a signal handler's exception for its own failure.

    On the main thread, this function starts another thread for the call. If a handler raises meanwhile, this function
    raises the handler's exception, and the other thread continues.

    Returns:
        The result of ``function``, or the exception that it raised.
    """
    if threading.current_thread() is not threading.main_thread():
        return _outcome(function)
    future: Future[T | Exception] = SafeFuture()
    jobs: SimpleQueue[_Job | None] = SimpleQueue()
    jobs.put((future, lambda: _outcome(function)))
    jobs.put(None)
    # A daemon thread, so that the interpreter can exit during an abandoned call.
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
        TransportError: The system cannot start another thread.
    """
    try:
        thread.start()
    except ThreadRefusedError as error:
        raise TransportError(f"expected the system to start another thread ({thread.name}): {error}") from error


def run_on_threads(
    work: Callable[[int], None],
    num_threads: int,
    *,
    name: str,
    failed: Callable[[BaseException], None],
    needs_all: bool,
) -> None:
    """Call ``work`` on several threads at once: ``work(0)`` on this thread, ``work(1)``, ``work(2)``, … on new threads.

    Returns only when no thread is in ``work`` any more, even if signal handlers raise meanwhile.

    Args:
        work: Function that each thread calls with the thread's index.
        num_threads: Number of threads, including this thread.
        name: Prefix of the new threads' names.
        failed: Called with each error that ``work`` or a signal handler raises, on the thread that raised the error.
        needs_all: Whether to report an error if a thread cannot be started; otherwise fewer threads do the work.
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
    # Thread.join comes later: if a signal handler raises in it, Python treats a running thread as ended. A thread's
    # ident shows whether it has started, because a handler could raise between a start and a count of starts. A thread
    # that starts this late finds that the work has ended.
    while len(ended) < sum(thread.ident is not None for thread in threads):
        try:
            ends.get()
        except BaseException as error:
            failed(error)
    for thread in threads:
        if thread.ident is not None:
            with contextlib.suppress(RuntimeError):  # The thread is only starting now.
                thread.join()


def at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Register ``function``, as a decorator, to be called when the main thread ends, before thread pools refuse work.

    Functions of ``atexit`` run too late: thread pools, and asyncio with them, already refuse work then.
    ``concurrent.futures`` registers its own end in the same way (Lib/concurrent/futures/thread.py). The functions run
    in reverse order of registration.
    """
    register = getattr(threading, "_register_atexit", atexit.register)
    register(function)
    return function


@at_exit
def _end_all() -> None:
    for executor in list(_living):
        executor.shutdown(wait=False)
