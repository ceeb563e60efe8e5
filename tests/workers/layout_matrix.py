"""One of several processes that send and receive a model and AdamW's states in every layout; started by `ranks`.

Usage: ``layout_matrix.py REFERENCE REPORTS``: the state to send, as ``torch.save`` wrote it, and a directory to
write a report to.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ft_transport import FetchProgress, HTTPTransport, TransportSettings

STEP = 7
TIMEOUT = timedelta(seconds=120)
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Model(nn.Module):
    """Sizes that do not divide evenly, and a parameter smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 13)
        self.up = nn.Linear(13, 24)
        self.down = nn.Linear(24, 13, bias=False)
        self.norm = nn.BatchNorm1d(13)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.norm(hidden + self.down(torch.relu(self.up(hidden)))) * self.scale.sum()


def train_reference() -> dict[str, Any]:
    """A model and its optimizer's states after a few steps in one process, by the names of parameters."""
    torch.manual_seed(1)
    model = Model()
    optimizer = make_optimizer(model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(0, 11, (8,))).square().mean().backward()
        optimizer.step()
    weights, states = get_state_dict(model, optimizer, options=_FULL)
    return {"model": weights, "optimizer": states}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True, foreach=False)


def _make_states(optimizer: Any) -> None:
    """Has AdamW make its states without a step, whose operators DTensor plans anew in each layout, for a second."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
        optimizer._init_group(group, *([] for _ in range(6)))
    optimizer.zero_grad()


def _fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def _fsdp_on_dim_1(model: nn.Module, mesh: DeviceMesh) -> None:
    def place(parameter: nn.Parameter) -> Shard:
        return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % mesh.size() == 0 else Shard(0)

    fully_shard(model, mesh=mesh, shard_placement_fn=place)


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _fsdp_and_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    _tensor_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])


def _replicated(model: nn.Module, mesh: DeviceMesh) -> None:
    distribute_module(model, mesh)


@dataclass(frozen=True)
class Layout:
    shape: tuple[int, ...]
    names: tuple[str, ...]
    apply: Callable[[nn.Module, DeviceMesh], None] | None = None

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


LAYOUTS = {
    "plain": Layout((1,), ("one",)),
    "replicated 2": Layout((2,), ("dp",), _replicated),
    "fsdp 4": Layout((4,), ("dp",), _fsdp),
    "fsdp 2, dim 1": Layout((2,), ("dp",), _fsdp_on_dim_1),
    "hsdp 2x2": Layout((2, 2), ("replicate", "shard"), _fsdp),
    "tp 2": Layout((2,), ("tp",), _tensor_parallel),
    "fsdp 2 x tp 2": Layout((2, 2), ("dp", "tp"), _fsdp_and_tensor_parallel),
}


class Replica:
    """One rank of a group that holds the state in one layout."""

    def __init__(self, layout: Layout, mesh: DeviceMesh) -> None:
        torch.manual_seed(99)
        self.model = Model()
        if layout.apply is not None:
            layout.apply(self.model, mesh)
        self.optimizer = make_optimizer(self.model)
        _make_states(self.optimizer)

    def state(self) -> dict[str, Any]:
        """Twice the optimizer: by names, and as it is; these share their tensors."""
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": states, "plain": self.optimizer.state_dict()}

    def load(self, reference: dict[str, Any]) -> None:
        own = copy.deepcopy(reference)  # It is divided in place.
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=own["model"],
            optim_state_dict=own["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
        for group in self.optimizer.param_groups:
            group["betas"] = tuple(group["betas"])  # set_state_dict makes them a list.


def scramble(value: Any) -> None:
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        value.detach().fill_(77)
    elif isinstance(value, dict):
        for item in value.values():
            scramble(item)


def differences(expected: Any, actual: Any, path: str = "") -> list[str]:
    """Where the whole of what is sharded is not the reference, bit for bit. Runs collectives."""
    if isinstance(expected, dict):
        if expected.keys() != actual.keys():
            return [f"{path}: keys {sorted(map(str, actual))}"]
        return [line for key in expected for line in differences(expected[key], actual[key], f"{path}.{key}")]
    if isinstance(expected, torch.Tensor):
        whole = actual.full_tensor() if isinstance(actual, DTensor) else actual
        is_equal = whole.dtype == expected.dtype and torch.equal(whole, expected)
        return [] if is_equal else [f"{path}: {whole} instead of {expected}"]
    return [] if expected == actual else [f"{path}: {actual!r} instead of {expected!r}"]


def replaced(own: Any, received: Any, path: str = "") -> list[str]:
    """The tensors that are not the receiver's own."""
    if isinstance(own, dict):
        return [line for key in own for line in replaced(own[key], received[key], f"{path}.{key}")]
    return [path] if isinstance(own, torch.Tensor) and received is not own else []


def local_parts(value: Any) -> Any:
    """Copies of a rank's own parts of the tensors, and the other values as they are."""
    if isinstance(value, dict):
        return {key: local_parts(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
    return value


def local_bytes(value: Any, seen: set[int]) -> int:
    """The memory of a rank's own parts, what is shared counted once."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        is_new = value.numel() > 0 and value.data_ptr() not in seen
        seen.add(value.data_ptr())
        return value.nbytes if is_new else 0
    return sum(local_bytes(item, seen) for item in value.values()) if isinstance(value, dict) else 0


def main() -> None:
    reference = torch.load(sys.argv[1], weights_only=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    received_bytes = 0

    def count(progress: FetchProgress) -> None:
        nonlocal received_bytes
        received_bytes = progress.done_bytes

    transports: list[HTTPTransport[Any]] = []
    addresses: dict[str, list[str]] = {}
    senders: list[Replica] = []
    for name, layout in LAYOUTS.items():
        mesh = DeviceMesh("cpu", torch.arange(layout.size).view(layout.shape), mesh_dim_names=layout.names)
        own = None
        if rank < layout.size:
            senders.append(Replica(layout, mesh))
            senders[-1].load(reference)
            transports.append(HTTPTransport(TIMEOUT, settings=TransportSettings(host="127.0.0.1")))
            transports[-1].send_checkpoint([], STEP, senders[-1].state(), TIMEOUT)
            own = transports[-1].metadata()
        everywhere: list[str | None] = [None] * world
        dist.all_gather_object(everywhere, own)
        addresses[name] = [address for address in everywhere if address is not None]

    report = []
    receiver: HTTPTransport[Any] = HTTPTransport(
        TIMEOUT, settings=TransportSettings(host="127.0.0.1", on_progress=count)
    )
    for name, layout in LAYOUTS.items():
        # From the last process on, so that a small layout is received by others than those that send it.
        ranks = torch.arange(world - layout.size, world).view(layout.shape)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=layout.names)
        if rank < world - layout.size:
            continue
        replica = Replica(layout, mesh)
        expected = None
        for source, from_whom in addresses.items():
            state = replica.state()
            scramble(state)
            received_bytes = 0
            received = receiver.fetch_sharded(
                from_whom, STEP, into=state, group_rank=rank - (world - layout.size), is_comparable=True
            )
            found = [f"after receiving: {line}" for line in received.differences(received.state)]
            found += [f"not in place: {path}" for path in replaced(state, received.state)]
            own = {key: received.state[key] for key in reference}
            if expected is None:
                # What is compared as a whole, in collectives, says of each later state what its parts must be.
                found += differences(reference, own)
                expected = local_parts(own)
            else:
                found += differences(expected, local_parts(own))
            report.append(
                {
                    "source": source,
                    "receiver": name,
                    "differences": found,
                    "received_bytes": received_bytes,
                    "local_bytes": local_bytes(state, set()),
                }
            )
    (Path(sys.argv[2]) / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    for transport in (*transports, receiver):
        transport.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
