"""A device and its process group that aren't there, after torchft's ``ProcessGroupNCCL`` and torch's streams.

The contract (torchft/process_group.py of 0.2.0, torch's notes on CUDA semantics): each thread begins on the first
device and on its default stream. ``configure`` connects the device that is current. ``Work.wait`` returns at once: only
the current stream waits, for good if a member never arrives. ``abort`` ends what the device runs, and sets the error.
``errored`` first waits for the current stream.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

_AT_ONCE_S = 20.0


class StandInCollective:
    """A collective, which the device runs at the last moment that the contract allows.

    Attributes:
        is_over: Set when the device has run it, or when it was aborted.
    """

    def __init__(self, *, is_member_missing: bool) -> None:
        self._is_member_missing = is_member_missing
        self.is_over = threading.Event()

    def run(self) -> None:
        if not self._is_member_missing:
            self.is_over.set()


class StandInStream:
    """A stream of the device. It is blocked by the collectives that it waits for."""

    def __init__(self, devices: StandInDevices) -> None:
        self._devices = devices
        self._outer: list[StandInStream] = []
        self.waits_for: list[StandInCollective] = []
        self.waited_for: list[StandInStream] = []
        devices.streams.append(self)

    def query(self) -> bool:
        for each in self.waits_for:
            each.run()
        return all(each.is_over.is_set() for each in self.waits_for)

    def synchronize(self) -> None:
        for each in self.waits_for:
            each.run()
            assert each.is_over.wait(_AT_ONCE_S), "the host waits for a device that never ends"

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(device=torch.device("cuda", 0), stream=self)

    def wait_event(self, event: SimpleNamespace) -> None:
        self.waited_for.append(event.stream)

    def __enter__(self) -> StandInStream:
        self._outer.append(self._devices.current_stream())
        self._devices.of_thread.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        self._devices.of_thread.stream = self._outer.pop()


class StandInDevices:
    """Stands in for ``torch.accelerator``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_thread = threading.local()
        self.streams: list[StandInStream] = []
        self.default_stream = StandInStream(self)
        for name in ("current_stream", "current_device_index", "set_device_index", "synchronize"):
            monkeypatch.setattr(torch.accelerator, name, getattr(self, name))
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch, "get_device_module", lambda: SimpleNamespace(is_initialized=lambda: True))

    def current_stream(self, device: object = None) -> StandInStream:
        stream: StandInStream = getattr(self.of_thread, "stream", self.default_stream)
        return stream

    def current_device_index(self) -> int:
        index: int = getattr(self.of_thread, "index", 0)
        return index

    def set_device_index(self, index: int) -> None:
        self.of_thread.index = index

    def synchronize(self) -> None:
        for stream in list(self.streams):
            stream.synchronize()


class StandInWork:
    def __init__(self, devices: StandInDevices, collective: StandInCollective) -> None:
        self._devices = devices
        self._collective = collective

    def wait(self) -> bool:
        self._devices.current_stream().waits_for.append(self._collective)
        return True


class StandInGroup:
    """Stands in for torchft's ``ProcessGroupNCCL``, without its timers. Sums stay what they are.

    Attributes:
        configured: For each `configure`, the number of members and the index of the current device.
        num_cut: Number of collectives that were aborted before the device ran them.
        is_member_missing: Whether collectives never end.
        is_timing_out: Whether the group's own timer aborts each collective.
    """

    def __init__(self, devices: StandInDevices) -> None:
        self._devices = devices
        self._begun: list[StandInCollective] = []
        self._error: Exception | None = None
        self.configured: list[tuple[int, int]] = []
        self.num_cut = 0
        self.is_member_missing = False
        self.is_timing_out = False

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *_: Any) -> None:
        self.abort()
        self.configured.append((world_size, self._devices.current_device_index()))
        self._error = None

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> StandInWork:
        collective = StandInCollective(is_member_missing=self.is_member_missing)
        self._begun.append(collective)
        if self.is_timing_out:
            self.abort()
        return StandInWork(self._devices, collective)

    def abort(self) -> None:
        self._error = RuntimeError("aborted")
        for each in self._begun:
            self.num_cut += not each.is_over.is_set()
            each.is_over.set()

    def errored(self) -> Exception | None:
        self._devices.current_stream().synchronize()
        return self._error

    def shutdown(self) -> None:
        self.abort()
