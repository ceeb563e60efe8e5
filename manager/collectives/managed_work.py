"""Collectives that report errors to the manager instead of raising them. The manager does not commit a failed step.

Objects of this module form no reference cycle, so a gradient is freed with its last reference, even if the garbage
collector is off. A `ManagedWork` and its futures refer to the collective. The collective refers to a future only
weakly, but to the future's result strongly.
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
    """A future with the result of a `ManagedWork` or callback. Callbacks run on the thread that waits for the work.

    torchft's ``DistributedDataParallel`` waits for the work, and then passes the attribute ``_fut`` to torch's reducer.
    """

    def __init__(self, collective: _Collective, callback: Callable[[], Any]) -> None:
        """Make a future for the result of ``callback``, which is called when the collective is over."""
        super().__init__()
        self._collective = collective
        # torchft reads the result from this attribute. Other callers read it from the future itself.
        self._fut: torch.futures.Future[Any] = torch.futures.Future()
        collective.add(_Promise(self, callback))

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> ManagedFuture:
        """Call ``callback`` with this future when the work is done. Return a future of the callback's result."""
        result = self._fut
        return ManagedFuture(self._collective, lambda: callback(result))

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> None:
        """Call ``callback`` with this future when the work is done."""
        self.then(callback)

    def wait(self) -> Any:
        """Wait for the work, and return the result.

        Raises:
            ManagerError: An exception of a signal handler interrupted the callback that makes the result.
        """
        self._collective.wait()
        if not self._fut.done():
            raise ManagerError("expected the result of a collective, but a signal handler's error interrupted it")
        return self._fut.wait()

    def value(self) -> Any:
        """Return the result. Call this only after a wait for the work."""
        return self._fut.value()

    def done(self) -> bool:
        """Return whether a wait for the work has finished."""
        return self._fut.done()


class ManagedWork(dist._Work):  # type: ignore[name-defined, misc] # torch declares no type for it
    """A collective that reports errors instead of raising them. The manager does not commit a step with an error.

    `wait` finishes the collective: averaging and callbacks run on the waiting thread, on that thread's current stream.
    Threads may call `wait` any number of times, one thread at a time. If an exception such as ``KeyboardInterrupt``
    interrupts a wait, `wait` raises the exception, and the collective counts as failed.

    Args:
        tensor: The tensor that is reduced in place.
        report_error: Called with the error when the collective, averaging or a callback fails.

    Attributes:
        tensor: The tensor that is reduced in place.
    """

    def __init__(self, tensor: torch.Tensor, report_error: Callable[[Exception], object]) -> None:
        super().__init__()
        self.tensor = tensor
        self._collective = _Collective(report_error)
        self._future: ManagedFuture | None = None

    def begin(self, work: Any, finish: Callable[[], object] | None) -> None:
        """Set the process group's work for this collective. Without this call, the collective counts as failed.

        Args:
            work: The work that the process group returned.
            finish: Called once after the collective has succeeded, e.g. to divide the sum; ``None`` for nothing.
        """
        self._collective.begin(work, finish)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Finish the collective; return whether the tensor is reduced.

        Args:
            timeout: Time limit. ``None`` and 0: that of the collective; torch's functional collectives pass 0
                (``kNoTimeout`` in torch/csrc/distributed/c10d/Types.hpp).
        """
        return self._collective.wait(timeout or None)

    def is_completed(self) -> bool:
        """Return whether a wait has begun to finish the collective."""
        return self._collective.is_over

    def is_settled(self) -> bool:
        """Return whether a wait has finished the collective."""
        return self._collective.is_settled

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        """Make the current stream wait for the collective, by calling `wait`."""
        self.wait(timeout)

    def synchronize(self) -> None:
        """Finish the collective, as `wait` does."""
        self.wait()

    def get_future(self) -> ManagedFuture:
        """Return the future of the reduced tensor."""
        if self._future is None:
            tensor = self.tensor
            self._future = ManagedFuture(self._collective, lambda: tensor)
        return self._future


def wait_all(works: Sequence[ManagedWork], deadline: Deadline = _NO_DEADLINE) -> bool:
    """Wait for all works, up to the deadline. Return whether every tensor is reduced."""
    is_good = True
    for work in works:
        is_good = work.wait(None if work.is_settled() else deadline.left()) and is_good
    return is_good


def uses_accelerator() -> bool:
    """Return whether this process uses an accelerator. Questions about devices and streams would make it use one.

    A process that trains on the host has no use for the memory of a CUDA context, and after a fork CUDA raises. Even
    ``torch.accelerator.is_available`` may prevent CUDA in later forks (its own documentation), so it is asked last.
    """
    is_initialized = getattr(torch.get_device_module(), "is_initialized", bool)
    return bool(is_initialized()) and torch.accelerator.is_available()


def forget_frames(error: BaseException) -> None:
    """Remove the tracebacks of an error and its causes.

    The frames of a traceback refer to tensors, and often to the object that stores the error.
    """
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
        future: Any future.
        default: The result if ``future`` fails or is not done in time.
        timeout: Longest wait for ``future``.
        report_error: Called once with the error if ``default`` is used.
    """
    result: torch.futures.Future[T] = torch.futures.Future()
    stream = torch.accelerator.current_stream() if uses_accelerator() else None
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
                # Does not block: it makes the stream wait for a collective that its device has not finished.
                value = done.wait()
            except Exception as error:
                report_error(error)
                value = default
            result.set_result(value)

    SafeThread(target=expire, name="ft-transport-future", daemon=True).start()
    future.add_done_callback(settle)
    return result


class _Promise:
    """A callback whose result becomes the result of a `ManagedFuture`. It refers to the future only weakly."""

    def __init__(self, future: ManagedFuture, callback: Callable[[], Any]) -> None:
        self._result = future._fut
        self._future = weakref.ref(future)
        self._callback = callback

    def fulfil(self) -> None:
        """Run the callback and complete the future. If the callback raises, raise its error."""
        try:
            result = self._callback()
        except BaseException as error:
            # Without this, a thread that waits for the future would wait for ever.
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

    A step may have thousands of works at the same time. So each work has few objects that the garbage collector tracks.

    Attributes:
        is_over: Whether a wait has begun to finish the collective.
        is_settled: Whether a wait has finished the collective.
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
        # In this order, an interruption between the lines is safe: without ``_work``, the collective counts as failed.
        self._finish = finish
        self._work = work

    def add(self, promise: _Promise) -> None:
        """Run the promise's callback when the collective is over, or now if it is over already."""
        with self._mutex:
            if self._promises is None:
                self._promises = []
            self._promises.append(promise)
            if self.is_over:
                self._fulfil_promises()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.is_settled and not self._promises:
            return self._is_good
        with self._mutex:
            if not self.is_over:
                self.is_over = True
                self._reduce(timeout)
            if self._promises:
                self._fulfil_promises()
            self.is_settled = True
            return self._is_good

    def _reduce(self, timeout: timedelta | None) -> None:
        try:
            if self._work is not None:
                self._work.wait(timeout) if timeout is not None else self._work.wait()
                if self._finish is not None:
                    self._finish()
                self._is_good = True
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            # Both refer to the process group, and so would keep its connections open.
            self._work = self._finish = None

    def _fulfil_promises(self) -> None:
        while self._promises:
            # Removed before its callback runs: the callback may add another promise, which runs at once.
            promise = self._promises.pop(0)
            try:
                promise.fulfil()
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
            # The waiting thread raises the error itself, so the report is another error, without the frames.
            self._report_error(_interruption(error))


def _interruption(error: BaseException) -> ManagerError:
    return ManagerError(f"expected to finish a collective, but {type(error).__name__} interrupted the wait")
