"""The sharded states of the benchmark ``reshard``: the weights of a transformer, divided by ranks that are only named.

DTensors say by their mesh which part they hold. The benchmark needs no collective, so that one process can hold the
parts of several ranks: each on a mesh that has no process groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_WIDTH: Final = 2048
_HIDDEN: Final = 5632
_NUM_LAYERS: Final = 8


@dataclass(frozen=True)
class ShardedSpec:
    """How a group of ranks divides the state: ``dim`` over the mesh's last dimension, replicated over the others."""

    mesh_shape: tuple[int, ...]
    dim: int

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh_shape)

    @classmethod
    def parse(cls, text: str) -> ShardedSpec:
        """From ``2x2@0``: mesh and dimension."""
        mesh, _, dim = text.partition("@")
        return cls(tuple(int(size) for size in mesh.split("x")), int(dim))

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.mesh_shape))}@{self.dim}"


def ensure_process_group() -> None:
    """DTensors want one to be there, if only of this process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def shapes(scale: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the weights; 1.0 GB in float32 at scale 1."""
    for layer in range(max(1, round(_NUM_LAYERS * scale))):
        for name in ("query", "key", "value", "output"):
            yield f"{layer}.{name}", (_WIDTH, _WIDTH)
        yield f"{layer}.up", (_HIDDEN, _WIDTH)
        yield f"{layer}.down", (_WIDTH, _HIDDEN)
        yield f"{layer}.norm", (_WIDTH,)


def build(spec: ShardedSpec, rank: int, scale: float, *, is_source: bool) -> dict[str, torch.Tensor]:
    """One rank's part of the state: numbers that say where in the whole they belong, or stale ones."""
    ranks = torch.arange(spec.num_ranks, dtype=torch.int).view(spec.mesh_shape)
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)
    state: dict[str, torch.Tensor] = {}
    for number, (name, shape) in enumerate(shapes(scale)):
        dim = min(spec.dim, len(shape) - 1)
        at = [*(Replicate() for _ in spec.mesh_shape[1:]), Shard(dim)]
        local_shape, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, at)
        local = torch.full(tuple(local_shape), -1.0)
        if is_source:
            local.copy_(expected_part(number, shape, tuple(local_shape), tuple(offset)))
        stride = torch.empty(shape, device="meta").stride()
        state[name] = DTensor.from_local(local, mesh, at, run_check=False, shape=torch.Size(shape), stride=stride)
    return state


def expected_part(
    number: int, shape: tuple[int, ...], local_shape: tuple[int, ...], offset: tuple[int, ...]
) -> torch.Tensor:
    """The part of a tensor in which each element is its own position, and a little more for each tensor."""
    whole = torch.zeros(local_shape, dtype=torch.float64)
    stride = 1
    for dim in reversed(range(len(shape))):
        positions = torch.arange(offset[dim], offset[dim] + local_shape[dim], dtype=torch.float64) * stride
        whole += positions.view([-1 if each == dim else 1 for each in range(len(shape))])
        stride *= shape[dim]
    return (whole % 16_777_213 + number).to(torch.float32)


def is_right(state: dict[str, torch.Tensor], scale: float) -> bool:
    """Whether a received state is what its own layout says it should be."""
    for number, (name, shape) in enumerate(shapes(scale)):
        tensor = state[name]
        assert isinstance(tensor, DTensor)
        local_shape, offset = compute_local_shape_and_global_offset(
            torch.Size(shape), tensor.device_mesh, tensor.placements
        )
        if not torch.equal(tensor.to_local(), expected_part(number, shape, tuple(local_shape), tuple(offset))):
            return False
    return True
