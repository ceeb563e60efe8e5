"""A manifest costs whoever decodes it no more time and memory than its length, and the deadline holds (promise 5)."""

from __future__ import annotations

import json
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from faulty_transports import transport
from scripted_peer import Peer, scripted
from state_tools import file_of_state, manifest_of, manifest_with, round_trip

from ft_transport import DeadlineExceededError, FetchFailedError, ManifestError, TransportError, UnsupportedLeafError
from ft_transport.state.encodings import MAX_EQUAL_HASHES
from ft_transport.state.resharding import reshard
from ft_transport.state.restore import Restore
from ft_transport.wire import nodes
from ft_transport.wire.chunks import digest
from ft_transport.wire.manifest import decode_header
from ft_transport.wire.nodes import (
    MAX_BIG_INT_DIGITS,
    MappingNode,
    NumpyArrayNode,
    SequenceNode,
    StoredBytesNode,
    TensorNode,
    ViewNode,
)

_FILE = file_of_state({"w": torch.zeros(1000)})
_HEADER_BYTES = manifest_of(_FILE).header_bytes
_HEADER = json.loads(_FILE[8:_HEADER_BYTES])
_MODULUS = sys.hash_info.modulus
_BYTES_PER_BYTE = 40
_SPARE_BYTES = 4 << 20


def with_tree(tree: str) -> bytes:
    """The header of a real snapshot, with another tree."""
    header = json.loads(json.dumps(_HEADER))
    header["__metadata__"]["ft_transport.tree"] = tree
    return json.dumps(header).encode()


def list_of(kind: str, items: list[str]) -> str:
    return f'["l","{kind}",[{",".join(items)}]]'


def alike(count: int) -> list[str]:
    """Ints whose hash is 0."""
    return [f'["i","{(number + 16) * _MODULUS:x}"]' for number in range(count)]


def tuples_alike(count: int) -> list[str]:
    """Tuples of one hash: -1 and -2 have the same."""
    bits = (count - 1).bit_length()
    return [list_of("tuple", [str(-1 - (number >> bit & 1)) for bit in range(bits)]) for number in range(count)]


def built(tree: str) -> object:
    """What a receiver makes of it."""
    manifest = decode_header(with_tree(tree))
    restore = Restore(manifest, into={})
    for view in restore.buffers(0, manifest.data_bytes):
        view[:] = bytes(len(view))
    return restore.finish()


def answer(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    lines = [f"HTTP/1.1 {status}", f"FT-Manifest-Digest: {digest(body):016x}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def serving(header: bytes) -> Callable[[Peer], None]:
    """A server of a snapshot of 4000 zeros."""

    def script(peer: Peer) -> None:
        while head := peer.request():
            if "/metadata" in head:
                peer.send(answer(header, f"Content-Length: {len(header)}"))
                continue
            first, last = (int(number) for number in re.findall(r"bytes=(\d+)-(\d+)", head)[0])
            content_range = f"Content-Range: bytes {first}-{last}/{len(header) + 8 + 4000}"
            length = f"Content-Length: {last - first + 1}"
            peer.send(answer(b"", content_range, length, status="206 Partial Content") + bytes(last - first + 1))

    return script


def fetch(port: int, *, timeout_s: float) -> None:
    with transport(2, max_failures=2) as receiver:
        receiver.fetch(f"http://127.0.0.1:{port}/checkpoint/", 7, timeout=timedelta(seconds=timeout_s))


@contextmanager
def bounded(num_bytes: int) -> Iterator[None]:
    """Memory within a multiple of the input."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= _SPARE_BYTES + _BYTES_PER_BYTE * num_bytes
    finally:
        tracemalloc.stop()


# ── keys that hash alike ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "tree",
    [
        list_of("set", alike(20_000)),
        list_of("frozenset", alike(20_000)),
        list_of("set", tuples_alike(1 << 13)),
        list_of("set", [list_of("frozenset", [each]) for each in alike(5_000)]),
        f'["d","dict",[{",0,".join(alike(20_000))},0]]',
        f'["d","ordered",[{",0,".join(alike(20_000))},0]]',
        f'["dd","int",[{",0,".join(alike(20_000))},0]]',
    ],
    ids=["set", "frozenset", "tuples", "frozensets", "dict", "ordered", "default"],
)
def test_keys_of_one_hash_are_refused(tree: str) -> None:
    with pytest.raises(ManifestError, match=f"more than {MAX_EQUAL_HASHES} keys with the same hash"):
        built(tree)


def test_a_fetch_of_such_keys_ends_at_once() -> None:
    header = with_tree(list_of("set", alike(40_000)))
    with scripted(serving(header)) as port, pytest.raises(ManifestError, match="keys with the same hash"):
        fetch(port, timeout_s=5)


def test_real_states_with_keys_of_every_kind_go_through() -> None:
    state = {
        "numbers": {number * 2**40: number for number in range(1000)},
        "floats": {number / 7 for number in range(2000)},
        "pairs": {(x, y) for x in range(-20, 20) for y in range(-20, 20)},
        "signs": {(a, b, c, d) for a in (-2, -1) for b in (-2, -1) for c in (-2, -1) for d in (-2, -1)},
        "large": {2**100 + number for number in range(1000)},
        "larger": [2 ** (4 * MAX_BIG_INT_DIGITS) - 1, -(2 ** (4 * MAX_BIG_INT_DIGITS)) + 1],
        "nested": frozenset({frozenset({number}) for number in range(1000)}),
    }
    assert round_trip(state) == state


@pytest.mark.parametrize(
    "tree", ['["d","dict",["a",1,"a",2]]', list_of("set", ["1", "1"]), list_of("set", ["1", "true"])]
)
def test_a_key_that_comes_twice_is_refused(tree: str) -> None:
    with pytest.raises(ManifestError, match="distinct"):
        built(tree)


def test_views_whose_descriptions_hash_alike_are_told_apart_quickly() -> None:
    """A dimension of one element may have any stride, and so any hash can be chosen: each is found by its bytes."""
    strides = [number * _MODULUS for number in range(3)]
    tree = SequenceNode("list", [ViewNode(1, (1, 1), (first, second), 0) for first in strides for second in strides])
    restore = Restore(manifest_with(tree))
    for view in restore.buffers(0, 32):
        view[:] = bytes(len(view))
    received: Any = restore.finish()
    assert len({tensor.stride() for tensor in received}) == 9


# ── numbers, arrays, nesting ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", ["9" * 20, "-" + "9" * 20, "1" * 4300, "1" * 100_000, str(2**63), "1e400"])
def test_a_number_that_json_readers_do_not_have_is_refused(number: str) -> None:
    with pytest.raises(ManifestError):
        built(list_of("list", [number]))


@pytest.mark.parametrize("sign", ["", "-"])
def test_an_int_of_too_many_digits_is_refused_on_both_sides(sign: str) -> None:
    digits = "f" * (MAX_BIG_INT_DIGITS + (0 if sign else 1) + 1)
    with pytest.raises(ManifestError, match=f"at most {MAX_BIG_INT_DIGITS} hex digits"):
        built(list_of("list", [f'["i","{sign}{digits}"]']))
    value = int(f"{sign}{digits}", 16)
    for state, path in (({"a": [value]}, "a.0"), ({"a": value}, "a"), ({value: 1}, "0x" if not sign else "-0x")):
        with pytest.raises(UnsupportedLeafError, match=f"at most {4 * MAX_BIG_INT_DIGITS} bits") as caught:
            file_of_state(state)
        assert caught.value.path is not None
        assert caught.value.path.startswith(path)
        assert len(str(caught.value)) < 1000


def test_more_containers_than_a_state_has_are_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ManifestError, match=f"at most {nodes.MAX_ARRAYS} arrays"):
        built(list_of("list", ['["l","list",[]]'] * (nodes.MAX_ARRAYS // 2)))
    monkeypatch.setattr(nodes, "MAX_ARRAYS", 1000)
    with pytest.raises(ManifestError, match="at most 1000 containers"):
        file_of_state([[] for _ in range(500)])
    # Brackets in a text are no arrays, whatever stands before and behind them.
    text = '["\\[' * 1000
    assert round_trip([text, {text: [1]}]) == [text, {text: [1]}]


@pytest.mark.parametrize("item", ["[]", '"[",[]'], ids=["arrays", "arrays and texts"])
def test_counting_arrays_copies_nothing_and_looks_at_the_time(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MAX_ARRAYS", 1 << 18)
    text = "[" + ",".join([item] * (nodes.MAX_ARRAYS + 1)) + "]"
    num_looks = 0

    def look() -> None:
        nonlocal num_looks
        num_looks += 1

    # The text itself is encoded once.
    tracemalloc.start()
    try:
        with pytest.raises(ManifestError, match="arrays, got"):
            nodes.decode_tree(text, peer="host:1", check_time=look)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < len(text) + (1 << 20)
    assert num_looks > 3

    def out_of_time() -> None:
        raise DeadlineExceededError("timed out")

    with pytest.raises(DeadlineExceededError):
        nodes.decode_tree(text, peer="host:1", check_time=out_of_time)


def test_a_tree_is_not_deeper_where_the_recursion_limit_is_high() -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000_000)
    try:
        for levels in (1_000, 200_000):
            with pytest.raises(ManifestError, match="nested arrays"):
                built('["l","list",[' * levels + "]]" * levels)
            with pytest.raises(ManifestError, match="nested arrays"):
                built('["l","list",["]]]]]]",' * levels + '""' + "]]" * levels)
    finally:
        sys.setrecursionlimit(before)


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_entries_that_are_named_again_and_again_are_not_copied_each_time() -> None:
    tensors = [torch.zeros(1 << 20, dtype=torch.uint8)]
    copies = {
        "arrays": [NumpyArrayNode(0, "|u1", (1 << 20,)) for _ in range(500)],
        "bytes": [StoredBytesNode(0) for _ in range(500)],
    }
    for items in copies.values():
        manifest = manifest_with(SequenceNode("list", items), tensors)
        restore = Restore(manifest)
        with bounded(manifest.data_bytes), pytest.raises(ManifestError, match="got more copies"):
            restore.finish()


def test_a_long_path_is_not_copied_for_each_of_very_many_items() -> None:
    key = "k" * 190
    inner = list_of("list", ['["l","list",[]]'] * 5_000)
    depth = 80
    tree = f'["d","dict",["{key}",' * depth + inner + "]]" * depth
    with bounded(len(tree)):
        built(tree)
    with pytest.raises(ManifestError) as caught:
        built(tree.replace('["l","list",[]]', '["T",9]'))
    assert len(str(caught.value)) < 2000


def test_a_tensor_at_a_key_that_comes_again_and_again_is_compared_without_memory_for_each() -> None:
    tree = '["d","dict",[' + ",".join(['"a",["T",0]'] * 10_000) + "]]"
    header = with_tree(tree)
    into = {"a": torch.zeros((1,) * 60)}
    with bounded(len(header)):
        Restore(decode_header(header), into=into)


# ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class _OutOfTime:
    """A clock that allows so many looks."""

    def __init__(self, num_looks: int) -> None:
        self.num_left = num_looks

    def __call__(self) -> None:
        self.num_left -= 1
        if self.num_left < 0:
            raise DeadlineExceededError("for the test")


_LONG = ",".join(f'"{number}",0' for number in range(5_000))


@pytest.mark.parametrize(
    "tree",
    [
        list_of("list", ["0"] * 5_000),
        list_of("list", ['["l","list",[]]'] * 5_000),
        list_of("set", [str(number) for number in range(5_000)]),
        f'["d","dict",[{_LONG}]]',
        list_of("list", [list_of("tuple", ["0"])] * 5_000),
    ],
    ids=["scalars", "lists", "members", "keys", "tuples"],
)
def test_the_clock_is_looked_at_again_and_again_while_a_state_is_built(tree: str) -> None:
    manifest = decode_header(with_tree(tree))
    restore = Restore(manifest, check_time=_OutOfTime(3))
    with pytest.raises(DeadlineExceededError):
        restore.finish()


def test_the_clock_is_looked_at_while_a_table_is_decoded_matched_and_merged() -> None:
    names = [f"t{number}" for number in range(3_000)]
    tree = MappingNode("dict", [item for index, name in enumerate(names) for item in (name, TensorNode(index))])
    manifest = manifest_with(tree, [torch.zeros(1, dtype=torch.uint8)] * len(names))
    header = file_of_state({name: torch.zeros(1, dtype=torch.uint8) for name in names})
    encoded = header[8 : manifest_of(header).header_bytes]
    with pytest.raises(DeadlineExceededError):
        decode_header(encoded, check_time=_OutOfTime(2))
    with pytest.raises(DeadlineExceededError):
        Restore(manifest, into=dict.fromkeys(names, 1), check_time=_OutOfTime(1))
    with pytest.raises(DeadlineExceededError):
        reshard([manifest], None, check_time=_OutOfTime(1))


def test_a_fetch_ends_at_its_deadline_also_while_it_decodes() -> None:
    header = with_tree(list_of("list", [list_of("tuple", ["0", "1"])] * 500_000))
    with scripted(serving(header)) as port:
        started_s = time.monotonic()
        with pytest.raises(TransportError) as caught:
            fetch(port, timeout_s=0.4)
        took_s = time.monotonic() - started_s
    error = caught.value.failures[-1] if isinstance(caught.value, FetchFailedError) else caught.value
    assert isinstance(error, DeadlineExceededError)
    assert took_s < 3
