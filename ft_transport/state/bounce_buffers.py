"""Copies between ordinary memory of the host and devices, bit for bit, beside the work of other threads.

`BounceBuffers` copies through page-locked buffers, which the device reads and writes directly. For ordinary memory, the
driver would copy through its own buffers, on one thread. For 4 GiB to an H200 on 16 cores, the driver took 440 ms, and
these buffers took 80 ms. Locking the memory itself, copying and unlocking took 207 ms.

`BitCopier` makes such copies on a thread of its own, on side streams. On the stream of a training thread, each buffer
would wait for all steps that are queued there, and these steps would wait for the copies.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import torch

from ft_transport.runtime.threads import SafeExecutor
from ft_transport.state.copying import Accelerator, Marks, mark
from ft_transport.state.tensors import as_bytes, carrier_of, has_memory

logger = logging.getLogger(__name__)

HALF_BYTES: Final = 32 << 20
_ALIGN_BYTES: Final = 64
_LEAST_BYTES: Final = 1 << 20
"""Smaller copies use ordinary memory, because torch frees page-locked memory only when the process ends."""

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy: same dtype and shape."""


class BitCopier:
    """Copies tensors bit for bit, on any devices, after the work that is queued when the copier is created.

    A thread of the copier makes the copies from and to devices, in the order of the calls.

    Args:
        devices: The devices of the tensors.
        accelerator: Makes streams and events; torch's own by default.
    """

    def __init__(self, devices: Iterable[torch.device], accelerator: Accelerator | None = None) -> None:
        self._accelerator = accelerator if accelerator is not None else Accelerator()
        self._after = mark(self._accelerator, [device for device in devices if device.type != "cpu"])
        self._buffers = BounceBuffers(self._accelerator)
        self._executor = SafeExecutor(1, "ft-transport-bounce")
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = threading.Lock()
        self._process_id = os.getpid()
        self._has_begun = self._is_closed = False
        self._failure: BaseException | None = None
        self._fill_failure: BaseException | None = None

    @property
    def is_open(self) -> bool:
        """Whether the copier accepts copies: `close` ends that, and a forked child lacks the copier's thread."""
        return not self._is_closed and os.getpid() == self._process_id

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy each source to its target. Return when these copies, and all that `begin` began, are complete.

        Raises:
            Exception: A copy failed, also one of an earlier call.
        """
        self.begin([pair for pair in pairs if not _is_on_host(pair)])
        for target, source in filter(_is_on_host, pairs):
            _copy_one(target, source)
        failure = self.wait()
        if failure is not None:
            raise failure

    def begin(self, pairs: Sequence[Pair]) -> None:
        """Begin to copy each source to its target. Any thread may call this."""
        if pairs:
            self._submit(partial(self._copy_all, pairs))

    def begin_fill(self, tensors: Sequence[torch.Tensor], byte: int) -> None:
        """Begin to set each byte of the tensors to ``byte``; each bool to ``True``."""
        if tensors:
            self._submit(partial(self._fill_all, tensors, byte))

    def wait(self) -> BaseException | None:
        """Wait until no copy is on its way, and return the first failure of a copy.

        A failure is no error of this call, in which a signal handler may raise an error of its own.
        """
        if self._has_begun and self.is_open:
            self._executor.submit(self._run).result()
        return self._failure

    def close(self) -> None:
        """Wait until no copy is on its way, and end the thread.

        Raises:
            Exception: `begin_fill` could not overwrite a tensor.
        """
        self.wait()
        self._is_closed = True
        self._executor.shutdown(wait=False)
        if self._fill_failure is not None:
            raise self._fill_failure

    def _submit(self, job: Callable[[], None]) -> None:
        self._has_begun = True
        self._jobs.append(job)
        self._executor.submit(self._run)

    def _run(self) -> None:
        # In the order of the calls, even if a signal handler has interrupted the start of a thread, so that two run.
        with self._running:
            while self._jobs:
                try:
                    self._jobs.popleft()()
                except BaseException as error:
                    self._failure = self._failure or error

    def _copy_all(self, pairs: Sequence[Pair]) -> None:
        to_device: list[Pair] = []
        to_host: list[Pair] = []
        others: list[Pair] = []
        for target, source in pairs:
            is_plain = target.is_cpu != source.is_cpu and _is_plain(target) and _is_plain(source)
            kind = others if not is_plain else to_host if target.is_cpu else to_device
            kind.append((target, source))
        self._buffers.to_device(to_device, self._after)
        self._buffers.to_host(to_host, self._after)
        for pair in others:
            if _is_on_host(pair):
                _copy_one(*pair)
            else:
                self._copy_on_stream(*pair)

    def _fill_all(self, tensors: Sequence[torch.Tensor], byte: int) -> None:
        try:
            for tensor in filter(has_memory, tensors):
                # All bits set is not a valid bool.
                bits = torch.full((tensor.nbytes,), 1 if tensor.dtype is torch.bool else byte, dtype=torch.uint8)
                self._copy_all([(tensor, bits.view(tensor.dtype).view(tensor.shape))])
        except BaseException as error:
            self._fill_failure = error

    def _copy_on_stream(self, target: torch.Tensor, source: torch.Tensor) -> None:
        stream = self._accelerator.new_stream(source.device if target.is_cpu else target.device)
        for event in self._after.values():
            stream.wait_event(event)
        try:
            with stream:
                _copy_one(target, source)
        finally:
            # torch waits only for a transfer, and then queues a copy on the device.
            stream.synchronize()


class BounceBuffers:
    """Copies through two page-locked buffers: the host fills or empties one while the device copies the other.

    The copies run on a side stream, after given events. Do not call this on the main thread, where a signal handler may
    interrupt the change of the current stream.

    Args:
        accelerator: Makes streams and events; torch's own by default.
        half_bytes: Largest size of each buffer.
    """

    def __init__(self, accelerator: Accelerator | None = None, *, half_bytes: int = HALF_BYTES) -> None:
        self._accelerator = accelerator if accelerator is not None else Accelerator()
        self._half_bytes = half_bytes

    def to_device(self, pairs: Sequence[Pair], after: Marks) -> None:
        """Copy row-major sources on the host to targets on devices. Return when all copies are complete.

        Args:
            pairs: The copies.
            after: For each device, the event after which its targets may be written.
        """
        for device, own in _by_device(pairs, [target for target, _ in pairs]):
            halves, stream = self._page_locked(own), self._stream(device, after)
            copied: list[Any] = []
            try:
                for number, batch in enumerate(_batches(own, halves)):
                    if number >= len(halves):
                        copied[-len(halves)].synchronize()
                    event = self._accelerator.new_event(device)
                    try:
                        with stream:
                            for bounce, target, source in batch:
                                bounce.copy_(source)
                                target.copy_(bounce, non_blocking=True)
                    finally:
                        event.record(stream)
                        copied.append(event)
            finally:
                # Even after an error: the next user of the buffers must not write to them while the device reads.
                for event in copied[-len(halves) :]:
                    event.synchronize()

    def to_host(self, pairs: Sequence[Pair], after: Marks) -> None:
        """Copy row-major sources on devices to targets on the host. Return when all copies are complete.

        Args:
            pairs: The copies.
            after: For each device, the event after which its sources may be read.
        """
        for device, own in _by_device(pairs, [source for _, source in pairs]):
            halves, stream = self._page_locked(own), self._stream(device, after)
            landing: list[tuple[Any, list[Pair]]] = []
            try:
                for batch in _batches(own, halves):
                    if len(landing) == len(halves):
                        _empty(*landing.pop(0))
                    event = self._accelerator.new_event(device)
                    landing.append((event, [(target, bounce) for bounce, target, _ in batch]))
                    try:
                        with stream:
                            for bounce, _, source in batch:
                                bounce.copy_(source, non_blocking=True)
                    finally:
                        event.record(stream)
            finally:
                for event, emptied in landing:
                    _empty(event, emptied)

    def read(self, batches: Iterable[Sequence[torch.Tensor]], after: Marks) -> Iterator[list[torch.Tensor]]:
        """Yield for each batch of uint8 tensors on devices their bytes, in a buffer, while the next batch is copied.

        A yielded tensor is valid until the next iteration.

        Args:
            batches: Row-major tensors. Those of a batch have at most ``half_bytes`` bytes together, padded
                (`padded_bytes`).
            after: For each device, the event after which its tensors may be read.
        """
        halves: list[torch.Tensor] = []
        streams: dict[torch.device, Any] = {}
        copied: deque[tuple[list[torch.Tensor], list[Any]]] = deque()
        try:
            for number, batch in enumerate(batches):
                views: list[torch.Tensor] = []
                events: list[Any] = []
                copied.append((views, events))
                halves = halves or (self._page_locked_halves(self._half_bytes) if batch else [])
                at = 0
                for source in batch:
                    views.append(halves[number % 2][at : at + source.numel()])
                    at += padded_bytes(source.numel())
                for device, pairs in _by_device(list(zip(views, batch, strict=True)), batch):
                    if device not in streams:
                        streams[device] = self._stream(device, after)
                    events.append(self._accelerator.new_event(device))
                    try:
                        with streams[device]:
                            for view, source in pairs:
                                view.copy_(source, non_blocking=True)
                    finally:
                        events[-1].record(streams[device])
                if number:
                    yield _arrived(copied.popleft())
            while copied:
                yield _arrived(copied.popleft())
        finally:
            # Also after an error: the next user of the buffers must not read what the device still writes.
            for rest in copied:
                _arrived(rest)

    def _stream(self, device: torch.device, after: Marks) -> Any:
        """Return a new stream that begins after the device's event."""
        stream = self._accelerator.new_stream(device)
        stream.wait_event(after[device])
        return stream

    def _page_locked(self, pairs: Sequence[Pair]) -> list[torch.Tensor]:
        """Return two page-locked buffers. For small copies, or if locking fails, return ordinary memory."""
        return self._page_locked_halves(min(self._half_bytes, sum(target.nbytes + _ALIGN_BYTES for target, _ in pairs)))

    def _page_locked_halves(self, num_bytes: int) -> list[torch.Tensor]:
        if num_bytes >= _LEAST_BYTES:
            try:
                return [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            except RuntimeError as error:
                logger.debug("copies to and from the device are slow, because no memory can be page-locked: %s", error)
        return [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2)]


def padded_bytes(num_bytes: int) -> int:
    """Return the number of bytes that a tensor takes in a buffer."""
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _arrived(copied: tuple[list[torch.Tensor], list[Any]]) -> list[torch.Tensor]:
    views, events = copied
    for event in events:
        event.synchronize()
    return views


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
            at += padded_bytes(taken)
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


def _is_on_host(pair: Pair) -> bool:
    return all(tensor.is_cpu for tensor in pair)


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
