"""Copies from devices to page-locked memory of the host.

`DeviceCopier` copies into a page-locked arena on a side stream. The side stream first waits for an event on the
training thread's stream. Without that event, it would read parameters while the optimizer's kernels still write them:
``step()`` only queues these kernels. All streams are made by ``torch.accelerator``. `CopiesInFlight` lets the next
optimizer step begin before the copies are complete: the device then runs the step's kernels after the copies.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from operator import methodcaller
from typing import Any, Final, TypeAlias

import torch

from ft_transport.errors import DeadlineExceededError, SnapshotError

_POLL_S: Final = 0.001

_CUDA_HOST_REGISTER_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every context of the process


Marks: TypeAlias = dict[torch.device, Any]
"""For each device, the event after which copies may read its memory."""


class Accelerator:
    """The functions of ``torch.accelerator`` that copies need. Tests replace this class by a fake."""

    def current_stream(self, device: torch.device) -> Any:
        """Return the stream on which the calling thread queues work for a device."""
        return torch.accelerator.current_stream(device)

    def new_stream(self, device: torch.device) -> Any:
        """Return a new stream of a device, which is a context manager."""
        return torch.Stream(device=device)

    def new_event(self, device: torch.device) -> Any:
        """Return a new event of a device, for streams to record and wait for."""
        return torch.Event(device=device)


def mark(accelerator: Accelerator, devices: Iterable[torch.device]) -> Marks:
    """Record an event on the calling thread's stream of each device, after all work that is queued now."""
    events = {}
    for device in devices:
        event = accelerator.new_event(device)
        event.record(accelerator.current_stream(device))
        events[device] = event
    return events


class DeviceCopier:
    """Copies from devices to the host, on one side stream for each device.

    Args:
        accelerator: Makes streams and events.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._streams: dict[torch.device, Any] = {}

    def mark(self, devices: Iterable[torch.device]) -> Marks:
        """See `mark`. The training thread calls this at the step boundary (before ``forward``)."""
        return mark(self._accelerator, devices)

    def copy(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Marks) -> None:
        """Copy each source on a device to its host target, after the events of `mark`. Return when all are complete.

        Any thread may call this. The caller keeps the sources alive, so that torch does not reuse their memory.

        Args:
            copies: Pairs of a host target and a device source.
            after: For each device, the event after which its sources may be read.
        """
        finished: list[Any] = []
        # The list at the end waits for all events in C, so that no signal handler can raise between two of them.
        synchronized = map(methodcaller("synchronize"), finished)
        try:
            self._queue_all(copies, after, finished)
        finally:
            # Even after an error: queued copies must not write into memory that the caller frees.
            list(synchronized)

    def queue(
        self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Marks, check: Callable[[], None]
    ) -> CopiesInFlight:
        """Queue the copies that `copy` would make, and return before they are complete.

        The caller keeps the sources and targets alive until the copies are complete. Do not call this on the main
        thread, where a signal handler may interrupt it.

        Args:
            copies: See `copy`.
            after: See `copy`.
            check: Raises a `SnapshotError` if a source has changed since `mark`.
        """
        finished: list[Any] = []
        try:
            self._queue_all(copies, after, finished)
        except BaseException:
            _synchronize(finished)
            raise
        return CopiesInFlight(self._accelerator, dict(zip(after, finished, strict=True)), check)

    def _queue_all(
        self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Marks, finished: list[Any]
    ) -> None:
        """Queue copies, and append the event at their end to ``finished``, for each device of ``after``."""
        for device, event in after.items():
            if device not in self._streams:
                self._streams[device] = self._accelerator.new_stream(device)
            stream = self._streams[device]
            stream.wait_event(event)
            done = self._accelerator.new_event(device)
            try:
                finished.append(done)
                with stream:
                    _queue(copies, device)
            finally:
                done.record(stream)


class CopiesInFlight:
    """Copies from devices that are queued and may still be running. Thread-safe.

    Each thread that is about to change the sources calls `before_write` or `wait` first. After `before_write`, the host
    does not wait for the copies: the device runs the kernels that write after the copies.

    Args:
        accelerator: Knows the streams of the calling threads.
        finished: For each device, the event at the end of its copies.
        check: Raises a `SnapshotError` if a source has changed. Called once, before the first write, or after the
            copies.

    Attributes:
        is_complete: Whether the copies are known to be complete.
    """

    def __init__(
        self, accelerator: Accelerator, finished: Mapping[torch.device, Any], check: Callable[[], None]
    ) -> None:
        self._accelerator = accelerator
        self._finished = finished
        self._check: Callable[[], None] | None = check
        self._mutex = threading.Lock()
        self._failure: SnapshotError | None = None
        self.is_complete = False

    def before_write(self) -> bool:
        """Order the writes that the calling thread queues on its current streams after the copies.

        Returns:
            Whether later writers must call this method or `wait` as well.
        """
        with self._mutex:
            if self.is_complete:
                return False
            self._check_once()
            for device, event in self._finished.items():
                self._accelerator.current_stream(device).wait_event(event)
            return True

    def wait(self, timeout: timedelta) -> None:
        """Wait until the copies are complete, before writes on any stream.

        Raises:
            DeadlineExceededError: The device has not executed the copies within the timeout.
        """
        deadline_s = time.monotonic() + timeout.total_seconds()
        while not all(event.query() for event in self._finished.values()):
            if time.monotonic() >= deadline_s:
                raise DeadlineExceededError(
                    f"expected the device to copy a snapshot in {timeout.total_seconds():.0f} s, before its tensors "
                    "change; is a collective stuck on the device?"
                )
            time.sleep(_POLL_S)
        with self._mutex:
            self._check_once()
            self.is_complete = True

    def complete(self) -> None:
        """Wait until the copies are complete.

        Raises:
            SnapshotError: A source has changed before a writer called `before_write` or `wait`.
        """
        _synchronize(self._finished.values())
        with self._mutex:
            self._check_once()
            self.is_complete = True
        if self._failure is not None:
            raise self._failure

    def _check_once(self) -> None:
        if self._check is None:
            return
        try:
            self._check()
        except SnapshotError as error:
            self._failure = error
        except BaseException:
            # A signal handler has raised. The caller may change the sources without another check.
            self._failure = SnapshotError("the check of whether tensors have changed was interrupted")
            raise
        finally:
            self._check = None  # it refers to the sources


def _synchronize(events: Iterable[Any]) -> None:
    for event in events:
        event.synchronize()


def _queue(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
    """Queue the copies from one device. ``runtime.signal_safe`` explains why this loop is in its own function."""
    for target, source in copies:
        if source.device == device:
            target.copy_(source, non_blocking=True)


def pinning() -> Callable[[torch.Tensor], Callable[[], None]] | None:
    """Return a function that page-locks an arena; ``None`` without a CUDA device.

    The function does nothing in a process that does not use CUDA: page-locking would create a CUDA context, and raises
    after a fork.

    Without page-locking, the driver copies through its own buffers, and blocks the host during the copy.
    """
    if not torch.cuda.is_available():
        return None

    def pin(data: torch.Tensor) -> Callable[[], None]:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch declares no types
            return lambda: None
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch declares no types
        address = data.data_ptr()
        status = cudart.cudaHostRegister(address, data.numel(), _CUDA_HOST_REGISTER_PORTABLE)
        if int(status) != 0:
            # CUDA keeps the error for the next kernel launch of this thread, which would be the trainer's.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            raise SnapshotError(f"expected to page-lock {data.numel()} bytes, cudaHostRegister returned {status}")

        def unpin() -> None:
            cudart.cudaHostUnregister(address)

        return unpin

    return pin
