"""Copies between devices and the host, bit for bit.

`DeviceCopier` copies into a page-locked arena on a side stream. The side stream first waits for an event on the
training thread's stream. Without that event, it would read parameters while the optimizer's kernels still write them:
``step()`` only queues these kernels. All streams are made by ``torch.accelerator``. `CopiesInFlight` lets the next
optimizer step begin before the copies are complete: the device then runs the step's kernels after the copies.

`BounceBuffers` copies from and to ordinary host memory through page-locked buffers, which the device reads and writes
directly. For ordinary memory, the driver would copy through its own buffers, on one thread. For 4 GiB to an H200 on 16
cores, the driver took 440 ms, and these buffers took 80 ms. Locking the memory itself, copying and unlocking took 207
ms.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from operator import methodcaller
from typing import Any, Final, TypeAlias, TypeVar

import torch

from ft_transport.errors import DeadlineExceededError, SnapshotError
from ft_transport.state.tensors import as_bytes, carrier_of

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger(__name__)

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


class DeviceCopier:
    """Copies from devices to the host, on one side stream for each device.

    Args:
        accelerator: Makes streams and events.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._streams: dict[torch.device, Any] = {}

    def mark(self, devices: Sequence[torch.device]) -> Marks:
        """Record an event on the calling thread's stream of each device, after all work that is queued now.

        The training thread calls this at the step boundary (before ``forward``).
        """
        events = {}
        for device in devices:
            event = self._accelerator.new_event(device)
            event.record(self._accelerator.current_stream(device))
            events[device] = event
        return events

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

    Without page-locking, the driver copies through its own buffers, and blocks the host during the copy.
    """
    if not torch.cuda.is_available():
        return None

    def pin(data: torch.Tensor) -> Callable[[], None]:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch declares no types
        address = data.data_ptr()
        status = cudart.cudaHostRegister(address, data.numel(), _CUDA_HOST_REGISTER_PORTABLE)
        if int(status) != 0:
            raise SnapshotError(f"expected to page-lock {data.numel()} bytes, cudaHostRegister returned {status}")

        def unpin() -> None:
            cudart.cudaHostUnregister(address)

        return unpin

    return pin


_HALF_BYTES: Final = 32 << 20
_ALIGN_BYTES: Final = 64
_LEAST_BYTES: Final = 1 << 20
"""Smaller copies use ordinary memory, because torch frees page-locked memory only when the process ends."""

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy."""


class BounceBuffers:
    """Copies through two page-locked buffers: the host fills or empties one while the device copies the other.

    Args:
        accelerator: Makes streams and events; torch's own by default.
        half_bytes: Largest size of each buffer.
    """

    def __init__(self, accelerator: Accelerator | None = None, *, half_bytes: int = _HALF_BYTES) -> None:
        self._accelerator = accelerator if accelerator is not None else Accelerator()
        self._half_bytes = half_bytes

    def to_device(self, pairs: Sequence[Pair]) -> None:
        """Copy row-major sources on the host to targets on devices. Return when all copies are complete.

        The copies are queued on the calling thread's stream of each device, after its earlier work.
        """
        for device, own in _by_device(pairs, [target for target, _ in pairs]):
            halves = self._page_locked(own)
            copied: list[Any] = []
            try:
                for number, batch in enumerate(_batches(own, halves)):
                    if number >= len(halves):
                        copied[-len(halves)].synchronize()
                    event = self._accelerator.new_event(device)
                    try:
                        for bounce, target, source in batch:
                            bounce.copy_(source)
                            target.copy_(bounce, non_blocking=True)
                    finally:
                        event.record(self._accelerator.current_stream(device))
                        copied.append(event)
            finally:
                # Even after an error: the next user of the buffers must not write to them while the device reads.
                for event in copied[-len(halves) :]:
                    event.synchronize()

    def to_host(self, pairs: Sequence[Pair]) -> None:
        """Copy row-major sources on devices to targets on the host. Return when all copies are complete.

        The copies are queued on the calling thread's stream of each device, after its earlier work.
        """
        for device, own in _by_device(pairs, [source for _, source in pairs]):
            halves = self._page_locked(own)
            landing: list[tuple[Any, list[Pair]]] = []
            try:
                for batch in _batches(own, halves):
                    if len(landing) == len(halves):
                        _empty(*landing.pop(0))
                    event = self._accelerator.new_event(device)
                    landing.append((event, [(target, bounce) for bounce, target, _ in batch]))
                    try:
                        for bounce, _, source in batch:
                            bounce.copy_(source, non_blocking=True)
                    finally:
                        event.record(self._accelerator.current_stream(device))
            finally:
                for event, emptied in landing:
                    _empty(event, emptied)

    def _page_locked(self, pairs: Sequence[Pair]) -> list[torch.Tensor]:
        """Return two page-locked buffers. For small copies, or if locking fails, return ordinary memory."""
        num_bytes = min(self._half_bytes, sum(target.nbytes + _ALIGN_BYTES for target, _ in pairs))
        if num_bytes >= _LEAST_BYTES:
            try:
                return [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            except RuntimeError as error:
                logger.debug("copies to and from the device are slow, because no memory can be page-locked: %s", error)
        return [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2)]


def _batches(
    pairs: Sequence[Pair], halves: Sequence[torch.Tensor]
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Divide copies into batches that fit into one buffer. Yield each as tuples of buffer slice, target and source.

    Consecutive batches use different buffers.
    """
    half_bytes = len(halves[0])
    number = at = 0
    batch: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for target, source in pairs:
        to, from_ = as_bytes(target.detach()), as_bytes(source.detach())
        start, end = 0, to.numel()
        while start < end:
            if at >= half_bytes:
                yield batch
                number, at, batch = number + 1, 0, []
            taken = min(end - start, half_bytes - at)
            bounce = halves[number % len(halves)][at : at + taken]
            batch.append((bounce, to[start : start + taken], from_[start : start + taken]))
            start += taken
            at += -(-taken // _ALIGN_BYTES) * _ALIGN_BYTES
    if batch:
        yield batch


def _empty(event: Any, emptied: Sequence[Pair]) -> None:
    event.synchronize()
    for target, bounce in emptied:
        target.copy_(bounce)


def _by_device(pairs: Sequence[Pair], on_device: Sequence[torch.Tensor]) -> list[tuple[torch.device, list[Pair]]]:
    found: dict[torch.device, list[Pair]] = {}
    for pair, tensor in zip(pairs, on_device, strict=True):
        found.setdefault(tensor.device, []).append(pair)
    return list(found.items())


def copy_bits(pairs: Sequence[Pair]) -> None:
    """Copy each source to its target, bit for bit, on any devices. Return when all copies are complete.

    The copies are queued on the calling thread's stream of each device, after its earlier work.

    Args:
        pairs: Pairs of a target and a source with the same dtype and shape.
    """
    to_device: list[Pair] = []
    to_host: list[Pair] = []
    others: list[Pair] = []
    for target, source in pairs:
        is_plain = target.is_cpu != source.is_cpu and _is_plain(target) and _is_plain(source)
        kind = others if not is_plain else to_host if target.is_cpu else to_device
        kind.append((target, source))
    buffers = BounceBuffers()
    buffers.to_device(to_device)
    buffers.to_host(to_host)
    try:
        for target, source in others:
            _copy_one(target, source)
    finally:
        # If a tensor is not row-major, torch waits only for the transfer, and then queues a copy on the device.
        for device in {tensor.device for pair in others for tensor in pair if not tensor.is_cpu}:
            torch.accelerator.current_stream(device).synchronize()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the bytes in memory are the values in row-major order: no lazy conjugate or negative."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _copy_one(target: torch.Tensor, source: torch.Tensor) -> None:
    target, source = target.detach(), source.detach()
    if not any(tensor.is_conj() or tensor.is_neg() for tensor in (target, source)):
        # Copy through a carrier dtype, because torch has no copy kernels for many small dtypes.
        carrier = carrier_of(target.dtype)
        target, source = target.view(carrier), source.view(carrier)
    target.copy_(source)
