"""Byte ranges as the frames of a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_transport.transfer.changed import Range, frames_of
from ft_transport.wire.chunks import CHUNK_BYTES
from ft_transport.wire.slices import MAX_REQUEST_BYTES, MAX_SLICES_PER_REQUEST, decode_request, encode_request

MAX_FRAMES_PER_REQUEST = MAX_REQUEST_BYTES // CHUNK_BYTES


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 3 * CHUNK_BYTES)), max_size=40))
def test_the_frames_have_each_byte_once_and_in_order(gaps: list[tuple[int, int]]) -> None:
    ranges: list[Range] = []
    at = 0
    for gap, num_bytes in gaps:
        ranges.append((at + gap, at + gap + num_bytes))
        at += gap + num_bytes
    frames = frames_of(ranges)
    slices = [piece for frame in frames for piece in frame]
    assert all(sum(piece.num_bytes for piece in frame) == CHUNK_BYTES for frame in frames[:-1])
    covered: list[Range] = []
    for piece in slices:
        if covered and covered[-1][1] == piece.start:
            covered[-1] = (covered[-1][0], piece.end)
        else:
            covered.append((piece.start, piece.end))
    assert covered == ranges


@pytest.mark.parametrize("num_bytes", [1, 5000, CHUNK_BYTES])
def test_a_source_takes_as_many_frames_as_one_request_may_have(num_bytes: int) -> None:
    ranges = [(2 * number * num_bytes, (2 * number + 1) * num_bytes) for number in range(2 * MAX_SLICES_PER_REQUEST)]
    frames = frames_of(ranges)[:MAX_FRAMES_PER_REQUEST]
    assert decode_request(encode_request(frames), data_bytes=ranges[-1][1]) == tuple(frames)
