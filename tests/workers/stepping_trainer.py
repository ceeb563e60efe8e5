"""A trainer that steps without pause, and the digest of what it held at each step boundary.

Run as a script: `stepping_trainer.py ours|torchft`. It prints the address of its transport, then obeys one-line
commands on standard input and answers each with one line of JSON on standard output:

``digests`` the digest of the state at each step so far; ``serve`` (torchft only) takes a snapshot the way torchft's
Manager does for a replica that is behind, and answers with its step; ``stop``.
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


def run_ours() -> None:
    from ft_transport import HTTPTransport
    from manager import Manager

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
            command = received.get_nowait() if not received.empty() else ""
            if command == "digests":
                answer(digests)
            elif command == "stop":
                break
    manager.shutdown()


def run_torchft() -> None:
    from torch.distributed import TCPStore
    from torchft.checkpointing.http_transport import HTTPTransport
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    model, optimizer, scheduler = build()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    transport: Any = HTTPTransport(TIMEOUT, num_chunks=0)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: None,
        state_dict=lambda: {key: part.state_dict() for key, part in parts.items()},
        min_replica_size=1,
        replica_id="trainer",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse.address(),
        checkpoint_transport=transport,
        timeout=TIMEOUT,
    )
    # As torchft's LocalSGD does it.
    optimizer.register_step_pre_hook(lambda *_: manager.disallow_state_dict_read())
    optimizer.register_step_post_hook(lambda *_: manager.allow_state_dict_read())
    digests: dict[int, str] = {}
    answer(transport.metadata())
    received = commands()
    step = 0

    def serve(served_step: int) -> None:
        # What Manager._async_quorum does on its own thread when the quorum names a replica that is behind.
        state = manager._manager_state_dict()
        transport.send_checkpoint(dst_ranks=[1], step=served_step, state_dict=state, timeout=TIMEOUT)
        answer(served_step)

    while True:
        digests[step] = digest_of({key: part.state_dict() for key, part in parts.items()})
        command = received.get_nowait() if not received.empty() else ""
        if command == "serve":
            threading.Thread(target=serve, args=(step,), daemon=True).start()
        elif command == "digests":
            answer(digests)
        elif command == "stop":
            break
        train_step(model, optimizer)
        scheduler.step()
        step += 1
    manager.shutdown(wait=False)
    lighthouse.shutdown()


if __name__ == "__main__":
    {"ours": run_ours, "torchft": run_torchft}[sys.argv[1]]()
