"""The header of a snapshot: what goes in comes out, and what does not belong is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ft_transport.errors import ManifestError
from ft_transport.wire import manifest as module
from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.manifest import Manifest, SnapshotId, TensorEntry, decode_header, encode_header
from ft_transport.wire.nodes import MappingNode, Node, TensorNode

_ID = SnapshotId("0123456789abcdef" * 2)
_TENSORS = [
    TensorEntry("b", "F32", (2, 3), 8, 32),
    TensorEntry("a", "U8", (8,), 0, 8),
    TensorEntry("nothing", "I64", (0, 4), 8, 8),
    TensorEntry("snowman ☃", "BF16", (), 32, 34),
]
_TREE = MappingNode("dict", ["a", TensorNode(1), "b", TensorNode(0), "x", 1.5, "y", None])


def _encode(
    tensors: list[TensorEntry] = _TENSORS, tree: Node = _TREE, chunk_bytes: int = 10, align_bytes: int = 64
) -> bytes:
    chunks = ChunkTable(data_bytes=max((entry.end for entry in tensors), default=0), chunk_bytes=chunk_bytes)
    return encode_header(
        step=12,
        snapshot_id=_ID,
        tensors=tensors,
        tree=tree,
        chunks=chunks,
        digests=[2**64 - 1 - index for index in range(chunks.num_chunks)],
        align_bytes=align_bytes,
    )


def _decode(header: dict[str, Any]) -> Manifest:
    return decode_header(json.dumps(header).encode(), peer="host:1")


def _header() -> dict[str, Any]:
    header: dict[str, Any] = json.loads(_encode()[8:])
    return header


def test_what_goes_in_comes_out() -> None:
    encoded = _encode()
    manifest = decode_header(encoded[8:])
    assert manifest == Manifest(
        step=12,
        snapshot_id=_ID,
        tensors=tuple(_TENSORS),
        tree=_TREE,
        chunks=ChunkTable(data_bytes=34, chunk_bytes=10),
        digests=(2**64 - 1, 2**64 - 2, 2**64 - 3, 2**64 - 4),
        header_bytes=len(encoded),
    )
    assert manifest.total_bytes == len(encoded) + 34
    assert decode_header(memoryview(encoded)[8:]) == manifest


def test_a_state_without_tensors_has_no_chunks() -> None:
    manifest = decode_header(_encode([], tree=None)[8:])
    assert (manifest.data_bytes, manifest.digests, manifest.tensors, manifest.tree) == (0, (), (), None)


@pytest.mark.parametrize("align_bytes", [8, 64, 4096])
def test_the_header_is_padded_with_spaces_as_safetensors_asks(align_bytes: int) -> None:
    encoded = _encode(align_bytes=align_bytes)
    assert len(encoded) % align_bytes == 0
    assert int.from_bytes(encoded[:8], "little") == len(encoded) - 8
    text = encoded[8:].decode()
    assert text.startswith("{")
    assert text.rstrip(" ").endswith("}")
    assert len(text) - len(text.rstrip(" ")) < align_bytes


def test_a_header_over_the_limit_is_neither_sent_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = _encode()
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", len(encoded) - 9)
    with pytest.raises(ManifestError, match="expected a manifest of at most"):
        _encode()
    with pytest.raises(ManifestError, match="expected a header of at most"):
        decode_header(encoded[8:])


def _metadata(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update(
        {f"ft_transport.{key}": value for key, value in changes.items()}
    )


def _entry(name: str, **changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(changes)


def _without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        for key in path[:-1]:
            header = header[key]
        del header[path[-1]]

    return change


_MALFORMED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no metadata": (_without("__metadata__"), "got a safetensors header without __metadata__"),
    "a newer format": (_metadata(format="3"), "expected snapshot format 2, got 3"),
    "an older format": (_metadata(format="1"), "expected snapshot format 2, got 1"),
    **{
        f"no {key}": (_without("__metadata__", f"ft_transport.{key}"), f"'ft_transport.{key}'.* got none")
        for key in ("format", "step", "tree", "meshes", "layouts", "snapshot", "digests", "chunk_bytes")
    },
    "a layout of no mesh": (_metadata(layouts="[[0,[],[],[],[]]]"), "expected an index into 0 meshes, got 0"),
    "metadata that is no string": (_metadata(step=12), "Expected `str`, got `int`"),
    "a negative step": (_metadata(step="-1"), "`int` >= 0"),
    "a step of words": (_metadata(step="latest"), "malformed"),
    "an id too short": (_metadata(snapshot="abc"), "32 hexadecimal digits, got 'abc'"),
    "an id of other digits": (_metadata(snapshot="G" * 32), "32 hexadecimal digits, got 'GGG"),
    "chunks of nothing": (_metadata(chunk_bytes="0"), "`int` >= 1"),
    "chunks of too much": (_metadata(chunk_bytes=str(2**41)), "`int` <= "),
    "a digest too few": (_metadata(digests="0" * 48), "expected 4 digests of 16 digits, got 48 characters"),
    "digests that are no digits": (_metadata(digests="x" * 64), "expected hexadecimal digests"),
    "white space among digests": (_metadata(digests="  " + "0" * 62), "white space between them"),
    "a tree that is no JSON": (_metadata(tree="[[["), "truncated"),
    "a tree with an unknown tag": (_metadata(tree='["zz",1]'), "Invalid value 'zz'"),
    "a node with too few fields": (_metadata(tree='["L",0]'), "Expected `array` of at least length"),
    "a node with too many fields": (_metadata(tree='["T",0,1]'), "Expected `array` of at most length"),
    "a negative index": (_metadata(tree='["T",-1]'), "`int` >= 0"),
    "float bits of too few digits": (_metadata(tree='["f","12"]'), "matching regex"),
    "bytes that are no base64": (_metadata(tree='["b","*"]'), "base64"),
    "a shape of too many dimensions": (_metadata(tree=json.dumps(["V", 0, [1] * 65, [], 0])), "length <= 64"),
    "an entry without a shape": (_without("b", "shape"), "missing required field `shape`"),
    "an entry that is a list": (lambda header: header.update(b=[]), "Expected `object`, got `array`"),
    "an unknown dtype": (_entry("b", dtype="F31"), "expected a known dtype, got 'F31' .at b"),
    "a negative size": (_entry("b", shape=[-2, -3]), "`int` >= 0"),
    "a size of a fraction": (_entry("b", shape=[1.5]), "Expected `int`"),
    "a shape of other bytes": (_entry("b", shape=[2, 4]), r"expected bytes \[8, 40\) for F32\[2, 4\], got \[8, 32\)"),
    "a hole between entries": (_entry("b", data_offsets=[9, 33]), r"expected bytes \[8, 32\)"),
    "a hole at the beginning": (_entry("a", data_offsets=[1, 9]), r"expected bytes \[0, 8\)"),
    "entries that overlap": (_entry("snowman ☃", data_offsets=[30, 32]), r"expected bytes \[32, 34\)"),
    "offsets the wrong way round": (_entry("b", data_offsets=[32, 8]), "expected bytes"),
    "an offset too many": (_entry("b", data_offsets=[8, 32, 33]), "length 2"),
    "an empty shape that cannot be counted": (
        _entry("nothing", shape=[0, 2**62, 2**62]),
        "expected nonzero sizes with a product of at most",
    ),
}


@pytest.mark.parametrize("what", sorted(_MALFORMED))
def test_a_malformed_header_is_refused_with_the_reason(what: str) -> None:
    change, reason = _MALFORMED[what]
    header = _header()
    assert _decode(header).step == 12
    change(header)
    with pytest.raises(ManifestError, match=reason) as caught:
        _decode(header)
    assert caught.value.peer == "host:1"
    assert "host:1" in str(caught.value)


@pytest.mark.parametrize(
    "encoded", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"__metadata__":', b"{}" * 2, b'{"a":1}']
)
def test_what_is_no_json_object_is_refused(encoded: bytes) -> None:
    with pytest.raises(ManifestError, match="expected"):
        decode_header(encoded, peer="host:1")


def test_of_an_entry_that_is_named_twice_the_bytes_must_still_fit() -> None:
    encoded = _encode()[8:].replace(b'"nothing"', b'"b"')
    with pytest.raises(ManifestError, match="expected bytes"):
        decode_header(encoded)


def test_unknown_metadata_of_a_later_release_is_ignored() -> None:
    header = _header()
    header["__metadata__"].update({"ft_transport.colour": "blue", "format": "pt"})
    header["b"]["checksum"] = "abc"
    assert _decode(header).tensors == tuple(_TENSORS)
