"""Three ranks train without a pause, two others, divided in another way, recover from them; started by `ranks`.

Usage: ``sharded_managers.py REPORTS``: a directory to write a report to. Every element of every tensor of the state is
the number of committed steps, so that two steps mixed, on one rank or on several, would show.
"""

from __future__ import annotations

import json
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ft_transport import HTTPTransport, TransportError, TransportSettings
from manager import Manager, ManagerError, RegistryError, StateTornError

NUM_TRAINING = 3
NUM_RECOVERING = 2
NUM_RECOVERIES = 5
TIMEOUT = timedelta(seconds=60)


class Counting(torch.optim.Optimizer):
    """Counts its steps in every element of parameters and states."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["count"] = torch.zeros_like(parameter)
                for tensor in (parameter, state["count"]):
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    local.add_(1)


def make(mesh: DeviceMesh, dim: int) -> tuple[nn.Module, Counting]:
    model = nn.Sequential(nn.Linear(64, 130, bias=False), nn.Linear(130, 64, bias=False))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda _parameter: Shard(dim))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()  # type: ignore[attr-defined]
    return model, Counting(model.parameters())


def manager_of(model: nn.Module, optimizer: Counting) -> Manager:
    transport: HTTPTransport[Any] = HTTPTransport(TIMEOUT, settings=TransportSettings(host="127.0.0.1"))
    manager = Manager(checkpoint_transport=transport)
    manager.register("model", model)
    manager.register("optimizer", optimizer)
    manager.attach(optimizer)
    return manager


def train(group: dist.ProcessGroup, manager: Manager, optimizer: Counting, done: Path) -> dict[str, Any]:
    pauses = random.Random(dist.get_rank())
    step = 0
    is_done = torch.zeros(1)
    while not is_done.item():
        manager.start_step(step)
        time.sleep(pauses.random() * 2e-3)  # No two ranks reach a boundary at the same moment.
        optimizer.step()
        step += 1
        is_done[0] = float(done.exists())
        dist.all_reduce(is_done, group=group)
    return {"steps": step}


def recover(
    group: dist.ProcessGroup, manager: Manager, model: nn.Module, optimizer: Counting, addresses: list[str]
) -> dict[str, Any]:
    refused = ""
    try:
        manager.recover(addresses)
    except ManagerError as error:
        refused = str(error)
    steps, wrong = [], []
    for _ in range(NUM_RECOVERIES):
        step = manager.recover(addresses, timeout=TIMEOUT, process_group=group).step
        steps.append(step)
        states = [optimizer.state[parameter]["count"] for parameter in model.parameters()]
        for tensor in (*model.parameters(), *states):
            assert isinstance(tensor, DTensor)
            if not torch.equal(tensor.to_local(), torch.full_like(tensor.to_local(), step)):
                wrong.append(f"step {step}: {tensor.to_local().unique().tolist()}")
            if tensor.placements != (Shard(1),):
                wrong.append(f"placements {tensor.placements}")
    # One rank is told too little; the others must not train on without it.
    together = ""
    try:
        is_last = dist.get_rank(group) == dist.get_world_size(group) - 1
        manager.recover(addresses[:1] if is_last else addresses, process_group=group)
    except (TransportError, StateTornError) as error:
        together = f"{type(error).__name__}: {error}"
    return {"recovered": steps, "wrong": wrong, "refused": refused, "together": together}


def try_a_collective(mesh: DeviceMesh) -> str:
    """A state function that makes whole tensors, as ``full_state_dict`` does."""
    model, optimizer = make(mesh, 0)
    manager = Manager(checkpoint_transport=HTTPTransport(TIMEOUT, settings=TransportSettings(host="127.0.0.1")))
    manager.register_state_dict_fn(
        "whole", lambda _state: None, lambda: {name: value.full_tensor() for name, value in model.state_dict().items()}
    )
    manager.attach(optimizer)
    try:
        manager.start_step(0)
    except RegistryError as error:
        return str(error)
    finally:
        manager.shutdown()
    return ""


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    reports = Path(sys.argv[1])
    training = DeviceMesh("cpu", list(range(NUM_TRAINING)), mesh_dim_names=("dp",))
    recovering = DeviceMesh("cpu", list(range(NUM_TRAINING, NUM_TRAINING + NUM_RECOVERING)), mesh_dim_names=("dp",))
    is_training = rank < NUM_TRAINING
    model, optimizer = make(training, 0) if is_training else make(recovering, 1)
    manager = manager_of(model, optimizer)
    addresses: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(addresses, manager.metadata())
    done = reports / "done"
    if is_training:
        report = train(training.get_group(), manager, optimizer, done)
        report["collective"] = try_a_collective(training)
    else:
        report = recover(recovering.get_group(), manager, model, optimizer, addresses[:NUM_TRAINING])
        dist.barrier(group=recovering.get_group())
        done.touch()
    (reports / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
