"""A trainer that keeps its state, and runs the lines that it is sent: ``keeping_trainer.py [WIDTH] [KEEP_EVERY]``.

It prints ``ready``, and ``done`` after each line. `manager`, `model`, `optimizer` and `counter` are what it trains.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from io import StringIO
from typing import Any

import torch
from torch import nn

from ft_transport import CheckpointStore, HTTPTransport
from manager import Manager

WIDTH = int(sys.argv[1]) if len(sys.argv) > 1 else 16
EVERY = int(sys.argv[2]) if len(sys.argv) > 2 else 1
log = StringIO()
logging.basicConfig(stream=log, level=logging.INFO)
torch.manual_seed(int.from_bytes(os.urandom(2), "big"))
DEVICE = os.environ.get("KEEPING_DEVICE", "cpu")
model = nn.Linear(WIDTH, WIDTH, device=DEVICE)
optimizer = torch.optim.AdamW(model.parameters())


class Counter:
    """Local state."""

    value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "noise": torch.full((2,), float(self.value))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


counter = Counter()
store = CheckpointStore(os.environ["KEEPING_STORE"]) if "KEEPING_STORE" in os.environ else None
manager = Manager(checkpoint_transport=HTTPTransport(), keep_every=EVERY, checkpoint_store=store)


def register() -> None:
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    manager.register("counter", counter, scope="local")
    manager.attach(optimizer)


def digest() -> str:
    """A digest of the whole state."""
    found = hashlib.blake2b(str(counter.value).encode(), digest_size=8)
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):
            found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(num_steps: int) -> str:
    """Make steps, begin the next one, wait until it is kept, and return the digest of what is kept."""
    for _ in range(num_steps):
        manager.start_step(manager.current_step())
        model(torch.randn(4, WIDTH, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        counter.value += 1
        keep(manager.current_step() + 1)
    return digest()


def keep(step: int) -> None:
    """Begin a step, and wait until its snapshot is with the keeper."""
    # Another manager of this loop would have made its memory resident some steps earlier.
    keeping()._prefault()
    while keeping().kept._stager._pool._preparing is not None:
        time.sleep(0.001)
    keeping()._job.result(20)
    manager.start_step(step)
    keeping()._wait_until_idle()


def keeping() -> Any:
    return manager._replica.keeping


def flip_bit(place: int) -> None:
    """Damage a kept snapshot: the newest is -1."""
    kept = keeping().kept._kept[place]
    kept.close.args[0].view[40] ^= 1


def resume() -> tuple[int, int, str, str] | None:
    """Resume, and return step, counter, source and digest."""
    recovery = manager.resume()
    return None if recovery is None else (recovery.step, counter.value, recovery.source, digest())


def error_of(function: Callable[[], object]) -> str:
    """The name of the error that a function raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return ""


def crash() -> None:
    """As a training function that fails and whose caller shuts the manager down."""
    try:
        raise ValueError
    finally:
        manager.shutdown()


if __name__ == "__main__":
    os.chdir(os.environ.get("KEEPING_DIRECTORY", tempfile.gettempdir()))
    register()
    print("ready", flush=True)
    for line in sys.stdin:
        exec(line)
        print("done", flush=True)
