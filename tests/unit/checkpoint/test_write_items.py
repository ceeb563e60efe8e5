"""What a rank puts into a checkpoint: under the names that DCP would give it, and each byte once."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharded_tools import mesh_of, part_of
from state_tools import file_of_state, manifest_of
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import Replicate, Shard

from ft_transport.checkpoint.write_items import LOCAL, SHARED, Described, describe
from ft_transport.errors import CheckpointError

Pair = namedtuple("Pair", "first second")


def describe_state(*parts: dict[Any, Any], rank: int = 0) -> Described:
    return describe([manifest_of(file_of_state(part)) for part in parts], rank)


def names_of(described: Described) -> set[str]:
    return {name for item in described.items for name in item.names} | {value.name for value in described.values}


def expect_names_of_dcp(state: dict[Any, Any]) -> None:
    described = describe_state(state)
    flat, paths = flatten_state_dict(state)
    assert names_of(described) == set(flat)
    assert described.paths == paths
    tensors = {name for name, value in flat.items() if isinstance(value, torch.Tensor)}
    assert {name for item in described.items for name in item.names} == tensors


def _trained() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


_T = torch.arange(6.0).view(2, 3)
_STATES: dict[str, dict[Any, Any]] = {
    "empty": {},
    "trained": _trained(),
    "lists with tensors": {"a": [_T, 1, {"b": _T[0]}], "c": [[_T], [1, 2]], "d": [[1], [2]], "e": []},
    "empty containers": {"a": {}, "b": [], "c": [{}], "d": [[]], "e": (), "f": [{"g": []}], "h": [[], {}]},
    "tuples": {"a": (_T, 1), "b": [(_T, 2)], "c": ((1, 2), 3), "d": [(1, 2), _T], "e": Pair(_T, 2)},
    "ties": {"a": _T, "b": {"c": _T}, "d": [_T, _T]},
    "views": {"base": _T, "row": _T[1], "column": _T[:, 1], "turned": _T.t(), "part": _T[0, 1:]},
    "a view alone": {"row": torch.arange(100.0).view(10, 10)[3]},
    "numpy": {"a": np.arange(4), "b": [np.float32(2)], "c": [np.arange(2), _T]},
    "keys": {7: _T, 2: {3: [_T]}, -1: 0, True: 1, None: 2, 0.5: _T, "x.y": _T, "": _T, "ä": 1, 1 << 80: 3},
    "other keys": {np.int64(3): _T, b"x": _T},
    "mappings": {"a": OrderedDict(x=_T), "b": defaultdict(list, y=[_T])},
    "leaves": {"a": None, "b": 1.5, "c": "text", "d": b"bytes", "e": {1, 2}, "f": torch.float32, "g": 1j},
    "tensors": {
        "scalar": torch.tensor(2.0), "nothing": torch.empty(0, 3), "bool": _T > 2, "half": _T.bfloat16(),
        "parameter": nn.Parameter(_T.clone()), "complex": torch.ones(3, dtype=torch.complex64), "double": _T.double(),
        "wide": torch.ones(3, dtype=torch.complex128), "strided": torch.arange(12.0).view(3, 4)[:, ::2],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", _STATES)
def test_names_are_those_of_dcp(name: str) -> None:
    expect_names_of_dcp(_STATES[name])


_leaves = st.one_of(
    st.none(),
    st.integers(-5, 5),
    st.text("ab.", max_size=2),
    st.builds(lambda size: torch.arange(float(size)), st.integers(0, 3)),
    st.builds(np.arange, st.integers(0, 3)),
)
_keys = st.one_of(st.text("ab.0", max_size=2), st.integers(0, 2), st.booleans(), st.none())
_states = st.recursive(
    _leaves,
    lambda below: st.one_of(
        st.dictionaries(_keys, below, max_size=3),
        st.lists(below, max_size=3),
        st.lists(below, max_size=2).map(tuple),
    ),
    max_leaves=8,
)


@given(st.dictionaries(_keys, _states, max_size=4))
def test_names_are_those_of_dcp_for_any_nesting(state: dict[Any, Any]) -> None:
    try:
        flatten_state_dict(state)
    except ValueError:
        # Two leaves have one name; DCP has none for one of them.
        with pytest.raises(CheckpointError, match="joined by dots"):
            describe_state(state)
        return
    expect_names_of_dcp(state)


def test_two_leaves_of_one_name_are_refused_by_it() -> None:
    with pytest.raises(CheckpointError, match="joined by dots") as caught:
        describe_state({"a": {"b": _T}, "a.b": 1})
    assert caught.value.path == "a.b"


def test_what_is_no_dict_is_refused() -> None:
    with pytest.raises(CheckpointError, match="expected a dict as state"):
        describe_state([_T])  # type: ignore[arg-type]


def test_what_is_tied_is_one_item_with_all_names() -> None:
    described = describe_state({"a": _T, "b": {"c": _T}, "other": _T.clone()})
    assert [item.names for item in described.items] == [("a", "b.c"), ("other",)]
    assert sum(item.num_bytes for item in described.items) == 2 * _T.nbytes


def test_all_bytes_of_the_snapshot_are_in_items_that_are_whole_entries() -> None:
    for state in _STATES.values():
        manifest = manifest_of(file_of_state(state))
        described = describe([manifest], 0)
        whole = [item.entry for item in described.items if item.is_entry]
        assert sorted(whole) == list(range(len(manifest.tensors)))
        sizes = {item.entry: item.num_bytes for item in described.items if item.is_entry}
        assert [sizes[index] for index in sorted(sizes)] == [entry.end - entry.start for entry in manifest.tensors]


def test_what_a_rank_has_for_itself_has_its_number_in_its_name() -> None:
    described = describe_state({"w": _T}, {"random": {"state": _T}, "seed": 3}, rank=5)
    assert names_of(described) == {"w", "rank_5.random.state", "rank_5.seed"}
    assert {item.part for item in described.items} == {SHARED, LOCAL}
    assert described.paths["rank_5.random.state"] == ("rank_5", "random", "state")


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("shape", [(8, 3), (5, 3), (1, 3), (0, 3)], ids=str)
def test_the_boxes_of_all_ranks_are_the_whole_tensor(shape: tuple[int, ...]) -> None:
    """Two rows of a mesh hold the same: equal keys. Within a row, each element is in one box."""
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    rows = []
    for row in range(2):
        boxes = {}
        for column in range(4):
            mesh = mesh_of((2, 4), 4 * row + column, "replicate", "shard")
            described = describe_state({"w": part_of(whole, mesh, [Replicate(), Shard(0)])}, rank=4 * row + column)
            for item in described.items:
                if item.names:
                    assert (item.names, item.global_shape, item.dtype) == (("w",), shape, "float32")
                    # Of a tensor that is empty as a whole, each rank says so.
                    assert item.key not in boxes or 0 in shape
                    boxes[item.key] = (item.offset, item.shape)
        rows.append(boxes)
    assert rows[0] == rows[1] != {}
    counted = torch.zeros(shape)
    for offset, extent in rows[0].values():
        counted[tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))] += 1
    assert torch.equal(counted, torch.ones(shape))
