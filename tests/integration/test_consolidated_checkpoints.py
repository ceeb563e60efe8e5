"""Whole tensors beside a checkpoint: what safetensors and an index of transformers' kind show is the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ft_transport import CheckpointDamagedError, CheckpointError, CheckpointStore
from ft_transport.checkpoint.plan import consolidate, create_consolidated
from ft_transport.checkpoint.write_items import describe
from ft_transport.state.snapshot import Taking
from ft_transport.state.stager import Stager
from ft_transport.wire.manifest import decode_header


def test_a_model_is_there_whole_with_tied_names_and_other_parts_are_not(tmp_path: Path) -> None:
    embedding, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head, "norm": nn.BatchNorm1d(4)})
    state = {"model": model.state_dict(), "optimizer": {"model": torch.ones(3)}, "count": 5}
    with CheckpointStore(tmp_path, consolidate="model") as store:
        store.save(1, state, wait=True)
        found = load_file(tmp_path / "step-1" / "model-00001-of-00001.safetensors")
        assert found.keys() == model.state_dict().keys() == _weight_map(tmp_path / "step-1").keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
        model.load_state_dict(found, strict=True)
        assert store.load(1).state["count"] == 5
        (tmp_path / "step-1" / "model-00001-of-00001.safetensors").write_bytes(b"gone")
        with pytest.raises(CheckpointDamagedError, match=r"model-00001-of-00001\.safetensors"):
            store.verify(1)


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, consolidate="weights") as store:
        with pytest.raises(CheckpointError, match=r"found none .*at weights"):
            store.save(1, {"model": {"weight": torch.ones(3)}})
        store.save(2, {"weights": {"weight": torch.ones(3)}}, wait=True)
        assert store.check_health().is_good
        assert store.steps() == (2,)


@pytest.mark.parametrize(
    "name",
    ["bfloat16", "complex64", "uint16", "float8_e4m3fn", "float8_e8m0fnu", "float8_e5m2fnuz", "float4_e2m1fn_x2"],
)
def test_every_dtype_that_safetensors_has_a_name_for_is_written_and_loaded_in_place(tmp_path: Path, name: str) -> None:
    tensor = torch.arange(64, dtype=torch.uint8).view(4, 16).view(getattr(torch, name))
    own = torch.zeros(4, 16, dtype=torch.uint8).view(tensor.dtype)
    with CheckpointStore(tmp_path, consolidate="model") as store:
        store.save(1, {"model": {"weight": tensor}}, wait=True)
        assert store.load(1, into={"model": {"weight": own}}).state["model"]["weight"] is own
    (found,) = load_file(tmp_path / "step-1" / "model-00001-of-00001.safetensors").values()
    for each in (found, own):
        assert (each.dtype, each.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(each.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*are deprecated:UserWarning")
@pytest.mark.parametrize("name", ["__metadata__", "scaled", "complex"])
def test_what_safetensors_cannot_hold_is_named(tmp_path: Path, name: str) -> None:
    tensor = torch.ones(3)
    if name == "scaled":
        tensor = torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
    elif name == "complex":
        tensor = tensor.to(torch.complex128)
    with CheckpointStore(tmp_path, consolidate="model") as store:
        with pytest.raises(CheckpointError, match=f"model.{name}"):
            store.save(1, {"model": {"weight": torch.ones(3), name: tensor}})
        assert store.steps() == ()


def test_a_large_model_goes_to_several_files(tmp_path: Path) -> None:
    model = {f"layer.{number}": torch.full((100,), float(number)) for number in range(10)}
    stager = Stager(max_snapshots=1, num_threads=1, chunk_bytes=1 << 20)
    snapshot = stager.begin(Taking(step=1, state={"model": model})).finish()
    described = describe([decode_header(snapshot.header[8:])], 0)
    plan = consolidate([described], "model", max_file_bytes=1000)
    assert [file.name for file in plan.files] == [f"model-{number:05}-of-00005.safetensors" for number in range(1, 6)]
    create_consolidated(tmp_path, plan)
    for file in plan.files:
        assert (tmp_path / file.name).stat().st_size == file.num_bytes
        assert all(not tensor.any() for tensor in load_file(tmp_path / file.name).values())
    weight_map = json.loads(plan.index)["weight_map"]
    assert weight_map["layer.0"] == weight_map["layer.1"] == plan.files[0].name
    snapshot.close()
    stager.close()


def _weight_map(directory: Path) -> dict[str, str]:
    index = json.loads((directory / "model.safetensors.index.json").read_bytes())
    weight_map: dict[str, str] = index["weight_map"]
    return weight_map
