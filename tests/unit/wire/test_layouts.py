"""Layouts: which part of a global tensor a process holds, as torch divides it, and numbers that make no layout."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharded_tools import STRIDES_AS_FSDP2
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ft_transport.errors import ManifestError
from ft_transport.state.placements import decode_placements
from ft_transport.wire.layouts import (
    MAX_INTERVALS,
    Layout,
    LayoutTable,
    Mesh,
    Placement,
    Region,
    check,
    region_of,
    shape_of,
)


def _mesh(*shape: int, at: tuple[int, ...] | None = None) -> Mesh:
    return Mesh("cpu", shape, tuple(range(math.prod(shape))), None, at)


def _taken(whole: torch.Tensor, region: Region) -> torch.Tensor:
    for dim, intervals in enumerate(region):
        indices = [index for start, end in intervals for index in range(start, end)]
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.long))
    return whole


def _as_torch_divides(whole: torch.Tensor, mesh: Mesh, at: tuple[Placement, ...]) -> torch.Tensor:
    assert mesh.coordinate is not None
    for placement, num_parts, part in zip(decode_placements(at), mesh.shape, mesh.coordinate, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            whole = placement._split_tensor(whole, num_parts, with_padding=False, contiguous=True)[0][part]
        else:
            assert isinstance(placement, Replicate)
    return whole


_strided = st.builds(Placement, st.just("strided_shard"), st.integers(0, 2), st.integers(1, 4))
_placements = st.one_of(
    st.just(Placement("replicate")),
    st.builds(Placement, st.just("shard"), st.integers(0, 2)),
    # Where torch divides strided shards otherwise than FSDP2 does, it says nothing about those that models have.
    *([_strided] if STRIDES_AS_FSDP2 else []),
)
_divisions = st.integers(1, 3).flatmap(
    lambda num_dims: st.tuples(
        st.lists(st.integers(1, 4), min_size=num_dims, max_size=num_dims).map(tuple),
        st.lists(_placements, min_size=num_dims, max_size=num_dims).map(tuple),
    )
)


@given(_divisions, st.tuples(st.integers(0, 13), st.integers(1, 7), st.integers(1, 5)))
def test_every_process_holds_what_torch_gives_it(
    division: tuple[tuple[int, ...], tuple[Placement, ...]], shape: tuple[int, int, int]
) -> None:
    mesh_shape, at = division
    whole = torch.arange(math.prod(shape)).view(shape)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        mesh = _mesh(*mesh_shape, at=coordinate)
        region = region_of(mesh, at, shape)
        assert region is not None
        expected = _as_torch_divides(whole, mesh, at)
        assert shape_of(region) == tuple(expected.shape)
        assert torch.equal(_taken(whole, region), expected)
        for intervals in region:
            assert all(end < start for (_, end), (start, _) in itertools.pairwise(intervals))


@given(_divisions, st.tuples(st.integers(1, 13), st.integers(1, 7), st.integers(1, 5)))
def test_the_offset_of_a_shard_is_the_one_that_torch_gives(
    division: tuple[tuple[int, ...], tuple[Placement, ...]], shape: tuple[int, int, int]
) -> None:
    mesh_shape, at = division
    for coordinate in itertools.product(*map(range, mesh_shape)):
        table = LayoutTable()
        table.add(_mesh(*mesh_shape, at=coordinate), at, global_shape=shape, global_stride=(1, 1, 1))
        local_shape, offset = _compute_local_shape_and_global_offset(
            shape, mesh_shape, list(coordinate), decode_placements(at)
        )
        if 0 not in local_shape:
            assert table.layouts[0].local_offset == tuple(offset)


def test_a_process_outside_the_mesh_holds_no_part() -> None:
    assert region_of(_mesh(2), (Placement("shard", 0),), (4,)) is None
    table = LayoutTable()
    table.add(_mesh(2), (Placement("shard", 0),), global_shape=(4,), global_stride=(1,))
    assert table.layouts[0].local_offset == (0,)


def test_a_strided_shard_of_more_pieces_than_memory_is_refused() -> None:
    many = (Placement("strided_shard", 0, 2**40),)
    with pytest.raises(ManifestError, match=f"at most {MAX_INTERVALS} pieces"):
        region_of(_mesh(2, at=(0,)), many, (2**40,))
    assert shape_of(region_of(_mesh(2, at=(0,)), many, (4,)) or ()) == (4,)


_MESH = Mesh("cpu", (2, 2), (0, 1, 2, 3), ("a", "b"), (0, 1))
_LAYOUT = Layout(0, (Placement("shard", 0), Placement("replicate")), (4, 6), (6, 1), (0, 0))


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": ()},
        {"ranks": (0, 1)},
        {"ranks": (0, 1, 2, 2)},
        {"ranks": (0, 1, 2, 2**40)},
        {"shape": (2**62, 4)},
        {"shape": (0, 2), "ranks": ()},
        {"dim_names": ("a",)},
        {"dim_names": ("a", "a")},
        {"coordinate": (0,)},
        {"coordinate": (0, 2)},
    ],
    ids=str,
)
def test_numbers_that_make_no_mesh_are_refused(changes: dict[str, Any]) -> None:
    check([_MESH], [_LAYOUT], peer=None)
    with pytest.raises(ManifestError, match="expected a mesh"):
        check([msgspec.structs.replace(_MESH, **changes)], [], peer=None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mesh": 1}, "expected an index into 1 meshes"),
        ({"placements": ()}, "one placement for each mesh dimension"),
        ({"global_stride": (6,)}, "shape, strides and offset of equal length"),
        ({"local_offset": (0, 0, 0)}, "shape, strides and offset of equal length"),
        ({"placements": (Placement("shard", 2), Placement("replicate"))}, "shards one of 2 tensor dimensions"),
        ({"placements": (Placement("strided_shard", 0, 0), Placement("replicate"))}, "a split_factor of at least 1"),
    ],
    ids=str,
)
def test_numbers_that_make_no_layout_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        check([_MESH], [msgspec.structs.replace(_LAYOUT, **changes)], peer="host:1")
