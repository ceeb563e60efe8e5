"""A valid tensor table under a tree that lies: a typed error, no code that a name chose, no memory without bound."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from property_examples import num_examples
from state_tools import manifest_with, receive

from ft_transport.errors import ManifestError, RestoreError
from ft_transport.state.restore import Restore
from ft_transport.wire import nodes
from ft_transport.wire.layouts import Layout, LayoutTable, Mesh, Placement
from ft_transport.wire.nodes import (
    BigIntNode,
    BytesNode,
    ConstantNode,
    CustomNode,
    DefaultDictNode,
    DequeNode,
    DTensorNode,
    FloatNode,
    LayoutNode,
    LeafNode,
    MappingNode,
    NamedTupleNode,
    Node,
    NumpyArrayNode,
    NumpyScalarNode,
    QuantizedNode,
    SequenceNode,
    StoredBytesNode,
    StringNode,
    TensorNode,
    ViewNode,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*are deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]
_SPARE_BYTES = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Iterator[None]:
    """Memory without bound then fails at once, with an error that is none of ours."""
    if not sys.platform.startswith("linux"):
        yield
        return
    torch.ones(64, 64) @ torch.ones(64, 64)  # torch's own threads have their stacks already
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + _SPARE_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def _receive(tree: Node, into: object = None, layouts: LayoutTable | None = None) -> object:
    restore = Restore(manifest_with(tree, layouts=layouts), into=into)
    for view in restore.buffers(0, 32):
        view[:] = b"\x01" * len(view)
    return restore.finish()


# ── any tree ──────────────────────────────────────────────────────────────────────────────────────────────────────

_index = st.integers(0, 3) | st.sampled_from([2**31, 2**62])
_size = st.integers(0, 8) | st.sampled_from([2**31, 2**32 + 1, 2**61, 2**62])
_sizes = st.lists(_size, max_size=4).map(tuple) | st.sampled_from([(8,), (2, 3), (0, 2**62, 2**62), (2**62,) * 4])
_dtype = st.sampled_from(
    ["float32", "uint8", "int64", "bool", "complex128", "qint8", "quint4x2", "int4", "bits16", "nope", "", "\0"]
)
_bits = (
    st.floats()
    .map(lambda value: torch.tensor(value, dtype=torch.float64).view(torch.int64).item())
    .map(lambda bits: f"{bits & (2**64 - 1):016x}")
)
_numpy_dtype = st.sampled_from(
    ["|u1", "<f4", ">f4", "|O", "<U2", "|S0", "<U0", "|V0", "|V8", "<M8[ns]", "<M8[x]", "<m8[99999999999s]", "a8",
     "i4,i4", "(99999999,99999999)i4", "|S99999999999", "<U2147483647", "T", "object", "{'a': 1}", "", "<f3", "=f4"]
)  # fmt: skip
_names = st.sampled_from(
    [("os", "system"), ("builtins", "eval"), ("this", "s"), ("torch", "Size"), ("collections", "deque"), ("", ""),
     ("sys", "modules"), ("time", "struct_time"), (__name__, "Recorder"), (__name__, "trap.field"), ("os", "path.join")]
)  # fmt: skip
_leaf_nodes: st.SearchStrategy[Node] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.builds(BigIntNode, st.sampled_from([1, 40, 5000, 1 << 20, (1 << 20) + 1]).map("f".__mul__)),
    st.builds(FloatNode, _bits),
    st.builds(StringNode, st.binary(max_size=4)),
    st.builds(BytesNode, st.binary(max_size=4), st.booleans()),
    st.builds(StoredBytesNode, _index, st.booleans()),
    st.builds(ConstantNode, st.sampled_from(["dtype", "device", "layout", "memory_format"]),
              st.text(max_size=5) | st.sampled_from(["float32", "cuda:300", "mkldnn", "cpu:-1", "torch.strided"])),
    st.builds(NumpyArrayNode, _index, _numpy_dtype, _sizes),
    st.builds(NumpyScalarNode, _numpy_dtype, st.binary(max_size=9) | st.sampled_from([b"\xff" * 8, b"\0" * 4])),
    st.builds(TensorNode, _index),
    st.builds(LayoutNode, _index, _dtype, _sizes, _sizes),
    st.builds(ViewNode, _index, _sizes, _sizes, _size),
)  # fmt: skip


def _inner_nodes(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    items = st.lists(inner, max_size=4)
    return st.one_of(
        st.builds(SequenceNode, st.sampled_from(["list", "tuple", "set", "frozenset", "size"]), items),
        st.builds(MappingNode, st.sampled_from(["dict", "ordered", "counter"]), items),
        st.builds(DefaultDictNode, st.sampled_from(["none", "list", "int"]), items),
        st.builds(DequeNode, st.none() | _size, items),
        st.builds(lambda name, fields, items: NamedTupleNode(*name, fields, items), _names,
                  st.lists(st.sampled_from(["x", "y"]), max_size=2), items),
        st.builds(CustomNode, st.text(max_size=3), inner),
        st.builds(QuantizedNode, inner, _dtype, _bits, st.integers(-(2**63), 2**63 - 1)),
        st.builds(LeafNode, inner, st.booleans(), st.booleans()),
        st.builds(DTensorNode, inner, st.integers(0, 3)),
    )  # fmt: skip


_coordinates = st.none() | st.lists(st.integers(0, 1), max_size=2).map(tuple)
_meshes = st.builds(
    Mesh,
    st.sampled_from(["cpu", "os", "mkldnn", "cuda:1", ""]),
    st.lists(_size | st.just(1), max_size=2).map(tuple),
    st.lists(_index, max_size=2).map(tuple),
    st.none() | st.lists(st.sampled_from(["dp", "tp"]), max_size=2).map(tuple),
    _coordinates,
)
_kinds = st.sampled_from(["shard", "replicate", "strided_shard"])
_layouts = st.builds(
    Layout,
    st.integers(0, 2),
    st.lists(st.builds(Placement, _kinds, st.integers(0, 3) | st.just(63), _size), max_size=2).map(tuple),
    _sizes,
    _sizes,
    _sizes,
)
_ONE_RANK = Mesh("cpu", (1,), (0,), ("dp",), (0,))
_tables = st.builds(
    LayoutTable,
    st.lists(_meshes | st.just(_ONE_RANK), max_size=2),
    st.lists(_layouts | st.just(Layout(0, (Placement("shard", 0),), (2, 3), (3, 1), (0, 0))), max_size=3),
)


_trees = st.recursive(_leaf_nodes, _inner_nodes, max_leaves=8)
_own = st.recursive(
    st.sampled_from([None, 1, "ab"])
    | st.sampled_from([(8,), (2, 3), (0,)]).map(torch.zeros)
    | st.just((8,)).map(lambda shape: torch.zeros(shape, dtype=torch.uint8)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.integers(0, 3) | st.text(max_size=1), inner, max_size=3)
    ),
    max_leaves=5,
)


def test_every_kind_of_node_is_attacked() -> None:
    kinds = {node.__name__ for node in nodes.TaggedNode.__args__}  # type: ignore[attr-defined]
    assert kinds - {"ComplexNode"} <= set(globals())


def _gives_a_state_or_a_typed_error(tree: Node, own: object, layouts: LayoutTable | None = None) -> None:
    with contextlib.suppress(ManifestError, RestoreError):
        _receive(tree, own, layouts)


@given(_trees, _own)
@settings(max_examples=num_examples(1500), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@example(MappingNode("dict", [BigIntNode("f" * 9000), 1]), {})
@example(SequenceNode("size", [BigIntNode("f" * 40)]), None)
@example(SequenceNode("size", [2**62, 2**62]), None)
@example(LayoutNode(7, "float32", (2, 3), (3, 1)), torch.zeros(2, 3))
@example(LayoutNode(0, "float32", (2, 3), (3, 1)), torch.zeros(2, 3))
@example(TensorNode(1), torch.zeros(1, 3).expand(2, 3))
@example(TensorNode(1), torch.zeros(2, 3, device="meta"))
@example(TensorNode(1), torch.zeros(2, 3).to_sparse())
def test_any_tree_gives_a_state_or_a_typed_error(tree: Node, own: object) -> None:
    _gives_a_state_or_a_typed_error(tree, own)


@given(_trees, _tables, _own)
@settings(max_examples=num_examples(500), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@example(DTensorNode(TensorNode(1), 0), LayoutTable([_ONE_RANK], [Layout(0, (), (2, 3), (3, 1), (0, 0))]), None)
def test_so_it_does_where_torch_distributed_runs(
    one_rank_group: None, tree: Node, layouts: LayoutTable, own: object
) -> None:
    _gives_a_state_or_a_typed_error(tree, own, layouts)


# ── single attacks ────────────────────────────────────────────────────────────────────────────────────────────────

_REFUSED: dict[str, Node] = {
    "an index beyond the table": TensorNode(2),
    "a layout of more bytes than were sent": LayoutNode(0, "float32", (2**40,), (1,)),
    "a layout whose sizes overflow to the right product": LayoutNode(0, "uint8", (2**62, 4, 8), (1, 1, 1)),
    "strides with holes": LayoutNode(1, "float32", (2, 3), (2**40, 1)),
    "strides that overlap": LayoutNode(1, "float32", (2, 3), (1, 1)),
    "fewer strides than sizes": LayoutNode(1, "float32", (2, 3), (1,)),
    "quantized values without a scale": LayoutNode(0, "qint8", (8,), (1,)),
    "values of less than a byte": LayoutNode(0, "quint4x2", (8,), (1,)),
    "a view that begins behind its base": ViewNode(1, (1,), (1,), 6),
    "a view that ends behind its base": ViewNode(1, (2,), (6,), 0),
    "a view of more elements than can be counted": ViewNode(1, (2**62, 2**62), (0, 0), 0),
    "an expanded view to be copied": QuantizedNode(ViewNode(0, (2**20,), (0,), 0), "quint8", "3ff0000000000000", 0),
    "a zero point out of range": QuantizedNode(TensorNode(0), "quint8", "3ff0000000000000", 2**40),
    "stored bytes of another dtype": StoredBytesNode(1),
    "an array of pointers": NumpyArrayNode(0, "|O", (1,)),
    "an array of nothing": NumpyArrayNode(0, "|S0", (2**40,)),
    "an array larger than its bytes": NumpyArrayNode(0, "<f8", (2**40,)),
    "an array whose sizes overflow": NumpyArrayNode(0, "|u1", (2**62, 4, 8)),
    "characters that are none": NumpyScalarNode("<U1", b"\xff\xff\xff\xff"),
    "two scalars in one": NumpyScalarNode("<i4", b"\0" * 8),
    "a surrogate cut in half": StringNode(b"\xed\xa0"),
    "an int of a million digits": BigIntNode("f" * ((1 << 20) + 1)),
    "a key without a value": MappingNode("dict", ["key"]),
    "a key that cannot be one": MappingNode("dict", [SequenceNode("list", []), 1]),
    "a set of lists": SequenceNode("set", [SequenceNode("list", [])]),
    "a size of words": SequenceNode("size", ["word"]),
    "an unknown encoding": CustomNode("nobody.knows", 1),
    "a device that torch does not know": ConstantNode("device", "toaster:0"),
    "a device index that wraps around": ConstantNode("device", "cuda:300"),
    "a parameter that is no tensor": LeafNode(1, True, True),
    "a gradient of integers": LeafNode(TensorNode(0), True, True),
}


@pytest.mark.parametrize("attack", sorted(_REFUSED))
def test_refused_with_its_place(attack: str) -> None:
    with pytest.raises((ManifestError, RestoreError)) as caught:
        _receive(MappingNode("dict", ["a", SequenceNode("list", [None, _REFUSED[attack]])]))
    assert caught.value.path is not None
    assert caught.value.path.startswith("a.1")


@pytest.mark.parametrize("kind", ["sequence", "mapping", "leaf"])
def test_a_tree_deeper_than_the_recursion_limit_is_refused(kind: str) -> None:
    tree: Node = None
    own: Any = torch.zeros(2)
    for _ in range(450):
        match kind:
            case "sequence":
                tree, own = SequenceNode("list", [tree]), [own]
            case "mapping":
                tree, own = MappingNode("dict", ["a", tree]), {"a": own}
            case "leaf":
                tree = LeafNode(tree, False, False)
    for into in (None, own):
        with pytest.raises(ManifestError, match=r"recursion limit|expected the header|nested arrays|levels of nesting"):
            _receive(tree, into)


def test_a_bound_costs_no_memory() -> None:
    received = _receive(DequeNode(2**62, [1]))
    assert received == deque([1], 2**62)


# ── names ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Recorder(NamedTuple("_Recorder", [("x", int), ("y", int)])):
    """A named tuple whose construction would do something."""

    __slots__ = ()

    def __new__(cls, *_values: object) -> NoReturn:
        raise AssertionError("a name from the network ran this")

    __init__ = __repr__ = __str__ = __format__ = __new__  # type: ignore[assignment]


class _Trap:
    def __getattribute__(self, name: str) -> NoReturn:
        raise AssertionError("a name from the network looked into this")


trap = _Trap()


class _LazyModule(ModuleType):
    def __getattribute__(self, name: str) -> NoReturn:
        raise AssertionError("a name from the network loaded this")


def test_a_named_tuple_is_made_without_its_constructor() -> None:
    received = _receive(SequenceNode("list", [NamedTupleNode(__name__, "Recorder", ["x", "y"], [1, 2])]))
    assert type(received[0]) is Recorder
    assert tuple(received[0]) == (1, 2)


@pytest.mark.parametrize(
    ("module", "qualname", "fields"),
    [
        ("os", "system", ["command"]),
        ("builtins", "eval", []),
        ("builtins", "tuple", []),
        ("collections", "OrderedDict", []),
        (__name__, "Recorder", ["x"]),
        (__name__, "Recorder.__new__", ["x", "y"]),
        (__name__, "trap", []),
        (__name__, "trap.x", []),
        (__name__, "", []),
        ("", "", []),
    ],
)
def test_a_name_of_anything_else_is_refused(module: str, qualname: str, fields: list[str]) -> None:
    with pytest.raises(ManifestError, match="expected the named tuple"):
        _receive(NamedTupleNode(module, qualname, fields, [0] * len(fields)))


def test_fields_and_values_must_be_as_many() -> None:
    with pytest.raises(ManifestError, match="expected 2 values of a named tuple, got 1"):
        _receive(NamedTupleNode(__name__, "Recorder", ["x", "y"], [1]))


def test_a_name_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "this" not in sys.modules
    lazy = _LazyModule("lazy_module")
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    for module in ("this", "lazy_module", "xml.dom.expatbuilder"):
        with pytest.raises(ManifestError, match="import its module before receiving"):
            _receive(NamedTupleNode(module, "s", [], []))
    assert "this" not in sys.modules


def test_the_files_of_others_are_no_snapshot() -> None:
    import safetensors.torch

    with pytest.raises(ManifestError, match="without __metadata__"):
        receive(safetensors.torch.save({"a": torch.ones(2)}))
