"""Whatever a peer sends as a manifest, the answer is a manifest or a typed error, and little memory."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
import torch
from fuzz_targets import is_consistent
from hypothesis import example, given, settings
from hypothesis import strategies as st
from property_examples import num_examples
from state_tools import file_of_state, manifest_of

from ft_transport.errors import ManifestError
from ft_transport.wire.manifest import MAX_HEADER_BYTES, Manifest, decode_header

_STATE = {
    "weight": torch.arange(6.0).view(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "column": torch.arange(6.0).view(2, 3).t(),
    "rest": [1, 2.5, None, True, "text", b"bytes", (2**70, float("nan")), {3: {1, 2}}],
}
_FILE = file_of_state(_STATE)
_HEADER = _FILE[8 : manifest_of(_FILE).header_bytes].rstrip()
_CONSTANT_BYTES = 1 << 20
_BYTES_PER_BYTE = 40
"""The smallest tensor table entry and tree node (``[],``) as objects; a list of lists costs about that much."""


def _decodes_or_refuses(encoded: bytes) -> Manifest | None:
    tracemalloc.start()
    try:
        return decode_header(encoded)
    except ManifestError:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= _CONSTANT_BYTES + _BYTES_PER_BYTE * len(encoded)


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b"")
@example(b"null")
@example(b"[]")
@example(b"{}")
@example(b'{"__metadata__":{}}')
@example(b'{"__metadata__":null}')
@example(b'{"__metadata__":{"ft_transport.format":"1"}}')
@example(b"\xff" * 100)
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
def test_any_bytes_give_a_typed_error(encoded: bytes) -> None:
    assert _decodes_or_refuses(encoded) is None


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


def _set_somewhere(value: Any, data: st.DataObject, replacement: Any) -> Any:
    """``value`` with one of its parts replaced."""
    if isinstance(value, (dict, list)) and value and data.draw(st.integers(0, 3)):
        key = data.draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        changed = value.copy()
        changed[key] = _set_somewhere(value[key], data, replacement)
        return changed
    return replacement


@given(st.data(), _json | st.integers(-(2**70), 2**70) | st.sampled_from([2**31, 2**62, 2**63, 10**400, "latest"]))
@settings(max_examples=num_examples(400))
def test_a_header_with_one_wrong_part_gives_a_consistent_manifest_or_a_typed_error(
    data: st.DataObject, replacement: Any
) -> None:
    header = json.loads(_HEADER)
    metadata = header["__metadata__"]
    if data.draw(st.booleans()):
        tree = json.loads(metadata["ft_transport.tree"])
        metadata["ft_transport.tree"] = json.dumps(_set_somewhere(tree, data, replacement))
    else:
        header = _set_somewhere(header, data, replacement)
    manifest = _decodes_or_refuses(json.dumps(header).encode())
    assert manifest is None or is_consistent(manifest)


def _with_tree(tree: str) -> bytes:
    header = json.loads(_HEADER)
    header["__metadata__"]["ft_transport.tree"] = tree
    return json.dumps(header).encode()


def _list_of(item: str, count: int) -> str:
    return '["l","list",[' + ",".join([item] * count) + "]]"


def _with_table(entry: str, count: int) -> bytes:
    metadata = {**json.loads(_HEADER)["__metadata__"], "ft_transport.digests": ""}
    entries = ",".join(f'"{number}":{entry}' for number in range(count))
    return f'{{"__metadata__":{json.dumps(metadata)},{entries}}}'.encode()


@pytest.mark.parametrize(
    "encoded",
    [
        _with_tree(_list_of("null", 50_000)),
        _with_tree(_list_of("0.5", 50_000)),
        _with_tree(_list_of('["T",0]', 50_000)),
        _with_tree(_list_of('["l","set",[]]', 50_000)),
        _with_tree(_list_of('["b","",false]', 50_000)),
        _with_tree('["l","list",[' * 20_000),
        _with_tree('["i","' + "f" * 500_000 + '"]'),
        _with_tree('["L",0,"float32",[' + "1," * 100_000 + "1],[1]]"),
        _with_tree("1" * 100_000),
        _with_table('{"dtype":"U8","shape":[0],"data_offsets":[0,0]}', 20_000),
        _with_table('{"dtype":"U8","shape":[4611686018427387904],"data_offsets":[0,4611686018427387904]}', 1),
        _with_table('{"dtype":"U8","shape":[' + "4611686018427387904," * 63 + '2],"data_offsets":[0,1]}', 20),
    ],
    ids=lambda encoded: f"{len(encoded)} bytes",
)
def test_memory_grows_with_the_input_alone(encoded: bytes) -> None:
    manifest = _decodes_or_refuses(encoded)
    assert manifest is None or is_consistent(manifest)


def test_a_header_over_the_limit_is_refused_unread() -> None:
    class Pretender(bytes):
        def __len__(self) -> int:
            return MAX_HEADER_BYTES + 1

    with pytest.raises(ManifestError, match=f"at most {MAX_HEADER_BYTES} bytes"):
        decode_header(Pretender(_HEADER), peer="host:1")
