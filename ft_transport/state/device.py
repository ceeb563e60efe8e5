"""Copies from an accelerator into a pinned arena, ordered behind the work that produced the tensors.

Uses ``torch.accelerator``: the copy runs on a side stream, which first waits for an event on the training thread's
stream. Without that event the side stream would read parameters while the optimizer's kernels, which ``step()`` only
queues, still write them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, Final, TypeAlias

import torch

from ft_transport.errors import SnapshotError

_CUDA_HOST_REGISTER_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every context of the process


Marks: TypeAlias = dict[torch.device, Any]
"""By device, the event after which copies may read its memory."""


class Accelerator:
    """The part of torch's device-neutral interface that copies need; tests replace it by a recording fake."""

    def current_stream(self, device: torch.device) -> Any:
        """Return the stream on which the calling thread queues work for ``device``."""
        return torch.accelerator.current_stream(device)

    def new_stream(self, device: torch.device) -> Any:
        """Return a new stream, usable as a context manager."""
        return torch.Stream(device=device)

    def new_event(self, device: torch.device) -> Any:
        """Return an event that streams record and wait for."""
        return torch.Event(device=device)


class DeviceCopier:
    """Queues copies on one side stream per device.

    Args:
        accelerator: Provides streams and events.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._streams: dict[torch.device, Any] = {}

    def mark(self, devices: Sequence[torch.device]) -> Marks:
        """Record an event on the calling thread's stream of each device, behind all queued work.

        The training thread calls this at the step boundary.
        """
        events = {}
        for device in devices:
            event = self._accelerator.new_event(device)
            event.record(self._accelerator.current_stream(device))
            events[device] = event
        return events

    def copy(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Marks) -> None:
        """Copy each ``(host target, device source)`` pair after the events; return when all copies are complete.

        For any thread. The caller keeps the sources alive meanwhile, so that the caching allocator cannot reuse their
        memory.
        """
        finished: list[Any] = []
        # Waits for all events in one call, so that no signal handler can raise between two devices.
        synchronized = map(methodcaller("synchronize"), finished)
        try:
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
        finally:
            # After an error too: queued copies must not write into memory that the caller frees.
            list(synchronized)


def _queue(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
    """Queue the copies from one device. A function of its own: ``runtime.handler_safety`` explains why for loops."""
    for target, source in copies:
        if source.device == device:
            target.copy_(source, non_blocking=True)


def pinning() -> Callable[[torch.Tensor], Callable[[], None]] | None:
    """Return a function that page-locks an arena; ``None`` without a CUDA device.

    The driver stages device copies to unpinned memory, and blocks the host meanwhile.
    """
    if not torch.cuda.is_available():
        return None

    def pin(data: torch.Tensor) -> Callable[[], None]:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch gives it no types
        address = data.data_ptr()
        status = cudart.cudaHostRegister(address, data.numel(), _CUDA_HOST_REGISTER_PORTABLE)
        if int(status) != 0:
            raise SnapshotError(f"expected to page-lock {data.numel()} bytes, cudaHostRegister answered {status}")

        def unpin() -> None:
            cudart.cudaHostUnregister(address)

        return unpin

    return pin
