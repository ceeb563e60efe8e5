"""Collectives that report errors instead of raising them; a step with an error is not committed.

Nothing here forms a reference cycle. A `ManagedWork` and its futures refer to the collective; the collective refers to
a future only weakly, and strongly to the future's result. So the last reference to a gradient frees it, even with the
cyclic garbage collector off.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from ft_transport.runtime.deadline import Deadline
from ft_transport.runtime.signal_safe import SafeEvent, SafeThread
from manager.errors import ManagerError

T = TypeVar("T")

_NO_DEADLINE: Final = Deadline()


class ManagedFuture(torch.futures.Future[Any]):
    """The result of a `ManagedWork`, or of a callback on it; callbacks run on the thread that waits for the work.

    torchft's ``DistributedDataParallel`` hands ``_fut`` to torch's reducer after waiting for the work.
    """

    def __init__(self, collective: _Collective, callback: Callable[[], Any]) -> None:
        """Private to this module.

        Args:
            collective: The collective.
            callback: Called when the collective is over; returns the result.
        """
        super().__init__()
        self._collective = collective
        # torchft reads the result here; other callers read it from the future itself.
        self._fut: torch.futures.Future[Any] = torch.futures.Future()
        collective.add(_Promise(self, callback))

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> ManagedFuture:
        """Run ``callback`` with this future once the work is done; return a future of its result."""
        result = self._fut
        return ManagedFuture(self._collective, lambda: callback(result))

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> None:
        """Run ``callback`` with this future once the work is done."""
        self.then(callback)

    def wait(self) -> Any:
        """Wait for the work, and return the value.

        Raises:
            ManagerError: Its callback was interrupted.
        """
        self._collective.wait()
        if not self._fut.done():
            # An exception of a signal handler interrupted the callback.
            raise ManagerError("expected the result of a collective, and finishing it was interrupted")
        return self._fut.wait()

    def value(self) -> Any:
        """Return the value; the work has been waited for."""
        return self._fut.value()

    def done(self) -> bool:
        """Whether the work has been waited for."""
        return self._fut.done()


class ManagedWork(dist._Work):  # type: ignore[name-defined, misc] # torch declares no type for it
    """A collective that reports its errors instead of raising them; a step with an error is not committed.

    `wait` finishes the collective: averaging and callbacks run on the waiting thread, on its stream. Any number of
    waits are allowed, by one thread at a time. A wait that an exception such as ``KeyboardInterrupt`` interrupts raises
    it, and the collective counts as failed.

    Args:
        value: The tensor, reduced in place.
        report_error: Called when the collective, averaging or a callback fails.
    """

    def __init__(self, value: torch.Tensor, report_error: Callable[[Exception], object]) -> None:
        super().__init__()
        self._value = value
        self._collective = _Collective(report_error)
        self._future: ManagedFuture | None = None

    def begin(self, work: Any, finish: Callable[[], object] | None) -> None:
        """Take over a collective that has begun. A work without a collective counts as failed.

        Args:
            work: The collective.
            finish: Called once after the collective succeeded, e.g. to average; ``None`` for nothing.
        """
        self._collective.begin(work, finish)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, reduced in place."""
        return self._value

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Finish the collective; return whether the tensor is reduced."""
        return self._collective.wait(timeout)

    def is_completed(self) -> bool:
        """Return whether a wait has begun to finish it."""
        return self._collective.is_over

    def is_settled(self) -> bool:
        """Return whether a wait has finished it."""
        return self._collective.is_settled

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        """Let the current stream wait, which `wait` does on the CPU and with torch's own works."""
        self.wait(timeout)

    def synchronize(self) -> None:
        """Do the same as `wait`."""
        self.wait()

    def get_future(self) -> ManagedFuture:
        """Return the future of the reduced tensor."""
        if self._future is None:
            value = self._value
            self._future = ManagedFuture(self._collective, lambda: value)
        return self._future


def wait_all(works: Sequence[ManagedWork], deadline: Deadline = _NO_DEADLINE) -> bool:
    """Finish all works until the deadline; return whether every tensor is reduced."""
    is_good = True
    for work in works:
        is_good = work.wait(None if work.is_settled() else deadline.left()) and is_good
    return is_good


def forget_frames(error: BaseException) -> None:
    """Remove an error's tracebacks: their frames refer to tensors, and often to the object that stores the error."""
    known: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and id(link) not in known:
            known.add(id(link))
            link.__traceback__ = None
            chain += [link.__cause__, link.__context__]


def never_failing(
    future: torch.futures.Future[T], default: T, timeout: timedelta, report_error: Callable[[Exception], object]
) -> torch.futures.Future[T]:
    """Return a future with the result of ``future``, or with ``default`` if ``future`` fails or takes too long.

    Args:
        future: Any future; its callbacks run on the thread that completes it.
        default: The result after a failure.
        timeout: The longest wait.
        report_error: Called once if ``default`` is used.
    """
    result: torch.futures.Future[T] = torch.futures.Future()
    stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None
    is_first = threading.Lock()
    is_settled = SafeEvent()

    def expire() -> None:
        if is_settled.wait(timeout.total_seconds()):
            return
        if is_first.acquire(blocking=False):
            report_error(TimeoutError(f"expected a future to be done within {timeout.total_seconds():g} s"))
            result.set_result(default)

    def settle(done: torch.futures.Future[T]) -> None:
        is_settled.set()
        if not is_first.acquire(blocking=False):
            return
        with stream if stream is not None else nullcontext():
            try:
                value = done.value()
            except Exception as error:
                report_error(error)
                value = default
            result.set_result(value)

    SafeThread(target=expire, name="ft-transport-future", daemon=True).start()
    future.add_done_callback(settle)
    return result


class _Promise:
    """The pending result of a `ManagedFuture`; refers to the callback strongly and to the future weakly."""

    def __init__(self, future: ManagedFuture, callback: Callable[[], Any]) -> None:
        self._result = future._fut
        self._future = weakref.ref(future)
        self._callback = callback

    def keep(self) -> None:
        """Run the callback and complete the future.

        Raises:
            BaseException: The callback failed.
        """
        try:
            result = self._callback()
        except BaseException as error:
            # A thread that waits for the future must not wait for ever.
            self._fail(error if isinstance(error, Exception) else _interruption(error))
            raise
        self._result.set_result(result)
        future = self._future()
        if future is not None:
            torch.futures.Future.set_result(future, result)

    def _fail(self, error: Exception) -> None:
        self._result.set_exception(error)
        future = self._future()
        if future is not None:
            torch.futures.Future.set_exception(future, error)


class _Collective:
    """The state that a `ManagedWork` and its futures share.

    A step may have thousands of works at one time, so each has few objects for the garbage collector to track.

    Attributes:
        is_over: Whether a wait has begun to finish it.
        is_settled: Whether a wait has finished it.
    """

    __slots__ = ("_finish", "_is_good", "_mutex", "_promises", "_report_error", "_work", "is_over", "is_settled")

    def __init__(self, report_error: Callable[[Exception], object]) -> None:
        self._report_error = report_error
        self._work: Any = None
        self._finish: Callable[[], object] | None = None
        self._promises: list[_Promise] | None = None
        self._mutex = threading.RLock()
        self._is_good = False
        self.is_over = False
        self.is_settled = False

    def begin(self, work: Any, finish: Callable[[], object] | None) -> None:
        # In this order: without a work the collective counts as failed, so an interruption between the lines is safe.
        self._finish = finish
        self._work = work

    def add(self, promise: _Promise) -> None:
        """Run the promise's callback when the collective is over; at once if it is over already."""
        with self._mutex:
            if self._promises is None:
                self._promises = []
            self._promises.append(promise)
            if self.is_over:
                self._keep_promises()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.is_settled and not self._promises:
            return self._is_good
        with self._mutex:
            if not self.is_over:
                self.is_over = True
                self._reduce(timeout)
            if self._promises:
                self._keep_promises()
            self.is_settled = True
            return self._is_good

    def _reduce(self, timeout: timedelta | None) -> None:
        try:
            if self._work is not None:
                self._work.wait(timeout) if timeout is not None else self._work.wait()
                if self._finish is not None:
                    self._finish()
                # Set here alone.
                self._is_good = True
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            # Both refer to the process group, which holds the connections open.
            self._work = self._finish = None

    def _keep_promises(self) -> None:
        while self._promises:
            # Removed before it runs: a callback may add another promise, which runs at once.
            promise = self._promises.pop(0)
            try:
                promise.keep()
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    raise

    def _fail(self, error: BaseException) -> None:
        self._is_good = False
        if isinstance(error, Exception):
            self._report_error(error)
            forget_frames(error)
        else:
            # The waiting thread raises the error itself, with its frames.
            self._report_error(_interruption(error))


def _interruption(error: BaseException) -> ManagerError:
    return ManagerError(f"expected to finish a collective, got {type(error).__name__}")
