"""Any nested state of the supported kinds comes back with the same types, order and bits."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from property_examples import num_examples
from state_equality import exact
from state_tools import file_of_state, manifest_of, receive

from ft_transport.state.comparison import state_digest
from ft_transport.state.tensors import DTYPES_BY_NAME

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*are deprecated:UserWarning"),
]


class Point(NamedTuple):
    x: Any
    y: Any = 0


Pair = namedtuple("Pair", ["left", "right"])  # the old spelling makes a class of its own kind

_PLAIN_DTYPES = sorted(name for name in DTYPES_BY_NAME if not name.startswith(("qint", "quint")))
_NUMPY_DTYPES = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.unsigned_integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?"),
    npst.complex_number_dtypes(endianness="?"),
    npst.datetime64_dtypes(endianness="?"),
    npst.timedelta64_dtypes(endianness="?"),
    npst.byte_string_dtypes(min_len=1),
    npst.unicode_string_dtypes(endianness="?", min_len=1),
)

_floats = st.floats(allow_nan=True, allow_subnormal=True) | st.builds(
    lambda payload, sign: (
        np.array([0x7FF0_0000_0000_0000 | payload | sign << 63], np.uint64).view(np.float64)[0].item()
    ),
    st.integers(1, 2**52 - 1),
    st.integers(0, 1),
)
_text = st.text(st.characters(exclude_categories=[]), max_size=8)  # lone surrogates too
_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**64), 2**64),
    st.integers(2**200, 2**210),
    _floats,
    st.complex_numbers(),
    _text,
    st.binary(max_size=8),
)
_hashable = st.recursive(
    _scalars,
    lambda inner: (
        st.tuples(inner, inner)
        | st.frozensets(inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=4,
)


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    """Random bits of any dtype, seen through a random chain of views."""
    dtype = DTYPES_BY_NAME[
        draw(st.sampled_from(_PLAIN_DTYPES) | st.sampled_from(["float32", "complex64", "complex128"]))
    ]
    shape = draw(st.lists(st.integers(1, 4) | st.integers(0, 4), max_size=4))
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    tensor = tensor.view(dtype).view(shape)
    for step in draw(st.lists(st.sampled_from(["transpose", "slice", "expand", "conj", "narrow"]), max_size=4)):
        if step == "transpose" and tensor.dim() > 1:
            tensor = tensor.transpose(0, -1)
        elif step == "slice" and tensor.dim():
            tensor = tensor[..., ::2]
        elif step == "narrow" and tensor.dim() and tensor.shape[0]:
            tensor = tensor[1:]
        elif step == "expand":
            tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
        elif step == "conj" and tensor.dtype in (torch.complex64, torch.complex128):
            tensor = tensor.conj() if draw(st.booleans()) else tensor.conj().imag
    if tensor.dtype in (torch.float32, torch.bfloat16, torch.complex64):
        form = draw(st.sampled_from(["plain", "leaf", "parameter", "frozen parameter"]))
        if form == "leaf":
            tensor = tensor.detach().requires_grad_()
        elif form != "plain":
            tensor = torch.nn.Parameter(tensor.detach(), requires_grad=form == "parameter")
    return tensor


_arrays = npst.arrays(_NUMPY_DTYPES, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)).map(
    np.asarray
) | npst.arrays(np.float32, (2, 3)).map(np.asfortranarray)
_numpy_scalars = (
    npst.arrays(_NUMPY_DTYPES, ())
    .map(lambda array: array[()])
    .filter(lambda scalar: not isinstance(scalar, (str, bytes)) or scalar[-1:] not in ("", b"", "\0", b"\0"))
)
_constants = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 3), torch.strided, torch.channels_last]
)
_leaves = st.one_of(
    _scalars,
    _tensors(),
    _tensors(),
    _tensors(),
    _arrays,
    _numpy_scalars,
    _constants,
    st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size),
    st.binary(max_size=4).map(bytearray),
    st.integers(0, 255).map(lambda value: bytes([value]) * 5000),
    st.integers(0, 255).map(lambda value: bytearray([value]) * 5000),
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    items = st.lists(inner, max_size=3)
    pairs = st.lists(st.tuples(_hashable, inner), max_size=3)
    return st.one_of(
        items,
        items.map(tuple),
        pairs.map(dict),
        pairs.map(OrderedDict),
        st.builds(defaultdict, st.sampled_from([None, list, dict, int, set]), pairs),
        st.builds(Counter, st.dictionaries(_hashable, st.integers(), max_size=3)),
        st.builds(deque, items, st.none() | st.integers(0, 5)),
        st.sets(_hashable, max_size=3),
        st.frozensets(_hashable, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner),
    )


_states = st.recursive(_leaves, _containers, max_leaves=12)


@given(_tensors())
@settings(max_examples=num_examples(400))
def test_any_tensor_round_trips_and_is_received_in_place(tensor: torch.Tensor) -> None:
    file = file_of_state(tensor)
    received = receive(file)
    assert exact(received) == exact(tensor)
    assert state_digest(received) == state_digest(tensor)
    _overwrite(received)
    again = receive(file, into=received)
    assert exact(again) == exact(tensor)
    assert again is received or 0 in received.stride()


@given(_states)
@example({float("nan"): -0.0, (1, "a"): [float("-inf")], None: True, 1: 1.0, b"x": "\ud800", 10**6000: 1})
@example({"\ud800": {"w": torch.ones(2), "é": torch.ones(3)}})
@example({"\ud800": torch.ones(2), "\udfff.x": {"\ud800": torch.zeros(1)}})
@example({10**6000: torch.ones(2), (10**6000, Point(1)): {1.5: torch.zeros(1)}})
@example([1e16, 1e22, 5e-324, 1.0, -1.0, 2**53 + 1, -(2**63), 2**63 - 1, 2**63, 2**64, 1.7976931348623157e308])
@example(
    {np.float64("nan"): np.datetime64("NaT", "s"), np.int8(-3): np.array(["a\0b", ""]), np.str_("x"): np.void(b"\0\1")}
)
@settings(max_examples=num_examples(300))
def test_any_state_round_trips(state: object) -> None:
    file = file_of_state(state)
    received = receive(file)
    assert exact(received) == exact(state)
    assert state_digest(received) == state_digest(state)


@given(_states)
@settings(max_examples=num_examples(100))
def test_any_state_is_received_into_any_receiver_of_the_same_form(state: object) -> None:
    file = file_of_state(state)
    # The receiver is the state itself, ties, overlaps and all, after its tensors were overwritten.
    own = receive(file)
    for tensor in _tensors_in(own):
        _overwrite(tensor)
    assert exact(receive(file, into=own)) == exact(receive(file))


@given(_states, _states)
@settings(max_examples=num_examples(100))
def test_a_receiver_of_another_form_changes_nothing(state: object, own: object) -> None:
    file = file_of_state(state)
    assert exact(receive(file, into=own)) == exact(state)


@given(_states)
@settings(max_examples=num_examples(50))
def test_two_snapshots_of_one_state_are_the_same_bytes_but_for_their_id(state: object) -> None:
    first, second = file_of_state(state), file_of_state(state)
    one, other = manifest_of(first), manifest_of(second)
    assert one.snapshot_id != other.snapshot_id
    assert first.replace(one.snapshot_id.encode(), other.snapshot_id.encode()) == second


def _overwrite(tensor: torch.Tensor) -> None:
    if tensor.numel() and 0 not in tensor.stride():
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
        tensor.detach().view(carrier[tensor.dtype.itemsize]).fill_(1)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors_in(item)]
    if isinstance(value, (list, tuple, deque)):
        return [tensor for item in value for tensor in _tensors_in(item)]
    return []
