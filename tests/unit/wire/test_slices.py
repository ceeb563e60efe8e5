"""Slices: the bytes of a box, what is adjacent joined, and requests that ask for too much or for what there is not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_transport.errors import ConfigurationError
from ft_transport.wire import slices
from ft_transport.wire.slices import Slice, answer_bytes, decode_request, encode_request, joined, slice_of
from ft_transport.wire.snapshot import copy_in, copy_out

_shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(_shapes)
    origin = [draw(st.integers(0, size - 1)) for size in shape]
    counts = [draw(st.integers(1, size - first)) for size, first in zip(shape, origin, strict=True)]
    return shape, origin, counts


@given(_boxes(), st.sampled_from(["u1", "i2", "f4", "f8", "c16"]), st.permutations(range(4)))
def test_a_slice_is_a_box_whatever_the_strides(
    box: tuple[list[int], list[int], list[int]], dtype: str, order: list[int]
) -> None:
    shape, origin, counts = box
    axes = [axis for axis in order if axis < len(shape)]
    whole = np.arange(np.prod(shape), dtype=dtype).reshape([shape[axis] for axis in axes])
    whole = whole.transpose(np.argsort(axes))
    assert list(whole.shape) == shape
    memory = memoryview(whole.base.base if whole.base.base is not None else whole.base).cast("B")
    piece = slice_of(0, whole.strides, origin, counts, whole.itemsize)
    expected = whole[tuple(slice(first, first + count) for first, count in zip(origin, counts, strict=True))]

    taken = bytearray(piece.num_bytes)
    copy_out(memory[piece.start : piece.end], piece, memoryview(taken))
    assert bytes(taken) == expected.tobytes()

    elsewhere = bytearray(len(memory))
    copy_in(memoryview(taken), memoryview(elsewhere)[piece.start : piece.end], piece)
    back = bytearray(piece.num_bytes)
    copy_out(memoryview(elsewhere)[piece.start : piece.end], piece, memoryview(back))
    assert back == taken
    assert sum(elsewhere) == sum(taken)  # nothing besides was written


def test_rows_that_follow_each_other_are_one_block() -> None:
    assert slice_of(100, (24, 4), (2, 0), (3, 6), 4) == Slice(148, 72)
    assert slice_of(100, (24, 4), (2, 1), (3, 2), 4) == Slice(152, 8, ((3, 24),))
    assert slice_of(0, (480, 120, 40, 4), (0, 0, 0, 0), (2, 4, 3, 5), 4) == Slice(0, 20, ((24, 40),))
    assert slice_of(7, (), (), (), 2) == Slice(7, 2)


def test_what_is_adjacent_is_joined_and_nothing_else() -> None:
    first, second, third = Slice(0, 8), Slice(8, 4), Slice(16, 4)
    strided = Slice(20, 4, ((2, 8),))
    assert joined([first, second, third, strided, Slice(32, 4)]) == (Slice(0, 12), third, strided, Slice(32, 4))
    assert joined([second, first]) == (second, first)


def test_a_request_makes_the_trip() -> None:
    frames = ((Slice(0, 8), Slice(16, 4, ((2, 8), (3, 4)))), (Slice(40, 2),))
    assert decode_request(encode_request(frames), data_bytes=42) == frames
    assert answer_bytes(frames) == 8 + 24 + 2 + 2 * 8


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "expected a request for slices"),
        (b"[]", "expected a request for slices"),
        (b'{"frames": 7}', "expected a request for slices"),
        (b"\xff", "expected a request for slices"),
        ({"frames": []}, "expected a request for 1 to"),
        ({"frames": [[]]}, "length >= 1"),
        ({"frames": [[[0, 0, []]]]}, "`int` >= 1"),
        ({"frames": [[[-1, 1, []]]]}, "`int` >= 0"),
        ({"frames": [[[0, 1, [[1, 4]]]]]}, "`int` >= 2"),
        ({"frames": [[[0, 1, [[2, -4]]]]]}, "`int` >= 0"),
        ({"frames": [[[0, 101, []]]]}, "slices of 100 bytes of data, got one up to byte 101"),
        ({"frames": [[[0, 1, [[2, 100]]]]]}, "got one up to byte 101"),
        ({"frames": [[[0, 1, [[2**62, 0]]]]]}, "expected frames of 1 to"),
        ({"frames": [[[0, 1, [[2**62, 2**62]] * 8]]]}, "expected frames of 1 to"),
        ({"frames": [[[0, 1, [[2, 1]] * 40]]]}, "length <= 31"),
        ({"frames": [[[0, 1, [[slices.CHUNK_BYTES + 1, 0]]]]]}, "expected frames of 1 to"),
        ({"frames": [[[0, 64, [[slices.CHUNK_BYTES // 64, 0]]]]] * 17}, "expected a request for 1 to"),
        ({"frames": [[[0, 1, [[slices.MAX_BLOCKS_PER_FRAME + 1, 0]]]]]}, "expected frames of at most"),
        ({"frames": [[[0, 1, []]] * (slices.MAX_SLICES_PER_REQUEST + 1)]}, "expected at most"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_request_for_too_much_or_for_nothing_is_refused(body: object, reason: str) -> None:
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ConfigurationError, match=reason):
        decode_request(encoded, data_bytes=100)
