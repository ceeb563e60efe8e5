"""A trainer that steps without pause, and the digest of what it held at each step boundary.

It prints the address of its transport, and for each line on standard input the digest of the state at each step so far,
as JSON; it ends with its standard input.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import xxhash

from ft_transport import HTTPTransport
from manager import Manager

TENSOR_BYTES = 4 << 20
TIMEOUT = timedelta(seconds=30)


class Model(torch.nn.Module):
    """Four tensors of 4 MiB and a BatchNorm, whose buffers change in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(TENSOR_BYTES // 4) for _ in range(4))
        self.norm = torch.nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).mean() + sum(weight[:4096].sum() for weight in self.weights)


def digest_of(state: Any) -> str:
    """One digest over every tensor of a nested state, in order."""
    hasher = xxhash.xxh3_64()
    pending = [state]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            hasher.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
        elif isinstance(value, dict):
            pending.extend(value[key] for key in sorted(value, key=str))
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        else:
            hasher.update(repr(value).encode())
    return hasher.hexdigest()


def build() -> tuple[Model, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)


def train_step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(32, 64)).backward()
    for weight in model.weights:
        # Every element moves in every step, so that a mixture of two steps cannot look like one.
        weight.grad.add_(1e-3)
    optimizer.step()


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


def commands() -> queue.SimpleQueue[str]:
    received: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            received.put(line.strip())
        received.put("stop")

    threading.Thread(target=read, daemon=True).start()
    return received


def main() -> None:
    model, optimizer, scheduler = build()
    transport: HTTPTransport[Any] = HTTPTransport(TIMEOUT)
    manager = Manager(checkpoint_transport=transport, timeout=TIMEOUT)
    for key, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
        manager.register(key, part)
    digests: dict[int, str] = {}
    answer(transport.metadata())
    received = commands()
    step = 0
    with manager.attach(optimizer):
        while True:
            manager.start_step(step)
            digests[step] = digest_of(manager.replica_state()["user"])
            train_step(model, optimizer)
            scheduler.step()
            step += 1
            command = received.get_nowait() if not received.empty() else None
            if command == "stop":
                break
            if command is not None:
                answer(digests)
    manager.shutdown()


if __name__ == "__main__":
    main()
