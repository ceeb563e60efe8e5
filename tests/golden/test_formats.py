"""A file of each format, written once, must decode to the same state for ever.

``format_2.safetensors`` is never written again. Another format gets a file of its own, made as this one was::

    PYTHONPATH=tests/support python tests/golden/test_formats.py tests/golden/format_3.safetensors
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from state_equality import exact
from state_tools import file_of_state, manifest_of, receive
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ft_transport import register_encoding
from ft_transport.state import encodings
from ft_transport.wire import nodes
from ft_transport.wire.chunks import digest
from ft_transport.wire.layouts import Layout, Mesh, Placement

_VERSIONS = (2,)


def golden_state(mesh: DeviceMesh) -> dict[Any, Any]:
    flat = torch.arange(12.0)
    nan = np.array([0x7FF8_0000_0000_1234], np.uint64).view(np.float64)[0].item()
    bits = torch.arange(4, dtype=torch.uint8)
    return {
        "scalars": [None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**100, 1.5, -0.0, float("-inf"), nan, 1 + 2j],
        "text": ["", "snow ☃", "\ud800", b"\0\xff", bytearray(b"x"), b"long" * 2000, bytearray(5000)],
        "containers": [(1, [2]), {3}, frozenset({"f"}), deque([1], 4), deque([2]), torch.Size([2, 3])],
        "mappings": [OrderedDict(b=1, a=2), Counter(x=3), defaultdict(list, y=[1]), defaultdict(None, z=2)],
        "named": inspect.ArgInfo(["self"], "args", "kwargs", {}),
        ("tuple", 1): {2: "int", 2.5: "float", None: "none", b"k": "bytes"},
        "constants": [torch.bfloat16, torch.device("cuda:1"), torch.sparse_coo, torch.channels_last],
        "dtypes": [torch.arange(8, dtype=torch.uint8).view(dtype) for dtype in (
            torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
            torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
            torch.float8_e5m2, torch.float8_e5m2fnuz)],
        "bool": torch.tensor([True, False]),
        "complex128": torch.tensor([1 + 2j], dtype=torch.complex128),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "flat": flat,
        "tie": flat,
        "view": flat[2:8].view(2, 3),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "expanded": torch.arange(3.0).expand(2, 3),
        "parameter": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
        "quantized": torch._make_per_tensor_quantized_tensor(bits, 0.5, 2),
        "numpy": [np.arange(3, dtype=">i2"), np.float32(2.5), np.array("2026-01-02", "M8[D]"), np.str_("u")],
        "sharded": nn.Parameter(distribute_tensor(torch.arange(4.0).view(2, 2), mesh, [Shard(0)])),
        "replicated": distribute_tensor(torch.ones(2), mesh, [Replicate()]),
        "custom": range(1, 9, 2),
    }  # fmt: skip


def _register() -> None:
    register_encoding(
        range,
        name="golden.range",
        encode=lambda value: (value.start, value.stop, value.step),
        decode=lambda value: range(*value),
    )


@pytest.fixture
def _range_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "_by_type", {})
    monkeypatch.setattr(encodings, "_by_name", {})
    _register()


@pytest.fixture
def mesh(one_rank_group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


@pytest.fixture(params=_VERSIONS)
def file(request: pytest.FixtureRequest) -> bytes:
    return Path(__file__).with_name(f"format_{request.param}.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*are deprecated:UserWarning")
@pytest.mark.usefixtures("_range_encoding")
def test_a_file_decodes_to_the_state_it_was_made_of(file: bytes, mesh: DeviceMesh) -> None:
    received, state = receive(file, meshes=[mesh]), golden_state(mesh)
    assert received.pop("custom") == state.pop("custom")
    assert exact(received) == exact(state)
    assert received["tie"] is received["flat"]
    assert received["view"].data_ptr() == received["flat"][2:].data_ptr()


def test_its_manifest_says_what_it_said(file: bytes) -> None:
    manifest = manifest_of(file)
    assert manifest.step == 7
    assert manifest.total_bytes == len(file)
    assert manifest.chunks.chunk_bytes == 1 << 16
    assert manifest.digests == (digest(file[manifest.header_bytes :]),)


def test_it_says_where_a_shard_lies(file: bytes) -> None:
    manifest = manifest_of(file)
    assert manifest.meshes == (Mesh("cpu", (1,), (0,), ("dp",), (0,)),)
    assert manifest.layouts == (
        Layout(0, (Placement("shard", 0),), (2, 2), (2, 1), (0, 0)),
        Layout(0, (Placement("replicate"),), (2,), (1,), (0,)),
    )


def test_it_holds_every_kind_of_node(file: bytes) -> None:
    header = json.loads(file[8 : manifest_of(file).header_bytes])
    tags = set()

    def collect(node: Any) -> None:
        if isinstance(node, list):
            if node and isinstance(node[0], str):
                tags.add(node[0])
            for item in node:
                collect(item)

    collect(json.loads(header["__metadata__"]["ft_transport.tree"]))
    assert {node.__struct_config__.tag for node in nodes.TaggedNode.__args__} <= tags  # type: ignore[attr-defined]


def test_safetensors_reads_it(file: bytes) -> None:
    loaded = safetensors.torch.load(file)
    assert loaded["flat"].tolist() == list(range(12))
    assert loaded["transposed"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    warnings.simplefilter("ignore")
    _register()
    with Path(sys.argv[1]).open("xb") as written:
        written.write(file_of_state(golden_state(init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))))
    torch.distributed.destroy_process_group()
