"""A step boundary is kept, so that a need that shows only during ``forward`` still gets a snapshot of the boundary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from state_equality import exact

from ft_transport import HTTPTransport, StepNotServedError, TransportError
from manager import RandomState, StateManager

LONG_S = 20.0
LONG = timedelta(seconds=LONG_S)
LARGE = 100_000


class Training:
    def __init__(self, transport: HTTPTransport[Any]) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, LARGE // 4), torch.nn.BatchNorm1d(LARGE // 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.manager = StateManager(checkpoint_transport=transport, prepare_memory=False)
        self.manager.register("model", self.model)
        self.manager.register("optimizer", self.optimizer)
        self.manager.register("random", RandomState())
        self.attachment = self.manager.attach(self.optimizer)
        assert self.manager._snapshotter is not None
        self.snapshotter = self.manager._snapshotter

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).square().mean().backward()

    def lock_is_free(self) -> bool:
        return not self.manager._lock.holders()


@pytest.fixture
def transports(new_transport: Callable[[], HTTPTransport[Any]]) -> tuple[HTTPTransport[Any], HTTPTransport[Any]]:
    return new_transport(), new_transport()


@pytest.fixture
def training(transports: tuple[HTTPTransport[Any], HTTPTransport[Any]]) -> Iterator[Training]:
    made = Training(transports[0])
    made.manager.start_step(0)
    made.forward_backward()
    made.optimizer.step()
    yield made
    made.manager.shutdown()


def test_a_snapshot_begun_during_forward_shows_the_boundary(
    training: Training, transports: tuple[HTTPTransport[Any], HTTPTransport[Any]]
) -> None:
    sender, receiver = transports
    assert training.manager.start_step(1, hold=True)
    expected = exact(training.manager.replica_state())
    training.forward_backward()
    changed = exact(training.manager.replica_state())
    assert changed != expected, "buffers and the generator have moved on"
    training.snapshotter.request()
    training.snapshotter.settle()
    stepping = threading.Thread(target=training.optimizer.step)
    stepping.start()
    received = receiver.fetch(sender.metadata(), 1, timeout=LONG)
    stepping.join(LONG_S)
    assert exact(received.state) == expected
    assert training.lock_is_free()


def test_a_boundary_that_nobody_needs_is_let_go_without_a_snapshot(
    training: Training, transports: tuple[HTTPTransport[Any], HTTPTransport[Any]]
) -> None:
    for step in (1, 2):
        assert training.manager.start_step(step, hold=True)
        training.forward_backward()
        training.snapshotter.settle()
        assert training.lock_is_free()
        training.optimizer.step()
    sender, receiver = transports
    assert sender.newest_sequence() == 0
    with pytest.raises(TransportError) as refused:
        receiver.fetch(sender.metadata(), 1, timeout=timedelta(seconds=0.5))
    assert isinstance(refused.value, (StepNotServedError, TimeoutError))


def test_the_optimizer_waits_until_it_is_settled(training: Training) -> None:
    assert training.manager.start_step(1, hold=True)
    training.forward_backward()
    stepping = threading.Thread(target=training.optimizer.step)
    stepping.start()
    with pytest.raises(TimeoutError):
        training.manager.writing("probe", timedelta(0)).__enter__()
    assert stepping.is_alive()
    training.snapshotter.settle()
    stepping.join(LONG_S)
    assert not stepping.is_alive()


def test_the_next_boundary_and_the_end_settle_what_was_forgotten(training: Training) -> None:
    assert training.manager.start_step(1, hold=True)
    assert training.manager.start_step(2, hold=True)
    training.manager.shutdown()
    assert training.lock_is_free()


def test_who_asks_for_the_latest_state_meanwhile_gets_the_boundary(
    training: Training, transports: tuple[HTTPTransport[Any], HTTPTransport[Any]]
) -> None:
    sender, receiver = transports
    assert training.manager.start_step(1, hold=True)
    expected = exact(training.manager.replica_state())
    asked = threading.Event()
    training.manager._transport.serve_fresh(None)  # type: ignore[union-attr]

    def request(_step: int | None) -> int:
        number = training.snapshotter.request()
        asked.set()
        return number

    sender.serve_fresh(request)
    received: list[Any] = []
    fetching = threading.Thread(target=lambda: received.append(receiver.fetch(sender.metadata(), timeout=LONG)))
    fetching.start()
    assert asked.wait(LONG_S)
    training.forward_backward()
    training.snapshotter.settle()
    fetching.join(LONG_S)
    assert exact(received[0].state) == expected


def test_a_state_that_would_have_to_be_copied_whole_is_not_held(
    new_transport: Callable[[], HTTPTransport[Any]],
) -> None:
    manager = StateManager(checkpoint_transport=new_transport(), prepare_memory=False)
    weight = torch.zeros(5_000_000)
    manager.register_state_dict_fn("weight", lambda state: None, lambda: {"weight": weight})
    try:
        assert not manager.start_step(1, hold=True)
        manager.replace_state_dict_fn("weight", lambda: {"weight": weight}, is_stable=True)
        assert manager.start_step(2, hold=True)
    finally:
        manager.shutdown()
    assert not manager._lock.holders()
