"""A replica whose state lies on a real device: boundaries, what forward changes, and digests, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from state_tools import on_host
from torch import nn

from ft_transport import HTTPTransport, TransportSettings
from ft_transport.state.comparison import TensorDigests
from manager import StateManager

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LONG_S = 60.0
LONG = timedelta(seconds=LONG_S)


def assert_equal(first: Any, second: Any, path: str = "") -> None:
    if isinstance(first, torch.Tensor):
        assert torch.equal(first.cpu(), second.cpu()), path
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for key in first:
            assert_equal(first[key], second[key], f"{path}.{key}")
    elif isinstance(first, (list, tuple)):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_equal(one, other, f"{path}.{index}")
    else:
        assert first == second, path


class Training:
    def __init__(self, transport: HTTPTransport[Any], model: nn.Module) -> None:
        self.model = model.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.manager = StateManager(checkpoint_transport=transport)
        self.manager.register("model", self.model)
        self.manager.register("optimizer", self.optimizer)
        self.manager.attach(self.optimizer)
        assert self.manager._replica.snapshots is not None
        self.snapshot_scheduler = self.manager._replica.snapshots

    def forward(self) -> torch.Tensor:
        result: torch.Tensor = self.model(torch.randn(64, 256, device="cuda"))
        return result.square().mean()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.step()


@pytest.fixture
def transports() -> Iterator[tuple[HTTPTransport[Any], HTTPTransport[Any]]]:
    settings = TransportSettings(host="127.0.0.1", advertise="127.0.0.1")
    both: tuple[HTTPTransport[Any], HTTPTransport[Any]] = (
        HTTPTransport(LONG, settings=settings),
        HTTPTransport(LONG, settings=settings),
    )
    yield both
    for transport in both:
        transport.shutdown()


def test_a_need_that_shows_during_forward_gets_the_boundary(
    transports: tuple[HTTPTransport[Any], HTTPTransport[Any]],
) -> None:
    sender, receiver = transports
    training = Training(sender, nn.Sequential(nn.Linear(256, 4096), nn.BatchNorm1d(4096), nn.Linear(4096, 4096)))
    for step in range(4):
        assert training.manager._replica.begin_step(step, hold=True)
        expected = on_host(training.manager.replica_state())
        loss = training.forward()
        training.snapshot_scheduler.request(share=True)
        is_taken = training.snapshot_scheduler.settle()
        # A fresh optimizer makes its states in the first step.
        assert is_taken or not step
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        torch.cuda._sleep(50_000_000)
        # And waited for: none is begun while another is under way.
        if is_taken:
            received = receiver.fetch(sender.metadata(), step, timeout=LONG)
            assert_equal(expected, received.state)
    training.manager.shutdown()


class _Clipped(nn.Linear):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(values)


def test_what_forward_changes_on_the_device_is_refused_once_and_copied_then(
    transports: tuple[HTTPTransport[Any], HTTPTransport[Any]],
) -> None:
    sender, receiver = transports
    training = Training(sender, _Clipped(256, 4096))
    training.manager.start_step(0)
    training.step()
    assert training.manager._replica.begin_step(1, hold=True)
    training.forward()
    training.snapshot_scheduler.request(share=True)
    assert not training.snapshot_scheduler.settle()
    training.step()
    assert training.manager._replica.begin_step(2, hold=True)
    expected = on_host(training.manager.replica_state())
    training.forward()
    training.snapshot_scheduler.settle()
    training.step()
    assert_equal(expected, receiver.fetch(sender.metadata(), 2, timeout=LONG).state)
    training.manager.shutdown()


def test_digests_read_what_was_queued_before_them_and_nothing_after() -> None:
    parameter = torch.zeros(1 << 22, device="cuda")
    for step in range(1, 4):
        torch.cuda._sleep(100_000_000)
        parameter.add_(1)
        digests = TensorDigests({"parameter": parameter}, lambda tensor: True)
        computed = digests.compute()
        expected = TensorDigests({"parameter": torch.full((1 << 22,), float(step))}, lambda tensor: True).compute()
        assert computed == expected
