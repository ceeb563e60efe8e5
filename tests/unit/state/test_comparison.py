"""States with equal bits have equal digests, and any difference is found and named."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from state_tools import round_trip
from torch import nn

from ft_transport.state.comparison import find_differences, state_digest
from ft_transport.state.snapshot import Taking
from ft_transport.state.stager import Stager
from ft_transport.wire.manifest import Manifest, decode_header


def test_a_single_element_of_any_stride_has_a_digest() -> None:
    assert state_digest(torch.arange(8.0)[::8]) == state_digest(torch.zeros(1))


CHUNK_BYTES = 4096


def manifest_of(state: object) -> Manifest:
    stager = Stager(max_snapshots=1, num_threads=1, chunk_bytes=CHUNK_BYTES)
    pending = stager.begin(Taking(step=3, state=state))
    pending.copy_deferred()
    snapshot = pending.finish()
    snapshot.close()
    stager.close()
    return decode_header(snapshot.header[8:])


def state() -> dict[str, Any]:
    flat = torch.arange(6000.0)
    return {
        "w": flat,
        "view": flat[2:4],
        "t": torch.arange(6).view(2, 3).t(),
        "n": [1, 2.0, {"a", "b"}, float("nan")],
        "e": torch.zeros(0),
        "u": torch.ones(2, 3).t(),
        "half": torch.arange(5, dtype=torch.bfloat16),
        "deep": {1: {"x": torch.full((3000,), 7.0)}},
        "bytes": b"x" * 5000,
    }


def differences(expected: object, actual: object) -> tuple[str, ...]:
    return find_differences(manifest_of(expected), actual, num_threads=2)


def test_equal_states_do_not_differ_whatever_the_order_of_their_keys() -> None:
    assert differences(state(), state()) == ()
    assert differences(state(), dict(reversed(state().items()))) == ()
    assert differences({}, {}) == ()


@pytest.mark.parametrize("kind", [OrderedDict, Counter, lambda items: defaultdict(int, items)])
def test_mappings_of_all_kinds_are_compared_by_key(kind: Callable[[object], dict[str, Any]]) -> None:
    items = {"a": 1, "b": torch.ones(3), 1: torch.zeros(3), "1": torch.full((3,), 2.0)}
    backwards = dict(reversed(items.items()))
    assert differences(kind(items), kind(backwards)) == ()
    assert differences(kind(items), kind({**backwards, "a": 2})) == ("a: expected 1, got 2",)
    # Keys of another type are other keys, also where they read the same.
    assert differences(kind(items), kind({**items, 1: torch.ones(3)})) != ()
    assert differences(kind(items), kind({**items, "1": torch.ones(3)})) != ()


def test_equal_states_of_different_objects_have_one_digest() -> None:
    assert state_digest(state()) == state_digest(state()) == state_digest(round_trip(state()))
    assert 0 <= state_digest(state()) < 2**64


DIGESTED_ALONE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a stride": lambda s: s.update(u=s["u"].contiguous()),
    "an order": lambda s: s.update(w=s.pop("w")),
}


@pytest.mark.parametrize("what", DIGESTED_ALONE)
def test_how_a_state_lies_and_is_ordered_changes_the_digest(what: str) -> None:
    changed = state()
    DIGESTED_ALONE[what](changed)
    assert state_digest(changed) != state_digest(state())


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a sign of zero": (lambda s: s["w"][0].neg_(), "the bytes differ in .*w"),
    "an empty tensor's shape": (lambda s: s.update(e=torch.zeros(0, 2)), "e: expected"),
    "a bit": (lambda s: s["w"].view(torch.int32)[5999:].bitwise_xor_(1), "the bytes differ in .*w"),
    "a bit of a strided tensor": (lambda s: s["t"][2:, 1:].add_(1), "the bytes differ in .*t"),
    "a bit deep down": (lambda s: s["deep"][1]["x"][0].neg_(), "the bytes differ in .*deep"),
    "a dtype": (lambda s: s.update(half=s["half"].half()), "half: expected bfloat16"),
    "a shape": (
        lambda s: s["deep"][1].update(x=s["deep"][1]["x"].view(3, -1)),
        r"expected float32\[3000\], got float32\[3, 1",
    ),
    "a tie": (lambda s: s.update(view=s["view"].clone()), "view: expected ViewNode"),
    "a number": (lambda s: s["n"].__setitem__(0, 2), r"n\[0\]|n.*expected 1, got 2"),
    "a type of a number": (lambda s: s["n"].__setitem__(0, True), "expected 1, got True"),
    "a key": (lambda s: s.update(w2=s.pop("w")), r"expected the same keys, got missing keys \['w'\] and"),
    "a kind of mapping": (lambda s: s.update(deep=OrderedDict(s["deep"])), "deep: expected .*'dict', got .*'ordered'"),
    "a length": (lambda s: s["n"].append(None), "4 items, got 5"),
    "a container": (lambda s: s.update(n=tuple(s["n"])), "expected 'list', got 'tuple'"),
    "a parameter": (lambda s: s.update(half=nn.Parameter(s["half"])), "half: expected TensorNode"),
    "stored bytes": (lambda s: s.update(bytes=b"y" + s["bytes"][1:]), "the bytes differ"),
}


@pytest.mark.parametrize("what", sorted(CHANGES))
def test_any_difference_changes_the_digest_and_is_found_and_named(what: str) -> None:
    changed = state()
    change, pattern = CHANGES[what]
    change(changed)
    assert state_digest(changed) != state_digest(state())
    found = differences(state(), changed)
    assert len(found) >= 1
    assert any(re.search(pattern, each) for each in found), found


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_how_a_tensor_lies_in_memory_is_no_difference_and_a_bit_of_it_is(dtype: torch.dtype) -> None:
    tensor = torch.randn(4, 3, 2, 5).to(dtype)
    for expected, actual in ((tensor, channels_last(tensor)), (channels_last(tensor), tensor)):
        assert differences({"w": expected}, {"w": actual}) == ()
        actual.view(-1)[7:8].neg_() if actual.is_contiguous() else actual[1, 2, 0, 3].neg_()
        assert differences({"w": expected}, {"w": actual}) == ("the bytes differ in w",)


def test_another_dtype_of_the_same_bytes_is_a_difference() -> None:
    tensor = torch.randn(4, 3, 2, 5)
    (found,) = differences({"w": tensor}, {"w": channels_last(tensor).view(torch.int32)})
    assert found == "w: expected float32[4, 3, 2, 5], got int32[4, 3, 2, 5]"
