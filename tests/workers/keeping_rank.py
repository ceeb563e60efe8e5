"""One rank that keeps its state and resumes: ``keeping_rank.py DIRECTORY NUM_STEPS KEEP_EVERY``.

It appends ``at ADDRESS``, ``resumed STEP SECONDS SOURCE`` and, at each step boundary, ``STEP DIGEST`` of its whole
state to ``RANK.txt``. What is trained in a step follows from the step and the rank, so all lives of a job have the same
state at the same step. With ``KEEPING_IS_WHOLE`` the digest is that of all ranks' replicated state, in any layout.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ft_transport import HTTPTransport
from manager import Manager

WIDTH = int(os.environ.get("KEEPING_WIDTH", "64"))
LAYOUT = os.environ.get("KEEPING_LAYOUT", "fsdp")
IS_WHOLE = bool(os.environ.get("KEEPING_IS_WHOLE"))
TABLE_BYTES = int(os.environ.get("KEEPING_TABLE_BYTES", "0"))
"""Size of this rank's shard of a table that every step changes without communication; AdamW adds twice as much."""


class Counter:
    """Local state: it is not the same on two ranks."""

    def __init__(self, rank: int) -> None:
        self.value = rank

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "noise": torch.full((3,), float(self.value))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer, counter: Counter) -> str:
    digest = xxhash.xxh3_128(b"" if IS_WHOLE else str(counter.value).encode())
    for parameter in model.parameters():
        for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):
            local = tensor
            if isinstance(tensor, DTensor):
                local = tensor.full_tensor() if IS_WHOLE else tensor.to_local()
            digest.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def spoil_copies(manager: Manager, step: int) -> bool:
    """Wait for the copies of other ranks' states at a step, beside older ones; flip a bit in each.

    Return whether they have come.
    """
    kept = manager._replica.keeping.kept
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        copies = [each for each in kept._kept if each.about.part.rank != kept._rank]
        if {each.about.part.step for each in copies} > {step}:
            for each in copies:
                if each.about.part.step == step:
                    each.close.args[0].view[4000] ^= 1
            return True
        time.sleep(0.01)
    return False


def main() -> None:
    directory, num_steps, keep_every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    if world_size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        shape = (2, world_size // 2) if LAYOUT == "hsdp" else (world_size,)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in model if LAYOUT != "ddp" else ():
            fully_shard(layer, mesh=mesh)
        if LAYOUT != "ddp":
            fully_shard(model, mesh=mesh)
    table_grad: torch.Tensor | None = None
    if TABLE_BYTES:
        shard = torch.rand(TABLE_BYTES // 4)
        model.register_parameter("table", nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)])))
        table_grad = DTensor.from_local(torch.ones(1).expand(len(shard)), mesh, [Shard(0)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    counter = Counter(rank)
    transport = HTTPTransport[object]()
    copies, host = int(os.environ.get("KEEPING_COPIES", "1")), os.environ.get("KEEPING_HOST")
    manager = Manager(checkpoint_transport=transport, keep_every=keep_every, copies=copies, failure_domain=host)
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    manager.register("counter", counter, scope="local")
    manager.attach(optimizer)
    if grace_s := os.environ.get("KEEPING_GRACE_S"):
        announcement = directory / f"{rank}.announced"
        manager.on_preemption(is_announced=announcement.exists, grace=timedelta(seconds=float(grace_s)))
    hold = directory / "hold"
    stuck, spoil = directory / f"{rank}.stuck", directory / f"{rank}.spoil"
    began_s = time.monotonic()
    recovery = manager.resume()
    step = manager.current_step()
    with (directory / f"{rank}.txt").open("a", buffering=1) as notes:
        notes.write(f"at {transport.metadata()}\n")
        source = recovery.source.replace(" ", "_") if recovery is not None else "nothing"
        notes.write(f"resumed {step} {time.monotonic() - began_s:.3f} {source}\n")
        while step < num_steps:
            manager.start_step(step)
            # The other ranks come as far as the next step, which is not kept.
            if spoil.exists() and step % keep_every == 0 and spoil_copies(manager, step):
                spoil.write_text(str(step))
                spoil.replace(stuck)
            notes.write(f"{step} {digest_of(model, optimizer, counter)}\n")
            torch.manual_seed(step * world_size + rank)
            model(torch.randn(8, WIDTH)).square().mean().backward()
            if LAYOUT == "ddp":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            while stuck.exists() or (hold.exists() and step >= int(hold.read_text())):
                time.sleep(0.01)
            if table_grad is not None:
                model.get_parameter("table").grad = table_grad
            optimizer.step()
            optimizer.zero_grad()
            counter.value += 7
            step += 1
        notes.write(f"{step} {digest_of(model, optimizer, counter)}\n")
        notes.write("done\n")
    manager.shutdown()


if __name__ == "__main__":
    main()
