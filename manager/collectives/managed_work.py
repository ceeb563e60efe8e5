"""Collectives that never fail a step by raising: what goes wrong is reported, and the step is not committed.

Nothing here forms a cycle. A `ManagedWork` and its futures refer to the collective; the collective refers to a future
only weakly, and keeps what the future resolves to. So gradients go away with the last reference to them, also where the
cyclic collector is turned off.
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
from ft_transport.runtime.handler_safety import SafeEvent, SafeThread
from manager.errors import ManagerError

T = TypeVar("T")

_NO_DEADLINE: Final = Deadline()


class ManagedFuture(torch.futures.Future[Any]):
    """The result of a `ManagedWork`, and of callbacks on it, which run where the work is waited for.

    torchft's ``DistributedDataParallel`` hands ``_fut`` to torch's reducer after waiting for the work.
    """

    def __init__(self, collective: _Collective, callback: Callable[[], Any]) -> None:
        """For this module alone.

        Args:
            collective: What it is the result of.
            callback: Called when that is over; returns the result.
        """
        super().__init__()
        self._collective = collective
        # What it resolves to. torchft looks here, others at the future itself, which has the same result.
        self._fut: torch.futures.Future[Any] = torch.futures.Future()
        collective.add(_Promise(self, callback))

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> ManagedFuture:
        """Run ``callback`` with this future once the work is done; return the future of what it returns."""
        result = self._fut
        return ManagedFuture(self._collective, lambda: callback(result))

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> None:
        """As `then`, without a result."""
        self.then(callback)

    def wait(self) -> Any:
        """Wait for the work, and return the value.

        Raises:
            ManagerError: Its callback was interrupted.
        """
        self._collective.wait()
        if not self._fut.done():
            # An interruption came between its turn and its result.
            raise ManagerError("expected the result of a collective, and finishing it was interrupted")
        return self._fut.wait()

    def value(self) -> Any:
        """Return the value; the work has been waited for."""
        return self._fut.value()

    def done(self) -> bool:
        """Whether the work has been waited for."""
        return self._fut.done()


class ManagedWork(dist._Work):  # type: ignore[name-defined, misc] # torch declares no type for it
    """A collective that never raises: what goes wrong is reported, and keeps the step from being committed.

    Waiting is what finishes it: averaging and callbacks run on the waiting thread, on its stream. It may be waited for
    any number of times, by one thread at a time. An interruption (``KeyboardInterrupt``) of a wait is raised, and the
    collective counts as failed from then on.

    Args:
        value: The tensor, reduced in place.
        report_error: Called if the collective, averaging or a callback fails.
    """

    def __init__(self, value: torch.Tensor, report_error: Callable[[Exception], object]) -> None:
        super().__init__()
        self._value = value
        self._collective = _Collective(report_error)
        self._future: ManagedFuture | None = None

    def begin(self, work: Any, finish: Callable[[], object] | None) -> None:
        """Take over a collective that has begun. Without a call of this the work counts as failed.

        Args:
            work: The collective.
            finish: Called once after it succeeded, e.g. to average; ``None`` for nothing.
        """
        self._collective.begin(work, finish)

    @property
    def tensor(self) -> torch.Tensor:
        """What is reduced in place."""
        return self._value

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Finish the collective. Returns whether the tensor is reduced."""
        return self._collective.wait(timeout)

    def is_completed(self) -> bool:
        """Whether it has been waited for."""
        return self._collective.is_over

    def is_settled(self) -> bool:
        """Whether it has been waited for, and that wait is over."""
        return self._collective.is_settled

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        """Let the current stream wait. On the CPU, and with torch's own works, that is what `wait` does."""
        self.wait(timeout)

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def get_future(self) -> ManagedFuture:
        """Return the future of the reduced tensor."""
        if self._future is None:
            value = self._value
            self._future = ManagedFuture(self._collective, lambda: value)
        return self._future


def wait_all(works: Sequence[ManagedWork], deadline: Deadline = _NO_DEADLINE) -> bool:
    """Finish all of them until the deadline. Returns whether every tensor is reduced."""
    is_good = True
    for work in works:
        is_good = work.wait(None if work.is_settled() else deadline.left()) and is_good
    return is_good


def forget_frames(error: BaseException) -> None:
    """Let an error that is kept refer to no frame: a frame refers to tensors, and often to whatever keeps the error."""
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
    """Return a future with the result of another one, or with ``default`` if that fails or takes too long.

    Args:
        future: Any; callbacks on it run on whatever thread completes it.
        default: The result in the end if there is none.
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
    """What a `ManagedFuture` becomes; keeps the callback, but not the future."""

    def __init__(self, future: ManagedFuture, callback: Callable[[], Any]) -> None:
        self._result = future._fut
        self._future = weakref.ref(future)
        self._callback = callback

    def keep(self) -> None:
        """Run the callback and complete the future.

        Raises:
            BaseException: What the callback raised.
        """
        try:
            result = self._callback()
        except BaseException as error:
            # Whoever waits for it must not wait for ever.
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
    """What a `ManagedWork` and its futures share.

    A step may have thousands of them at one time: objects that the garbage collector has to look at are kept few.

    Attributes:
        is_over: Whether it has been waited for.
        is_settled: Whether that wait has returned.
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
        # In this order: without the work it counts as failed, whatever interrupts here.
        self._finish = finish
        self._work = work

    def add(self, promise: _Promise) -> None:
        """Keep it when this is over, in order; at once if it is."""
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
                # Nothing but this makes it count.
                self._is_good = True
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            # They keep the process group, and with it the connections, for as long as they are referred to.
            self._work = self._finish = None

    def _keep_promises(self) -> None:
        while self._promises:
            # First taken out: a callback may add another one, and that runs at once.
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
            # The error itself goes on to whoever waited, with its frames.
            self._report_error(_interruption(error))


def _interruption(error: BaseException) -> ManagerError:
    return ManagerError(f"expected to finish a collective, got {type(error).__name__}")
