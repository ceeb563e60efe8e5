"""Collectives on a device: each thread has its own device and stream, and the host waits for no dead member.

There is no device here: see ``device_collectives``. ``tests/gpu/test_nccl.py`` runs NCCL on one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_collectives import StandInCollective, StandInDevices, StandInGroup, StandInStream
from quorum_threads import beside, lighthouse, make_manager, run_replicas

from manager import GlooProcessGroup, Manager
from manager.collectives.managed_work import never_failing

NewManager = Callable[..., Manager]

OWN_DEVICE = 3
TIMEOUT = timedelta(seconds=1)
AT_ONCE_S = 20.0


@pytest.fixture
def new_member(quorum_ready: None) -> Iterator[NewManager]:
    """Makes managers whose first quorum has two members, and shuts both down at the end."""
    with lighthouse(2) as address, ExitStack() as stack:

        def make(name: str, **keywords: Any) -> Manager:
            manager = make_manager(address, name, has_part=True, **keywords)
            stack.callback(manager.shutdown)
            return manager

        yield make


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> StandInDevices:
    return StandInDevices(monkeypatch)


def test_the_training_thread_s_stream_waits_for_a_wrapped_future(devices: StandInDevices) -> None:
    class StandInFuture:
        """After ``ivalue::Future`` (ATen/core/ivalue_inl.h): ``wait`` has the stream wait, and ``value`` has not."""

        is_reduced = StandInCollective(is_member_missing=False)

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


def test_the_quorum_thread_connects_the_device_of_the_training_thread(
    devices: StandInDevices, new_manager: NewManager
) -> None:
    groups = StandInGroup(devices), StandInGroup(devices)
    first = new_manager("first", pg=groups[0], has_part=True)

    def step() -> None:
        torch.accelerator.set_device_index(OWN_DEVICE)
        first.start_quorum()
        first.should_commit()

    def join() -> None:
        torch.accelerator.set_device_index(OWN_DEVICE + 1)
        second = new_manager("second", pg=groups[1], has_part=True)
        second.start_quorum()
        assert second.should_commit()
        second.shutdown()  # The first one would wait for it in the next quorum.

    beside(step, join)
    assert groups[0].configured[:2] == [(1, OWN_DEVICE), (2, OWN_DEVICE)]
    assert groups[1].configured == [(2, OWN_DEVICE + 1)]


def test_a_new_group_does_not_cut_off_a_collective_after_the_commit(
    devices: StandInDevices, new_manager: NewManager
) -> None:
    group = StandInGroup(devices)
    first = new_manager("first", pg=group, has_part=True)

    def step() -> None:
        first.start_quorum()
        assert first.should_commit()
        # A logged loss: only the stream waits for it.
        first.allreduce(torch.ones(1)).wait()

    def join() -> None:
        second = new_manager("second", pg=StandInGroup(devices), has_part=True)
        second.start_quorum()
        assert second.should_commit()
        second.shutdown()

    beside(step, join)
    assert len(group.configured) > 1
    assert group.num_cut == 0


def test_an_error_is_reported_at_once_while_a_collective_never_ends(
    devices: StandInDevices, new_manager: NewManager
) -> None:
    group = StandInGroup(devices)
    manager = new_manager("alone", pg=group, has_part=True)
    group.is_member_missing = True
    with StandInStream(devices) as own:
        manager.start_quorum()
        assert manager.allreduce(torch.ones(4)).wait()
        assert not own.query()
        manager.report_error(ValueError("a bad batch"))
        assert own.query(), "the report ends what the device runs"
        assert not manager.should_commit()


def test_a_vote_does_not_wait_for_ever_for_a_member_that_died(devices: StandInDevices, new_member: NewManager) -> None:
    def replica(name: str) -> tuple[bool, float, str, bool, int]:
        group = StandInGroup(devices)
        manager = new_member(name, pg=group)
        with StandInStream(devices):
            group.is_member_missing = True
            manager.start_quorum()
            manager.allreduce(torch.ones(4)).wait()
            started_s = time.monotonic()
            is_committed = manager.should_commit(timeout=TIMEOUT)
            seconds, error = time.monotonic() - started_s, str(manager.errored())
            group.is_member_missing = False
            manager.start_quorum()
            manager.allreduce(torch.ones(4)).wait()
            return is_committed, seconds, error, manager.should_commit(), len(group.configured)

    for is_committed, seconds, error, is_next, num_configured in run_replicas(
        lambda: replica("first"), lambda: replica("second")
    ):
        assert not is_committed
        assert TIMEOUT.total_seconds() / 2 < seconds < AT_ONCE_S / 2
        assert "expected the device to finish the collectives" in error
        assert is_next
        assert num_configured == 2


def test_gradients_of_a_collective_that_was_aborted_do_not_count_as_averaged(
    devices: StandInDevices, new_manager: NewManager
) -> None:
    group = StandInGroup(devices)
    manager = new_manager("alone", pg=group, has_part=True)
    weight = torch.nn.Parameter(torch.ones(2))
    averaged = []
    for is_timing_out in (True, False):
        group.is_timing_out = is_timing_out
        manager.start_quorum()
        weight.grad = torch.ones(2)
        averaged.append((manager.average_gradients([weight]), manager.should_commit()))
    assert averaged == [(False, False), (True, True)]


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device."""

    is_cpu = False


def test_gloo_copies_in_the_order_of_the_stream_that_begins_and_the_one_that_waits_follows(
    devices: StandInDevices, new_member: NewManager
) -> None:
    class Group(GlooProcessGroup):
        """Notes the stream with which gloo orders its copies from the device, and the one for those to it."""

        def __init__(self) -> None:
            super().__init__()
            self.streams: list[Any] = []

        def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
            self.streams.append(devices.current_stream())
            work = super().allreduce(tensors, opts)

            def wait() -> bool:
                self.streams.append(devices.current_stream())
                return bool(work.wait())

            return SimpleNamespace(wait=wait)

    def replica(name: str, value: float) -> tuple[bool, bool, list[float]]:
        group = Group()
        manager = new_member(name, pg=group)
        manager.start_quorum()
        tensor = torch.full((2,), value)
        with StandInStream(devices) as own:
            work = manager.allreduce(tensor.as_subclass(OnDevice))
        with StandInStream(devices) as other:
            work.wait()
        assert manager.should_commit()
        return group.streams == [own, own], own in other.waited_for, tensor.tolist()

    outcomes = run_replicas(lambda: replica("first", 1.0), lambda: replica("second", 2.0))
    assert outcomes == [(True, True, [1.5, 1.5])] * 2
