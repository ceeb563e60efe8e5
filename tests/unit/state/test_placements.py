"""DTensors: shard, mesh and placements are kept, and a shard never lands where another one belongs."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
import torch
from state_equality import exact
from state_tools import deliver, file_of_state, manifest_of, receive, round_trip
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ft_transport.errors import ManifestError, RestoreError
from ft_transport.state import placements
from ft_transport.state.flatten import flatten
from ft_transport.state.restore import Restore
from ft_transport.wire.layouts import Layout, Mesh, Placement
from ft_transport.wire.nodes import DTensorNode, LeafNode, TensorNode

pytestmark = pytest.mark.usefixtures("one_rank_group")


@functools.cache
def _mesh_of_two_dimensions(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=names)


@pytest.fixture(scope="module", autouse=True)
def _groups(one_rank_group: None) -> None:
    """Opens what torch 2.9 opens for a mesh of several dimensions, and never closes."""
    _mesh("dp", "tp")
    _mesh("replicate", "shard")


def _mesh(*names: str) -> DeviceMesh:
    return _mesh_of_two_dimensions(*names) if len(names) == 2 else init_device_mesh("cpu", (1,), mesh_dim_names=names)


def _sharded(mesh: DeviceMesh, *at: Any, shape: tuple[int, ...] = (4, 6)) -> DTensor:
    return distribute_tensor(torch.arange(24.0).view(shape), mesh, list(at))


@pytest.mark.parametrize(
    ("names", "at"),
    [
        (("dp",), [Shard(0)]),
        (("dp",), [Shard(1)]),
        (("dp",), [Replicate()]),
        (("dp", "tp"), [Replicate(), Shard(0)]),
        (("dp", "tp"), [Shard(1), Shard(0)]),
    ],
)
def test_a_dtensor_comes_back_with_its_placements(names: tuple[str, ...], at: list[Any]) -> None:
    mesh = _mesh(*names)
    value = _sharded(mesh, *at)
    received = round_trip({"w": value}, into={"other": _sharded(mesh, *at)})["w"]
    assert exact(received) == exact(value)
    assert received.device_mesh is mesh
    assert torch.equal(received.full_tensor(), value.full_tensor())
    spec, sent = received._spec, value._spec
    assert (spec.mesh, spec.placements, spec.tensor_meta) == (sent.mesh, sent.placements, sent.tensor_meta)


def test_a_strided_shard_keeps_its_split() -> None:
    mesh = _mesh("dp", "tp")
    at = (_StridedShard(0, split_factor=1), Shard(0))
    value = DTensor.from_local(torch.arange(6.0).view(2, 3), mesh, at, run_check=False)
    received = round_trip([value], meshes=[mesh])[0]
    assert received.placements == at
    assert placements.encode_placements(received, "") == [
        Placement("strided_shard", 0, 1),
        Placement("shard", 0),
    ]


def test_parameters_stay_parameters() -> None:
    mesh = _mesh("dp")
    state = [
        nn.Parameter(_sharded(mesh, Shard(0))),
        nn.Parameter(_sharded(mesh, Shard(0)), requires_grad=False),
        _sharded(mesh, Shard(0)).requires_grad_(),
        _sharded(mesh, Shard(0)),
    ]
    received = round_trip(state, meshes=[mesh])
    assert exact(received) == exact(state)
    assert [isinstance(value, nn.Parameter) for value in received] == [True, True, False, False]
    own = [nn.Parameter(_sharded(mesh, Replicate()).redistribute(mesh, [Shard(0)]) * 0) for _ in range(2)]
    in_place = receive(file_of_state(state[:1] * 2), into=own)
    assert in_place[0] is own[0]
    assert in_place[1] is own[1]
    assert exact(in_place[1]) == exact(state[0])


def test_a_dtensor_is_received_into_the_receivers_own() -> None:
    mesh = _mesh("dp")
    value, own = _sharded(mesh, Shard(0)), distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)])
    file = file_of_state({"w": value})
    restore = Restore(manifest_of(file), into={"w": own})
    deliver(restore, file, manifest_of(file))
    assert exact(own) == exact(value), "it is received into directly"
    received: Any = restore.finish()
    assert received["w"] is own
    assert exact(own) == exact(value)


@pytest.mark.parametrize(
    "own",
    [
        pytest.param(lambda mesh: _sharded(mesh, Shard(1)), id="other placement"),
        pytest.param(
            lambda mesh: DTensor.from_local(torch.zeros(4, 6), mesh, [_StridedShard(0, split_factor=2)]), id="strided"
        ),
        pytest.param(lambda mesh: _sharded(_mesh("dp", "tp"), Shard(0), Replicate()), id="other mesh"),
        pytest.param(lambda mesh: _sharded(mesh, Shard(0), shape=(6, 4)), id="other shape"),
        pytest.param(
            lambda mesh: distribute_tensor(torch.zeros(4, 6, dtype=torch.int32), mesh, [Shard(0)]), id="dtype"
        ),
        pytest.param(lambda mesh: torch.zeros(4, 6), id="no DTensor"),
    ],
)
def test_a_receiver_that_holds_another_part_is_left_alone(own: Any) -> None:
    mesh = _mesh("dp")
    value, other = _sharded(mesh, Shard(0)), own(mesh)
    before = exact(other)
    received = receive(file_of_state([value]), into=[other], meshes=[mesh])[0]
    assert exact(received) == exact(value)
    assert exact(other) == before
    own_part = _sharded(mesh, Shard(0))
    assert type(receive(file_of_state([torch.zeros(4, 6)]), into=[own_part])[0]) is torch.Tensor
    assert exact(own_part) == exact(value)


def test_another_division_is_told_before_anything_comes() -> None:
    mesh = _mesh("dp")
    state = {"a": _sharded(mesh, Shard(0)), "b": _sharded(mesh, Shard(0)), "c": torch.zeros(4, 6)}
    own = {"a": _sharded(mesh, Shard(1)), "b": torch.zeros(4, 6), "c": _sharded(mesh, Shard(0))}
    incoming = Restore(manifest_of(file_of_state(state)), into=own).incoming
    described = {mismatch.path: (mismatch.own, mismatch.received) for mismatch in incoming.mismatches}
    assert set(described) == {"a", "b", "c"}
    assert all("by (Shard(dim=" in text for text in described["a"])
    assert described["b"] == ("a plain tensor of [4, 6]", "a shard of a DTensor")
    assert described["c"][1] == "a plain tensor"


def test_an_empty_shard_of_another_dtype_is_not_taken_for_the_one_that_was_sent() -> None:
    mesh = _mesh("dp")
    value = distribute_tensor(torch.zeros(0, 3), mesh, [Shard(0)])
    own = distribute_tensor(torch.zeros(0, 3, dtype=torch.bfloat16), mesh, [Shard(0)])
    assert exact(receive(file_of_state([value]), into=[own])) == exact([value])


def test_a_local_shard_inside_a_larger_buffer_and_a_transposed_one_make_the_trip() -> None:
    mesh = _mesh("dp")
    value = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)], run_check=False)
    buffer = torch.arange(12.0)
    value._local_tensor = buffer[6:].view(2, 3)
    assert value.to_local().storage_offset() == 6
    transposed = DTensor.from_local(torch.arange(6.0).view(2, 3).t(), mesh, [Shard(0)], run_check=False)
    received, received_transposed = round_trip([value, transposed], meshes=[mesh])
    assert received.to_local().tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
    assert exact(received_transposed) == exact(transposed)
    # And as a receiver: only its own part of the buffer is written.
    sent = DTensor.from_local(torch.full((2, 3), -1.0), mesh, [Shard(0)], run_check=False)
    assert receive(file_of_state([sent]), into=[value])[0] is value
    assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] + [-1.0] * 6


def test_a_process_outside_the_mesh_keeps_what_it_holds() -> None:
    mesh = DeviceMesh("cpu", torch.tensor(1), _init_backend=False)
    assert mesh.get_coordinate() is None
    value = distribute_tensor(torch.tensor([5, 6, 7]), mesh, [])
    for received in (round_trip([value])[0], round_trip([value], meshes=[mesh])[0]):
        assert received._local_tensor.tolist() == value._local_tensor.tolist() == [5, 6, 7]
        assert received._spec == value._spec


# ── which mesh ────────────────────────────────────────────────────────────────────────────────────────────────────


def _layout_of(dtensor: DTensor) -> tuple[Layout, Mesh]:
    table = flatten(dtensor).layouts
    return table.layouts[0], table.meshes[0]


def _described(mesh: DeviceMesh) -> tuple[Layout, Mesh]:
    return _layout_of(_sharded(mesh, Shard(0)))


def test_a_mesh_named_by_the_caller_goes_before_one_in_the_state() -> None:
    named, in_state = _mesh("dp"), DeviceMesh("cpu", torch.tensor([0]), mesh_dim_names=("dp",))
    state = {"a": [1, (_sharded(in_state, Shard(0)),)]}
    described = placements.describe_mesh(named)
    resolver = placements.MeshResolver(state, [_mesh("tp"), named])
    assert resolver.resolve(described, "p") is named
    assert placements.MeshResolver(state).resolve(described, "p") is in_state


def test_a_mesh_of_other_names_or_form_is_not_used_and_one_is_built_once() -> None:
    resolver = placements.MeshResolver([_sharded(_mesh("tp"), Shard(0))], [_mesh("dp", "tp")])
    described = placements.describe_mesh(_mesh("dp"))
    built = resolver.resolve(described, "p")
    assert (built.mesh_dim_names, built.mesh.tolist(), built.device_type) == (("dp",), [0], "cpu")
    assert resolver.resolve(described, "q") is built


def test_of_several_meshes_of_one_form_that_of_the_same_ranks_is_taken() -> None:
    first = DeviceMesh("cpu", torch.tensor([0, 1]), _init_backend=False)
    second = DeviceMesh("cpu", torch.tensor([0, 2]), _init_backend=False)
    resolver = placements.MeshResolver(None, [first, second])
    assert resolver.resolve(placements.describe_mesh(second), "p") is second
    assert resolver.resolve(placements.describe_mesh(first), "q") is first


def test_a_state_that_contains_itself_is_searched_once() -> None:
    state: dict[str, Any] = {"w": _sharded(_mesh("dp"), Shard(0))}
    state["self"] = [state]
    assert placements.MeshResolver(state).resolve(placements.describe_mesh(_mesh("dp")), "p") is state["w"].device_mesh


def test_without_a_mesh_the_error_names_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of_state({"model": [_sharded(_mesh("dp"), Shard(0))]})
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(RestoreError, match=r"device mesh of shape \[1\] and names \('dp',\).*at model.0"):
        receive(file)


def test_a_shard_of_another_place_in_the_mesh_is_refused() -> None:
    mesh = _mesh("dp")
    layout, described = _described(mesh)
    assert described.coordinate == (0,)
    elsewhere = msgspec.structs.replace(described, shape=(2,), ranks=(0, 1), coordinate=(1,))
    half = msgspec.structs.replace(layout, local_offset=(4, 0), global_shape=(8, 6))
    with pytest.raises(RestoreError, match=r"mesh coordinate \(0,\), got the shard of coordinate \(1,\).*at p"):
        placements.rebuild(torch.zeros(4, 6), half, elsewhere, mesh, "p")
    replicated = msgspec.structs.replace(layout, placements=(Placement("replicate"),))
    assert placements.rebuild(torch.zeros(4, 6), replicated, elsewhere, mesh, "p").shape == (4, 6)


def test_where_a_mesh_dimension_replicates_all_along_it_hold_the_same_part() -> None:
    mesh = _mesh("replicate", "shard")
    own = _sharded(mesh, Replicate(), Shard(0))
    layout, described = _layout_of(own)
    other_row = msgspec.structs.replace(described, coordinate=(1, 0))
    other_column = msgspec.structs.replace(described, coordinate=(0, 1))
    assert placements.matches(own, layout, other_row)
    assert not placements.matches(own, layout, other_column)


@pytest.mark.parametrize(
    "changes",
    [
        {"global_shape": (4,), "global_stride": (1,), "local_offset": (0,)},
        {"global_shape": (2, 6)},
        {"global_shape": (4, 7)},
        {"global_shape": (2**62, 6), "global_stride": (2**62, 2**62)},
        {"local_offset": (5, 0)},
    ],
    ids=str,
)
def test_a_layout_that_is_not_that_of_the_shard_is_refused(changes: dict[str, Any]) -> None:
    mesh = _mesh("dp")
    layout, described = _described(mesh)
    assert placements.rebuild(torch.zeros(4, 6), layout, described, mesh, "p").shape == (4, 6)
    with pytest.raises(ManifestError, match="at p"):
        placements.rebuild(torch.zeros(4, 6), msgspec.structs.replace(layout, **changes), described, mesh, "p")


@pytest.mark.parametrize("device_type", ["hub", "cuda:0"])
def test_no_mesh_is_built_on_what_is_no_kind_of_device(device_type: str) -> None:
    described = msgspec.structs.replace(placements.describe_mesh(_mesh("dp")), device_type=device_type)
    with pytest.raises(RestoreError, match="expected a device mesh"):
        placements.MeshResolver(None).resolve(described, "p")


def test_the_layout_says_where_the_shard_lies() -> None:
    flat = flatten(nn.Parameter(_sharded(_mesh("dp", "tp"), Shard(1), Replicate())))
    assert flat.tree == LeafNode(DTensorNode(TensorNode(0), 0), parameter=True, requires_grad=True)
    assert flat.layouts.meshes == [Mesh("cpu", (1, 1), (0,), ("dp", "tp"), (0, 0))]
    assert flat.layouts.layouts == [Layout(0, (Placement("shard", 1), Placement("replicate")), (4, 6), (6, 1), (0, 0))]


def test_a_layout_is_described_once_for_all_tensors_that_have_it() -> None:
    mesh = _mesh("dp")
    table = flatten([_sharded(mesh, Shard(0)), _sharded(mesh, Shard(0)), _sharded(mesh, Shard(1))]).layouts
    assert (len(table.meshes), len(table.layouts)) == (1, 2)
