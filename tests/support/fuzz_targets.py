"""What decodes bytes of a peer or of a disk: as functions of bytes that return, or raise an error of ours."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from aiohttp.web_request import BaseRequest
from state_tools import file_of_state, manifest_of, manifest_with

from ft_transport.checkpoint import manifest as checkpoint_manifest
from ft_transport.coordination import votes
from ft_transport.errors import FetchFailedError, ManifestError, PeerUnreachableError
from ft_transport.http.server.snapshot_routes import _requested_range
from ft_transport.state.resharding import reshard
from ft_transport.state.restore import Restore
from ft_transport.wire.chunks import digest
from ft_transport.wire.delta import TensorPair, decode_delta, encode_delta
from ft_transport.wire.manifest import Manifest, decode_digests, decode_header
from ft_transport.wire.nodes import Node, decode_tree
from ft_transport.wire.routes import parse_after, parse_served_steps, parse_step
from ft_transport.wire.slices import Slice, decode_request, encode_request

_MAX_BYTES = 1 << 20
_JSON_WORDS = (b"[", b"]", b'"a"', b"null", b"true", b"0", b'["T",0]', b"[]", b"{}", b'""', b",0", b"-")
_TREE_WORDS = (
    *_JSON_WORDS, b'["l","list",[', b'["l","set",[', b'["l","frozenset",[', b'["l","size",[', b'["d","dict",[',
    b'["dd","int",[', b'["q",1,[', b'["i","', b'["i","ffffffffffffffffffff"]', b'["f","7ff8000000000001"]',
    b'["c","0000000000000000","7ff0000000000000"]', b'["s","7aCA"]', b'["b","AAAA",false]', b'["B",0,true]',
    b'["n","time","struct_time",[],[]]', b'["k","dtype","float32"]', b'["k","device","cpu"]', b'["na",0,"<f4",[2]]',
    b'["na",0,"|u1",[8]]', b'["ns","<f8","AAAAAAAAAAA="]', b'["x","nobody",0]', b'["L",1,"float32",[2,3],[1,2]]',
    b'["V",1,[2],[1],0]', b'["Q",["T",0],"quint8","3ff0000000000000",0]', b'["g",["T",1],true,true]',
    b'["D",["T",1],0]', b'["l","tuple",[1,["T",0]]]', b'["d","ordered",["a",1]]', b'["d","counter",["a",1]]', b'"<U4"',
    b'"|S0"', b'"M8[ns]"', b'"quint8"',
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A function that raises errors of ours and no others; inputs that are well-formed; words of the format."""

    call: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = _JSON_WORDS


def _received(manifest: Any, into: object = None) -> object:
    restore = Restore(manifest, into=into)
    for view in restore.buffers(0, manifest.data_bytes):
        view[:] = b"\x01" * len(view)
    return restore.finish()


_STATE = {
    "weight": torch.arange(6.0).view(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "column": torch.arange(6.0).view(2, 3).t(),
    "rest": [1, 2.5, None, True, "text", b"bytes", (2**70, float("nan")), {3: {1, 2}}, np.arange(3), np.float32(1)],
}


def is_consistent(manifest: Manifest) -> bool:
    """Whether its tensors cover its data without a gap, and each chunk has a digest."""
    ends = [0]
    for tensor in sorted(manifest.tensors, key=lambda tensor: (tensor.start, tensor.end)):
        assert tensor.start == ends[-1]
        ends.append(tensor.end)
    assert manifest.data_bytes == ends[-1]
    return manifest.digests is None or len(manifest.digests) == manifest.chunks.num_chunks


def _fuzz_header(data: bytes) -> object:
    manifest = decode_header(data)
    assert is_consistent(manifest)
    return _received(manifest)


_BASE = manifest_with(None)
_OWN = {"a": torch.zeros(2, 3), "b": [torch.zeros(8, dtype=torch.uint8), {1: torch.zeros(2, 3)}]}


def _fuzz_tree(data: bytes) -> object:
    tree: Node
    try:
        tree = decode_tree(data.decode("utf-8", "surrogateescape"), peer=None)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:  # as the header's decoder takes them
        raise ManifestError(f"{type(error).__name__}: {error}") from error
    manifest = dataclasses.replace(_BASE, tree=tree)
    try:
        return _received(manifest, _OWN)
    finally:
        reshard([manifest, manifest], None)


def _fuzz_table(data: bytes) -> object:
    """The header's table and its meshes and layouts, whatever the rest of it."""
    parts = data.split(b"\n", 2)
    if len(parts) < 3:
        return None
    metadata: dict[str, str] = json.loads(json.dumps(_METADATA))
    metadata["ft_transport.meshes"] = parts[0].decode("latin-1")
    metadata["ft_transport.layouts"] = parts[1].decode("latin-1")
    encoded = b'{"__metadata__":' + json.dumps(metadata).encode() + b"," + parts[2] + b"}"
    manifest = decode_header(encoded)
    reshard([manifest], None)
    return _received(manifest)


_FILE = file_of_state(_STATE)
_HEADER = _FILE[8 : manifest_of(_FILE).header_bytes].rstrip()
_METADATA = {
    **json.loads(_HEADER)["__metadata__"],
    "ft_transport.digests": "later",
    "ft_transport.tree": '["d","dict",["w",["D",["T",0],0],"v",["T",1]]]',
}
_TABLE = (
    b'[["cpu",[2],[0,1],["dp"],[1]]]\n'
    b'[[0,[["shard",0,0]],[4,3],[3,1],[2,0]],[0,[["strided_shard",0,2]],[4,3],[3,1],[0,0]]]\n'
    b'"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"v":{"dtype":"U8","shape":[8],"data_offsets":[24,32]}'
)


def _fuzz_slices(data: bytes) -> object:
    return decode_request(data, data_bytes=100_000)


class _Request:
    """What is looked at of a request; aiohttp makes a range of its header."""

    method = "GET"
    http_range = BaseRequest.http_range

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = self._headers = headers
        self._cache: dict[str, object] = {}


def _fuzz_range(data: bytes) -> object:
    text = data.decode("latin-1")
    value, _, condition = text.partition("\n")
    headers = {"Range": value.strip("\r\0"), **({"If-Range": condition.strip("\r\0\n")} if condition else {})}
    asked = _requested_range(_Request(headers), 1000, '"id"')  # type: ignore[arg-type]
    assert asked is None or 0 <= asked[0] <= 1000 >= asked[1] >= 0
    return asked


def _fuzz_routes(data: bytes) -> object:
    text = data.decode("latin-1")
    step = parse_step(text)
    assert step is None or step == "latest" or 0 <= step < 10**18
    return step, parse_after(text), parse_served_steps(text)


def _fuzz_digests(data: bytes) -> object:
    return decode_digests(data.decode("latin-1"), 2, peer=None)


def _fuzz_delta(data: bytes) -> object:
    return [len(changes.positions) for changes in decode_delta(data, max_bytes=_MAX_BYTES).changes()]


def _delta() -> bytes:
    base = np.random.default_rng(1).integers(0, 256, 4 << 10, dtype=np.uint8)
    pairs = []
    for item_bytes in (1, 2, 4, 8):
        new = base.copy()
        new.view(f"<u{item_bytes}")[[0, 3, 300]] ^= 5
        pairs.append(TensorPair(f"w{item_bytes}", item_bytes, base, new))
    encoded = encode_delta(3, 2, pairs)
    assert encoded is not None
    return encoded


def _fuzz_vote(data: bytes) -> object:
    vote = votes.decode(data)
    if vote.failure is not None:
        votes.rebuild(vote.failure)
    return votes.tally([vote, vote])


def _fuzz_all_votes(data: bytes) -> object:
    cast = votes.decode_all(data, 2)
    for vote in cast:
        if vote is not None and vote.failure is not None:
            votes.rebuild(vote.failure)
    return votes.tally(cast)


def _votes() -> Iterable[votes.Vote]:
    failed = FetchFailedError("all failed", failures=(PeerUnreachableError("no", peer="a:1", step=3),), path="x")
    for error in (None, OSError(28, "No space left", "/disk"), failed, KeyError("k")):
        yield votes.Vote(phase="write", failure=votes.describe(error) if error is not None else None, payload=b"p")


def _fuzz_checkpoint(data: bytes) -> object:
    sealed = b'{"digest":"%016x","body":%b}' % (digest(data), data)
    return checkpoint_manifest.decode_sealed(sealed, name="manifest.json")


def _fuzz_rank_file(data: bytes) -> object:
    return checkpoint_manifest.decode_rank_file(data, name="rank-0.json")


def _checkpoint_manifest() -> bytes:
    files = (checkpoint_manifest.FileEntry("rank-0.json", 10, "0" * 16),)
    manifest = checkpoint_manifest.CheckpointManifest(
        format=checkpoint_manifest.FORMAT_VERSIONS["xxh3-64"], step=3, num_ranks=1, local_keys=("rng",), files=files
    )
    return msgspec.json.encode(manifest)


_MSGPACK_WORDS = (
    b"\x91", b"\xc0", b"\xc2", b"\x01", b"\xa1a", b"\xc4\x01a", b"\xdd\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xc7",
    b"\xd9\x02\xff\xff", b"\x92\xa1", b"\xff",
)  # fmt: skip
_TREES = (
    b'["d","dict",["a",["T",1],"b",["l","list",[["T",0],["d","dict",[1,["T",1]]]]]]]',
    json.loads(_HEADER)["__metadata__"]["ft_transport.tree"].encode(),
    *(word for word in _TREE_WORDS if word.endswith(b"]")),
)
_SLICES = encode_request([(Slice(0, 100), Slice(200, 8, ((3, 16), (2, 100)))), (Slice(5, 1),)])
_RANGES = (b"bytes=0-99", b"bytes=5-", b"bytes=-5", b'bytes=1-2\n"id"', b"bytes=1-2,4-5")
_RANK_FILE = checkpoint_manifest.encode_rank_file(
    ["__0_0.ft"], [_HEADER], *(2 * [[[0] * len(manifest_of(_FILE).tensors)]])
)

TARGETS: dict[str, Target] = {
    "header": Target(_fuzz_header, (_HEADER,), _TREE_WORDS),
    "tree": Target(_fuzz_tree, _TREES, _TREE_WORDS),
    "table": Target(_fuzz_table, (_TABLE,)),
    "slices": Target(_fuzz_slices, (_SLICES, b'{"frames":[]}')),
    "range": Target(_fuzz_range, _RANGES, (b"bytes", b"=", b"-", b",", b"0", b"\n", b"9" * 30)),
    "routes": Target(_fuzz_routes, (b"latest", b"12", b"3, 4,x,5"), (b"latest", b",", b"9" * 30, b"\xb2")),
    "digests": Target(_fuzz_digests, (b"0123456789abcdef" * 2,), (b" ", b"g", b"f" * 16)),
    "delta": Target(_fuzz_delta, (_delta(),), _MSGPACK_WORDS),
    "vote": Target(_fuzz_vote, tuple(map(votes.encode, _votes())), _MSGPACK_WORDS),
    "votes": Target(_fuzz_all_votes, tuple(votes.encode_all([vote, None]) for vote in _votes())),
    "checkpoint": Target(_fuzz_checkpoint, (_checkpoint_manifest(),)),
    "rank_file": Target(_fuzz_rank_file, (_RANK_FILE,), _TREE_WORDS),
}
