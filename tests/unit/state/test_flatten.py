"""What a state becomes: names of entries, and refusals that say where."""

from __future__ import annotations

import collections
import decimal
import enum
import functools
import io
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from state_tools import file_of_state, manifest_of, round_trip
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from ft_transport.errors import SnapshotError, UnsupportedLeafError
from ft_transport.state import flatten as flattening
from ft_transport.state.flatten import flatten
from ft_transport.wire.nodes import MAX_DEPTH


class Point(NamedTuple):
    x: Any
    y: Any


class PointWithMore(Point):
    pass


class MyDict(dict[str, int]):
    pass


class Colour(enum.IntEnum):
    RED = 1


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self) -> int:
        return 1


class Subclass(torch.Tensor):
    pass


def _computed() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 2


def _freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _with_attribute() -> PointWithMore:
    point = PointWithMore(1, 2)
    point.extra = 3  # type: ignore[attr-defined]
    return point


def _computed_dtensor() -> torch.Tensor:
    return distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)]).requires_grad_()


def _nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


def _per_channel(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, dtype)


_REFUSED: dict[str, Callable[[], object]] = {
    "a function": lambda: lambda: None,
    "a class": lambda: dict,
    "a module": nn.Identity,
    "an enum": lambda: Colour.RED,
    "a decimal": lambda: decimal.Decimal(1),
    "a range": lambda: range(3),
    "a subclass of dict": lambda: MyDict(a=1),
    "a local named tuple": lambda: namedtuple("Local", ["x"])(1),
    "a named tuple with attributes": _with_attribute,
    "an array of objects": lambda: np.array([object()]),
    "an array of records": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "a masked array": lambda: np.ma.masked_array([1], [True]),
    "an empty numpy string": lambda: np.str_(""),
    "a numpy string that ends with zero": lambda: np.str_("a\0"),
    "numpy bytes that end with zero": lambda: np.bytes_(b"a\0"),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a meta tensor": lambda: torch.ones(2, device="meta"),
    "a subclass of tensor": lambda: torch.ones(2).as_subclass(Subclass),
    "a computed tensor": _computed,
    "a freed storage": _freed,
    "a defaultdict of a function": lambda: defaultdict(lambda: 1),
    "a defaultdict of what cannot be hashed": lambda: defaultdict(Unhashable()),
    "a generator": torch.Generator,
    "a TextIOWrapper": lambda: io.TextIOWrapper(io.BytesIO()),
    "a nested tensor": lambda: _nested(torch.strided),
    "a jagged tensor": lambda: _nested(torch.jagged),
    "a tensor quantized per channel": lambda: _per_channel(torch.qint8),
    "a tensor of four bits quantized per channel": lambda: _per_channel(torch.quint4x2),
    "a lazy module that has not run yet; call its forward": lambda: nn.LazyLinear(2).weight,
    "redistribute it first": lambda: DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Partial()]),
    "a computed tensor of shards": lambda: _computed_dtensor() * 2,
}
_SAID = {
    "a TextIOWrapper": "TextIOWrapper",
    "a lazy module that has not run yet; call its forward": "lazy module that has not run yet; call its forward",
    "redistribute it first": "redistribute it first",
    "a computed tensor of shards": "computed tensor",
}


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks:UserWarning",
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore:torch.quantize_per_tensor.*are deprecated:UserWarning",
)
@pytest.mark.parametrize("what", sorted(_REFUSED))
def test_what_has_no_safe_encoding_is_refused_by_its_path(what: str) -> None:
    leaf = _REFUSED[what]()
    with pytest.raises(UnsupportedLeafError, match=_SAID.get(what, ".")) as caught:
        flatten({"model": [1, {"layer.weight": leaf}], "good": torch.ones(2)})
    assert caught.value.path == "model.1.layer.weight"
    assert "(at model.1.layer.weight)" in str(caught.value)
    with pytest.raises(UnsupportedLeafError) as caught:
        flatten(leaf)
    assert caught.value.path == "(root)"


def test_a_key_is_refused_by_its_own_path() -> None:
    with pytest.raises(UnsupportedLeafError) as caught:
        flatten({"a": {Colour.RED: 1}})
    assert caught.value.path == "a.<Colour> (key)"


def _list_in_itself() -> object:
    value: list[object] = []
    value.append((1, {"again": value}))
    return value


def _dict_in_itself() -> object:
    value: dict[str, object] = {}
    value["self"] = deque([OrderedDict(value=value)])
    return value


@pytest.mark.parametrize("make", [_list_in_itself, _dict_in_itself])
def test_a_container_that_contains_itself_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(SnapshotError, match="contains itself"):
        flatten({"a": make()})


def test_a_container_at_two_places_is_no_cycle() -> None:
    shared = [1, torch.ones(2)]
    received = round_trip({"a": shared, "b": [shared, shared]})
    assert received["b"][1][1].tolist() == [1.0, 1.0]


_WRAPPERS: dict[str, Callable[[Any], object]] = {
    "list": lambda inner: [inner],
    "tuple": lambda inner: (inner,),
    "dict": lambda inner: {"a": inner},
    "defaultdict": lambda inner: defaultdict(list, a=inner),
    "deque": lambda inner: deque([inner]),
    "named tuple": lambda inner: Point(inner, 0),
}


@pytest.mark.parametrize("kind", sorted(_WRAPPERS))
def test_the_deepest_state_makes_the_trip_and_a_deeper_one_is_refused(kind: str) -> None:
    state: Any = torch.ones(1)
    for _ in range(MAX_DEPTH):
        state = _WRAPPERS[kind](state)
    file = file_of_state(state)
    assert manifest_of(file).tensors[0].name.count(".") == MAX_DEPTH - 1
    assert type(round_trip(state, into=state)) is type(state)
    with pytest.raises(SnapshotError, match=f"at most {MAX_DEPTH} levels"):
        flatten(_WRAPPERS[kind](state))


def test_where_the_stack_is_nearly_used_up_the_error_is_typed() -> None:
    def descend(levels: int) -> None:
        if levels:
            descend(levels - 1)
        else:
            flatten(functools.reduce(lambda inner, _: [inner], range(MAX_DEPTH - 1), []))

    with pytest.raises(SnapshotError, match="recursion limit"):
        descend(600)


def test_entries_are_named_by_their_paths() -> None:
    state = {
        "model": OrderedDict(weight=torch.ones(2), bias=torch.zeros(1)),
        "state": {0: {"exp_avg": torch.ones(3)}, (1, "a"): [None, torch.ones(4)]},
        "point": Point(torch.ones(5), 1),
        "counts": collections.Counter(a=1),
        "array": np.ones(2),
        "long": b"x" * 5000,
        None: torch.ones(6),
        2.5: torch.ones(7),
        10**400: torch.ones(8),
        "ends with \ud800": torch.ones(9),
    }
    names = [tensor.name for tensor in manifest_of(file_of_state(state)).tensors]
    assert names[:10] == [
        "model.weight", "model.bias", "state.0.exp_avg", "state.(1, a).1", "point.0", "array", "long", "None", "2.5",
        f"{10**400:#x}",
    ]  # fmt: skip
    assert names[10:] == ["ends with \\ud800"]
    assert flatten(torch.ones(2)).blocks.names == ["(root)"]


def test_names_that_collide_are_numbered() -> None:
    state = {
        "a.b": torch.ones(1),
        "a": {"b": torch.ones(2)},
        1: torch.ones(3),
        "1": torch.ones(4),
        "1#2": torch.ones(5),
        "__metadata__": torch.ones(6),
    }
    names = flatten(state).blocks.names
    assert names == ["a.b", "a.b#2", "1", "1#2", "1#2#2", "__metadata__#2"]
    received = round_trip(state)
    assert [len(value) for value in (received["a.b"], received["a"]["b"], received[1], received["1"])] == [1, 2, 3, 4]
    assert len(received["__metadata__"]) == 6


def test_equal_sets_read_the_same_whatever_their_history() -> None:
    one, other = {f"key {index}" for index in range(50)}, set()
    for index in reversed(range(80)):
        other.add(f"key {index}")
    for index in range(50, 80):
        other.remove(f"key {index}")
    assert list(one) != list(other)
    assert flatten(one).tree == flatten(other).tree
    assert flatten(frozenset(one)).tree == flatten(frozenset(other)).tree


def _mixed_state() -> dict[str, Any]:
    tied = torch.arange(6.0)
    whole = torch.arange(12)
    return {
        "first": {"weight": tied, "same": tied, "alias": tied.detach(), "reshaped": tied.view(2, 3)},
        "whole": whole,
        "odd": {
            "strided": torch.ones(4, 3).T,
            "negative": torch._neg_view(torch.ones(3)),
            "complex": torch.ones(2, dtype=torch.complex64),
            "empty": torch.empty(0, 3),
            "leaf": torch.ones(2, requires_grad=True),
            "parameter": nn.Parameter(torch.ones(2)),
            "exotic": torch.ones(4).to(torch.float8_e4m3fnuz),
        },
        "array": np.arange(3),
        "again": {"late alias": tied.detach(), "brain": torch.ones(3, dtype=torch.bfloat16), "é": torch.ones(1)},
        "a.b": torch.ones(1),
        "a": {"b": torch.ones(2), "": torch.ones(3), "list": [torch.ones(1), tied]},
        "": torch.zeros(2),
    }


@pytest.mark.parametrize("kind", ["all", "without views", *_mixed_state()["odd"]])
def test_the_fast_lane_describes_what_the_slow_one_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = _mixed_state()
    if kind == "all":
        state["part"] = state["whole"][3:7]
    elif kind == "without views":
        del state["first"]["reshaped"]
    else:
        state = {"plain": torch.ones(2), "odd": {kind: state["odd"][kind]}}
    fast = flatten(state)
    monkeypatch.setattr(flattening, "_MAX_LANE_ATTEMPTS", 0)
    slow = flatten(state)
    assert fast.tree == slow.tree
    for column in ("names", "dtypes", "shapes", "num_bytes", "item_bytes"):
        assert list(getattr(fast.blocks, column)) == list(getattr(slow.blocks, column)), column
    assert [name for name, source in zip(fast.blocks.names, fast.blocks.sources, strict=True) if source.is_neg()] == []
    # Copies that flattening itself makes, of negative views and arrays, lie elsewhere each time.
    copied = {"odd.negative", "array"}
    of_both = zip(fast.blocks.names, fast.blocks.addresses, slow.blocks.addresses, strict=True)
    assert [name for name, one, other in of_both if one != other and name not in copied] == []


def test_of_two_leaves_the_first_one_is_refused() -> None:
    """A tensor is looked at later than other leaves, and yet reported before those that follow it."""
    for wrong in (_freed(), torch.ones(2).to_sparse(), torch.ones(2, device="meta")):
        with pytest.raises(UnsupportedLeafError) as refused:
            flatten({"fine": torch.ones(1), "first": wrong, "second": Unhashable()})
        assert refused.value.path == "first"
