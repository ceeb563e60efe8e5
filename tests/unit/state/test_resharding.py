"""What a receiver in another layout is told it needs, and which states it cannot have."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sharded_tools import STRIDES_AS_FSDP2, mesh_of, part_of
from state_equality import exact
from state_tools import file_of_state, manifest_of
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from ft_transport.errors import ManifestError, RestoreError, TransportError
from ft_transport.state.resharding import reshard
from ft_transport.state.restore import Restore
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.layouts import Layout, Mesh, Placement, region_of, shape_of
from ft_transport.wire.manifest import Manifest, SnapshotId, TensorEntry
from ft_transport.wire.nodes import DTensorNode, LayoutNode, LeafNode, MappingNode, TensorNode, ViewNode
from ft_transport.wire.reshard import Planner
from ft_transport.wire.snapshot import copy_in, copy_out

pytestmark = pytest.mark.usefixtures("one_rank_group")

WHOLE = torch.arange(60.0).view(10, 6)


def _receive(sources: Sequence[object], into: Any, **settings: Any) -> Any:
    """What arrives of the states of several ranks; without a network."""
    files = [file_of_state(source) for source in sources]
    manifests = [manifest_of(file) for file in files]
    resharding = reshard(manifests, into, **settings)
    restore = Restore(resharding.manifest, into=into)
    planner = Planner(manifests)
    for source, reads in enumerate(planner.plan(resharding.wanted)):
        data = memoryview(files[source])[manifests[source].header_bytes :]
        for read in reads:
            held, place = planner.held(read, source), planner.destination(read)
            taken = memoryview(bytearray(held.num_bytes))
            copy_out(data[held.start : held.end], held, taken)
            (memory,) = restore.buffers(place.start, place.end)
            copy_in(taken, memory, place)
    return restore.finish()


def _ranks(whole: torch.Tensor, shape: tuple[int, ...], *at: Any) -> list[DTensor]:
    return [part_of(whole, mesh_of(shape, rank), at) for rank in range(math.prod(shape))]


def _own(*at: Any, shape: tuple[int, ...] = (2,), rank: int = 1, whole: torch.Tensor = WHOLE) -> DTensor:
    return part_of(torch.zeros_like(whole), mesh_of(shape, rank), at)


def test_parts_arrive_in_the_receivers_own_tensors() -> None:
    own = {"w": _own(Shard(1)), "p": _own(Shard(0), shape=(3,), rank=2)}
    sources = [
        {"w": part, "p": negative}
        for part, negative in zip(_ranks(WHOLE, (4,), Shard(0)), _ranks(-WHOLE, (4,), Shard(0)), strict=True)
    ]
    received = _receive(sources, own)
    assert received["w"] is own["w"]
    assert received["p"] is own["p"]
    assert torch.equal(own["w"].to_local(), WHOLE[:, 3:])
    assert torch.equal(own["p"].to_local(), -WHOLE[8:])


def test_a_whole_tensor_is_made_of_parts_and_divided_into_parts() -> None:
    into = {"w": torch.zeros(10, 6)}
    received = _receive([{"w": part} for part in _ranks(WHOLE, (2, 2), Shard(1), Shard(0))], into)
    assert received["w"] is into["w"]
    assert torch.equal(into["w"], WHOLE)
    own = {"w": _own(Shard(0), shape=(4,), rank=3)}
    assert _receive([{"w": WHOLE}], own)["w"] is own["w"]
    assert torch.equal(own["w"].to_local(), WHOLE[9:])


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64, torch.complex128]
)
def test_every_dtype_is_divided(dtype: torch.dtype) -> None:
    items = (torch.arange(60) % 7).to(dtype) if dtype is not torch.float8_e4m3fn else torch.arange(60.0).to(dtype)
    whole = items.view(10, 6)
    parts = [
        DTensor.from_local(
            whole[5 * rank : 5 * rank + 5].clone(),
            mesh_of((2,), rank),
            [Shard(0)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        for rank in range(2)
    ]
    own = DTensor.from_local(
        whole[:, :3].clone().view(torch.uint8).zero_().view(dtype),
        mesh_of((2,), 0),
        [Shard(1)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    received = _receive([{"w": part} for part in parts], {"w": own})["w"]
    assert received is own
    assert exact(own.to_local()) == exact(whole[:, :3].contiguous())


def test_what_is_not_sharded_comes_whole_from_the_first_source() -> None:
    values = {"step": 3, "names": ("a", None), "array": np.arange(5, dtype=">i2"), "long": b"x" * 9000}
    sources = [
        {"w": part, "seen": torch.tensor([rank]), **values} for rank, part in enumerate(_ranks(WHOLE, (2,), Shard(0)))
    ]
    into = {"w": _own(Shard(1)), "seen": torch.tensor([9])}
    received = _receive(sources, into)
    assert received["seen"] is into["seen"]
    assert into["seen"].item() == 0
    assert exact({key: received[key] for key in values}) == exact(values)
    assert _receive(sources[::-1], into)["seen"].item() == 1


def test_receivers_and_sources_may_have_another_memory_layout() -> None:
    own = DTensor.from_local(
        torch.zeros(3, 10).t(), mesh_of((2,), 0), [Shard(1)], run_check=False, shape=WHOLE.shape, stride=WHOLE.stride()
    )
    parts = _ranks(WHOLE, (3,), Shard(0))
    for part in parts[1:]:
        part._local_tensor = part.to_local().t().contiguous().t()
    assert not own.to_local().is_contiguous()
    assert _receive([{"w": part} for part in parts], {"w": own})["w"] is own
    assert torch.equal(own.to_local(), WHOLE[:, :3])


def test_views_at_the_sources_are_tensors_here() -> None:
    flats = [torch.cat([part.to_local().flatten(), torch.ones(2)]) for part in _ranks(WHOLE, (2,), Shard(0))]
    sources = []
    for rank, part in enumerate(_ranks(WHOLE, (2,), Shard(0))):
        part._local_tensor = flats[rank][:30].view(5, 6)
        sources.append({"w": part, "flat": flats[rank]})
    own = {"w": _own(Shard(1)), "flat": torch.zeros(32)}
    received = _receive(sources, own)
    assert torch.equal(received["w"].to_local(), WHOLE[:, 3:])
    assert torch.equal(received["flat"], flats[0])


def test_ties_stay_ties_and_come_once() -> None:
    sources = [{"a": part, "b": {"c": part}} for part in _ranks(WHOLE, (2,), Shard(0))]
    own = _own(Shard(1))
    manifests = [manifest_of(file_of_state(source)) for source in sources]
    assert len(reshard(manifests, {"a": own, "b": {"c": own}}).wanted) == 1
    received = _receive(sources, {"a": own, "b": {"c": own}})
    assert received["a"] is received["b"]["c"] is own


def test_a_view_of_a_tensor_that_comes_whole_stays_a_view() -> None:
    base = torch.arange(6.0)
    sources = [{"view": base[2:4], "base": base, "w": part} for part in _ranks(WHOLE, (2,), Shard(0))]
    received = _receive(sources, {"w": _own(Shard(1))})
    assert torch.equal(received["base"], base)
    assert received["view"].data_ptr() == received["base"][2:].data_ptr()
    own_base = torch.zeros(6)
    own = {"view": own_base[2:4], "base": own_base, "w": _own(Shard(1))}
    received = _receive(sources, own)
    assert received["view"] is own["view"]
    assert torch.equal(own_base, base)


def test_a_part_that_is_in_the_state_by_itself_is_a_tensor_of_its_own() -> None:
    sources = [{"local": part.to_local(), "w": part} for part in _ranks(WHOLE, (2,), Shard(0))]
    received = _receive(sources, {"local": torch.zeros(5, 6), "w": torch.zeros(10, 6)})
    assert torch.equal(received["w"], WHOLE)
    assert torch.equal(received["local"], WHOLE[:5])


def test_stages_of_a_model_are_put_together_by_name() -> None:
    first, second = ({f"layer{stage}": part} for stage, part in enumerate(_ranks(WHOLE, (2,), Replicate())))
    own = {"layer0": _own(Shard(0)), "layer1": _own(Shard(1))}
    received = _receive([{"model": first}, {"model": second}], {"model": own})["model"]
    assert torch.equal(received["layer0"].to_local(), WHOLE[5:])
    assert torch.equal(received["layer1"].to_local(), WHOLE[:, 3:])


# ── states that the receiver does not have yet ────────────────────────────────────────────────────────────────────


def _with_moments(*at: Any) -> list[dict[str, Any]]:
    return [
        {"w": part, "state": {0: {"moment": moment, "step": torch.tensor(3.0)}}}
        for part, moment in zip(_ranks(WHOLE, (4,), *at), _ranks(WHOLE, (4,), *at), strict=True)
    ]


def test_states_of_an_optimizer_that_has_not_stepped_are_divided_as_its_parameters() -> None:
    received = _receive(_with_moments(Shard(0)), {"w": _own(Shard(1)), "state": {}})
    moment = received["state"][0]["moment"]
    assert moment.placements == (Shard(1),)
    assert torch.equal(moment.to_local(), WHOLE[:, 3:])
    assert received["state"][0]["step"].item() == 3.0


def test_so_they_are_where_the_source_is_not_sharded() -> None:
    source = {"w": WHOLE, "state": {0: {"moment": -WHOLE, "step": torch.tensor(3.0)}}, "seen": torch.ones(3)}
    own = {"w": _own(Shard(1)), "state": {}, "seen": torch.zeros(3)}
    for settings in ({}, {"like": lambda path: own["w"] if path[-1] == "moment" else None}):
        received = _receive([source], own, **settings)
        assert torch.equal(received["state"][0]["moment"].to_local(), -WHOLE[:, 3:])
        assert type(received["state"][0]["step"]) is torch.Tensor
        assert type(received["seen"]) is torch.Tensor


def test_where_that_is_not_clear_the_caller_says_it() -> None:
    three = zip(*(_ranks(WHOLE, (4,), Shard(0)) for _ in range(3)), strict=True)
    sources = [{"a": first, "b": second, "state": {0: third}} for first, second, third in three]
    own = {"a": _own(Shard(0)), "b": _own(Shard(1)), "state": {}}
    with pytest.raises(RestoreError, match=r"found 2 different ways.*at state.0") as caught:
        _receive(sources, own)
    assert "create an optimizer's states first" in str(caught.value)
    received = _receive(sources, own, like=lambda path: own["b"] if path == ("state", 0) else None)
    assert torch.equal(received["state"][0].to_local(), WHOLE[:, 3:])


def test_without_anything_to_go_by_it_is_refused() -> None:
    with pytest.raises(RestoreError, match=r"found none: create an optimizer's states first.*at w"):
        _receive([{"w": part} for part in _ranks(WHOLE, (4,), Shard(0))], {})


def test_without_a_state_to_receive_into_all_comes_whole() -> None:
    parts = _ranks(WHOLE, (2, 2), Replicate(), Shard(1))
    received = _receive([{("a", 1): {"w": part}, None: {"x": 3}} for part in parts], None)
    assert exact(received) == exact({("a", 1): {"w": WHOLE}, None: {"x": 3}})


# ── states that cannot be had ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ({"a": 1}, {"a": 2}, "at a"),
        ({"a": 1}, {"a": True}, "at a"),
        ({"a": [1, 2]}, {"a": [1]}, "at a"),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, "at a.b"),
        ({"a": torch.ones(2)}, {"a": 3}, "at a"),
        ({"a": b"x" * 9000}, {"a": b"y"}, "at a"),
        ({"a": np.ones(3)}, {"a": np.ones(4)}, "at a"),
    ],
    ids=str,
)
def test_sources_that_contradict_each_other_are_refused(one: Any, other: Any, where: str) -> None:
    with pytest.raises(RestoreError, match=f"expected the same value from every source.*scope='local'.*{where}"):
        _receive([one, other], {})


def test_a_part_that_no_source_has_is_named() -> None:
    parts = _ranks(WHOLE, (4,), Shard(0))
    with pytest.raises(
        RestoreError, match=r"the 60 elements .* got sources with 42 of them; pass all ranks .*at deep.w"
    ):
        _receive([{"deep": {"w": part}} for part in parts[:2] + parts[3:]], {"deep": {"w": torch.zeros(10, 6)}})


def test_other_dtypes_and_layouts_at_other_sources_are_refused() -> None:
    parts = _ranks(WHOLE, (2,), Shard(0))
    with pytest.raises(RestoreError, match="expected F32 from every source, got F64 from source 1"):
        _receive([{"w": parts[0]}, {"w": _ranks(WHOLE.double(), (2,), Shard(0))[1]}], {"w": torch.zeros(10, 6)})
    with pytest.raises(RestoreError, match="on all ranks of a mesh"):
        _receive([{"w": parts[0]}, {"w": _ranks(WHOLE, (2,), Shard(1))[1]}], {"w": torch.zeros(10, 6)})


def test_a_division_of_the_users_own_is_refused() -> None:
    uneven = [
        DTensor.from_local(part, mesh_of((2,), rank), [Shard(0)], run_check=False, shape=WHOLE.shape, stride=(6, 1))
        for rank, part in enumerate((WHOLE[:7].clone(), WHOLE[7:].clone()))
    ]
    with pytest.raises(RestoreError, match="not divided by torch's rules can only be received in the same layout"):
        _receive([{"w": part} for part in uneven], {"w": torch.zeros(10, 6)})
    with pytest.raises(RestoreError, match=r"got .* in the receiver's state"):
        _receive([{"w": part} for part in _ranks(WHOLE, (2,), Shard(0))], {"w": uneven[0]})


def test_partial_values_are_refused_by_name() -> None:
    partial = DTensor.from_local(torch.ones(10, 6), mesh_of((2,), 0), [Partial()], run_check=False)
    with pytest.raises(TransportError, match=r"sharded or replicated, got placement P.*at w"):
        file_of_state({"w": partial})
    with pytest.raises(TransportError, match=r"sharded or replicated, got placement P.*at w"):
        _receive([{"w": part} for part in _ranks(WHOLE, (2,), Shard(0))], {"w": partial})


def test_another_shape_is_told_before_anything_comes() -> None:
    own = {"w": part_of(torch.zeros(10, 8), mesh_of((2,), 0), [Shard(0)])}
    manifests = [manifest_of(file_of_state({"w": part})) for part in _ranks(WHOLE, (2,), Shard(0))]
    restore = Restore(reshard(manifests, own).manifest, into=own)
    assert list(restore.incoming.mismatches) == [("w", "float32[10, 8]", "float32[10, 6]", False)]


@pytest.mark.skipif(not STRIDES_AS_FSDP2, reason="this torch divides strided shards otherwise than FSDP2 does")
def test_strided_shards_are_put_together() -> None:
    parts = _ranks(WHOLE, (2, 2), _StridedShard(0, split_factor=2), Shard(0))
    into = {"w": torch.zeros(10, 6)}
    _receive([{"w": part} for part in parts], into)
    assert torch.equal(into["w"], WHOLE)


# ── hostile manifests ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("size", "split"), [(8192, 4096), (1 << 30, 4096)])
def test_layouts_that_cut_a_tensor_into_too_many_parts_are_refused_soon(size: int, split: int) -> None:
    at = (Placement("strided_shard", 0, split), Placement("strided_shard", 1, split))
    manifests = []
    for coordinate in ((0, 0), (0, 1), (1, 0), (1, 1)):
        mesh = Mesh("cpu", (2, 2), (0, 1, 2, 3), None, coordinate)
        shape = shape_of(region_of(mesh, at, (size, size)) or ())
        layout = Layout(0, at, (size, size), (size, 1), (0, 0))
        num_bytes = math.prod(shape)
        manifests.append(
            Manifest(
                step=1,
                snapshot_id=SnapshotId(f"{coordinate[0]}{coordinate[1]}" * 16),
                tensors=(TensorEntry("w", "U8", shape, 0, num_bytes),),
                tree=DTensorNode(TensorNode(0), 0),
                meshes=(mesh,),
                layouts=(layout,),
                chunks=ChunkTable(data_bytes=num_bytes, chunk_bytes=1 << 30),
                digests=None,
                header_bytes=0,
            )
        )
    started_s = time.process_time()
    with pytest.raises(ManifestError, match="at most"):
        Planner(manifests).plan(reshard(manifests, None).wanted)
    assert time.process_time() - started_s < 20


@pytest.mark.parametrize(
    "local",
    [MappingNode("dict", []), 3, "x", LeafNode(TensorNode(0), True, True), ViewNode(0, (5, 6), (6,), 0), TensorNode(9)],
    ids=str,
)
@pytest.mark.parametrize("which", [0, 1])
def test_a_part_that_is_no_tensor_of_the_table_is_refused(local: Any, which: int) -> None:
    manifests = [manifest_of(file_of_state({"w": part})) for part in _ranks(WHOLE, (2,), Shard(0))]
    manifests[which] = dataclasses.replace(manifests[which], tree=MappingNode("dict", ["w", DTensorNode(local, 0)]))

    def plan() -> None:
        planner = Planner(manifests)
        for source, reads in enumerate(planner.plan(reshard(manifests, {"w": _own(Shard(1))}).wanted)):
            for read in reads:
                planner.held(read, source)

    with pytest.raises((ManifestError, RestoreError)):
        plan()


@pytest.mark.parametrize(
    ("node", "dtype", "shape"),
    [
        (LayoutNode(0, "complex128", (5, 6), (6, 1)), "F64", (5, 6)),
        (LayoutNode(0, "complex128", (5, 6), (6, 1)), "F64", (60,)),
        (LayoutNode(0, "float32", (2**40,), (1,)), "F32", (5, 6)),
        (LayoutNode(0, "nope", (5, 6), (6, 1)), "F32", (5, 6)),
    ],
    ids=str,
)
def test_a_layout_of_other_bytes_is_refused(node: LayoutNode, dtype: str, shape: tuple[int, ...]) -> None:
    num_bytes = math.prod(shape) * (8 if dtype == "F64" else 4)
    manifest = dataclasses.replace(
        manifest_of(file_of_state({"w": WHOLE})),
        tensors=(TensorEntry("w", dtype, shape, 0, num_bytes),),
        tree=MappingNode("dict", ["w", node]),
    )
    with pytest.raises(ManifestError, match="at w"):
        reshard([manifest], {})
