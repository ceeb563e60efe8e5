"""What one receiver asks another one for: the ranges of bytes that chunks are, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_transport.wire.chunks import ChunkTable
from ft_transport.wire.relayed import HEADER, MAX_RANGES, answer_bytes, chunks_of, format_ranges, parse_ranges

_TABLE = ChunkTable(data_bytes=1050, chunk_bytes=100)


@given(st.lists(st.integers(0, _TABLE.num_chunks - 1), min_size=1, unique=True))
def test_what_is_asked_for_is_what_is_understood_in_its_order(chunks: list[int]) -> None:
    ranges = parse_ranges(format_ranges(_TABLE, chunks))
    assert ranges is not None
    assert chunks_of(_TABLE, ranges) == chunks
    assert answer_bytes(_TABLE, chunks) == sum(HEADER.size + _TABLE.length_of(chunk) for chunk in chunks)


def test_neighbours_are_one_range() -> None:
    assert format_ranges(_TABLE, [4, 5, 6, 0, 1, 10]) == "400-700,0-200,1000-1050"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "-",
            "5",
            "0-",
            "-5",
            "5-5",
            "7-5",
            "0-5,4-9",
            "4-9,0-5",
            "0-5,0-5",
            "0-5,",
            "+0-5",
            "0-\u0665",
            "0x0-0x5",
            "0-1e9",
        ),
        "0-" + 19 * "9",
        ",".join(f"{2 * at}-{2 * at + 1}" for at in range(MAX_RANGES + 1)),
    ],
)
def test_anything_else_is_none(text: str) -> None:
    assert parse_ranges(text) is None


def test_the_longest_request_fits_a_line_of_http() -> None:
    table = ChunkTable(data_bytes=10**15, chunk_bytes=1 << 20)
    text = format_ranges(table, range(0, 2 * MAX_RANGES, 2))
    assert parse_ranges(text) is not None
    largest = ",".join(f"{10**17 + 2 * at}-{10**17 + 2 * at + 1}" for at in range(MAX_RANGES))
    assert parse_ranges(largest) is not None
    assert len(largest) < 4096


@pytest.mark.parametrize(
    "ranges", [[(0, 99)], [(1, 100)], [(0, 1051)], [(1000, 1100)], [(1100, 1200)], [(0, 100), (150, 200)]]
)
def test_parts_of_chunks_are_none(ranges: list[tuple[int, int]]) -> None:
    assert chunks_of(_TABLE, ranges) is None
