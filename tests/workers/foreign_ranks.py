"""Two ranks save with other programs: torchtitan with FSDP2, and FSDP1; started by `ranks`. Usage: ``... ROOT``.

`Titan` has the layout of torchtitan 0.3.0 (components/checkpointer/dcp.py, components/optimizer/utils.py): a model's
tensors by their bare names, and an optimizer's states and settings by the names of its parameters.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from programs import fork_writers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor

from ft_transport import CheckpointStore
from manager import RegistryError, StateManager


class Titan:
    """The states of a run of torchtitan.

    Args:
        model: Its model.
        optimizer: Its optimizer.
        step: How far it is.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        self._model = model
        self._optimizer = optimizer
        self._step = step

    def states(self) -> dict[str, Any]:
        """What torchtitan gives to ``dcp.save``."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        optimizer: dict[str, Any] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                for slot, value in self._optimizer.state[parameter].items():
                    optimizer[f"state.{name}.{slot}"] = value
                optimizer.update(
                    {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
                )
        return {
            **self._model.state_dict(),
            "optimizer": optimizer,
            "dataloader": {"dp_rank_0": pickle.dumps({"position": 3}), "world_size": 1},
            "lr_scheduler": {"last_epoch": self._step},
            "train_state": {"step": self._step, "ntokens_seen": 10 * self._step},
        }


def trained(num_steps: int, mesh: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, with two groups of parameters, after so many steps."""
    torch.manual_seed(num_steps)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 6))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.5 + num_steps}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=0.01 * (1 + num_steps))
    for _ in range(num_steps):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def main() -> None:
    root = Path(sys.argv[1])
    fork_writers()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model, optimizer = trained(2, mesh)
    dcp.save(Titan(model, optimizer, 40).states(), checkpoint_id=root / "step-40")
    own_model, own_optimizer = trained(0, mesh)
    manager = StateManager(checkpoint_store=CheckpointStore(root))
    manager.register("model", own_model)
    manager.register("optimizer", own_optimizer)
    resumed = manager.resume()
    assert resumed is not None
    assert manager.current_step() == 40
    for own, saved in zip(own_model.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(_local(own), _local(saved))
    for own, saved in zip(own_model.parameters(), model.parameters(), strict=True):
        for slot, value in optimizer.state[saved].items():
            assert torch.equal(_local(own_optimizer.state[own][slot]), _local(value))
    manager.start_step(40)
    manager.shutdown()
    check_fsdp1(root / "fsdp1", mesh)
    dist.barrier()
    dist.destroy_process_group()


def check_fsdp1(root: Path, mesh: DeviceMesh) -> None:
    """A model of FSDP1 is refused with its remedies, and the second one works."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(8, 8), device_mesh=mesh, device_id=torch.device("cpu"))
    manager = StateManager()
    with pytest.raises(RegistryError, match=r"fully_shard.*set_state_dict_type"):
        manager.register("model", model)
    manager.shutdown()
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    with CheckpointStore(root) as store:
        store.save(1, {"model": model.state_dict()}, wait=True)
        assert store.load(1).state["model"]["weight"].shape == (8, 8)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    main()
