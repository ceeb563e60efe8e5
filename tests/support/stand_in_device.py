"""A device that isn't there, after the documentation of torch.Stream, torch.Event and ``copy_(non_blocking=True)``.

Work is queued and runs in order within a stream, between streams only where one waits for an event, and nothing has run
for certain before somebody synchronises. Here it runs at the last moment that this allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class StandInStream:
    def __init__(self, device: torch.device, log: list[str], name: str) -> None:
        self.device, self.log, self.name = device, log, name
        self.queue: list[Callable[[], object]] = []
        self.outer: list[StandInStream | None] = []

    def wait_event(self, event: StandInEvent) -> None:
        self.log.append(f"{self.name} waits")
        self.queue.append(event.run_until)

    def __enter__(self) -> None:
        self.outer.append(OnDevice.stream)
        OnDevice.stream = self

    def __exit__(self, *_: object) -> None:
        OnDevice.stream = self.outer.pop()


class StandInEvent:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.is_done = False
        self.stream: StandInStream | None = None

    def record(self, stream: StandInStream) -> None:
        self.log.append(f"recorded on {stream.name}")
        self.stream = stream
        stream.queue.append(self._finish)

    def _finish(self) -> None:
        self.is_done = True

    def run_until(self) -> None:
        while not self.is_done:
            assert self.stream is not None, "an event that was not recorded"
            self.stream.queue.pop(0)()

    def query(self) -> bool:
        """The device has time to run while the host asks again."""
        assert self.stream is not None
        self.log.append(f"queried {self.stream.name}")
        self.run_until()
        return True

    def synchronize(self) -> None:
        assert self.stream is not None
        self.log.append(f"synchronised with {self.stream.name}")
        self.run_until()


class StandInAccelerator:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.training: dict[torch.device, StandInStream] = {}
        self.num_streams = 0

    def current_stream(self, device: torch.device) -> StandInStream:
        return self.training.setdefault(device, StandInStream(device, self.log, f"training {device}"))

    def new_stream(self, device: torch.device) -> StandInStream:
        self.num_streams += 1
        return StandInStream(device, self.log, f"side {device}")

    def new_event(self, device: torch.device) -> StandInEvent:
        return StandInEvent(self.log)

    def is_idle(self) -> bool:
        return not any(stream.queue for stream in self.training.values())


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device. Copies to and from it are queued on the stream that is current."""

    accelerator: StandInAccelerator
    stream: StandInStream | None = None
    is_cpu = False  # type: ignore[assignment]
    device = torch.device("cuda", 0)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.copy_:
            return super().__torch_function__(func, types, args, kwargs or {})
        target, source = (each.as_subclass(torch.Tensor) for each in args)
        if not (kwargs or {}).get("non_blocking"):
            return target.copy_(source)
        stream = OnDevice.stream or OnDevice.accelerator.current_stream(cls.device)
        assert stream.device == cls.device
        stream.log.append(f"copy on {stream.name}")
        stream.queue.append(lambda: target.copy_(source))
        return args[0]


class OnAnother(OnDevice):
    device = torch.device("cuda", 1)  # type: ignore[assignment]
