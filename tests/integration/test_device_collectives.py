"""Collectives on a device: each thread has its own device and stream, and the host waits for no dead member.

There is no device here: see ``device_collectives``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from device_collectives import StandInDevices, StandInStream

from manager.collectives.managed_work import never_failing

TIMEOUT = timedelta(seconds=1)
AT_ONCE_S = 20.0


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> StandInDevices:
    return StandInDevices(monkeypatch)


def test_the_training_thread_s_stream_waits_for_a_wrapped_future(devices: StandInDevices) -> None:
    class StandInFuture:
        """After ``ivalue::Future`` (ATen/core/ivalue_inl.h): ``wait`` has the stream wait, and ``value`` has not."""

        is_reduced = threading.Event()

        def add_done_callback(self, callback: Callable[[Any], object]) -> None:
            self.callback = callback

        def wait(self) -> str:
            devices.current_stream().waits_for.append(self.is_reduced)
            return "sum"

        def value(self) -> str:
            return "sum"

    future: Any = StandInFuture()
    errors: list[Exception] = []
    with StandInStream(devices) as own:
        wrapped = never_failing(future, "default", TIMEOUT, errors.append)
    completing = threading.Thread(target=future.callback, args=(future,))
    completing.start()
    completing.join(AT_ONCE_S)
    assert wrapped.wait() == "sum"
    assert own.waits_for == [future.is_reduced]
    assert not errors
