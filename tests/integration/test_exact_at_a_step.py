"""A state fetched in the middle of a step is that of the last step boundary, to the last buffer and counter."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from ft_transport import HTTPTransport
from manager import Manager, RandomState

_TIMEOUT = timedelta(seconds=30)
_WIDTH = 1024

NewTransport = Callable[[], "HTTPTransport[Any]"]
FetchedWhileLooping = Callable[[Manager, "HTTPTransport[Any]", Callable[[], None]], int]


class Counters:
    """What a loop counts in plain Python."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"num_samples": self.num_samples, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_samples, self.losses = state["num_samples"], state["losses"]


def _model() -> torch.nn.Module:
    """Large and small parameters, large and small buffers; the large ones are copied behind the trainer's back."""
    return torch.nn.Sequential(
        torch.nn.Linear(32, _WIDTH), torch.nn.BatchNorm1d(_WIDTH), torch.nn.Dropout(), torch.nn.Linear(_WIDTH, 8)
    )


def _manager(transport: HTTPTransport[Any], **parts: Any) -> Manager:
    manager = Manager(checkpoint_transport=transport, timeout=_TIMEOUT)
    for key, part in parts.items():
        manager.register(key, part)
    manager.register("rng", RandomState(), on_training_thread=True)
    return manager


def _loss(model: torch.nn.Module) -> torch.Tensor:
    noise = random.random() + np.random.rand()
    return (model(torch.randn(8, 32)) + noise).square().mean()


def test_buffers_scheduler_random_numbers_counters_and_scaler(
    new_transport: NewTransport, fetched_while_looping: FetchedWhileLooping
) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100_000)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    large_buffer = torch.zeros(1 << 15)
    counters = Counters()
    transport = new_transport()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "counters": counters}
    manager = _manager(transport, **parts)
    manager.register_state_dict_fn("buffer", large_buffer.copy_, lambda: large_buffer)

    def train_step() -> None:
        optimizer.zero_grad()
        loss = _loss(model)
        # A large buffer that forward changes, as a codebook or a cache does.
        large_buffer.add_(1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        counters.num_samples += 8
        counters.losses = [*counters.losses[-3:], float(loss.detach())]

    with manager.attach(optimizer):
        assert fetched_while_looping(manager, transport, train_step) >= 6
    manager.shutdown()


def test_lbfgs_that_runs_forward_inside_its_step(
    new_transport: NewTransport, fetched_while_looping: FetchedWhileLooping
) -> None:
    model = _model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3, history_size=3)
    transport = new_transport()
    manager = _manager(transport, model=model, optimizer=optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model)
        loss.backward()
        return loss

    with manager.attach(optimizer):
        assert fetched_while_looping(manager, transport, lambda: optimizer.step(closure)) >= 6
    manager.shutdown()


def test_two_optimizers_that_step_one_after_the_other(
    new_transport: NewTransport, fetched_while_looping: FetchedWhileLooping
) -> None:
    model = _model()
    head, body = list(model[3].parameters()), list(model[:3].parameters())
    optimizers = [torch.optim.SGD(body, lr=0.01, momentum=0.9), torch.optim.Adam(head, lr=0.01)]
    transport = new_transport()
    manager = _manager(transport, model=model, body=optimizers[0], head=optimizers[1])

    def train_step() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        _loss(model).backward()
        for optimizer in optimizers:
            optimizer.step()

    with manager.attach(*optimizers):
        assert fetched_while_looping(manager, transport, train_step) >= 6
    manager.shutdown()


@pytest.mark.usefixtures("torchft_ready")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_the_transport_of_torchft_sends_what_a_step_has_changed_meanwhile() -> None:
    from torchft.checkpointing.http_transport import HTTPTransport as TorchftTransport

    weight = torch.zeros(4)
    source, receiver = (TorchftTransport(timeout=_TIMEOUT, num_chunks=0) for _ in range(2))
    try:
        source.send_checkpoint([1], step=1, state_dict={"weight": weight}, timeout=_TIMEOUT)
        weight.add_(1)
        address = urlsplit(source.metadata())._replace(netloc=f"127.0.0.1:{urlsplit(source.metadata()).port}").geturl()
        received: Any = receiver.recv_checkpoint(0, address, 1, _TIMEOUT)
    finally:
        for transport in (source, receiver):
            transport.shutdown()
            transport._server.server_close()  # `shutdown` leaves the socket open
    assert torch.equal(received["weight"], torch.ones(4))
