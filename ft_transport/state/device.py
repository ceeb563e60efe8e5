"""Copies from an accelerator into a pinned arena, ordered behind the work that produced the tensors.

Written for ``torch.accelerator``: the copy runs on a side stream, which first waits for an event recorded on the
training thread's stream. Without that event the side stream would read parameters that the optimizer's kernels are
still writing, because those kernels were only queued when ``step()`` returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, Final, TypeAlias

import torch

from ft_transport.errors import SnapshotError

_CUDA_HOST_REGISTER_PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every context of the process


Marks: TypeAlias = dict[torch.device, Any]
"""By device, the event after which its memory may be copied."""


class Accelerator:
    """The part of torch's device-neutral interface that a copy needs; tests put a recording fake in its place."""

    def current_stream(self, device: torch.device) -> Any:
        """The stream on which the calling thread queues work for ``device``."""
        return torch.accelerator.current_stream(device)

    def new_stream(self, device: torch.device) -> Any:
        """A stream of its own, usable as a context manager."""
        return torch.Stream(device=device)

    def new_event(self, device: torch.device) -> Any:
        """An event that streams record and wait for."""
        return torch.Event(device=device)


class DeviceCopier:
    """Queues copies on one side stream per device.

    Args:
        accelerator: Where streams and events come from.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._streams: dict[torch.device, Any] = {}

    def mark(self, devices: Sequence[torch.device]) -> Marks:
        """Records, on the calling thread's stream of each device, an event behind all work queued so far.

        Called on the training thread at the step boundary.
        """
        events = {}
        for device in devices:
            event = self._accelerator.new_event(device)
            event.record(self._accelerator.current_stream(device))
            events[device] = event
        return events

    def copy(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Marks) -> None:
        """Copies each ``(host target, device source)`` pair behind the events ``after``; returns when all have landed.

        May run on any thread. The caller keeps the sources alive until this returns, so the caching allocator cannot
        hand their memory to somebody else meanwhile.
        """
        finished: list[Any] = []
        # Waits for all of them in one call, in which no signal handler can raise between two devices.
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
            # After an error too: what was queued must not write into memory that the caller then gives away.
            list(synchronized)


def _queue(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
    """Queues the copies from one device. A function of its own: see ``runtime.handler_safety`` about loops."""
    for target, source in copies:
        if source.device == device:
            target.copy_(source, non_blocking=True)


def pinning() -> Callable[[torch.Tensor], Callable[[], None]] | None:
    """How to page-lock an arena on this machine, or ``None`` where nothing would be gained.

    Device copies from unpinned memory are staged by the driver and block the host.
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
