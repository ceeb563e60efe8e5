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


class StandInStream:
    """A stream of the device. It is blocked by the collectives that it waits for."""

    def __init__(self, devices: StandInDevices) -> None:
        self._devices = devices
        self._outer: list[StandInStream] = []
        self.waits_for: list[threading.Event] = []

    def query(self) -> bool:
        return all(each.is_set() for each in self.waits_for)

    def synchronize(self) -> None:
        for each in self.waits_for:
            assert each.wait(_AT_ONCE_S), "the host waits for a device that never ends"

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
        self.current_stream().synchronize()


class StandInWork:
    def __init__(self, devices: StandInDevices, is_done: threading.Event) -> None:
        self._devices = devices
        self._is_done = is_done

    def wait(self) -> bool:
        self._devices.current_stream().waits_for.append(self._is_done)
        return True


class StandInGroup:
    """Stands in for torchft's ``ProcessGroupNCCL``, without its timers. Sums stay what they are.

    Attributes:
        configured: For each `configure`, the number of members and the index of the current device.
        is_member_missing: Whether collectives never end.
        is_timing_out: Whether the group's own timer aborts each collective.
    """

    def __init__(self, devices: StandInDevices) -> None:
        self._devices = devices
        self._begun: list[threading.Event] = []
        self._error: Exception | None = None
        self.configured: list[tuple[int, int]] = []
        self.is_member_missing = False
        self.is_timing_out = False

    def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *_: Any) -> None:
        self.abort()
        self.configured.append((world_size, self._devices.current_device_index()))
        self._error = None

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> StandInWork:
        is_done = threading.Event()
        self._begun.append(is_done)
        if not self.is_member_missing:
            is_done.set()
        if self.is_timing_out:
            self.abort()
        return StandInWork(self._devices, is_done)

    def abort(self) -> None:
        self._error = RuntimeError("aborted")
        for each in self._begun:
            each.set()

    def errored(self) -> Exception | None:
        self._devices.synchronize()
        return self._error

    def shutdown(self) -> None:
        self.abort()
