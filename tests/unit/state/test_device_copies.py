"""Copies from a device wait for the work that makes the tensors, and the lock for the copies.

There is no device here: see ``stand_in_device``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from interruptions import at_every_place
from stand_in_device import OnAnother, OnDevice, StandInAccelerator, StandInEvent, StandInStream
from state_tools import file_of, open_stager, receive, take

from ft_transport.errors import DeadlineExceededError, SnapshotError
from ft_transport.state import copying as module
from ft_transport.state import stager as stager_module
from ft_transport.state.blocks import FlatState
from ft_transport.state.copying import Accelerator, DeviceCopier, pinning
from ft_transport.state.flatten import flatten
from ft_transport.state.snapshot import Taking


def _flatten_on_device(state: object) -> FlatState:
    """As ``flatten`` does for tensors on a device; the last of several is on another one."""
    flat = flatten(state)
    sources = [source.as_subclass(OnDevice) for source in flat.blocks.sources]
    if len(sources) > 2:
        sources[-1] = sources[-1].as_subclass(OnAnother)
    flat.blocks.sources[:] = sources
    flat.blocks.addresses[:] = array("q", [0] * len(sources))
    return flat


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> StandInAccelerator:
    monkeypatch.setattr(stager_module, "flatten", _flatten_on_device)
    monkeypatch.setattr(OnDevice, "stream", None)
    OnDevice.accelerator = StandInAccelerator()
    return OnDevice.accelerator


def test_a_snapshot_shows_the_work_that_was_queued_before_it(accelerator: StandInAccelerator) -> None:
    parameter = torch.zeros(4)
    accelerator.current_stream(OnDevice.device).queue.append(lambda: parameter.fill_(2.0))
    with open_stager(accelerator=accelerator) as stager:
        snapshot = take(stager, 1, [parameter])
        assert receive(file_of(snapshot))[0].tolist() == [2.0] * 4
        snapshot.close()


def test_the_stand_in_shows_a_side_stream_that_does_not_wait(
    accelerator: StandInAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInStream, "wait_event", lambda self, event: None)
    parameter = torch.zeros(4)
    accelerator.current_stream(OnDevice.device).queue.append(lambda: parameter.fill_(2.0))
    with open_stager(accelerator=accelerator) as stager:
        snapshot = take(stager, 1, [parameter])
        assert receive(file_of(snapshot))[0].tolist() == [0.0] * 4
        snapshot.close()


@pytest.mark.parametrize("is_step_first", [True, False])
def test_an_optimizer_step_runs_after_the_copies_and_the_host_waits_for_neither(
    accelerator: StandInAccelerator, is_step_first: bool
) -> None:
    parameter = torch.zeros(4)
    training = accelerator.current_stream(OnDevice.device)
    with open_stager(accelerator=accelerator) as stager:
        training.queue.append(lambda: parameter.fill_(2.0))
        pending = stager.begin(Taking(step=1, state=[parameter], deferrable=lambda tensor: True))
        assert accelerator.log == ["recorded on training cuda:0"]
        # Forward and backward of the next step, which do not change parameters, are not waited for.
        ran: list[bool] = []
        training.queue.append(lambda: ran.append(True))
        in_flight = pending.copy_deferred()
        assert in_flight is not None
        assert in_flight.before_write()
        assert accelerator.log[1:] == [
            "side cuda:0 waits", "copy on side cuda:0", "recorded on side cuda:0", "training cuda:0 waits"
        ]  # fmt: skip
        training.queue.append(lambda: parameter.fill_(3.0))
        # The device runs the step at once, or not before somebody waits for it.
        if is_step_first:
            while training.queue:
                training.queue.pop(0)()
            assert ran
            assert parameter.tolist() == [3.0] * 4
        assert not in_flight.is_complete
        snapshot = pending.finish()
        assert is_step_first or not ran
        assert not in_flight.before_write()
        assert receive(file_of(snapshot))[0].tolist() == [2.0] * 4
        snapshot.close()


def test_writes_on_other_streams_begin_after_the_copies(accelerator: StandInAccelerator) -> None:
    parameter = torch.full((4,), 2.0)
    with open_stager(accelerator=accelerator) as stager:
        pending = stager.begin(Taking(step=1, state=[parameter], deferrable=lambda tensor: True))
        in_flight = pending.copy_deferred()
        assert in_flight is not None
        in_flight.wait(timedelta(seconds=20))
        assert accelerator.log[-1] == "queried side cuda:0"
        assert in_flight.is_complete
        parameter.fill_(3.0)
        snapshot = pending.finish()
        assert receive(file_of(snapshot))[0].tolist() == [2.0] * 4
        snapshot.close()


@pytest.mark.parametrize("is_write_ordered", [True, False])
def test_only_changes_before_the_next_writer_make_a_snapshot_fail(
    accelerator: StandInAccelerator, is_write_ordered: bool
) -> None:
    parameter = torch.full((4,), 2.0)

    def check() -> None:
        if parameter._version:
            raise SnapshotError("moved")

    with open_stager(accelerator=accelerator, max_snapshots=1) as stager:
        taking = Taking(step=1, state=[parameter], deferrable=lambda tensor: True, check_deferred=check)
        pending = stager.begin(taking)
        in_flight = pending.copy_deferred()
        assert in_flight is not None
        if is_write_ordered:
            in_flight.before_write()
        accelerator.current_stream(OnDevice.device).queue.append(lambda: parameter.fill_(3.0))
        torch._C._autograd._unsafe_set_version_counter((parameter,), (1,))
        if is_write_ordered:
            pending.finish().close()
        else:
            with pytest.raises(SnapshotError, match="moved"):
                pending.finish()
        take(stager, 2, [parameter]).close()  # the arena is free again


def test_a_device_that_is_stuck_is_named_in_time(
    accelerator: StandInAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_stager(accelerator=accelerator) as stager:
        pending = stager.begin(Taking(step=1, state=[torch.ones(4)], deferrable=lambda tensor: True))
        in_flight = pending.copy_deferred()
        assert in_flight is not None
        with monkeypatch.context() as stuck:
            stuck.setattr(StandInEvent, "query", lambda _event: False)
            with pytest.raises(DeadlineExceededError, match="expected the device to copy a snapshot in 0 s"):
                in_flight.wait(timedelta(seconds=0.05))
        pending.finish().close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_what_a_handler_raises_during_the_check_reaches_the_writer_and_the_snapshot_fails(
    accelerator: StandInAccelerator, error: type[BaseException]
) -> None:
    def check() -> None:
        raise error

    with open_stager(accelerator=accelerator) as stager:
        taking = Taking(step=1, state=[torch.ones(4)], deferrable=lambda tensor: True, check_deferred=check)
        pending = stager.begin(taking)
        in_flight = pending.copy_deferred()
        assert in_flight is not None
        with pytest.raises(error):
            in_flight.before_write()
        in_flight.before_write()
        with pytest.raises(SnapshotError, match="interrupted"):
            pending.finish()


def test_a_held_state_is_copied_after_the_clones_that_belong_to_it(accelerator: StandInAccelerator) -> None:
    with open_stager(accelerator=accelerator) as stager:
        held = stager.hold(Taking(step=1, state=[torch.ones(4)], deferrable=lambda _: False, max_held_bytes=100))
        assert held is not None
        accelerator.log.clear()
        assert held.marks[OnDevice.device].stream is accelerator.current_stream(OnDevice.device)
        given = accelerator.new_event(OnDevice.device)
        given.record(accelerator.new_stream(OnDevice.device))
        assert stager.mark({OnDevice.device, torch.device("cpu")}).keys() == {OnDevice.device}
        again = stager.hold(Taking(step=2, state=[torch.ones(4)], deferrable=lambda _: True), {OnDevice.device: given})
        assert again is not None
        assert again.marks == {OnDevice.device: given}


def test_an_abandoned_snapshot_frees_its_memory_after_its_copies(accelerator: StandInAccelerator) -> None:
    with open_stager(accelerator=accelerator, max_snapshots=1) as stager:
        pending = stager.begin(Taking(step=1, state=[torch.ones(4)], deferrable=lambda tensor: True))
        pending.copy_deferred()
        pending.abandon()
        assert accelerator.log[-1] == "synchronised with side cuda:0"
        take(stager, 2, [torch.ones(4)]).close()


def test_what_cannot_wait_is_complete_when_begin_returns(accelerator: StandInAccelerator) -> None:
    buffer, parameter = torch.zeros(2), torch.zeros(4)
    with open_stager(accelerator=accelerator) as stager:
        pending = stager.begin(Taking(step=1, state=[buffer, parameter], deferrable=lambda tensor: tensor.numel() == 4))
        buffer.fill_(1)
        pending.copy_deferred()
        snapshot = pending.finish()
        received = receive(file_of(snapshot))
        snapshot.close()
    assert received[0].tolist() == [0.0, 0.0]
    assert accelerator.log.count("copy on side cuda:0") == 2


def test_each_device_has_one_side_stream_for_good(accelerator: StandInAccelerator) -> None:
    state = [torch.arange(3.0), torch.arange(6.0).view(2, 3).t(), torch.arange(5)]
    with open_stager(accelerator=accelerator) as stager:
        for step in range(3):
            snapshot = take(stager, step, state)
            received = receive(file_of(snapshot))
            assert [tensor.tolist() for tensor in received] == [tensor.tolist() for tensor in state]
            snapshot.close()
    assert accelerator.num_streams == 2
    assert accelerator.log.count("copy on side cuda:0") == 6
    assert accelerator.log.count("copy on side cuda:1") == 3


def test_a_cast_is_queued_with_the_copy(accelerator: StandInAccelerator) -> None:
    parameter, count = torch.full((4, 2), 0.1), torch.arange(3)
    accelerator.current_stream(OnDevice.device).queue.append(lambda: parameter.add_(1))
    with open_stager(accelerator=accelerator) as stager:
        snapshot = stager.begin(Taking(step=1, state=[parameter.t(), count], float_dtype=torch.bfloat16)).finish()
        received = receive(file_of(snapshot))
        snapshot.close()
    assert received[0].dtype is torch.bfloat16
    assert torch.equal(received[0], torch.full((2, 4), 1.1).bfloat16())
    assert torch.equal(received[1], count)
    assert accelerator.log.count("copy on side cuda:0") == 2


def test_after_an_error_nothing_writes_any_more(accelerator: StandInAccelerator) -> None:
    copier = DeviceCopier(accelerator)
    target = torch.zeros(4)
    source = torch.ones(4).as_subclass(OnDevice)
    other = torch.ones(4).as_subclass(OnAnother)
    marks = copier.mark([OnDevice.device, OnAnother.device])

    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        copier.copy([(target, source), (torch.zeros(4).as_subclass(Refusing), other)], marks)
    # What was queued has landed, and so the arena may be given to the next.
    assert target.tolist() == [1.0] * 4
    assert accelerator.log[-2:] == ["synchronised with side cuda:0", "synchronised with side cuda:1"]


def test_on_the_host_no_stream_is_asked_for() -> None:
    accelerator = StandInAccelerator()
    with open_stager(accelerator=accelerator) as stager:
        take(stager, 1, torch.ones(3)).close()
        # Not even where there is an accelerator: a process that was forked must not use it.
        assert stager.mark({torch.device("cpu"), torch.device("meta")}) == {}
    assert accelerator.log == []
    assert accelerator.num_streams == 0


class StandInCudaRuntime:
    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        self.calls.append(("register", address, num_bytes, flags))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  # CUDA's name
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def _with_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], StandInCudaRuntime]:
    def install(status: int) -> StandInCudaRuntime:
        runtime = StandInCudaRuntime(status)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        return runtime

    return install


def test_arenas_are_page_locked_where_there_is_cuda(_with_cuda: Callable[[int], StandInCudaRuntime]) -> None:  # noqa: PT019
    runtime = _with_cuda(0)
    with open_stager() as stager:
        take(stager, 1, torch.ones(3)).close()
        take(stager, 2, torch.ones(3)).close()
        assert [call[0] for call in runtime.calls] == ["register"]
        _, address, num_bytes, flags = runtime.calls[0]
        assert num_bytes == 4096
        assert flags == module._CUDA_HOST_REGISTER_PORTABLE
    assert runtime.calls[1:] == [("unregister", address)]


def test_a_process_that_does_not_use_cuda_page_locks_nothing(
    _with_cuda: Callable[[int], StandInCudaRuntime],  # noqa: PT019
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = _with_cuda(0)
    # Also after a fork, in which every call of CUDA raises.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with open_stager() as stager:
        take(stager, 1, torch.ones(3)).close()
    assert not runtime.calls


def test_an_arena_that_cannot_be_page_locked_is_an_error(
    _with_cuda: Callable[[int], StandInCudaRuntime],  # noqa: PT019
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = _with_cuda(2)
    launched: list[object] = []
    zeros = torch.zeros

    def launch(*sizes: int, **keywords: Any) -> torch.Tensor:
        if keywords.get("device") == "cuda":
            launched.append(keywords)
            raise RuntimeError("CUDA error: the error of cudaHostRegister")
        return zeros(*sizes, **keywords)

    monkeypatch.setattr(torch, "zeros", launch)
    with open_stager(max_snapshots=1) as stager:
        for _ in range(3):
            with pytest.raises(SnapshotError, match="cudaHostRegister returned 2"):
                take(stager, 1, torch.ones(3))
        assert len(launched) == 3, "the next kernel of the trainer must not get the error"
        runtime.status = 0
        take(stager, 1, torch.ones(3)).close()


def test_without_a_device_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pinning() is None


def test_torchs_own_accelerator_has_what_the_stand_in_has() -> None:
    public = {name for name in dir(Accelerator) if not name.startswith("_")}
    assert public == {"current_stream", "new_stream", "new_event"}
    assert public <= set(dir(StandInAccelerator))
    for name in ("wait_event", "__enter__", "__exit__"):
        assert hasattr(torch.Stream, name)
        assert hasattr(StandInStream, name)
    for name in ("record", "synchronize", "query"):
        assert hasattr(torch.Event, name)
        assert hasattr(StandInEvent, name)


def test_wherever_a_handler_raises_nothing_is_on_its_way_and_no_stream_stays_current(
    accelerator: StandInAccelerator,
) -> None:
    copier = DeviceCopier(accelerator)
    source = torch.ones(4).as_subclass(OnDevice)
    other = torch.ones(4).as_subclass(OnAnother)

    def copy() -> None:
        copies = [(torch.zeros(4), source), (torch.zeros(4), source), (torch.zeros(4), other)]
        copier.copy(copies, copier.mark([OnDevice.device, OnAnother.device]))

    def check() -> None:
        assert OnDevice.stream is None
        queued = [each for stream in copier._streams.values() for each in stream.queue]
        assert not [each for each in queued if each.__name__ == "<lambda>"], "a copy is on its way"

    at_every_place(copy, check, at_least=10)
