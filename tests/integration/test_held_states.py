"""A step boundary is kept, so that a need that shows only during ``forward`` still gets a snapshot of the boundary."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from state_equality import exact

from ft_transport import HTTPTransport, StateMovedError, StepNotServedError, TransportError
from ft_transport.runtime.signal_safe import SafeFuture
from ft_transport.transfer.server import SnapshotLease
from manager import RandomState
from manager.recovery.replica import Replica
from manager.snapshots.requests import copy_and_publish
from manager.snapshots.scheduler import SnapshotScheduler

LONG_S = 20.0
LONG = timedelta(seconds=LONG_S)
LARGE = 100_000


def scheduler_of(replica: Replica) -> SnapshotScheduler:
    assert replica.snapshots is not None
    return replica.snapshots


class Training:
    def __init__(self, transport: HTTPTransport[Any]) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, LARGE // 4), torch.nn.BatchNorm1d(LARGE // 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.replica = Replica(LONG, transport)
        self.state = self.replica.state
        self.state.registry.register_object("model", self.model)
        self.state.registry.register_object("optimizer", self.optimizer)
        self.state.registry.register_object("random", RandomState())
        self.state.attach((self.optimizer,), every_commit=True)
        self.snapshot_scheduler = scheduler_of(self.replica)

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).square().mean().backward()

    def lock_is_free(self) -> bool:
        return not self.state.lock.holders()


@pytest.fixture
def transports(new_transport: Callable[[], HTTPTransport[Any]]) -> tuple[HTTPTransport[Any], HTTPTransport[Any]]:
    return new_transport(), new_transport()


@pytest.fixture
def training(transports: tuple[HTTPTransport[Any], HTTPTransport[Any]]) -> Iterator[Training]:
    made = Training(transports[0])
    made.replica.begin_step(0)
    made.forward_backward()
    made.optimizer.step()
    yield made
    made.replica.close(wait=True)


def test_a_boundary_that_nobody_needs_is_let_go_without_a_snapshot(
    training: Training, transports: tuple[HTTPTransport[Any], HTTPTransport[Any]]
) -> None:
    for step in (1, 2):
        assert training.replica.begin_step(step, hold=True)
        training.forward_backward()
        training.snapshot_scheduler.settle()
        assert training.lock_is_free()
        training.optimizer.step()
    sender, receiver = transports
    assert sender.server.newest_sequence() == 0
    with pytest.raises(TransportError) as refused:
        receiver.fetch(sender.metadata(), 1, timeout=timedelta(seconds=0.5))
    assert isinstance(refused.value, (StepNotServedError, TimeoutError))


def test_the_optimizer_waits_until_it_is_settled(training: Training) -> None:
    assert training.replica.begin_step(1, hold=True)
    training.forward_backward()
    stepping = threading.Thread(target=training.optimizer.step)
    stepping.start()
    with pytest.raises(TimeoutError):
        training.state.lock.write("probe", timedelta(0)).__enter__()
    assert stepping.is_alive()
    training.snapshot_scheduler.settle()
    stepping.join(LONG_S)
    assert not stepping.is_alive()


def test_who_asks_during_a_wait_is_served_at_once_and_who_asks_after_it_at_the_next_boundary(
    training: Training, transports: tuple[HTTPTransport[Any], HTTPTransport[Any]]
) -> None:
    sender, receiver = transports
    training.replica.begin_step(1)
    snapshots = training.replica.snapshots
    assert snapshots is not None
    with snapshots.serving(LONG):
        expected = exact(training.state.content())
        assert exact(receiver.fetch(sender.metadata(), "latest", timeout=LONG).state) == expected
    assert training.lock_is_free()
    training.forward_backward()
    assert snapshots.request() == 1, "what was served does not show what forward has changed"
    assert training.replica.begin_step(1)
    training.optimizer.step()


def test_a_save_that_the_quorum_thread_overtakes_reads_the_one_snapshot(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert training.replica.begin_step(1, hold=True)
    scheduler, snapshots = training.snapshot_scheduler, training.replica.snapshots
    settle = scheduler.settle

    def settle_late() -> bool:
        monkeypatch.undo()
        quorum = threading.Thread(target=settle)
        quorum.start()
        quorum.join(LONG_S)
        return settle()

    monkeypatch.setattr(scheduler, "settle", settle_late)
    assert snapshots is not None
    leased: SafeFuture[SnapshotLease] = SafeFuture()
    snapshots.take_leased(leased).result(LONG_S)
    lease = leased.result(LONG_S)
    assert lease.step == 1
    lease.release()
    assert training.replica.transport is not None
    assert training.replica.transport.server.newest_sequence() == 1
    training.optimizer.step()


def test_the_next_boundary_and_the_end_settle_what_was_forgotten(training: Training) -> None:
    assert training.replica.begin_step(1, hold=True)
    assert training.replica.begin_step(2, hold=True)
    training.replica.close(wait=True)
    assert training.lock_is_free()


def test_who_asks_for_the_latest_state_meanwhile_gets_the_boundary(
    training: Training, transports: tuple[HTTPTransport[Any], HTTPTransport[Any]]
) -> None:
    sender, receiver = transports
    assert training.replica.begin_step(1, hold=True)
    expected = exact(training.state.content())
    asked = threading.Event()
    sender.serve_fresh(None)

    def request(_step: int | None) -> int:
        number = training.snapshot_scheduler.request()
        asked.set()
        return number

    sender.serve_fresh(request)
    received: list[Any] = []
    fetching = threading.Thread(target=lambda: received.append(receiver.fetch(sender.metadata(), timeout=LONG)))
    fetching.start()
    assert asked.wait(LONG_S)
    training.forward_backward()
    assert exact(training.state.content()) != expected, "buffers and the generator have moved on"
    training.snapshot_scheduler.settle()
    stepping = threading.Thread(target=training.optimizer.step)
    stepping.start()
    fetching.join(LONG_S)
    stepping.join(LONG_S)
    assert exact(received[0].state) == expected
    assert training.lock_is_free()


def test_a_step_to_come_is_served_although_training_goes_on_while_it_is_copied(
    training: Training, transports: tuple[HTTPTransport[Any], HTTPTransport[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = transports
    asked, copying, may_copy = threading.Event(), threading.Event(), threading.Event()
    request = training.snapshot_scheduler.request

    def asks(step: int | None) -> int | None:
        answer = request(step)
        asked.set()
        return answer

    def copy(*arguments: Any) -> None:
        copying.set()
        assert may_copy.wait(LONG_S)
        copy_and_publish(*arguments)

    monkeypatch.setattr("manager.snapshots.scheduler.copy_and_publish", copy)
    sender.serve_fresh(None)
    sender.serve_fresh(asks)
    received: list[Any] = []
    fetching = threading.Thread(target=lambda: received.append(receiver.fetch(sender.metadata(), 2, timeout=LONG)))
    fetching.start()
    try:
        assert asked.wait(LONG_S)
        training.replica.begin_step(1)
        training.replica.begin_step(2)
        expected = exact(training.state.content())
        assert copying.wait(LONG_S)
        training.replica.begin_step(3)
        for _ in range(2):
            asked.clear()
            assert asked.wait(LONG_S)
    finally:
        may_copy.set()
        fetching.join(LONG_S)
    assert received[0].step == 2
    assert exact(received[0].state) == expected


def test_a_state_that_would_have_to_be_copied_whole_is_not_held(
    new_transport: Callable[[], HTTPTransport[Any]],
) -> None:
    replica = Replica(LONG, new_transport())
    weight = torch.zeros(5_000_000)
    replica.state.registry.register("weight", lambda state: None, lambda: {"weight": weight})
    try:
        assert not replica.begin_step(1, hold=True)
        replica.state.registry.replace("weight", lambda: {"weight": weight}, is_stable=True)
        assert replica.begin_step(2, hold=True)
    finally:
        replica.close(wait=True)
    assert not replica.state.lock.holders()


class _Clipped(torch.nn.Linear):
    """Clips its own weight in every forward, as some critics do."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(values)


def _embedding() -> torch.nn.Module:
    return torch.nn.Embedding(LARGE // 4, 4, max_norm=0.1)


def _clipped() -> torch.nn.Module:
    return _Clipped(4, LARGE // 4)


class ChangingTraining:
    """A model whose forward changes its parameters in place."""

    def __init__(self, transport: HTTPTransport[Any], model: torch.nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.replica = Replica(timedelta(seconds=5), transport)
        self.state = self.replica.state
        self.state.registry.register_object("model", model)
        self.state.registry.register_object("optimizer", self.optimizer)
        self.state.attach((self.optimizer,), every_commit=True)
        self.snapshot_scheduler = scheduler_of(self.replica)

    def forward(self) -> torch.Tensor:
        is_embedding = isinstance(self.model, torch.nn.Embedding)
        values = torch.arange(1000) if is_embedding else torch.randn(8, 4)
        result: torch.Tensor = self.model(values)
        return result.square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()


@pytest.mark.parametrize(("make_model", "num_steps_before"), [(_embedding, 0), (_clipped, 0), (_clipped, 3)])
def test_parameters_that_forward_changes_are_served_as_at_the_boundary_or_not_at_all(
    transports: tuple[HTTPTransport[Any], HTTPTransport[Any]],
    make_model: Callable[[], torch.nn.Module],
    num_steps_before: int,
) -> None:
    sender, receiver = transports
    training = ChangingTraining(sender, make_model())
    try:
        for step in range(num_steps_before):
            training.replica.begin_step(step, hold=True)
            training.snapshot_scheduler.settle()
            training.step()
        served = 0
        for step in range(num_steps_before, num_steps_before + 3):
            assert training.replica.begin_step(step, hold=True)
            expected = exact(training.state.content())
            training.forward()
            training.snapshot_scheduler.request(share=True)
            training.snapshot_scheduler.settle()
            if training.snapshot_scheduler.shows_present_state():
                training.forward()
                try:
                    received = receiver.fetch(sender.metadata(), step, timeout=LONG)
                except TransportError:
                    served -= 1
                else:
                    assert exact(received.state) == expected
                served += 1
            training.step()
        assert served >= 2, "one boundary is enough to learn which parameters forward changes"
    finally:
        training.replica.close(wait=True)


def test_a_copy_in_the_background_that_forward_runs_into_is_not_served(
    transports: tuple[HTTPTransport[Any], HTTPTransport[Any]],
) -> None:
    sender, receiver = transports
    training = ChangingTraining(sender, _clipped())
    may_copy = threading.Event()
    begin = sender.server.take

    def begin_slowly(*arguments: Any, **keywords: Any) -> Any:
        in_progress = begin(*arguments, **keywords)
        copy_deferred = in_progress.copy_deferred
        in_progress.copy_deferred = lambda: may_copy.wait(LONG_S) and copy_deferred()  # type: ignore[method-assign, assignment]
        return in_progress

    sender.server.take = begin_slowly  # type: ignore[method-assign]
    try:
        taken = training.replica.snapshots.take(0)
        training.forward()
        may_copy.set()
        with pytest.raises(StateMovedError, match=r"model\.weight changed in place"):
            taken.result(LONG_S)
        expected = exact(training.state.content())
        taken = training.replica.snapshots.take(0)
        training.model.weight.data.neg_()  # type: ignore[union-attr, operator]
        taken.result(LONG_S)
        assert exact(receiver.fetch(sender.metadata(), 0, timeout=LONG).state) == expected
    finally:
        training.replica.close(wait=True)


def _num_calls(function: Callable[[], object]) -> int:
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_a_boundary_that_nobody_needs_does_the_same_whatever_the_number_of_parameters(
    new_transport: Callable[[], HTTPTransport[Any]],
) -> None:
    calls: list[int] = []
    for num_parameters in (4, 1000):
        parameters = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(3)) for _ in range(num_parameters))
        model = torch.nn.ModuleDict({"weights": parameters, "norm": torch.nn.BatchNorm1d(8, affine=False)})
        optimizer = torch.optim.AdamW(parameters)
        replica = Replica(LONG, new_transport())
        try:
            registry = replica.state.registry
            registry.register_object("model", model)
            registry.register_object("optimizer", optimizer)
            registry.register_object("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 10))
            replica.state.attach((optimizer,), every_commit=True)
            snapshot_scheduler = scheduler_of(replica)
            for step in range(6):
                for parameter in parameters:
                    parameter.grad = torch.ones_like(parameter)
                calls.append(_num_calls(partial(replica.begin_step, step, hold=True)))
                snapshot_scheduler.settle()
                optimizer.step()
        finally:
            replica.close(wait=True)
    assert calls[5] == calls[11]
    assert calls[10] == calls[11]


def test_no_memory_is_taken_for_copies_before_anybody_needs_one(
    new_transport: Callable[[], HTTPTransport[Any]],
) -> None:
    training = ChangingTraining(new_transport(), torch.nn.Linear(4, LARGE))
    try:
        for step in range(6):
            assert training.replica.begin_step(step, hold=True)
            training.snapshot_scheduler.settle()
            training.step()
        assert "ft-transport-snapshot" not in Path("/proc/self/maps").read_text()
    finally:
        training.replica.close(wait=True)


def test_what_a_write_section_changes_is_not_taken_for_a_change_by_forward(
    transports: tuple[HTTPTransport[Any], HTTPTransport[Any]],
) -> None:
    sender, receiver = transports
    training = ChangingTraining(sender, torch.nn.Linear(4, LARGE // 4))
    try:
        # A step that is abandoned, and another state that is loaded before the next one: as when a replica heals.
        assert training.replica.begin_step(0, hold=True)
        training.snapshot_scheduler.settle()
        with training.state.lock.write("loading another state"), torch.no_grad():
            training.model.weight.mul_(2)  # type: ignore[operator, union-attr]
        training.step()
        assert training.replica.begin_step(1, hold=True)
        expected = exact(training.state.content())
        training.snapshot_scheduler.request(share=True)
        held: list[Any] = []
        hold = sender.server.hold

        def hold_noted(taking: Any, *marks: Any) -> Any:
            held.append(taking.state["user"]["model"])
            return hold(taking, *marks)

        sender.server.hold = hold_noted  # type: ignore[method-assign]
        assert training.snapshot_scheduler.settle()
        places = {name: tensor.data_ptr() for name, tensor in training.model.state_dict().items()}
        assert [{name: tensor.data_ptr() for name, tensor in model.items()} for model in held] == [places], (
            "the optimizer guards all there is"
        )
        assert exact(receiver.fetch(sender.metadata(), 1, timeout=LONG).state) == expected
    finally:
        training.replica.close(wait=True)
