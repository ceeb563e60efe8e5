"""Checkpoints of a model and AdamW's states, saved in HSDP and loaded in other layouts; started by `ranks`.

Usage: ``checkpoint_layouts.py ROOT REPORTS``: in four processes it saves to ROOT, in one it loads from there. Each
writes a report to the directory REPORTS.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import layout_matrix as layouts
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layout_matrix import LAYOUTS, Layout, Replica, differences, local_bytes, replaced, scramble
from programs import fork_writers
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ft_transport import CheckpointStore, StoreSettings, TransportError

NUM_RANKS = 4
STEP = 7
SAVED_AS = "hsdp 2x2"
LOADED_AS = {
    "hsdp 2x2": LAYOUTS["hsdp 2x2"],
    "plain": Layout((4,), ("dp",)),
    "tp 4": Layout((4,), ("tp",), layouts._tensor_parallel),
    "fsdp 2 x tp 2": LAYOUTS["fsdp 2 x tp 2"],
}
SETTINGS = StoreSettings(timeout=timedelta(seconds=60), max_failed_saves=10)


class Model(nn.Module):
    """Large enough that what is not tensors hardly counts; sizes that do not divide evenly, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 511)
        self.up = nn.Linear(511, 768)
        self.down = nn.Linear(768, 511, bias=False)
        self.norm = nn.LayerNorm(511)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        return self.norm(hidden + self.down(torch.relu(self.up(hidden)))) * self.scale.sum()


def make_reference() -> dict[str, Any]:
    """The same in every process."""
    layouts.Model = Model  # type: ignore[assignment, misc]
    return layouts.train_reference()


def empty_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: empty_like(item) for key, item in value.items()}
    return torch.full_like(value, 77) if isinstance(value, torch.Tensor) else value


def num_bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def refusal(save: Callable[[], Any]) -> dict[str, Any] | None:
    try:
        save()
    except TransportError as error:
        return {"kind": type(error).__name__, "text": str(error), "path": error.path}
    return None


def flip_a_bit(tensor: torch.Tensor) -> None:
    tensor.detach().view(torch.int32).flatten()[-1].bitwise_xor_(1)


class ReadCounter:
    """Bytes of data files that this process reads, whatever it says that it does."""

    def __init__(self) -> None:
        self.num_bytes = 0
        preadv = os.preadv

        def counting(descriptor: int, buffers: Any, *args: Any) -> int:
            count = preadv(descriptor, buffers, *args)
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
                self.num_bytes += count
            return count

        os.preadv = counting

    def take(self) -> int:
        taken, self.num_bytes = self.num_bytes, 0
        return taken


def load_in_layouts(store: CheckpointStore, reference: dict[str, Any], counter: ReadCounter) -> dict[str, Any]:
    report = {}
    for name, layout in LOADED_AS.items():
        mesh = DeviceMesh("cpu", torch.arange(layout.size).view(layout.shape), mesh_dim_names=layout.names)
        state = Replica(layout, mesh).state()
        scramble(state)
        counter.take()
        loaded = store.load(STEP, into=state, is_comparable=True)
        report[name] = {
            "differences": [
                *loaded.differences(loaded.state),
                *differences(reference, {key: loaded.state[key] for key in reference}),
                *(f"not in place: {path}" for path in replaced(state, loaded.state)),
            ],
            "said_to_be_read": loaded.num_bytes_read,
            "read": counter.take(),
            "local": local_bytes(state, set()),
        }
    loaded = store.load(STEP)
    is_whole = not any(isinstance(value, DTensor) for value in flatten_state_dict(loaded.state)[0].values())
    report["nothing to load into"] = {
        "differences": [
            *differences(reference, {key: loaded.state[key] for key in reference}),
            *([] if is_whole else ["a DTensor"]),
        ],
        "said_to_be_read": loaded.num_bytes_read,
        "read": counter.take(),
    }
    return report


def load_with_dcp(directory: Path, state: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    flat, paths = flatten_state_dict(state)
    metadata = FileSystemReader(directory).read_metadata()
    scramble(state)
    dcp.load(state, checkpoint_id=directory)
    return {
        "differences": differences(reference, {key: state[key] for key in reference}),
        "are_names_equal": set(metadata.state_dict_metadata) == set(flat),
        "are_paths_equal": metadata.planner_data == paths,
        "num_names": len(flat),
    }


def refuse_diverged(store: CheckpointStore, root: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Each on a state of which one rank holds something else."""
    rank = dist.get_rank()
    report: dict[str, Any] = {}

    def save(name: str, diverged: dict[str, Any]) -> None:
        report[name] = refusal(lambda: store.save(STEP + 1, diverged, wait=True))

    changed = copy.deepcopy(state)
    if rank == 3:
        flip_a_bit(changed["optimizer"]["state"]["up.weight"]["exp_avg"].to_local())
    save("a shard", changed)
    save("a plain tensor", {"sharded": state["model"], "plain": {"t": torch.full((100,), float(rank == 2))}})
    save("a value", {"sharded": state["model"], "plain": {"n": [1, 2, float(rank == 1)]}})
    save("a shape", {"plain": torch.zeros(3 if rank == 1 else 4)})
    report["left"] = sorted(path.name for path in root.iterdir()) if not rank else []
    # It costs the store nothing: the same state without what was changed.
    store.save(STEP + 1, state, wait=True)
    report["steps"] = store.steps()
    return report


def consolidate(root: Path, mesh: DeviceMesh, dim: int) -> list[str]:
    """What is wrong with the whole tensors beside a checkpoint of a model that is divided along a dimension."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 202), nn.Linear(202, 150), nn.Linear(150, 6)).to(torch.bfloat16)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(dim if parameter.ndim > 1 else 0))
    expected = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}  # type: ignore[operator]
    with CheckpointStore(root, consolidate="model", settings=SETTINGS) as store:
        store.save(STEP, {"model": model.state_dict(), "step": 3}, wait=True)
        store.verify(STEP)
    directory = root / f"step-{STEP}"
    index = json.loads((directory / "model.safetensors.index.json").read_bytes())
    found: dict[str, torch.Tensor] = {}
    for name in set(index["weight_map"].values()):
        found.update(load_file(directory / name))
    wrong = differences(expected, found)
    if index["weight_map"].keys() != expected.keys():
        wrong.append(f"the index has {sorted(index['weight_map'])}")
    if index["metadata"]["total_size"] != sum(tensor.nbytes for tensor in expected.values()):
        wrong.append(f"the index has {index['metadata']}")
    return wrong


def load_stages(store: CheckpointStore) -> list[str]:
    """Each rank has another part of a model, as in a pipeline; all have one tensor in common."""
    own = f"stage {dist.get_rank()}"
    store.save(STEP + 2, {"all": torch.ones(5), own: {"w": torch.full((100,), float(dist.get_rank()))}}, wait=True)
    expected = {
        "all": torch.ones(5), **{f"stage {n}": {"w": torch.full((100,), float(n))} for n in range(NUM_RANKS)}
    }  # fmt: skip
    return differences(expected, dict(sorted(store.load(STEP + 2).state.items())))


def share_files(root: Path, replica: Replica, reference: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint after one in which a tensor had other values, loaded in another layout and with DCP."""
    weight = replica.state()["model"]["down.weight"].to_local()
    with CheckpointStore(root, settings=SETTINGS) as store:
        weight.neg_()
        store.save(STEP - 1, replica.state(), wait=True)
        weight.neg_()
        store.save(STEP, replica.state(), wait=True)
        files = [path.stat() for path in (root / f"step-{STEP}").iterdir()]
        layout = LAYOUTS["fsdp 2 x tp 2"]
        mesh = DeviceMesh("cpu", torch.arange(layout.size).view(layout.shape), mesh_dim_names=layout.names)
        state = Replica(layout, mesh).state()
        scramble(state)
        loaded = store.load(STEP, into=state)
    return {
        "new_bytes": sum(status.st_size for status in files if status.st_nlink == 1),
        "tensor_bytes": 4 * weight.numel() * layout.shape[1],
        "differences": differences(reference, {key: loaded.state[key] for key in reference}),
        "dcp": load_with_dcp(root / f"step-{STEP}", replica.state(), reference)["differences"],
    }


def run_four(root: Path) -> dict[str, Any]:
    reference = make_reference()  # With a group, ranks other than the first get nothing from get_state_dict.
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    counter = ReadCounter()
    layout = LAYOUTS[SAVED_AS]
    mesh = DeviceMesh("cpu", torch.arange(layout.size).view(layout.shape), mesh_dim_names=layout.names)
    replica = Replica(layout, mesh)
    replica.load(reference)
    report: dict[str, Any] = {"state_bytes": local_bytes(reference, set())}
    with CheckpointStore(root / "sharded", settings=SETTINGS) as store:
        store.save(STEP, replica.state(), wait=True)
        directory = root / "sharded" / f"step-{STEP}"
        report["file_bytes"] = num_bytes_of(directory)
        report["own_file_bytes"] = (directory / f"__{rank}_0.distcp").stat().st_size
        report["loaded"] = load_in_layouts(store, reference, counter)
        report["dcp"] = load_with_dcp(directory, replica.state(), reference)
        replica.load(reference)
        report["diverged"] = refuse_diverged(store, root / "sharded", replica.state())
        report["stages"] = load_stages(store)
    replica.load(reference)
    report["shared"] = share_files(root / "shared", replica, reference)
    report["consolidated"] = [consolidate(root / f"consolidated-{dim}", mesh, dim) for dim in (0, 1)]
    with CheckpointStore(root / "plain", rank_local=("own",), settings=SETTINGS) as store:
        plain = {"both": torch.arange(3 << 20), "small": [torch.ones(7) * n for n in range(100)]}
        store.save(STEP, {**plain, "own": torch.tensor([rank])}, wait=True)
        report["plain_bytes"] = local_bytes(plain | {"small": dict(enumerate(plain["small"]))}, set())
        report["plain_file_bytes"] = num_bytes_of(root / "plain" / f"step-{STEP}")
        loaded = store.load().state
        report["plain_own"] = loaded["own"].item()
        report["is_plain_equal"] = torch.equal(loaded["both"], plain["both"]) and all(
            torch.equal(one, other) for one, other in zip(loaded["small"], plain["small"], strict=True)
        )
    dist.barrier()
    dist.destroy_process_group()
    return report


def run_one(root: Path) -> dict[str, Any]:
    """What four ranks have saved, in a process that knows of no group."""
    reference = make_reference()
    directory = root / "sharded" / f"step-{STEP}"
    whole = Replica(LAYOUTS["plain"], None).state()  # type: ignore[arg-type]
    report: dict[str, Any] = {"dcp": load_with_dcp(directory, whole, reference)}
    with CheckpointStore(root / "sharded", read_only=True) as store:
        into = empty_like(reference)
        loaded = store.load(STEP, into=into)
        report["differences"] = differences(reference, {key: loaded.state[key] for key in reference})
        report["replaced"] = replaced(into, {key: loaded.state[key] for key in reference})
    return report


def main() -> None:
    root, reports = Path(sys.argv[1]), Path(sys.argv[2])
    fork_writers()
    is_one = "RANK" not in os.environ
    report = run_one(root) if is_one else run_four(root)
    (reports / f"{'one' if is_one else os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
