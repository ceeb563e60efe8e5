from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_transport.wire.chunks import CHUNK_BYTES, Hasher, chunk_bytes_for, digest


def test_the_digest_is_xxh3_64_as_published() -> None:
    # The empty input with seed 0: XSUM_XXH3_testdata in the reference implementation (xxHash, cli/xsum_sanity_check.c).
    assert digest(b"") == 0x2D06800538D394C2


@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=5))
def test_piece_by_piece_is_the_same_as_at_once(data: bytes, cuts: list[int]) -> None:
    hasher = Hasher()
    start = 0
    for end in [*sorted(cuts), len(data)]:
        hasher.update(memoryview(data)[start:end])
        start = max(start, min(end, len(data)))
    assert hasher.intdigest() == digest(data) == digest(memoryview(data))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_one_changed_bit_changes_the_digest(data: bytes, choose: st.DataObject) -> None:
    damaged = bytearray(data)
    damaged[choose.draw(st.integers(0, len(data) - 1))] ^= 1 << choose.draw(st.integers(0, 7))
    assert digest(bytes(damaged)) != digest(data)


@pytest.mark.parametrize(
    ("data_bytes", "expected"),
    [
        (0, 1 << 20),
        (1, 1 << 20),
        (256 << 20, 1 << 20),
        ((512 << 20) - 1, 1 << 20),
        (512 << 20, 2 << 20),
        ((1 << 30) - 1, 2 << 20),
        (1 << 30, 4 << 20),
        (1 << 40, 4 << 20),
    ],
)
def test_small_states_have_small_chunks(data_bytes: int, expected: int) -> None:
    assert chunk_bytes_for(data_bytes, most=CHUNK_BYTES) == expected


def test_chunks_are_never_larger_than_the_setting() -> None:
    assert chunk_bytes_for(1 << 40, most=1 << 16) == 1 << 16
    assert chunk_bytes_for(0, most=1 << 16) == 1 << 16
