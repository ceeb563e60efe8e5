"""Four ranks, HSDP 2 x 2, save a model with a consolidated copy; started by `ranks`. Usage: ``... ROOT DIM``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from programs import fork_writers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from ft_transport import CheckpointStore


def main() -> None:
    root, dim = Path(sys.argv[1]), int(sys.argv[2])
    fork_writers()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 202), nn.Linear(202, 150), nn.Linear(150, 6)).to(torch.bfloat16)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(dim if parameter.ndim > 1 else 0))
    state = {"model": model.state_dict(), "step": 3}
    expected = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    with CheckpointStore(root, consolidate="model") as store:
        store.save(3, state, wait=True)
        store.verify(3)
    index = json.loads((root / "step-3" / "model.safetensors.index.json").read_bytes())
    found = {}
    for name in set(index["weight_map"].values()):
        found.update(load_file(root / "step-3" / name))
    assert found.keys() == expected.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
